"""What the variables of a script hold: numbers, tensors, generators and all that has a state."""

import ast
import inspect
import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

from trainkit.checkpoints.hashing import hash_tensor
from trainkit.config import TrainingConfig
from trainkit.hashes import digest

NUM_PARTS = 50  # of the first and of the last entries of a list are compared
WRITES = (".append", ".extend", ".appendleft", ".update", "print")
GENERATORS = np.random.Generator | random.Random | torch.Generator


def held(
    script: Path, run_state: dict[str, Any], with_states: bool = True
) -> dict[str, dict[str, Any]]:
    """What the variables of the script hold now, by name: their kind, and their parts by place.

    They are those of the functions of its folder that are being called and of its modules there,
    with the attributes of objects of its own classes. with_states=False leaves out what has a
    state_dict, but not what such an object of its own class has as plain attributes.
    """
    found: dict[str, Any] = {"run.state": run_state}
    frame = inspect.currentframe()
    while frame:
        if is_own(frame.f_globals, script):
            found = {**frame.f_locals, **found}
        frame = frame.f_back
    for name, module in [*sys.modules.items()]:
        if is_own(names := getattr(module, "__dict__", {}), script):
            prefix = "" if name == "__main__" else f"{name}."
            found = {f"{prefix}{key}": value for key, value in names.items()} | found
    noted: dict[str, dict[str, Any]] = {}
    modules: set[int] = set()
    for name, value in found.items():
        parts: dict[str, Any] = {}
        if not name.startswith("__") and (with_states or not has_state(value)):
            note("", value, parts, script)
        if parts:
            noted[name] = {"kind": home_kind(value), "parts": parts}
        for place, part in attributes_of(value, script, modules):
            note("", part, parts := {}, script, is_part=True)
            if parts:
                noted[f"{name}.{place}"] = {"kind": home_kind(part), "parts": parts}
    return noted


def is_own(names: dict[str, Any], script: Path) -> bool:
    """Are these the names of a module of the script's folder, and not of the kit?"""
    path, is_kit = names.get("__file__"), str(names.get("__name__")).startswith("trainkit")
    return path is not None and not is_kit and Path(path).resolve().parent == script.parent


def has_state(value: Any) -> bool:
    """Has it a state_dict, as modules, optimizers and schedules have?"""
    is_class = isinstance(value, type)
    return not is_class and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def home_kind(value: Any) -> str:
    """What kind of home is right for it: see HOMES of pages.py."""
    parts = [*value.values()] if isinstance(value, dict) else value
    if isinstance(parts, list | tuple | deque) and len(parts):
        return home_kind(parts[0])
    if isinstance(value, GENERATORS):
        return "generator"
    if isinstance(value, torch.Tensor | np.ndarray):
        return "tensor"
    return "state" if has_state(value) else "number"


def note(
    place: str, value: Any, parts: dict[str, Any], script: Path, is_part: bool = False
) -> None:
    """Write what a value holds into `parts`: numbers and texts themselves, of others a hash."""
    if value is None or isinstance(value, bool | int | float | str):
        parts[place] = value if value == value else "nan"
    elif isinstance(value, torch.Tensor | np.ndarray):
        with suppress(Exception):  # of a kind that has no bytes
            tensor = torch.as_tensor(value).detach()
            parts[place] = hash_tensor(tensor)[:8]
            norms = [float(part.double().norm()) for part in (tensor, tensor.flatten()[:1])]
            parts[f"{place} is like"] = [*tensor.shape, *norms]
    elif isinstance(value, GENERATORS):
        state = getattr(getattr(value, "bit_generator", None), "state", None)
        read = getattr(value, "getstate", None) or getattr(value, "get_state", None)
        parts[place] = digest(repr(state) if read is None else str(list(read())))
    elif isinstance(value, dict):
        for key, part in [*value.items()]:
            note(f"{place}[{key!r}]", part, parts, script, is_part)
    elif isinstance(value, list | tuple | deque):
        parts[f"{place} has"] = len(value)
        entries = [*enumerate(value)]
        for number, part in entries[:NUM_PARTS] + entries[NUM_PARTS:][-NUM_PARTS:]:
            note(f"{place}[{number}]", part, parts, script, is_part)
    elif has_state(value):
        with suppress(Exception):  # of an object that is not ready; it is not compared
            note(place, value.state_dict(), parts, script, is_part=True)
    elif not is_part and not isinstance(value, TrainingConfig):
        made_by = vars(sys.modules.get(type(value).__module__, sys))
        if isinstance(value, FunctionType) or is_own(made_by, script):
            parts[f"{place} is"] = type(value).__name__  # its attributes may come later
            for name, part in [*getattr(value, "__dict__", {}).items()]:
                note(f"{place}.{name}", part, parts, script, is_part=True)


def attributes_of(value: Any, script: Path, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """What a module of the script's own classes keeps beside its weights, as a counter is."""
    for place, module in value.named_modules() if isinstance(value, nn.Module) else ():
        made_by = vars(sys.modules.get(type(module).__module__, sys))
        if is_own(made_by, script) and id(module) not in seen:
            seen.add(id(module))
            place = place.removeprefix("module").lstrip(".")
            for name, part in [*vars(module).items()]:
                if not name.startswith("_") and name != "training" and not has_state(part):
                    yield f"{place}.{name}".lstrip("."), part


def names_read(script: Path) -> set[str]:
    """The variables that a script, with the modules of its folder, reads: not only adds to."""
    names: set[str] = set()

    def look(node: ast.AST) -> None:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(node.id)
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(WRITES):
            node = ast.Pass() if "print" in ast.unparse(call.func) else ast.Tuple(call.args)
        for child in ast.iter_child_nodes(node):
            look(child)

    for module in [*sys.modules.values()]:
        if is_own(getattr(module, "__dict__", {}), script):
            look(ast.parse(Path(module.__file__ or "").read_bytes()))
    return names
