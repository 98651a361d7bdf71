"""How the Slurm script ends a job, with stand-ins for Slurm's commands."""

import os
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, linux_only

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
    ("job", "code", "earlier", "expected", "requeued"),
    [
        (DONE, 0, "", 0, False),
        (f"{SAVE}; {DONE}", 0, "", 0, False),
        (SAVE, 1, "", 75, True),
        ("true", 1, "", 1, False),
        ("true", 2, DONE, 2, False),  # refused: the DONE is that of an earlier run
        ("true", 1, SAVE, 1, False),  # nothing new was saved: the next attempt would end alike
    ],
)
def test_the_run_folder_says_how_a_job_ended(
    tmp_path: Path, job: str, code: int, earlier: str, expected: int, requeued: bool
) -> None:
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "WHERE": str(tmp_path),
        "JOB": job,
        "CODE": str(code),
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "7",
    }
    subprocess.run(["bash", "-c", earlier], env=environment, check=True)
    for path in tmp_path.glob("run/DONE"):
        os.utime(path, (1, 1))
    script = ROOT / "docs" / "slurm" / "train.sbatch"
    words = ["bash", script, tmp_path / "run", "train_mnist.py", "--epochs", "2"]
    job_result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30)
    assert job_result.returncode == expected, job_result.stderr
    assert (tmp_path / "requeued").exists() == requeued
    started = (tmp_path / "started").read_text()
    assert "--num_machines 2 --num_processes 16" in started
    assert f"train_mnist.py --epochs 2 --run-dir {tmp_path}/run --resume auto" in started
