"""The front of a package: names that scripts import from it, each loaded on its first use."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def hand_out(front: str, names: dict[str, str], below: str = "") -> Callable[[str], Any]:
    """Return the __getattr__ of a package that hands out names.

    Args:
        front: the package, as `trainkit.tables`.
        names: the module of each name, below the package `below` (default: the front).
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in names:
            raise AttributeError(f"{front} has no {name!r}")
        return getattr(import_module(f"{below or front}.{names[name]}"), name)

    return __getattr__
