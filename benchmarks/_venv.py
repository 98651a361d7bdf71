"""A folder of packages for one program: what it installs does not change this environment."""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1", "ACCELERATE_USE_CPU": "true"}


def install(folder: Path, pins: str, alone: str = "") -> Path:
    """Make a virtual environment that sees the packages of this one, and return its python.

    Args:
        pins: requirements; nothing that is here already takes another version for them.
        alone: requirements that are installed without what they ask for.
    """
    python, done = folder / "bin/python", folder / "installed"
    if done.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (path,) = folder.glob("lib/python*/site-packages")
    (path / "base.pth").write_text(sysconfig.get_path("purelib"))
    kept = (
        "torch torchvision numpy accelerate transformers datasets timm safetensors pandas pyarrow"
    )
    have = {each.name: each.version for each in importlib.metadata.distributions()}
    names = [f"{name}=={have[name]}" for name in kept.split() if name in have]
    (folder / "kept.txt").write_text("\n".join(names))
    pip = [python, "-m", "pip", "install", "-q", "--no-cache-dir", "-c", folder / "kept.txt"]
    subprocess.run([*pip, *pins.split()], check=True)
    if alone:
        subprocess.run([*pip, "--no-deps", *alone.split()], check=True)
    done.touch()
    return python


def environment(**more: str) -> dict[str, str]:
    """The variables of a program that computes on one core of the CPU."""
    return {**os.environ, **CPU, "PYTHONPATH": str(Path.cwd()), **more}
