"""What makes an exported folder a Gradio Space: app.py, what it imports, requirements.txt."""

import ast
import importlib.metadata
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEFT_OUT = {"predict", "model.load", "modelkit.hub"}  # app.py takes the model from model.py there


def write_space(folder: Path) -> None:
    """Copy app.py and every module of this repository that it needs; name the packages they need.

    In the folder, `pip install -r requirements.txt && python app.py` opens the page of the model.
    """
    files, packages = needed_by("app.py")
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    text = "".join((ROOT / f"requirements{part}.txt").read_text() for part in ("", "-extras"))
    bounds = {name: line for line, name in re.findall(r"^(([\w-]+)[^#\s]*)", text, re.M)}
    wanted = sorted(bounds.get(package, package) for package in {*packages, "gradio"})
    (folder / "requirements.txt").write_text("\n".join(wanted) + "\n")


def needed_by(name: str) -> tuple[list[str], set[str]]:
    """What a file of this repository imports: files, itself too, and packages to install."""
    files, modules = [name], set()
    for name in files:  # which grows meanwhile
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            inside = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for module in {inside + alias.name for alias in node.names} - LEFT_OUT:
                paths = [f"{stem.replace('.', '/')}.py" for stem in (module, inside[:-1])]
                found = [path for path in paths if (ROOT / path).is_file()]
                files += [path for path in found if path not in files]
                modules |= set() if found else {module.split(".")[0]}
    installed = importlib.metadata.packages_distributions()
    return files, {installed[module][0] for module in modules if module in installed}
