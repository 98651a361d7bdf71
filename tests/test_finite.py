"""Numbers that went bad stop every process in the same step and reach neither weights nor disk."""

import math
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from faults import incomplete, newest

from trainkit.errors import RunFailure
from trainkit.run.guards import MAX_SKIPPED, FiniteGuard


def test_weights_that_differ_between_processes_reach_no_checkpoint(accelerator, monkeypatch):
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
        with pytest.raises(RunFailure, match=f"the weights {words}") if words else nullcontext():
            guard.finish(optimizer)


class OnACard(torch.Tensor):
    """A norm on a machine without a device, which says that it is on one."""

    device = torch.device("cuda", 0)


def test_a_norm_on_a_card_is_read_one_step_later_or_before_a_checkpoint(accelerator, monkeypatch):
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch, "Event", lambda device: event)
    guard = FiniteGuard(accelerator)
    good, bad = (torch.tensor(x).as_subclass(OnACard) for x in (1.0, math.nan))
    losses = [torch.tensor(2.5), torch.tensor(0.5)]
    guard.check(good, losses, "step 1, learning rate 0.1")
    guard.check(bad, losses, "step 2, learning rate 0.1")
    guard.check(good, losses, "step 2, learning rate 0.1")  # of a second optimizer
    with pytest.raises(RunFailure, match=r"step 2, .* 0.1: loss 2.5 and 0.5, gradient norm nan"):
        guard.check(good, losses, "step 3, learning rate 0.1")
    guard.check(bad, losses, "step 4, learning rate 0.1")
    with pytest.raises(RunFailure, match=r"step 4, learning rate 0.1: .* gradient norm nan"):
        guard.finish()


def test_fp16_may_skip_steps_but_not_for_ever(accelerator):
    guard, losses = FiniteGuard(accelerator), [torch.tensor(math.nan)]
    for skipped in [True] * (MAX_SKIPPED - 1) + [False] + [True] * (MAX_SKIPPED - 1):
        guard.count_skipped(skipped, losses)
    with pytest.raises(RunFailure, match=r"loss nan, gradient norm inf"):
        guard.count_skipped(True, losses)


# A step has two losses, of which the first is minimised, and an evaluation one. So after the
# evaluation that follows the fifth step the 12th is of the sixth.
def test_a_bad_loss_of_the_last_process_stops_all_in_that_step(fork_main, arguments, tmp_path):
    args = [*arguments["train_mnist"], f"--log-every 50 --run-dir {tmp_path}/run"]
    fault = {"rank": 1, "add": [12, "inf"]}
    outcome = fork_main("train_mnist", *args, world=2, fault=fault)
    error = outcome.error(1)
    assert re.search(r"at step 6, learning rate .*loss inf, gradient norm nan", error), error
    assert newest(tmp_path / "run") == 4 and not incomplete(tmp_path / "run")
