"""Imports inside trainkit only run down, and what a person reads stays short."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import trainkit

import pytest
from conftest import ROOT

# A module may import those of its own row and of the rows above it. A folder stands for its files.
LAYERS = [
    "text hashes fronts repairs",
    "errors",
    "config",
    "store",
    "launch",
    "numbers plots",
    "checkpoints",
    "run",
    "reading",
    "pictures tables texts language rows",
    "tools predict app",
]
WINGS = LAYERS[-2].split()
LAYER = {name: number for number, row in enumerate(LAYERS) for name in row.split()}
KIT = sorted((ROOT / "trainkit").rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports anywhere, also `from package import module`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names if node.module else []


def layer(module: str) -> int | None:
    """The layer of `trainkit.text` or of a name in it; None outside of trainkit."""
    package, _, rest = module.partition(".")
    if package != "trainkit" or not rest:
        return None
    room, _, name = rest.partition(".")
    return LAYER.get(f"{room}.{name.partition('.')[0]}", LAYER.get(room))


@pytest.mark.parametrize("path", KIT, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_only_run_down(path):
    own = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    if own == "trainkit":
        own = "trainkit.tools"  # the package itself hands out names of every room
    for name in imported(path):
        assert name.partition(".")[0] != "examples", name
        if (theirs := layer(name)) is not None:
            assert theirs <= layer(own), f"{own} imports {name}"
            wing, other = own.split(".")[1], name.split(".")[1]
            assert not {wing, other} <= {*WINGS} or wing == other, f"{own} imports {name}"


def test_no_module_is_imported_by_its_name_to_get_around_the_rows():
    for path in KIT:
        fronts = ROOT / "trainkit" / "__init__.py", ROOT / "trainkit" / "fronts.py"
        is_front = path in fronts or path.parent.name == "repairs"
        assert is_front or "import_module" not in path.read_text(), path


FRONTS = {"trainkit", "trainkit.config", "trainkit.errors", *(f"trainkit.{wing}" for wing in WINGS)}


def modules(source: str) -> Iterator[str]:
    """The modules of the kit from which a program takes names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("trainkit"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainkit"):
            # `from trainkit import tools` is a room, and no name of trainkit's.
            rooms = {alias.name for alias in node.names} & LAYER.keys()
            yield from [f"trainkit.{name}" for name in rooms] if rooms else [node.module]


PROGRAMS = [*ROOT.glob("*.py"), *ROOT.glob("examples/*.py")]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md")]


@pytest.mark.parametrize("path", PROGRAMS + PAGES, ids=lambda path: path.name)
def test_scripts_and_pages_take_names_from_trainkit_and_from_the_front_of_a_wing(path):
    """Whoever has copied a script is then not broken by the next move of a file."""
    text = path.read_text()
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"^ *(from trainkit\S* import \w+)", text, re.MULTILINE))
        text = re.sub("^ +", "", text, flags=re.MULTILINE)
    inside = {name for name in modules(text) if name not in FRONTS}
    if path.name in ("predict.py", "app.py"):  # they are no training
        inside -= {f"trainkit.{path.stem}"}
    assert not inside, f"{path.name} imports from {sorted(inside)}"


def test_trainkit_has_each_name_that_it_hands_out():
    for name in trainkit.NAMES:
        assert name == "UNSET" or getattr(trainkit, name) is not None


def test_no_name_stands_twice():
    of_every_script, places = {"main", "Config", "make_model", "load_data"}, defaultdict(list)
    for path in KIT:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(ROOT).as_posix())
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not twice.keys() - of_every_script, twice


def test_no_function_is_long_and_little_is_kept_from_the_formatter():
    num_skipped = 0
    for path in (ROOT / "train_mnist.py", ROOT / "train_regression.py", *KIT):
        if "tools" in path.parts:
            continue
        num_skipped += path.read_text().count("# fmt: skip")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name != "main":
                length = node.end_lineno - node.lineno + 1
                assert length <= 45, f"{path.name}: {node.name} has {length} lines"
    assert num_skipped <= 30
