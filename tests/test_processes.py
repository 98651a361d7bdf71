"""One process may work alone for as long as it lives; one that does not answer is lost."""

import re
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from conftest import linux_only

from trainkit.errors import LoneFailure, LostProcess
from trainkit.launch import contact, processes
from trainkit.launch.processes import failing_together


def process(rank: int) -> SimpleNamespace:
    return SimpleNamespace(num_processes=2, process_index=rank)


@pytest.fixture
def store(monkeypatch):
    """What two processes share, here two threads, whose calls have one number."""
    shared = torch.distributed.HashStore()
    for module in (processes, contact):
        monkeypatch.setattr(module, "store_of_processes", lambda: shared)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(processes, "NUMBERS", iter([0, 0]))
    monkeypatch.setattr(contact, "BEAT_SECONDS", 0.05)
    return shared


def test_a_process_that_works_longer_than_the_limit_is_waited_for(store):
    limit = timedelta(seconds=0.4)
    stop = processes.start_beating(process(1))
    arriving = threading.Timer(1.5, processes.wait_for_all, (process(1), limit))
    arriving.start()
    began = time.monotonic()
    processes.wait_for_all(process(0), limit)
    assert time.monotonic() - began > 1
    arriving.join()
    stop()


def test_a_process_that_does_not_answer_is_lost_after_the_limit(store):
    processes.start_beating(process(1))()  # it stops at once
    with pytest.raises(LoneFailure, match="process 1 has not answered for 0 s"):
        processes.wait_for_all(process(0), timedelta(seconds=0.4))


def test_a_lost_process_is_said_without_asking_the_others(monkeypatch):
    monkeypatch.setattr("trainkit.launch.processes.gather_object", None)  # it would wait for it
    with pytest.raises(LostProcess, match="gone"), failing_together(process(0), "saving"):
        raise LostProcess("gone")


SLOW = '''"""A regression whose first process does longer than --timeout what it does alone."""

import os
import time

import train_regression
from accelerate import Accelerator
from trainkit.checkpoints import commit as durable
from trainkit.run.run import Run


def slow(call, seconds=3):
    def slowly(*args, **options):
        if os.environ["RANK"] == "0":
            time.sleep(seconds)
        return call(*args, **options)

    return slowly


def main(argv):
    train_regression.load_data = slow(train_regression.load_data)
    Run.end_epoch = slow(Run.end_epoch)
    Accelerator.save_state = slow(Accelerator.save_state)
    durable.make_durable = slow(durable.make_durable, 7)  # beside the evaluation
    train_regression.main(argv)
'''


@linux_only
def test_data_pictures_and_a_checkpoint_may_take_the_first_process_longer_than_the_timeout(
    tmp_path, fork_main
):
    flags = f"--num-samples 64 --epochs 1 --timeout 2 --no-pictures --run-dir {tmp_path}/run"
    done = fork_main(SLOW, flags, world=2)
    assert done.codes == [0, 0], done.output
    assert "2 processes on cpu" in done.stdout
    waits = (
        r"process 1 in main, line \d+ of train_regression.py still waits for process 0 in slowly"
    )
    assert re.search(waits, done.stderr), done.output


# A part that one process leaves out from its third step on; one that is slow in its fourth.
APART = """
import os
import time

import torch
import train_regression
from torch import nn


class Net(nn.Module):
    def __init__(self, num_features):
        super().__init__()
        self.a, self.part, self.calls = nn.Linear(num_features, 1), nn.Linear(1, 1), 0

    def forward(self, x):
        self.calls += 1
        is_other = os.environ["RANK"] == "1"
        if is_other and WHAT == "slow" and self.calls == 4:
            time.sleep(8)  # in this line
        x = self.a(x)
        return x if is_other and WHAT == "drop" and self.calls > 2 else self.part(x)


def main(argv):
    train_regression.make_model = lambda metadata: Net(len(metadata["features"]))
    train_regression.main(argv)
"""


@linux_only
@pytest.mark.parametrize(
    "what, sentence",
    [
        ("drop", r"part.weight, part.bias of a model got no gradient in this step on process 1"),
        (
            "slow",
            r"process 0 waited for --timeout 2 s in main, line \d+ of train_regression.py, while "
            r"process 1 (is alive|was last seen), in forward, line \d+ of given.py: .*raise --time",
        ),
    ],
)
def test_an_error_is_the_cause_and_not_a_lost_contact(tmp_path, fork_main, what, sentence):
    flags = f"--num-samples 64 --epochs 4 --timeout 2 --run-dir {tmp_path}/run"
    done = fork_main(APART, flags, world=2, given={"WHAT": what})
    assert done.codes == [1, 1], done.output
    assert re.search(f"error: {sentence}", done.stderr), done.output
    assert "error: process 0 lost contact" not in done.output
