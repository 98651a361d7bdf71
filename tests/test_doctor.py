"""The doctor finds what keeps ranks from training together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import conftest
import pytest

from trainkit import doctor

# Rank 1 of a doctor's run, made ill in the ways that sys.argv[1] names.
PATIENT = """
import importlib.metadata, os, subprocess, sys, time

sys.path.insert(0, {root!r})
from trainkit import doctor, startup

doctor.world.TOKEN_WAIT_SECONDS, doctor.GLOO_SECONDS = 0.5, 3
version, measure_matmul = importlib.metadata.version, doctor.measure_matmul


def behind_a_busy_loop(accelerator):
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [core])
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(3)]
    try:
        return measure_matmul(accelerator)
    finally:
        for loop in loops:
            loop.kill()


def lose_the_network(accelerator):
    os.environ["GLOO_SOCKET_IFNAME"] = "nosuch"  # read whenever a group is opened
    return measure_matmul(accelerator)


if os.environ["RANK"] == "1":
    if "absent" in sys.argv[1]:
        time.sleep(600)
    if "version" in sys.argv[1]:
        importlib.metadata.version = lambda name: "0.1" if name == "torch" else version(name)
    if "slow" in sys.argv[1]:
        doctor.measure_matmul = behind_a_busy_loop
    if "loopback" in sys.argv[1]:
        doctor.measure_matmul = lose_the_network
    if "unshared" in sys.argv[1]:
        os.mkdir("elsewhere")
        os.chdir("elsewhere")
startup.run(lambda: sys.exit(doctor.main(sys.argv[2:])))
"""


def examine(folder: Path, illness: str, *args: str) -> subprocess.CompletedProcess:
    patient = folder / "patient.py"
    patient.write_text(PATIENT.format(root=str(conftest.ROOT)))
    return conftest.run(str(patient), illness, *args, config="2cpu", cwd=folder, timeout=60)


@pytest.fixture(scope="module")
def ill(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The problems of a run with three faults."""
    if sys.platform != "linux":
        pytest.skip("only Linux ties a process to a core, which makes it slow")
    result = examine(tmp_path_factory.mktemp("ill"), "version slow unshared", "--json")
    report = json.loads(result.stdout)
    assert report["num_processes"] == 2
    assert result.returncode == 1 and "exitcode  : 1" in result.stderr
    assert len(report["problems"]) == 3, report["problems"]
    return report["problems"]


def test_a_wrong_version_is_named(ill: list[str]) -> None:
    assert any("and 0.1 on rank 1 " in problem for problem in ill), ill


def test_a_slow_rank_is_named(ill: list[str]) -> None:
    assert any(problem.startswith("rank 1 ") and "slow" in problem for problem in ill), ill


def test_an_unshared_run_folder_is_named(ill: list[str]) -> None:
    assert any(problem.startswith("runs is not the same folder") for problem in ill), ill


def test_a_rank_that_never_comes_ends_the_doctor_with_one_sentence(tmp_path: Path) -> None:
    result = examine(tmp_path, "absent", "--timeout", "2")
    assert result.returncode == 1 and not result.stdout
    assert "error: process 0 did not meet the other processes" in result.stderr


def test_healthy_ranks_are_measured_and_called_healthy(tmp_path: Path) -> None:
    command = [*conftest.command("", config="2cpu")[:-1], "-m", "trainkit.doctor", "--json"]
    result = subprocess.run(
        [*command, "--run-dir", tmp_path],
        cwd=conftest.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ,
    )
    report = json.loads(result.stdout)
    assert report["format"] == 2 and report["num_processes"] == 2
    # Other work on this machine may slow a rank down; nothing else may be wrong.
    assert all("slow" in problem for problem in report["problems"]), report["problems"]
    assert [entry["bytes"] for entry in report["all_reduce"]] == [2**12, 2**22, 100 * 2**20]
    assert all(entry["correct"] and entry["seconds"] > 0 for entry in report["all_reduce"])
    for rank in report["ranks"]:
        assert rank["backend"] == "gloo" and rank["matmul_flops"]["float32"] > 1e8
    assert list(tmp_path.iterdir()) == []


def test_the_text_has_79_columns_whatever_the_names_and_the_number_of_ranks() -> None:
    rank = {
        "host": "a-host-with-a-long-name.example.org",
        "device": "AMD EPYC 9B45 128-Core Processor",
        "driver": "none",
        "backend": "gloo",
        "threads": 64,
        "free_bytes": 2**41,
        "facts": {"torch": "2.15.0", "accelerate": "1.15.0"},
        "matmul_flops": {"float32": 1e15, "bfloat16": 1e15, "float16": 1e15},
    }
    sums = {"bytes": 100 * 2**20, "seconds": 100.0, "bus_bytes_per_second": 1e11, "correct": False}
    report = {
        "ranks": [rank] * 1000,
        "all_reduce": [sums],
        "problems": ["rank 3 is slow " * 9],
        "run_dir": "runs/mnist",
    }
    lines = doctor.as_text(report).splitlines()
    assert max(map(len, lines)) <= 79 and len(lines) < 50
    assert lines[-1].startswith("verdict: do not train")


@pytest.mark.slow
def test_a_gloo_group_that_cannot_be_opened_beside_nccl_is_one_sentence(tmp_path: Path) -> None:
    result = examine(tmp_path, "loopback", "--json")
    problems = json.loads(result.stdout)["problems"]
    (problem,) = [problem for problem in problems if "slow" not in problem]
    assert problem.startswith("the gloo group that training opens beside gloo failed on node 0 ")
    assert "address for: nosuch" in problem and "set GLOO_SOCKET_IFNAME to" in problem
    assert result.returncode == 1
