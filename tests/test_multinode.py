"""Several machines: two launchers that meet on this one."""

import socket
import subprocess
import time
from pathlib import Path

import conftest
import pytest
import yaml
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

# train_mnist.py, which writes down beside the cache how many pictures each process decoded.
COUNTING = f"""
import os, sys
from pathlib import Path

sys.path.insert(0, {str(conftest.ROOT)!r})
import train_mnist
from trainkit.pictures import decoding
from trainkit.launch import startup

decode_all = decoding.decode

def decode(blocks, *args):
    with open(Path(os.environ["HF_HOME"], "decoded"), "a") as file:
        file.write(f"{{len(blocks.cells)}} {{os.environ['RANK']}}\\n")
    return decode_all(blocks, *args)

decoding.decode = decode
startup.run(train_mnist.main)
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


@pytest.mark.slow
@pytest.mark.parametrize("caches, world", [("ab", 2), ("aa", 4)])
def test_each_cache_is_filled_by_one_process(tiny_mnist, tmp_path, fork_main, caches, world):
    port, args = free_port(), [SMALL, tiny_mnist, "--run-dir"]
    script, flags = tmp_path / "train_counting.py", (*args, tmp_path / "four")
    script.write_text(COUNTING)
    started = []
    for node, cache in enumerate(caches):
        (tmp_path / cache).mkdir(exist_ok=True)
        there = {"HF_HOME": str(tmp_path / cache), **IN_DOUBLE}
        extra = ("--num_processes", world)
        started.append(start_node(node, port, *flags, script=script, extra=extra, **there))
    fork_main("train_mnist", *args, tmp_path / "one", double=True).finished()
    (code, output, errors), (other_code, _, _) = finish(started)
    assert code == other_code == 0, errors
    conftest.assert_num_processes(output, world)
    conftest.assert_same_numbers(tmp_path / "four", tmp_path / "one")
    for cache in caches:  # each is filled once, by one process
        words = (tmp_path / cache / "decoded").read_text().split()
        assert sum(map(int, words[::2])) == 331 + 101
        assert len({*words[1::2]}) == 1


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


@pytest.mark.slow
def test_with_c10d_the_run_goes_on_when_a_killed_node_returns(small_mnist, tmp_path, fork_main):
    args = [EIGHT_EPOCHS, small_mnist, "--run-dir"]
    fork_main("train_mnist", *args, tmp_path / "one", double=True).finished()
    port = free_port()
    elastic = yaml.safe_load((conftest.CONFIGS / "2node_16gpu_elastic.yaml").read_text())
    config = yaml.safe_load((conftest.CONFIGS / "2node_4cpu.yaml").read_text())
    config["same_network"] = elastic["same_network"]
    (tmp_path / "elastic.yaml").write_text(yaml.safe_dump(config))

    def start_elastic(node):
        flags = (*args, tmp_path / "run", "--resume", "auto")
        there = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **IN_DOUBLE}
        extra = ("--rdzv_backend", elastic["rdzv_backend"], "--max_restarts", 3)
        config = tmp_path / "elastic.yaml"
        return start_node(node, port, *flags, config=config, extra=extra, **there)

    first = start_elastic(0)
    conftest.wait_until(lambda: port_answers(port))  # the first launcher listens
    second = start_elastic(1)
    conftest.wait_for_step(tmp_path / "run", 10)
    conftest.kill_all(second)
    time.sleep(3)
    assert first.poll() is None
    results = finish([first, start_elastic(1)])
    assert [code for code, _, _ in results] == [0, 0], results
    assert "resuming from" in results[0][1] + results[1][1]
    conftest.assert_same_numbers(tmp_path / "run", tmp_path / "one")


def port_answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
