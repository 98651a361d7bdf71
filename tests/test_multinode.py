"""Several machines: two launchers that meet on this one."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conftest
import pytest
import yaml
from double import IN_DOUBLE, SAME

from trainkit.world import find_differences

SMALL = ("--epochs", 2, "--log-every", 3, "--eval-batch-size", 100)

# train_mnist.py, with the second node made different in the ways that $DIFFERENT names.
DIFFERENT = f"""
import importlib.metadata, os, runpy, sys

sys.path.insert(0, {str(conftest.ROOT)!r})
sys.argv[0] = {str(conftest.ROOT / "train_mnist.py")!r}
import trainkit.world

version = importlib.metadata.version
if os.environ["GROUP_RANK"] == "1":
    if "version" in os.environ["DIFFERENT"]:
        importlib.metadata.version = lambda name: "0.1" if name == "torch" else version(name)
    if "revision" in os.environ["DIFFERENT"]:
        trainkit.world.git_revision = lambda: "fedcba9"
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# train_mnist.py, which writes down beside the cache how many pictures each process decoded.
COUNTING = f"""
import os, sys
from pathlib import Path

sys.path.insert(0, {str(conftest.ROOT)!r})
import train_mnist
from datakit import pictures
from trainkit import startup

decode_all = pictures.decode_pictures

def decode(pictures, *args):
    with open(Path(os.environ["HF_HOME"], "decoded"), "a") as file:
        file.write(f"{{len(pictures)}} {{os.environ['RANK']}}\\n")
    return decode_all(pictures, *args)

pictures.decode_pictures = decode
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
    **environment: str,
) -> subprocess.Popen:
    """What a person types on machine `node`."""
    words = conftest.command(script, *args, config=config)
    words[5:5] = map(
        str,
        [
            "--machine_rank",
            node,
            "--main_process_ip",
            "127.0.0.1",
            "--main_process_port",
            port,
            *extra,
        ],
    )
    return start(words, **environment)


def start(words: list[str], **environment: str) -> subprocess.Popen:
    mark = os.urandom(8).hex()
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment | {"TEST_RUN": mark},
    )
    process.mark = mark
    return process


def finish(started: list[subprocess.Popen], timeout: float = 90) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each; a hang fails the test."""
    deadline = time.monotonic() + timeout
    try:
        outputs = [p.communicate(timeout=max(1, deadline - time.monotonic())) for p in started]
    except subprocess.TimeoutExpired:
        for process in started:
            conftest.kill_all(process)
        pytest.fail("hung\n" + "\n".join("\n".join(p.communicate()) for p in started))
    return [(p.returncode, *output) for p, output in zip(started, outputs, strict=True)]


def start_different(folder: Path, data: Path, how: str, *only_second: object) -> list:
    """Two nodes of one process each, without launchers, which would hide the exit codes."""
    script = folder / "different.py"
    script.write_text(DIFFERENT)
    args = [sys.executable, script, "--dataset", data, "--run-dir", folder / "run", *SMALL]
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "DIFFERENT": how,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return [
        start(
            list(map(str, [*args, *only_second] if node else args)),
            RANK=str(node),
            GROUP_RANK=str(node),
            **shared,
        )
        for node in (0, 1)
    ]


def assert_refused(results: list[tuple[int, str, str]], *phrases: str) -> None:
    for code, _, errors in results:  # each node says it in its own log
        sentence = next(line for line in errors.splitlines() if line.startswith("error: "))
        assert code == 2 and "Traceback" not in errors
        for phrase in phrases:
            assert phrase in sentence, sentence
        assert sentence.count(" is ") == len(phrases), sentence


def assert_equal_rows(run_dir: Path, other_dir: Path) -> None:
    rows, others = conftest.rows(run_dir), conftest.rows(other_dir)
    assert len(rows) == len(others) > 2
    for row, other in zip(rows, others, strict=True):
        assert row == pytest.approx(other, rel=SAME)


def elastic_config(folder: Path) -> Path:
    """2node_4cpu.yaml with the rendezvous of 2node_16gpu_elastic.yaml."""
    config = yaml.safe_load((conftest.CONFIGS / "2node_4cpu.yaml").read_text())
    elastic = yaml.safe_load((conftest.CONFIGS / "2node_16gpu_elastic.yaml").read_text())
    for name in ("rdzv_backend", "same_network"):
        config[name] = elastic[name]
    path = folder / "elastic.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize(
    "caches", [("a", "b"), pytest.param(("a", "a"), marks=pytest.mark.slow)], ids=["two", "shared"]
)
def test_two_nodes_of_two_processes_train_as_one_process(
    small_mnist: Path,
    tmp_path: Path,
    train_in_double: Callable[..., str],
    caches: tuple[str, str],
) -> None:
    port, args = free_port(), ("--dataset", small_mnist, *SMALL)
    script = tmp_path / "train_counting.py"
    script.write_text(COUNTING)
    nodes = []
    for node, cache in enumerate(caches):
        (tmp_path / cache).mkdir(exist_ok=True)
        nodes.append(
            start_node(
                node,
                port,
                *args,
                "--run-dir",
                tmp_path / "four",
                script=script,
                HF_HOME=str(tmp_path / cache),
                **IN_DOUBLE,
            )
        )
    train_in_double("train_mnist", *args, "--run-dir", tmp_path / "one")
    (code, output, errors), (other_code, _, _) = finish(nodes)
    assert code == other_code == 0, errors
    assert "device      4 processes on cpu" in output
    assert_equal_rows(tmp_path / "four", tmp_path / "one")
    for cache in {*caches}:  # each is filled once, by one process
        counts = [line.split() for line in (tmp_path / cache / "decoded").read_text().splitlines()]
        assert sum(int(number) for number, _ in counts) == conftest.NUM_TRAIN + conftest.NUM_TEST
        assert len({rank for _, rank in counts}) == 1


