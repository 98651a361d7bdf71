"""The learning rate of each step is that of PyTorch's own schedulers."""

import argparse
import math

import pytest
import torch
from torch.optim import lr_scheduler

from trainkit.optim import make_scheduler

LEARNING_RATE = 0.01


def make_sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LEARNING_RATE)


def rates(schedule: str, epochs: int, steps_per_epoch: int, **flags: float) -> list[float]:
    """The learning rate of every step, and the one after the last."""
    defaults = {"gamma": 0.9, "cosine_epochs": None, "warmup": 0.0, "scale_lr": None}
    args = argparse.Namespace(schedule=schedule, epochs=epochs, learning_rate=LEARNING_RATE,
                              batch_size=32, **(defaults | flags))  # fmt: skip
    optimizer = make_sgd()
    return stepped(optimizer, make_scheduler(optimizer, args, steps_per_epoch),
                   steps=epochs * steps_per_epoch - (schedule == "onecycle"))  # fmt: skip


def stepped(
    optimizer: torch.optim.Optimizer, *schedulers: lr_scheduler.LRScheduler, steps: int
) -> list[float]:
    values = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        values.append(optimizer.param_groups[0]["lr"])
    return values


@pytest.mark.parametrize("cosine_epochs", [50, 20])  # 20: two zeros of the cosine in 100 epochs
@pytest.mark.parametrize("steps_per_epoch", [1, 3, 25])
def test_exponential_and_cosine_are_two_schedulers_stepped_by_hand(
    steps_per_epoch: int, cosine_epochs: int
) -> None:
    optimizer = make_sgd()
    exponential = lr_scheduler.ExponentialLR(optimizer, 0.9)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, cosine_epochs)
    by_hand = stepped(optimizer, exponential, cosine, steps=100)
    ours = rates("exponential+cosine", 100, steps_per_epoch, cosine_epochs=cosine_epochs)
    assert len(ours) == 100 * steps_per_epoch + 1
    assert ours[::steps_per_epoch] == pytest.approx(by_hand, rel=1e-9, abs=1e-16)


@pytest.mark.parametrize("steps_per_epoch", [1, 7])
def test_single_schedules_are_pytorchs(steps_per_epoch: int) -> None:
    optimizer = make_sgd()
    exponential = stepped(optimizer, lr_scheduler.ExponentialLR(optimizer, 0.8), steps=12)
    ours = rates("exponential", 12, steps_per_epoch, gamma=0.8)
    assert ours[::steps_per_epoch] == pytest.approx(exponential, rel=1e-12)

    optimizer, steps = make_sgd(), 12 * steps_per_epoch
    cosine = stepped(optimizer, lr_scheduler.CosineAnnealingLR(optimizer, steps), steps=steps)
    assert rates("cosine", 12, steps_per_epoch) == pytest.approx(cosine, rel=1e-9, abs=1e-16)

    optimizer = make_sgd()
    onecycle = lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, steps, pct_start=0.25,
                                       cycle_momentum=False)  # fmt: skip
    assert rates("onecycle", 12, steps_per_epoch, warmup=0.25) == pytest.approx(
        stepped(optimizer, onecycle, steps=steps - 1), rel=1e-6
    )
    assert set(rates("constant", 12, steps_per_epoch)) == {LEARNING_RATE}


@pytest.mark.parametrize("schedule", ["constant", "cosine", "exponential", "exponential+cosine"])
def test_a_warmup_multiplies_by_a_line_up_to_1(schedule: str) -> None:
    with_warmup, without = rates(schedule, 10, 4, warmup=0.24), rates(schedule, 10, 4)
    line = [min(1, (step + 1) / 10) for step in range(41)]  # 10 steps: 0.24 x 40, rounded up
    expected = [factor * rate for factor, rate in zip(line, without, strict=True)]
    assert with_warmup == pytest.approx(expected, rel=1e-12)


def test_no_run_is_too_short_for_a_schedule() -> None:
    for epochs, warmup in ((4, 0.25), (2, 0.5), (1, 0.0), (1, 0.9)):
        for schedule in ("onecycle", "cosine", "exponential+cosine", "constant"):
            values = rates(schedule, epochs, 1, warmup=warmup)
            assert all(math.isfinite(value) and 0 <= value <= 0.0101 for value in values)
