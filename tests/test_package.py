"""The kit as an installed package: a script in any folder can train with it."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, run


@pytest.fixture(scope="module")
def site_dir(tmp_path_factory):
    """A folder into which pip has installed the wheel of this repository, and nothing else."""
    pytest.importorskip("setuptools", minversion="77")  # as pyproject.toml wants it
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


def test_a_script_in_another_folder_trains_draws_and_predicts(site_dir, tmp_path):
    def call(*words):
        return run(*words, cwd=tmp_path, env={"PYTHONPATH": str(site_dir)}).stdout

    (tmp_path / "mine").mkdir()
    script = tmp_path / "mine" / "train_mine.py"
    told = "import trainkit\nprint('from', trainkit.__file__)\n"
    script.write_text(told + (ROOT / "train_regression.py").read_text())
    flags = "--epochs 2 --batch-size 60 --num-samples 375 --run-dir r --pictures"
    assert f"from {site_dir}/" in call(script, *flags.split())
    assert (tmp_path / "r" / "fit.png").exists()  # finish() found trainkit.tools
    (tmp_path / "t.csv").write_text(",".join(f"x{n}" for n in range(10)) + "\n" + "0," * 9 + "0\n")
    assert "predicted_y0" in call(ROOT / "predict.py", "r", "--script", script, "t.csv")
