"""Errors for people: one sentence, one exit code, on all processes alike."""

import errno
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from unicodedata import category

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_TARGET_MISSED = 3
EXIT_STOPPED = 75
EXIT_INTERRUPTED = 130

LATE_START_SECONDS = 60.0
# How gloo and NCCL begin their messages; torch raises some of gloo's as a plain RuntimeError.
LIBRARY_MESSAGE = re.compile(r"\[[^\]]*gloo/|gloo |nccl ", re.IGNORECASE)


class UsageError(ValueError):
    """Wrong arguments, data, folder or launch: one sentence for the person who typed it."""


class RunFailure(RuntimeError):
    """Something broke that no argument caused (disk, numbers): one sentence, exit code 1."""


def is_main_rank() -> bool:
    """True on the process that may print on its machine, also before there is an Accelerator."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))) == 0


def printable(text: str) -> str:
    """The text without what could steer a terminal: names and labels are other people's words."""
    fine = "\n\t\u200c\u200d"  # the last two join letters in some scripts
    return "".join(c if c.isprintable() or category(c) == "Zs" or c in fine else ascii(c)[1:-1]
                   for c in text)  # fmt: skip


@contextmanager
def as_usage_error(what: str) -> Iterator[None]:
    """Turn whatever the body raises into a UsageError that begins with `what`."""
    try:
        yield
    except UsageError:
        raise
    except Exception as problem:
        # datasets wraps the error of a file reader in one of its own.
        raise UsageError(f"{what}: {first_sentence(problem.__cause__ or problem)}") from problem


@contextmanager
def failing_together(
    accelerator: Accelerator, what: str, kind: type[Exception] = UsageError
) -> Iterator[None]:
    """Raise `kind` on all processes if the body fails on any: no process waits for one that left.

    The message is that of a UsageError or RunFailure, else `what` and the reason. Every process
    must enter this, and the body must not communicate.
    """
    error = None
    try:
        yield
    except (UsageError, RunFailure) as problem:
        error = str(problem)
    except Exception as problem:
        if not isinstance(problem, OSError):
            traceback.print_exc()  # perhaps a bug: where it is
        error = f"{what}: {first_sentence(problem)}"
    raise_together(accelerator, error, kind)


def raise_together(
    accelerator: Accelerator, error: str | None, kind: type[Exception] = UsageError
) -> None:
    """Raise one error on all processes if any has one. Every process must call this."""
    errors = gather_object([error]) if accelerator.num_processes > 1 else [error]
    first = next((message for message in errors if message is not None), None)
    if first is not None:
        raise kind(first)


def count(number: int, noun: str) -> str:
    """A number and its noun: 1 process, 2 processes."""
    plural = "es" if noun.endswith(("s", "batch")) else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def first_sentence(problem: BaseException) -> str:
    """The kind of an exception and the first sentence of its message, on one line."""
    lines = str(problem).strip().splitlines() or ["no reason given"]
    reason = lines[0].removeprefix("Error tokenizing data. ")  # pandas: row and column come next
    return f"{type(problem).__name__}: {reason.split('. ')[0]}"


def what_befell(error: RuntimeError | OSError) -> str | None:
    """What happened to this process alone, for example a lost peer; None if that is not known."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "ran out of memory, try a larger --accumulate or a smaller --batch-size"
    if text.startswith("DataLoader worker"):
        return "lost a loader worker (the kernel kills one when memory runs out)"
    if torch.distributed.is_available():
        lost = isinstance(error, torch.distributed.DistError)
        if lost or (type(error) is RuntimeError and LIBRARY_MESSAGE.match(text)):
            if torch.distributed.is_initialized():
                return "lost contact with another process of this run"
            return "did not meet the other processes (see their output, or ask trainkit.doctor)"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None)):
        return "found the disk full"
    return None


def leave(code: int) -> None:
    """End this process without waiting for peers that may never come."""
    sys.stdout.flush()
    sys.stderr.flush()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # The interpreter's exit would join communication threads that wait for the other processes.
        os._exit(code)
    if code == EXIT_USAGE and not is_main_rank():
        # The main process may still be importing what this one has imported. If this one ended
        # first, the launcher would end the main process before it could print the sentence.
        time.sleep(LATE_START_SECONDS)
    sys.exit(code)
