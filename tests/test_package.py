"""The kit as an installed package: a script in any folder can train with it."""

import io
import re
import shutil
import subprocess
import sys
from importlib import metadata

import trainkit

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
    moved = source / "build" / "lib" / "trainkit" / "moved.py"  # of an earlier `pip install .`
    moved.parent.mkdir(parents=True)
    moved.touch()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    site = folder / "site"
    command = [*pip, "--no-index", "--target", site, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not [*site.rglob("moved.py")]
    return site


def test_a_script_in_another_folder_trains_draws_and_predicts(site_dir, tmp_path):
    def call(*words):
        env = {"PYTHONPATH": str(site_dir)}
        return run(*words, cwd=tmp_path, env=env, launcher_flags=["-m"]).stdout

    (tmp_path / "mine").mkdir()
    script = tmp_path / "mine" / "train_mine.py"
    told = "import trainkit\nprint('from', trainkit.__file__, trainkit.__version__)\n"
    script.write_text(told + (ROOT / "train_regression.py").read_text())
    flags = "--epochs 2 --batch-size 60 --num-samples 375 --run-dir r --pictures"
    said = call("mine.train_mine", *flags.split())
    (version,) = metadata.distributions(name="exact-trainkit", path=[str(site_dir)])
    assert f"from {site_dir}/trainkit/__init__.py {version.version}\n" in said
    assert (tmp_path / "r" / "fit.png").exists()  # finish() found trainkit.tools
    (tmp_path / "t.csv").write_text(",".join(f"x{n}" for n in range(10)) + "\n" + "0," * 9 + "0\n")
    # The command that it ends with, and the same with a table in place of the page.
    (shown,) = re.findall(r"^next: python -m trainkit\.app (.*)$", said, re.MULTILINE)
    assert shown == "r --script mine/train_mine.py"
    assert "predicted_y0" in call("trainkit.predict", *shown.split(), "t.csv")


def test_a_terminal_says_that_torch_is_being_imported(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    seen = Terminal()
    monkeypatch.setattr(sys, "stderr", seen)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(trainkit, "import_module", lambda name: print(seen.getvalue(), name))
    with pytest.raises(AttributeError):  # None has no Run
        trainkit.__getattr__("Run")
    *_, first, then, _ = seen.getvalue().split("\r")
    assert first == trainkit.LOADING and then == " " * len(first)
