"""Several machines: two launchers that meet on this one."""

import socket
import subprocess
from pathlib import Path

import conftest
import pytest
from conftest import linux_only
from double import IN_DOUBLE

SMALL = "--epochs 2 --batch-size 60 --log-every 3 --eval-batch-size 100 --dataset"

# train_mnist.py, where only the second node gets the last flag.
DIFFERENT = """
import os
import train_mnist

def main(argv):
    node = os.environ["GROUP_RANK"] = os.environ["RANK"]
    train_mnist.main(argv if node == "1" else argv[:-2])
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_node(
    node: int,
    port: int,
    *args: object,
    config: str | Path = "2node_4cpu",
    extra: tuple = (),
    script: str | Path = "train_mnist.py",
    **env: str,
) -> subprocess.Popen:
    """What a person types on machine `node`."""
    flags = ["--machine_rank", node, "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    flags = list(map(str, (*flags, *extra)))
    return conftest.start(script, *args, config=config, launcher_flags=flags, env=env)


def finish(started: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each; a hang fails the test."""
    outputs = []
    try:
        outputs = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            conftest.kill_all(process)
    return [(p.returncode, *output) for p, output in zip(started, outputs, strict=True)]


def test_two_nodes_train_as_one_process(tmp_path, fork_main):
    port, flags = free_port(), "--num-samples 128 --epochs 2 --log-every 1 --no-pictures --run-dir"
    how = {"script": "train_regression.py", "extra": ("--num_processes", 2), **IN_DOUBLE}
    started = [start_node(node, port, flags, tmp_path / "two", **how) for node in (0, 1)]
    fork_main("train_regression", flags, tmp_path / "one", double=True).finished()
    (code, output, errors), (other_code, _, _) = finish(started)
    assert code == other_code == 0, errors
    conftest.assert_num_processes(output, 2)
    conftest.assert_same_numbers(tmp_path / "two", tmp_path / "one")


# How the second node differs, and what is said of it.
DIFFERENCES = [
    ("--seed", "--seed is 0 on process 0 of node 0 ("),
    ("--dataset", "the hash of the data is "),  # of another size: other numbers of batches too
]


@linux_only
@pytest.mark.parametrize("how, sentence", DIFFERENCES)
def test_a_node_that_differs_is_named(how, sentence, small_mnist, tiny_mnist, tmp_path, fork_main):
    other = f"{how} {tiny_mnist if how == '--dataset' else 7}"
    args = f"{SMALL} {small_mnist} --run-dir {tmp_path}/run {other}"
    line = fork_main(DIFFERENT, args, world=2).error(2)
    assert f"error: the processes of this run differ: {sentence}" in line
    assert "on process 1 of node 1 (" in line
    assert not (tmp_path / "run").exists()


EIGHT_EPOCHS = SMALL.replace("--epochs 2", "--epochs 8 --save-every 5 --timeout 20")


@pytest.mark.slow
def test_after_a_killed_launcher_and_a_killed_node_a_resume_ends_with_the_same_bytes(
    small_mnist, tmp_path
):
    args = [EIGHT_EPOCHS, small_mnist, "--run-dir"]

    def start_both(name, *more):
        port = free_port()
        return [start_node(n, port, *args, tmp_path / name, *more) for n in (0, 1)]

    finish(start_both("whole"))

    def attempt(step, kill):
        started = start_both("run", "--resume", "auto")
        conftest.wait_for_step(tmp_path / "run", step)
        kill(started[1])
        (code, output, errors), _ = finish(started)
        assert code != 0 and not (tmp_path / "run" / "DONE").exists()
        return output + errors

    # Its processes take the launcher's death as SIGTERM, and all four save.
    assert "stopped by " in attempt(10, subprocess.Popen.kill)
    # A machine without power says nothing at all.
    assert "lost contact with another process" in attempt(25, conftest.kill_all)
    results = finish(start_both("run", "--resume", "auto"))
    assert [code for code, _, _ in results] == [0, 0], results
    conftest.assert_same_bytes(tmp_path / "run", tmp_path / "whole")
