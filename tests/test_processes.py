"""One process may work alone for as long as it lives; one that does not answer is lost."""

import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from conftest import linux_only

from trainkit.errors import LoneFailure, LostProcess
from trainkit.launch import processes
from trainkit.launch.nodes import first_on_each_node
from trainkit.launch.processes import failing_together

SINGLE = SimpleNamespace(num_processes=1, is_main_process=True, is_local_main_process=True)


def process(rank: int) -> SimpleNamespace:
    return SimpleNamespace(num_processes=2, process_index=rank)


@pytest.fixture
def store(monkeypatch):
    """What two processes share, here two threads, whose calls have one number."""
    shared = torch.distributed.HashStore()
    monkeypatch.setattr(processes, "store_of_processes", lambda: shared)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(processes, "NUMBERS", iter([0, 0]))
    monkeypatch.setattr(processes, "BEAT_SECONDS", 0.05)
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


def test_what_takes_long_before_the_first_step_is_said(monkeypatch, capfd):
    monkeypatch.setattr(processes, "SAY_SECONDS", (0.05, 0.1, 60.0))
    main = SimpleNamespace(is_main_process=True)
    stop = processes.say_what_takes_long(main, lambda: False)
    time.sleep(0.4)
    stop()
    processes.say_what_takes_long(SimpleNamespace(is_main_process=False), lambda: False)
    processes.say_what_takes_long(main, lambda: True)  # it has made a step
    time.sleep(0.2)
    said = capfd.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in said] == ["no step yet after 0 s"] * 2


def test_what_takes_long_is_named_by_the_script_and_by_the_function(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    said = first_on_each_node(SINGLE, processes._say_where, timedelta(seconds=1))
    assert said.startswith("at work in test_what_takes_long_is_named_by_the_script_and_by_the_fun")
    assert "(test_processes.py, line" in said
    assert ", in frame_of_main_thread (private_names.py, line" in said


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
