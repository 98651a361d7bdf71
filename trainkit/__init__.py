"""The mechanics of a training run. Scripts import from here; each name is loaded on first use.

A script imports this before torch, so that Ctrl-C during its imports ends it with one sentence.
"""

import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

# The module of each name. Imported late, because predict.py does not train or need the loop.
NAMES = {
    "Run": "run.run",
    "EXIT_TARGET_MISSED": "errors",
    "UsageError": "errors",
    "InMemory": "numbers.loaders",
    "make_loaders": "numbers.loaders",
    "compiled_with_model": "run.compiling",
    "by_length": "numbers.orders",
    "Dropout": "numbers.randoms",
    "key": "numbers.randoms",
    "keyed_normal": "numbers.randoms",
    "keyed_uniform": "numbers.randoms",
    "permute": "numbers.randoms",
    "make_optimizer": "numbers.optim",
    "make_scheduler": "numbers.optim",
    "shorten": "text",
    "startup": "launch.startup",
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"trainkit has no {name!r}")
    module = import_module(f"trainkit.{NAMES[name]}")
    return module if NAMES[name].endswith(f".{name}") else getattr(module, name)


def keep_standard_files() -> None:
    """Open the null device where standard input, output or error is closed.

    Otherwise the next file that is opened would get its number, and what other libraries print
    would be written into that file. This is called before anything else opens files.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free
            os.set_inheritable(null, True)


def interrupt(number: int, frame: Any) -> None:
    """Raise KeyboardInterrupt on Ctrl-C; a second one, or one in an import, ends the process.

    During an import, numpy would swallow the KeyboardInterrupt and fail later in a thousand lines.
    """
    signal.signal(number, signal.SIG_DFL)
    while frame:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            if os.environ.get("LOCAL_RANK", "0") == "0":
                with suppress(OSError):  # its reader may have gone away
                    os.write(2, b"error: interrupted at once, without saving\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if None in (sys.stdin, sys.stdout, sys.stderr):  # it was closed when Python started
    keep_standard_files()
if signal.getsignal(signal.SIGINT) is signal.default_int_handler and not hasattr(sys, "ps1"):
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, interrupt)
