"""The kit as an installed package: a script in any folder can train with it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, rows


@pytest.fixture(scope="module")
def site_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the wheel of this repository, and nothing else."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"  # setuptools writes beside its sources
    shutil.copytree(ROOT / "trainkit", source / "trainkit")
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    site = folder / "site"
    command = [*pip, "--no-index", "--target", site, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return site


def test_a_script_in_another_folder_trains_and_resumes_with_the_installed_kit(
    site_dir: Path, tmp_path: Path
) -> None:
    script = Path(shutil.copy(ROOT / "train_regression.py", tmp_path / "train_mine.py"))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["PYTHONPATH"] = str(site_dir)
    flags = [
        "--epochs",
        "2",
        "--save-every",
        "2",
        "--batch-size",
        "60",
        "--num-samples",
        "375",
        "--no-pictures",
    ]
    for more in (["--stop-after-steps", "5"], ["--resume", "auto"]):
        command = [sys.executable, script.name, *flags, "--run-dir", "runs/mine", *more]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert [row["epoch"] for row in rows(tmp_path / "runs/mine", "epochs")][-1] == 2
    where = "import trainkit; print(trainkit.__file__)"
    command = [sys.executable, "-c", where]
    found = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True).stdout
    assert Path(found.strip()).is_relative_to(site_dir)
