"""main under notebook_launcher, and the notebook for a free GPU from its first cell to its last."""

import json
import os
import re
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from conftest import CONFIGS, NUM_TEST, ROOT, linux_only, rows, run, write_script

# As cells of a notebook: in a process of their own, because the launcher forks it.
CELLS = """
import sys
from accelerate import notebook_launcher
sys.path.insert(0, root)
import train_regression
notebook_launcher(train_regression.main, (argv,), num_processes=2, mixed_precision="bf16")
"""


@pytest.mark.slow
@linux_only  # elsewhere a fork after torch was imported is not safe, and a Mac trains on its GPU
def test_notebook_launcher_runs_main_on_two_processes(tmp_path):
    argv = f"--num-samples 100 --epochs 2 --no-pictures --run-dir {tmp_path / 'run'}".split()
    # Not forked from the nursery: the launcher refuses a process that has imported bitsandbytes.
    run(write_script(tmp_path, CELLS, {"root": str(ROOT), "argv": argv}))
    made = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (made["num_processes"], made["mixed_precision"]) == (2, "bf16")
    assert (tmp_path / "run" / "DONE").exists()
    assert rows(tmp_path / "run", "epochs")[-1]["eval_samples"] == 20


QUICKSTART = ROOT / "examples" / "quickstart.ipynb"


def test_the_quickstart_holds_no_output_and_names_configurations_that_are_there():
    """Those of GPUs; what it runs on a CPU is run below."""
    notebook = nbformat.read(QUICKSTART, 4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    # A command that fails in a cell of any other kind would not stop the notebook.
    code = "\n".join(cell.source for cell in cells)
    assert {*re.findall(r"^[!%].*", code, re.MULTILINE)} == {"%%bash -e"}
    yamls = {CONFIGS / f"{name}.yaml" for name in re.findall(r'"(\dc?g?pu\w*)"', code)}
    assert len(yamls) == 3 and yamls < {*CONFIGS.iterdir()}


@linux_only
@pytest.mark.slow
def test_the_quickstart_runs_from_a_fresh_clone(small_mnist, tmp_path, monkeypatch):
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
    text = "".join(output.get("text", "") for found in outputs.values() for output in found)
    assert re.search(r"seven\.png: \d ", text) and "skipped" in text
    pictures = [output for found in outputs.values() for output in found if "data" in output]
    assert ["image/png" in picture["data"] for picture in pictures] == [True] * 3
    assert "resuming from runs/killed" in text or "it was done already" in text
    for name in ("mnist", "killed"):
        assert (runs / name / "DONE").exists()
        assert rows(runs / name, "epochs")[-1]["eval_samples"] == NUM_TEST
