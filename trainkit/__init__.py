"""A training run without its model, data and loss. Scripts import from here.

Each name is loaded on first use, and no script needs one from a file inside a room: the wings, such
as trainkit.pictures, hand out their own. `Run` is where to begin.

A script imports this before torch, so that Ctrl-C during its imports ends it with one sentence.
"""

import gc
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

__version__ = "1.0.0"
LOADING = "importing torch ..."  # what a terminal shows for these seconds

# The names that each module has for scripts. Imported late, because predict.py needs no loop.
MODULES = {
    "run.run": "Run",
    "run.compiling": "compiled_with_model",
    "numbers.loaders": "InMemory make_loaders",
    "numbers.optim": "make_optimizer make_scheduler",
    "numbers.orders": "by_length",
    "numbers.randoms": "Dropout key keyed_normal keyed_uniform permute",
    "config": "UNSET Count Fraction MayChange Metric NonNegative Optimizer Positive ReadOnlyIf "
    "Rule Schedule Seed Share TrainingConfig flag parse",
    "errors": "EXIT_TARGET_MISSED LoneFailure RunFailure UsageError as_usage_error",
    "reading.paths": "refuse_pipe",
    "reading.predictor": "Classifier Predictor",
    "repairs.private_names": "plain_name",
    "repairs.replaced": "name_without_compiler",
    "store.atomic": "write_durably",
    "store.jsons": "from_exact_json",
    "store.records": "CLONE PREDICTIONS load_predictions",
    "text": "count printable shorten",
}
# Modules of which scripts call startup.run(main) and shards.make(accelerator, build).
WHOLE = {"startup": "launch.startup", "shards": "checkpoints.sharded"}
NAMES = {name: module for module, names in MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in NAMES | WHOLE:
        raise AttributeError(f"trainkit has no {name!r}")
    # torch makes hundreds of thousands of objects when it is imported. To look for garbage among
    # them, where there is none, takes a tenth of the CPU time of a start.
    collects = gc.isenabled()
    gc.disable()
    is_first = "torch" not in sys.modules and os.environ.get("LOCAL_RANK", "0") == "0"
    seen = is_first and sys.stderr is not None and sys.stderr.isatty()
    if seen:
        print(LOADING, end="\r", file=sys.stderr, flush=True)
    try:
        module = import_module(f"trainkit.{WHOLE.get(name) or NAMES[name]}")
    finally:
        if seen:
            print(" " * len(LOADING), end="\r", file=sys.stderr, flush=True)
        if collects:
            gc.enable()
    return module if name in WHOLE else getattr(module, name)


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
