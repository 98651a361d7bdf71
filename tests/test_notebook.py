"""main under notebook_launcher, and the notebook for a free GPU from its first cell to its last."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from conftest import CONFIGS, NUM_TEST, ROOT, linux_only, rows

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


QUICKSTART = ROOT / "notebooks" / "quickstart.ipynb"
SHELL = "%%bash -e\n"


def test_the_quickstart_names_what_is_there_and_holds_no_output() -> None:
    notebook = nbformat.read(QUICKSTART, 4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    code = "".join(cell.source for cell in cells)
    for name in re.findall(r"[\w/]+\.(?:py|txt)\b", code):
        assert (ROOT / name).is_file(), name
    yamls = re.findall(r'"(\dc?g?pu\w*)"', code)
    assert sorted(yamls) == ["1gpu_fp16", "2cpu", "2gpu_fp16"]
    assert all((CONFIGS / f"{name}.yaml").is_file() for name in yamls)
    assert "python -m pytest -q -m gpu" in code and "--resume auto" in code
    for cell in cells:
        # A command that fails in a cell of any other kind would not stop the notebook.
        if cell.source.startswith(SHELL):
            command = ["bash", "-n", "-c", cell.source.removeprefix(SHELL)]
            assert shutil.which("bash") is None or subprocess.run(command).returncode == 0
        else:
            ast.parse(cell.source)


@linux_only
@pytest.mark.slow
def test_the_quickstart_runs_from_a_fresh_clone(
    small_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout")
    notebook = nbformat.read(QUICKSTART, 4)
    settings = next(cell for cell in notebook.cells if cell.source.startswith("REPOSITORY"))
    settings.source = f'REPOSITORY = {str(ROOT)!r}\nFLAGS = "--epochs 3 --dataset {small_mnist}"'
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # all is there; nothing is fetched
    monkeypatch.setenv("PYTEST_ADDOPTS", "tests/test_emulated_cards.py")
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=place).execute()
    runs = tmp_path / "quickstart" / "runs"
    made = json.loads((runs / "mnist" / "run.json").read_text())
    assert made["num_processes"] == 2
    outputs = {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    (pictures,) = (found for code, found in outputs.items() if "display(" in code)
    assert ["image/png" in output["data"] for output in pictures] == [True] * 3
    text = "".join(output.get("text", "") for found in outputs.values() for output in found)
    assert re.search(r"hub/example\.png: \d ", text) and "skipped" in text
    assert "resuming from runs/killed" in text or "it was done already" in text
    for name in ("mnist", "killed"):
        assert (runs / name / "DONE").exists()
        assert rows(runs / name, "epochs")[-1]["eval_samples"] == NUM_TEST
