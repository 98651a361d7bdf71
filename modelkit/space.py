"""What makes an exported folder a Gradio Space: app.py, what it imports, requirements.txt."""

import ast
import importlib.metadata
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LEFT_OUT = {"predict", "model"}  # app.py takes the model from model.py there


def write_space(folder: Path) -> None:
    """Copy app.py and every module of this repository that it needs; name the packages they need.

    In the folder, `pip install -r requirements.txt && python app.py` opens the page of the model.
    """
    copied, packages, waiting = set(), {"gradio"}, [Path("app.py")]
    while waiting:
        path = waiting.pop()
        if path in copied:
            continue
        copied.add(path)
        (folder / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / path, folder / path)
        for name in _imported(path) - LEFT_OUT:
            stem = name.replace(".", "/")
            files = [Path(f"{stem}.py"), Path(stem, "__init__.py")]
            waiting += (found := [file for file in files if (ROOT / file).is_file()])
            packages |= set() if found else {name.split(".")[0]}
    text = "".join((ROOT / f"requirements{part}.txt").read_text() for part in ("", "-extras"))
    wanted = [line.strip() for line, name in re.findall(r"^(([\w-]+)[^#\n]*)", text, re.M)
              if name.replace("-", "_") in packages]  # fmt: skip
    (folder / "requirements.txt").write_text("\n".join(wanted) + "\n")


def space_metadata() -> dict[str, Any]:
    """What a Space's README.md must say. Of a model's README.md the Hub ignores it."""
    try:
        version = {"sdk_version": importlib.metadata.version("gradio")}
    except importlib.metadata.PackageNotFoundError:
        version = {}  # the Hub then takes the newest that it has
    python = "{}.{}".format(*sys.version_info)
    return {"sdk": "gradio", **version, "python_version": python, "app_file": "app.py"}


def _imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere; of `from a import b` both a and a.b."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
            names.add(str(node.module))
    return names