@pytest.mark.slow
def test_a_node_with_another_seed_version_and_revision_is_named(
    small_mnist: Path, tmp_path: Path
) -> None:
    nodes = start_different(tmp_path, small_mnist, "version revision", "--seed", 7)
    assert_refused(
        finish(nodes), "--seed is 0 on node 0", "and 0.1 on node 1", "and fedcba9 on node 1"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_node_with_other_data_is_named(small_mnist: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    other = tmp_path / "other"
    other.mkdir()
    for path in small_mnist.iterdir():  # another number of pictures: other numbers of batches too
        pq.write_table(pq.read_table(path)[:200], other / path.name)
    nodes = start_different(tmp_path, small_mnist, "", "--dataset", other)
    assert_refused(finish(nodes), "the data's md5 is ")


@pytest.mark.parametrize(
    ("values", "phrases"),
    [
        ("aaaa", []),
        ("aabb", ["seed is a on node 0, and b on node 1"]),
        ("aabbcc", ["seed is a on node 0, and b on node 1, and c on node 2"]),
        (
            "aaaaaabbccbbbbbb",
            [
                "seed is a on node 0, node 1, node 2, and b on node 3, node 5, node 6 and 1 more, "
                "and c on node 4"
            ],
        ),
    ],
)
def test_what_differs_is_said_with_the_nodes_that_have_it(values: str, phrases: list[str]) -> None:
    ranks: list[dict[str, Any]] = [
        {"node": f"node {rank // 2}", "facts": {"same": "x", "seed": value}}
        for rank, value in enumerate(values)
    ]
    assert find_differences(ranks) == phrases


EIGHT_EPOCHS = ("--epochs", 8, "--log-every", 3, "--eval-batch-size", 100)
EIGHT_EPOCHS += ("--save-every", 5, "--timeout", 20)


@pytest.mark.slow
def test_after_a_killed_launcher_and_a_killed_node_a_resume_ends_with_the_same_bytes(
    small_mnist: Path, tmp_path: Path
) -> None:
    args = ("--dataset", small_mnist, *EIGHT_EPOCHS)
    port = free_port()
    finish([start_node(n, port, *args, "--run-dir", tmp_path / "whole") for n in (0, 1)])
    args = (*args, "--run-dir", tmp_path / "run", "--resume", "auto")

    def attempt(step: int, kill: Callable[[subprocess.Popen], None]) -> tuple[str, str]:
        port = free_port()
        nodes = [start_node(n, port, *args) for n in (0, 1)]
        wait_for(tmp_path / "run" / "checkpoints" / f"step-{step:010}")
        kill(nodes[1])
        (code, output, errors), _ = finish(nodes, timeout=60)
        assert code != 0 and not (tmp_path / "run" / "DONE").exists()
        return output, errors

    # Its processes take the launcher's death as SIGTERM, and all four save.
    output, _ = attempt(10, subprocess.Popen.kill)
    assert "stopped by " in output and "--resume auto" in output
    # A machine without power says nothing at all.
    _, errors = attempt(25, conftest.kill_all)
    assert "lost contact with another process" in errors and "--resume auto" in errors
    port = free_port()
    results = finish([start_node(n, port, *args) for n in (0, 1)])
    assert [code for code, _, _ in results] == [0, 0], results
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_with_c10d_the_run_goes_on_when_a_killed_node_returns(
    small_mnist: Path, tmp_path: Path, train_in_double: Callable[..., str]
) -> None:
    args = ("--dataset", small_mnist, *EIGHT_EPOCHS)
    train_in_double("train_mnist", *args, "--run-dir", tmp_path / "one")
    port, config = free_port(), elastic_config(tmp_path)

    def start_elastic(node: int) -> subprocess.Popen:
        return start_node(
            node,
            port,
            *args,
            "--run-dir",
            tmp_path / "run",
            "--resume",
            "auto",
            config=config,
            extra=("--rdzv_backend", "c10d", "--max_restarts", 3),
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            **IN_DOUBLE,
        )

    first = start_elastic(0)
    wait_until(lambda: port_answers(port), "the first launcher listens")
    second = start_elastic(1)
    wait_for(tmp_path / "run" / "checkpoints" / "step-0000000010")
    conftest.kill_all(second)
    time.sleep(3)
    assert first.poll() is None
    results = finish([first, start_elastic(1)], timeout=120)
    assert [code for code, _, _ in results] == [0, 0], results
    assert "resuming from" in results[0][1] + results[1][1]
    assert_equal_rows(tmp_path / "run", tmp_path / "one")


def port_answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(path: Path) -> None:
    wait_until(path.exists, f"{path} exists")


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.02)
