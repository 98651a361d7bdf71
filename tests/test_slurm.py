"""The Slurm script: how it ends a job, with stand-ins for Slurm's commands, and on a real Slurm."""

import os
import subprocess
import sys
from pathlib import Path

import conftest
import pytest
from conftest import ROOT, linux_only
from faults import digests

from trainkit.errors import EXIT_STOPPED

SCRIPT = ROOT / "docs" / "slurm" / "train.sbatch"
STAND_INS = {
    "scontrol": """case "$2" in
        hostnames) echo n1 ;;
        node) echo "NodeName=n1 NodeAddr=127.0.0.1 CPUs=2" ;;
        *) echo "$@" >> "$WHERE/requeued" ;;
    esac""",
    "srun": 'echo "$@" > "$WHERE/started"; eval "$JOB"; exit "$CODE"',
}
SAVE = 'mkdir -p "$WHERE/run/checkpoints/step-0000000007"'
DONE = 'mkdir -p "$WHERE/run"; touch "$WHERE/run/DONE"'


@linux_only  # as is Slurm
@pytest.mark.parametrize(
    "job, code, earlier, expected",
    [
        (f"{SAVE}; {DONE}", 0, "", 0),
        (SAVE, 1, "", EXIT_STOPPED),
        ("true", 1, "", 1),
        ("true", 2, DONE, 2),  # refused: the DONE is that of an earlier run
        ("true", 1, SAVE, 1),  # nothing new was saved: the next attempt would end alike
    ],
)
def test_the_run_folder_says_how_a_job_ended(tmp_path, job, code, earlier, expected):
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = f"PATH={tmp_path}:{os.environ['PATH']} WHERE={tmp_path} CODE={code}"
    environment += " SLURM_JOB_NODELIST=n1 SLURM_NNODES=2 SLURM_JOB_ID=7"
    environment = os.environ | dict(pair.split("=", 1) for pair in environment.split())
    subprocess.run(["bash", "-c", earlier], env=environment, check=True)
    for path in tmp_path.glob("run/DONE"):
        os.utime(path, (1, 1))
    words = ["bash", SCRIPT, tmp_path / "run", "train_mnist.py", "--epochs", "2"]
    ended = subprocess.run(words, env=environment | {"JOB": job}, capture_output=True, timeout=30)
    assert ended.returncode == expected, ended.stderr
    assert (tmp_path / "requeued").exists() == (expected == EXIT_STOPPED)
    started = (tmp_path / "started").read_text()
    assert "--num_machines 2 --num_processes 16" in started
    assert f"train_mnist.py --epochs 2 --run-dir {tmp_path}/run --resume auto" in started


def slurm(*words: object) -> str:
    return subprocess.run([*map(str, words)], capture_output=True, text=True, check=True).stdout


def go_on(job: str):
    """Wait until the job is back in the queue; Slurm would hold it back for two minutes.

    In the second in which it ended, its nodes would refuse it: "Job credential revoked".
    """
    conftest.wait_until(lambda: "JobState=PENDING" in slurm("scontrol", "show", "job", job))
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now+3")


@pytest.fixture
def two_nodes():
    """Skip before anything is run for nothing."""
    try:
        assert slurm("sinfo", "-h", "-o", "%D %t") == "2 idle\n"
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no Slurm here")


@pytest.mark.slow
def test_a_job_with_a_killed_and_a_stopped_process_ends_with_the_bytes_of_an_undisturbed_run(
    two_nodes, undisturbed, tiny_mnist, tmp_path, monkeypatch
):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CONFIG", "accelerate_configs/2node_4cpu.yaml")
    monkeypatch.setenv("PROCESSES_PER_NODE", "1")
    words = conftest.typed("sbatch")
    words[words.index("/shared/runs/mnist")] = str(run_dir)
    words[1:1] = ["--gpus-per-node=0", "--cpus-per-task=1", f"--output={log}", "--parsable"]
    monkeypatch.chdir(ROOT)
    job = slurm(*words, *conftest.ENGINE_FLAGS.split(), tiny_mnist).strip()
    conftest.wait_for_step(run_dir, 30)
    conftest.find_process(run_dir).kill()
    go_on(job)
    conftest.wait_for_step(run_dir, 120)
    slurm("scancel", "--signal=TERM", job)
    go_on(job)
    conftest.wait_until((run_dir / "DONE").exists)
    assert log.read_text().count("resuming from") == 2
    assert digests(run_dir) == digests(undisturbed)
