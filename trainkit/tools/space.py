"""What makes an exported folder a Gradio Space: app.py, what it imports, requirements.txt."""

import importlib.metadata
import re
import shutil
import tomllib
from itertools import chain
from modulefinder import ModuleFinder
from pathlib import Path

ROOT = Path(__file__).parents[2]
# app.py takes the model from model.py there, and nobody compares runs there.
LEFT_OUT = ["predict", "model", "trainkit.tools.hub", "trainkit.tools.compare"]


def write_space(folder: Path) -> None:
    """Copy app.py and every module of this repository that it needs; name the packages they need.

    In the folder, `pip install -r requirements.txt && python app.py` opens the page of the model.
    """
    finder = ModuleFinder([str(ROOT)], excludes=LEFT_OUT)
    finder.run_script(str(ROOT / "app.py"))
    modules = finder.modules.values()
    for source in filter(None, (module.__file__ for module in modules)):  # type: ignore[attr-defined]
        path = folder / Path(source).relative_to(ROOT)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    text = "\n".join([(ROOT / "requirements.txt").read_text(), *chain(*extras.values())])
    bounds = {name: line for line, name in re.findall(r"^(([\w-]+)[^#\s]*)", text, re.M)}
    installed = importlib.metadata.packages_distributions()
    missing = {name.partition(".")[0] for name in finder.badmodules} & installed.keys()
    packages = {installed[name][0] for name in missing} | {"gradio"}
    wanted = sorted(bounds.get(package, package) for package in packages)
    (folder / "requirements.txt").write_text("\n".join(wanted) + "\n")
