"""Without what other platforms lack: fcntl, resource, SIGUSR1, setpgid, folders to be synced."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, kill_all, rows, run, start
from PIL import Image

WITHOUT = {"PYTHONPATH": f"{ROOT / 'tests' / 'platform_without'}{os.pathsep}{ROOT}"}


def test_a_run_trains_stops_resumes_and_predicts_without_them(
    small_mnist: Path, tmp_path: Path
) -> None:
    flags = ["--dataset", small_mnist, "--model", "lenet", "--batch-size", 48, "--num-workers", 2,
             "--log-every", 1, "--save-every", 3, "--epochs", 60, "--run-dir"]  # fmt: skip
    run_dir = tmp_path / "run"
    # A cache of its own: without fcntl a file that a kernel lock left behind counts as locked.
    environment = WITHOUT | {"HF_HOME": str(tmp_path / "hf")}
    process = start("train_mnist.py", *flags, run_dir, env=environment)
    deadline = time.monotonic() + 100
    while not list(run_dir.glob("checkpoints/step-*")) and process.poll() is None:
        if time.monotonic() > deadline:
            kill_all(process)
            pytest.fail(str(process.communicate()))
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 75 and "stopped by SIGINT" in output, errors
    stopped_at = rows(run_dir)[-1]["step"]
    again = run("train_mnist.py", *flags, run_dir, "--resume", "auto", "--stop-after-steps",
                stopped_at + 10, env=environment)  # fmt: skip
    assert again.returncode == 0 and "resuming from" in again.stdout, again.stderr
    assert rows(run_dir)[-1]["eval_samples"] == 251
    assert json.loads((run_dir / "run.json").read_text())["num_processes"] == 1
    Image.new("L", (28, 28)).save(tmp_path / "black.png")
    said = run("predict.py", run_dir, tmp_path / "black.png", env=environment)
    assert said.returncode == 0 and "black.png" in said.stdout, said.stderr


def test_the_doctor_examines_without_them(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from trainkit import doctor
from trainkit.rundir import sync
for name in ("fcntl", "resource"):
    assert sys.modules[name] is None
assert not hasattr(signal, "SIGUSR1") and not hasattr(os, "setpgid")
sync(__import__("pathlib").Path("."))  # opens no folder, and does not mind
sys.exit(doctor.main(sys.argv[1:]))
"""
    done = subprocess.run([sys.executable, "-c", code, "--run-dir", str(tmp_path), "--json"],
                          cwd=ROOT, env={**os.environ, **WITHOUT},
                          capture_output=True, text=True, timeout=100)  # fmt: skip
    assert done.returncode == 0, done.stderr
