"""Every setting of the whole process, one function each, and how a script ends.

run(main) applies them before main. What is about safety or numbers, refuse_pickled_code and
compute_float32_in_full, is applied by Run, so that it holds in a notebook too. What each saves is
measured by `python -m benchmarks.time_to_accuracy --compare startup`.
"""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from trainkit.cli.text import printable
from trainkit.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    SIGNALS,
    LoneFailure,
    RunFailure,
    Stopped,
    UsageError,
    explain,
    is_main_rank,
    leave,
)
from trainkit.launch.environment import by_accelerate, shards_wanted
from trainkit.private import run_exit_functions, skip_the_compiler

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4  # <malloc.h>
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def run(main: Callable[[], Any]) -> None:
    """Call main and turn its errors for people into one line on each machine.

    UsageError ends with exit code 2, RunFailure with 1, a signal before the first step with 75, a
    second Ctrl-C with 130. Other exceptions leave a traceback and exit code 1, and below it one
    sentence if it is known what happened to this process alone (a lost peer, a dead loader worker,
    no memory). No process waits for peers that may never come.
    """
    keep_memory()
    skip_the_compiler()
    fork_at_rest()
    atexit.register(_ignore_signals)  # the teardown has no handlers: the exit code would change
    try:
        end_with_launcher()
        main()
        code = 0
    except (UsageError, RunFailure, Stopped) as error:
        _end(f"error: {error}", error.exit_code, is_main_rank() or isinstance(error, LoneFailure))
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        code = end.code or 0
    except KeyboardInterrupt:
        _end("error: interrupted at once, without saving", EXIT_INTERRUPTED, is_main_rank())
    except Exception as error:
        traceback.print_exc()
        reason = explain(error)
        _end(
            f"error: process {os.environ.get('RANK', '0')} {reason}; what was saved is whole: "
            "remove the cause, then start the same command with --resume auto",
            EXIT_FAILURE,
            reason is not None,
        )
    finish(code)


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def finish(code: int) -> NoReturn:
    """End with this code; a signal ends it at once, as a thread of the script may keep it waiting.

    It goes without the interpreter's teardown. That takes 0.4 to 0.7 s once torch is imported; and
    in it a thread of gloo that still holds tensors asks for the interpreter, which aborts a process
    that is done, seen in 1 of some 200 (pytorch/pytorch pull request 179291).
    """
    for number in SIGNALS:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(number, lambda *_: os._exit(code))
    run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refuse_pickled_code() -> None:
    """Every torch.load of this process, accelerate's included, refuses to unpickle code."""
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)  # torch refuses to load with both
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"


def compute_float32_in_full() -> None:
    """float32 is float32 on every device: torch lets a GPU's convolutions round to TF32, 10 bits.

    Whoever wants speed picks a bf16 YAML, which is faster still and says so.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def end_with_launcher() -> None:
    """Let the death of the launcher reach this process as SIGTERM, which saves and ends the run.

    Only under a launcher: `nohup python train_mnist.py &` must outlive its shell. Linux only.
    """
    if sys.platform == "linux" and ("TORCHELASTIC_RUN_ID" in os.environ or by_accelerate()):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def fork_at_rest() -> None:
    """Fork no loader worker while gloo's threads still end a collective: it may hang at its start.

    In Python before 3.11.10 (https://github.com/python/cpython/issues/112275) that was met by 8 of
    14,634 forks made at once after collectives, and by none of 14,229 that waited 10 ms.
    """
    if sys.platform == "linux" and sys.version_info < (3, 11, 10):
        os.register_at_fork(before=lambda: time.sleep(0.01))


def keep_memory() -> None:
    """Keep the memory of freed tensors: wide trains 11 to 17 % faster, small models up to a third.

    glibc would give large tensors back to the kernel in every step and wait for new, zeroed pages
    in the next. So none is mapped on its own, the heap grows by 64 MB and shrinks only from 2 GB.

    A sharded run gives back what has a megabyte or more: the layers that it gathers and frees all
    the time leave holes in the heap, which grew to four times the model.
    """
    mapped = (M_MMAP_THRESHOLD, 2**20) if shards_wanted() else (M_MMAP_MAX, 0)
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for name, value in (mapped, (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26)):
            libc.mallopt(name, value)


def _end(text: str, code: int, loud: bool) -> NoReturn:
    if loud:
        print(printable(text), file=sys.stderr)
    leave(code)
