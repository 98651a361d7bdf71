"""What is compiled with the models, and what CUDA graphs may overwrite."""

from trainkit import compiled_with_model

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin

import train_mnist
from trainkit.run.compiling import Compiling


@pytest.fixture
def compiling(accelerator):
    """That of a run whose YAML compiles, in its first step."""
    torch._dynamo.reset()
    accelerator.state.dynamo_plugin = TorchDynamoPlugin("eager", fullgraph=True, dynamic=False)
    made = Compiling(accelerator)
    made.start_step(is_whole=True)
    yield made
    made.release()


@compiled_with_model
def mark(values: torch.Tensor) -> torch.Tensor:
    """The values if this is compiled, else their negatives."""
    return values if torch.compiler.is_compiling() else -values


def test_outside_of_a_run_that_compiles_a_function_is_as_it_is_written(accelerator):
    ones = torch.ones(2)
    assert mark(ones).sum() == -2
    Compiling(accelerator).start_step(is_whole=True)
    assert mark(ones).sum() == -2  # its YAML does not compile
    assert mark.__name__ == "mark" and mark.__doc__.startswith("The values")


def test_a_function_is_compiled_in_the_first_whole_step_alone(compiling):
    ones = torch.ones(2)
    compiling.start_step(is_whole=False)
    assert mark(ones).sum() == 2
    compiling.finish_step(is_whole=True)
    assert mark(ones).sum() == 2
    assert mark(torch.ones(3)).sum() == -3  # another shape
    compiling.release()
    assert mark(ones).sum() == -2


def test_a_function_within_a_compiled_model_is_a_part_of_it(compiling):
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    model = torch.compile(lambda x: 2 * mark(x), backend="eager", fullgraph=True)
    assert model(torch.ones(2)).sum() == 4
    assert counters["unique_graphs"] == before + 1


def test_an_error_of_the_function_itself_stays_one(compiling):
    @compiled_with_model
    def multiply(values: torch.Tensor) -> torch.Tensor:
        return values @ torch.ones(7)

    with pytest.raises(RuntimeError, match="size mismatch"):
        multiply(torch.ones(3, 3))


def test_cuda_graphs_use_memory_again_from_step_to_step_and_not_within_one(
    tiny_mnist, tmp_path, run_main, monkeypatch
):
    """Else a model would overwrite the pictures that it is given."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    torch._dynamo.reset()
    calls, augment = [], train_mnist.augment

    def see(*args: object) -> torch.Tensor:
        calls.append("augment")
        return augment(*args)

    monkeypatch.setattr(train_mnist, "augment", see)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: calls.append("mark"))
    run_main("train_mnist", f"--dataset {tiny_mnist} --epochs 1 --run-dir {tmp_path}")
    assert len(calls) > 10 and calls == ["mark", "augment"] * (len(calls) // 2)
