"""Numbers that went bad stop every process in the same step and reach neither weights nor disk."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from faults import Nursery, incomplete, newest

from trainkit.checkpoint import Progress
from trainkit.finite import MAX_SKIPPED, FiniteGuard
from trainkit.launch import RunFailure
from trainkit.optim import clip_gradients

OPTIMIZERS = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
    "adam": lambda weights: torch.optim.Adam(weights, lr=0.1, fused=True),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True),
}


@pytest.fixture
def accelerator() -> Accelerator:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return Accelerator(cpu=True)


class Event:
    """A device event on a machine without a device."""

    def __init__(self, device: torch.device):
        self.device = device

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def test_the_norm_is_that_of_torch_over_all_parameter_groups(accelerator: Accelerator) -> None:
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 40, 500)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    unused = torch.nn.Parameter(torch.zeros(2))  # without a gradient
    groups = [{"params": weights[:2]}, {"params": [*weights[2:], unused]}]
    norm = clip_gradients(accelerator, torch.optim.SGD(groups, lr=0.1), math.inf)
    assert norm == torch.nn.utils.get_total_norm([weight.grad for weight in weights])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_deferred_guard_skips_the_update_and_raises_one_step_later(
    accelerator: Accelerator, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does: the fused optimizer skips on the device, the host reads one step later."""
    monkeypatch.setattr(torch, "Event", Event)
    weight = torch.nn.Parameter(torch.ones(5))
    optimizer = accelerator.prepare(OPTIMIZERS[name]([weight]))
    guard = FiniteGuard(accelerator, optimizer)
    guard.deferred = True
    progress = Progress()

    def step(gradient: float) -> None:
        weight.grad = torch.full((5,), gradient)
        guard.check(weight.grad.norm(), torch.tensor(2.5), progress, learning_rate=0.1)
        optimizer.step()
        progress.step += 1

    step(1.0)
    step(2.0)
    good = weight.detach().clone()
    state = {k: v.clone() for k, v in optimizer.optimizer.state[weight].items() if v is not None}
    assert not torch.equal(good, torch.ones(5))
    step(math.nan)
    assert torch.equal(weight.detach(), good)
    for key, value in state.items():
        assert torch.equal(optimizer.optimizer.state[weight][key], value), key
    with pytest.raises(RunFailure, match=r"step 3, learning rate 0.1: loss 2.5, gradient norm nan"):
        step(1.0)
    assert torch.equal(weight.detach(), good)
    step(math.inf)
    with pytest.raises(RunFailure, match=r"gradient norm inf"):
        guard.finish()
    assert torch.equal(weight.detach(), good)
    step(1.0)
    guard.finish()
    assert not torch.equal(weight.detach(), good)


def test_weights_that_are_not_finite_are_never_saved(accelerator: Accelerator) -> None:
    weight = torch.nn.Parameter(torch.ones(5))
    guard = FiniteGuard(accelerator, accelerator.prepare(torch.optim.SGD([weight], lr=0.1)))
    guard.check(torch.tensor(1.0), torch.tensor(1.0), Progress(step=6), learning_rate=1e30)
    guard.finish()
    weight.data[3] = math.inf
    with pytest.raises(RunFailure, match=r"weights went bad at step 7, learning rate 1e\+30"):
        guard.finish()


def test_fp16_may_skip_steps_but_not_for_ever(accelerator: Accelerator) -> None:
    optimizer = SimpleNamespace(step_was_skipped=True)
    fake = SimpleNamespace(device=torch.device("cpu"), scaler=object(), reduce=lambda loss: loss)
    guard = FiniteGuard(fake, optimizer)
    nan = torch.tensor(math.nan)
    for _ in range(MAX_SKIPPED - 1):
        guard.check(nan, nan, Progress(step=3), 0.1)
    optimizer.step_was_skipped = False
    guard.check(nan, nan, Progress(step=3), 0.1)
    optimizer.step_was_skipped = True
    with pytest.raises(RunFailure, match=r"step 5, learning rate 0.1: loss nan"):
        for _ in range(MAX_SKIPPED):
            guard.check(nan, nan, Progress(step=4), 0.1)


# The sixth step: five are in an epoch, whose evaluation has three batches. Pictures are normalised
# once before the first step, too.
@pytest.mark.parametrize(("bad", "call"), [("nan", 10), ("inf", 9)])
@pytest.mark.parametrize("world", [1, 2])
def test_a_bad_number_on_the_last_process_stops_all_in_that_step(
    nursery: Nursery, arguments: dict, tmp_path: Path, world: int, bad: str, call: int
) -> None:
    args = [*arguments["train_mnist"], "--log-every", 50, "--run-dir", tmp_path / "run"]
    outcome = nursery.run("train_mnist", *args, world=world, fault={"rank": world - 1, bad: call})
    assert outcome.codes == [1] * world, outcome.output
    errors = [line for line in outcome.output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "Traceback" not in outcome.output
    assert "the numbers went bad at step 6, learning rate " in errors[0]
    assert f"loss {bad}, gradient norm nan" in errors[0]
    assert newest(tmp_path / "run") == 4 and not incomplete(tmp_path / "run")


@pytest.mark.parametrize("world", [1, 2])
def test_a_huge_learning_rate_ends_in_one_sentence(
    nursery: Nursery, arguments: dict, tmp_path: Path, world: int
) -> None:
    args = [*arguments["train_mnist"], "--optimizer", "sgd", "--learning-rate", 1e38]
    args += ["--schedule", "constant", "--warmup", 0, "--save-every", 1]
    outcome = nursery.run("train_mnist", *args, "--run-dir", tmp_path / "run", world=world)
    assert outcome.codes == [1] * world, outcome.output
    errors = [line for line in outcome.output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "step" in errors[0] and "learning rate 1e+38" in errors[0]
    assert newest(tmp_path / "run") <= 1
