"""Numbers that went bad stop every process in the same step and reach neither weights nor disk."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from faults import Nursery, incomplete, newest

from trainkit.errors import RunFailure
from trainkit.finite import MAX_SKIPPED, FiniteGuard, Position
from trainkit.optim import clip_gradients

OPTIMIZERS = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
    "adam": lambda weights: torch.optim.Adam(weights, lr=0.1, fused=True),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True),
}


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
    guard = FiniteGuard(accelerator)
    monkeypatch.setattr(guard, "skips_on_device", lambda optimizer: True)
    number = iter(range(1, 100))

    def step(gradient: float) -> None:
        weight.grad = torch.full((5,), gradient)
        position = Position(next(number), 0.1)
        guard.check(optimizer, weight.grad.norm(), torch.tensor(2.5), position)
        optimizer.step()

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
        guard.finish(optimizer)
    assert torch.equal(weight.detach(), good)
    step(1.0)
    guard.finish(optimizer)
    assert not torch.equal(weight.detach(), good)


def test_weights_that_are_not_finite_are_never_saved(accelerator: Accelerator) -> None:
    weight = torch.nn.Parameter(torch.ones(5))
    guard = FiniteGuard(accelerator)
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.1))
    guard.check(optimizer, torch.tensor(1.0), torch.tensor(1.0), Position(7, 1e30))
    guard.finish(optimizer)
    weight.data[3] = math.inf
    with pytest.raises(RunFailure, match=r"not finite after step 7, learning rate 1e\+30"):
        guard.finish(optimizer)


def test_fp16_may_skip_steps_but_not_for_ever(accelerator: Accelerator) -> None:
    optimizer = SimpleNamespace(step_was_skipped=True)
    fake = SimpleNamespace(device=torch.device("cpu"), scaler=object(), reduce=lambda loss: loss)
    guard = FiniteGuard(fake)
    nan = torch.tensor(math.nan)
    for _ in range(MAX_SKIPPED - 1):
        guard.check(optimizer, nan, nan, Position(4, 0.1))
    optimizer.step_was_skipped = False
    guard.check(optimizer, nan, nan, Position(4, 0.1))
    optimizer.step_was_skipped = True
    with pytest.raises(RunFailure, match=r"step 5, learning rate 0.1: loss nan"):
        for _ in range(MAX_SKIPPED):
            guard.check(optimizer, nan, nan, Position(5, 0.1))


# A step has two losses, of which the first is minimised, and an evaluation three. So the 9th is of
# the fifth step, and after the evaluation the 14th of the sixth.
@pytest.mark.parametrize(("bad", "call"), [("nan", 9), ("inf", 14)])
@pytest.mark.parametrize("world", [1, 2])
def test_a_bad_number_on_the_last_process_stops_all_in_that_step(
    nursery: Nursery, arguments: dict, tmp_path: Path, world: int, bad: str, call: int
) -> None:
    args = [*arguments["train_mnist"], "--log-every", 50, "--run-dir", tmp_path / "run"]
    outcome = nursery.run("train_mnist", *args, world=world, fault={"rank": world - 1, bad: call})
    assert outcome.codes == [1] * world, outcome.output
    errors = [line for line in outcome.output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "Traceback" not in outcome.output
    assert "loss or gradient is not finite at step 6, learning rate " in errors[0]
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
