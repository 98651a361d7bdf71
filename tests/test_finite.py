"""Numbers that went bad stop every process in the same step and reach neither weights nor disk."""

import math
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from faults import Nursery, incomplete, newest

from trainkit.errors import RunFailure
from trainkit.guards.finite import MAX_SKIPPED, FiniteGuard, Position
from trainkit.optim import clip_gradients


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
    norm = clip_gradients(accelerator, math.inf, torch.optim.SGD(groups, lr=0.1))
    assert norm == torch.nn.utils.get_total_norm([weight.grad for weight in weights])


def test_weights_that_differ_between_processes_reach_no_checkpoint(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, weight = FiniteGuard(accelerator), torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for *other, words in (
        (2.00001, 0.1, None),
        (2.01, 0.1, "or learning rates differ between the processes .*2 to 2.01"),
        (2.0, 0.11, "or learning rates differ between the processes .*2 to 2:"),
        (math.inf, 0.1, "are not finite"),
    ):
        rank = torch.tensor([other])
        monkeypatch.setattr(accelerator, "gather", lambda mine, rank=rank: torch.cat((mine, rank)))
        if words is None:
            guard.finish(optimizer)
            continue
        with pytest.raises(RunFailure, match=f"the weights {words}"):
            guard.finish(optimizer)


class OnACard(torch.Tensor):
    """A norm on a machine without a device, which says that it is on one."""

    device = torch.device("cuda", 0)


def test_a_norm_on_a_card_is_read_one_step_later_or_before_a_checkpoint(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "Event", Event)
    guard = FiniteGuard(accelerator)
    good, bad = (torch.tensor(x).as_subclass(OnACard) for x in (1.0, math.nan))
    losses = [torch.tensor(2.5), torch.tensor(0.5)]
    guard.check(good, losses, Position(1, 0.1))
    guard.check(bad, losses, Position(2, 0.1))
    guard.check(good, losses, Position(2, 0.1))  # of a second optimizer
    with pytest.raises(RunFailure, match=r"step 2, .* 0.1: loss 2.5 and 0.5, gradient norm nan"):
        guard.check(good, losses, Position(3, 0.1))
    guard.check(bad, losses, Position(4, 0.1))
    with pytest.raises(RunFailure, match=r"step 4, learning rate 0.1: .* gradient norm nan"):
        guard.finish()


def test_weights_that_are_not_finite_are_never_saved(accelerator: Accelerator) -> None:
    weight = torch.nn.Parameter(torch.ones(5))
    guard = FiniteGuard(accelerator)
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.1))
    guard.check(torch.tensor(1.0), [torch.tensor(1.0)], Position(7, 1e30))
    guard.finish(optimizer)
    weight.data[3] = math.inf
    with pytest.raises(RunFailure, match=r"not finite after step 7, learning rate 1e\+30"):
        guard.finish(optimizer)


def test_fp16_may_skip_steps_but_not_for_ever(accelerator: Accelerator) -> None:
    guard, losses = FiniteGuard(accelerator), [torch.tensor(math.nan)]
    for skipped in [True] * (MAX_SKIPPED - 1) + [False] + [True] * (MAX_SKIPPED - 1):
        guard.count_skipped(skipped, losses)
    with pytest.raises(RunFailure, match=r"loss nan, gradient norm inf"):
        guard.count_skipped(True, losses)


# A step has two losses, of which the first is minimised, and an evaluation three. So the 9th is of
# the fifth step, and after the evaluation the 14th of the sixth.
@pytest.mark.parametrize(("bad", "call"), [("nan", 9), ("inf", 14)])
@pytest.mark.parametrize("world", [1, 2])
def test_a_bad_number_on_the_last_process_stops_all_in_that_step(
    nursery: Nursery, arguments: dict, tmp_path: Path, world: int, bad: str, call: int
) -> None:
    args = [*arguments["train_mnist"], *f"--log-every 50 --run-dir {tmp_path}/run".split()]
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
    args = [*arguments["train_mnist"], *["--optimizer", "sgd", "--learning-rate", "1e+38"]]
    args += ["--schedule", "constant", "--warmup", "0", "--save-every", "1"]
    outcome = nursery.run("train_mnist", *args, "--run-dir", tmp_path / "run", world=world)
    assert outcome.codes == [1] * world, outcome.output
    errors = [line for line in outcome.output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "step" in errors[0] and "learning rate 1e+38" in errors[0]
    assert newest(tmp_path / "run") <= 1
