"""notebook_launcher starts two processes of main from one that has no launcher."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import NUM_TEST, ROOT, linux_only, rows

# As cells of a notebook: in a process of their own, because the launcher forks it.
CELLS = """
import sys
from accelerate import notebook_launcher
sys.path.insert(0, {root!r})
import {script}
notebook_launcher({script}.main, ({argv!r},), num_processes=2, mixed_precision="bf16")
"""
SCRIPTS = {
    "train_mnist": ("--model", "lenet", "--batch-size", "96", "--epochs", "1"),
    "train_regression": ("--num-samples", "100", "--epochs", "2"),
}


@linux_only  # elsewhere a fork after torch was imported is not safe, and a Mac trains on its GPU
@pytest.mark.parametrize(
    "script", [pytest.param("train_mnist", marks=pytest.mark.slow), "train_regression"]
)
def test_notebook_launcher_runs_main_on_two_processes(
    script: str, small_mnist: Path, tmp_path: Path
) -> None:
    if not (ROOT / f"{script}.py").exists():
        pytest.skip(f"{script}.py is not here")
    argv = ["--run-dir", str(tmp_path / "run"), *SCRIPTS[script]]
    if script == "train_mnist":
        argv += ["--dataset", str(small_mnist)]
    cells = CELLS.format(root=str(ROOT), script=script, argv=argv)
    done = subprocess.run(
        [sys.executable, "-c", cells], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (made["num_processes"], made["mixed_precision"]) == (2, "bf16")
    assert (tmp_path / "run" / "DONE").exists()
    last = rows(tmp_path / "run", "epochs")[-1]
    assert last["eval_samples"] == (NUM_TEST if script == "train_mnist" else 20)
