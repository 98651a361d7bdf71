"""The mechanics of a training run; what a script needs is imported from here, when it is used."""

from importlib import import_module
from typing import Any

# Where each name lives. Imported late: predict.py, which trains nothing, starts without the loop.
NAMES = {
    "Run": "run",
    "EXIT_TARGET_MISSED": "errors",
    "UsageError": "errors",
    "InMemory": "order",
    "make_loaders": "order",
    "Dropout": "draws",
    "keyed_uniform": "draws",
    "make_optimizer": "optim",
    "make_scheduler": "optim",
    "peak_learning_rate": "optim",
    "count": "words.text",
    "shorten": "words.text",
}
MODULES = {"arguments": "words.arguments", "startup": "launch.startup"}


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return import_module(f"trainkit.{MODULES[name]}")
    if name in NAMES:
        return getattr(import_module(f"trainkit.{NAMES[name]}"), name)
    raise AttributeError(f"trainkit has no {name!r}")
