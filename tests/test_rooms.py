"""Imports inside trainkit only run down, and what a person reads stays short."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

# A module may import those of its own row and of the rows above it. A folder stands for its files.
LAYERS = [
    "text hashes repairs",
    "errors",
    "config",
    "store",
    "launch",
    "numbers",
    "rng",
    "plots",
    "checkpoints",
    "run",
    "reading",
    "pictures tables texts language rows",
    "tools",
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


def test_no_script_imports_what_shows_its_results():
    for path in [*ROOT.glob("train_*.py"), *(ROOT / "examples").glob("*.py")]:
        assert not [name for name in imported(path) if name.startswith("trainkit.tools")], path


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
