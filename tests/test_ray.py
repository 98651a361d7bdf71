"""python -m launchers.ray: a script on a Ray cluster of two nodes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import conftest
import psutil
import pytest

from trainkit.errors import EXIT_USAGE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without work and two nodes with a CPU each."""
    utils = pytest.importorskip("ray.cluster_utils", exc_type=ImportError)
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else a token is written to the home folder
    started = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    os.environ["RAY_ADDRESS"] = started.address
    started.nodes = [started.add_node(num_cpus=1) for _ in range(2)]
    yield started
    started.shutdown()
    del os.environ["RAY_AUTH_MODE"], os.environ["RAY_ADDRESS"]


def start(log: Path, *words: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "launchers.ray", *map(str, words)]
    with open(log, "w") as file:  # a pipe that nobody reads fills up and stops Ray
        return subprocess.Popen(command, cwd=conftest.ROOT, stdout=file, stderr=file)


def find(run_dir: Path) -> psutil.Process:
    """A process of the script, not the launcher."""
    for process in psutil.process_iter(["cmdline", "name"]):
        words = process.info["cmdline"] or []
        if str(run_dir) in words and "launchers.ray" not in words:
            return process
    raise AssertionError("no process of the run was found")


def test_a_run_stopped_killed_and_without_a_node_ends_with_the_bytes_of_an_undisturbed_one(
    cluster: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    flags = ["--num-samples", 400, "--model", "mlp", "--epochs", 150, "--save-every", 5]
    log = tmp_path / "log"
    launched = start(
        log, "--workers", 2, "--retries", 9, run_dir, "train_regression.py", *flags, "--no-pictures"
    )

    def wait_for(step: int) -> None:
        name = f"step-{step:010}"
        while max((p.name for p in run_dir.glob("checkpoints/step-*")), default="") < name:
            assert launched.poll() is None, log.read_text()
            time.sleep(0.05)

    wait_for(50)
    find(run_dir).terminate()
    wait_for(300)
    find(run_dir).parent().kill()
    wait_for(700)
    cluster.remove_node(cluster.nodes[1], allow_graceful=False)
    cluster.add_node(num_cpus=1)
    try:
        assert launched.wait(240) == 0, log.read_text()
    finally:
        launched.kill()
    assert log.read_text().count("resuming from") == 3
    whole = tmp_path / "whole"
    result = conftest.run("train_regression.py", *flags, "--run-dir", whole, config="2cpu")
    conftest.assert_num_processes(result.stdout, 2)
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (run_dir / name).read_bytes() == (whole / name).read_bytes()


def test_a_refusal_is_said_once_and_not_tried_again(cluster: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = ["--workers", 2, tmp_path / "run", "train_regression.py", "--batch-size", 3]
    assert start(log, *words).wait(120) == EXIT_USAGE
    assert log.read_text().count("error: --batch-size 3 must") == 1
