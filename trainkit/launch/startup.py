"""All settings that affect the whole process, one function each, and how a script ends.

Those that affect safety or numbers are applied by Run, so that they also hold in a notebook.
"""

import contextlib
import ctypes
import gc
import io
import multiprocessing
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from trainkit.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    SIGNALS,
    LoneFailure,
    LostProcess,
    RunFailure,
    Stopped,
    UsageError,
    advise,
    explain,
    is_main_rank,
)
from trainkit.launch import contact
from trainkit.launch.cores import share_cores
from trainkit.launch.environment import by_accelerate, shards_wanted
from trainkit.repairs.replaced import run_exit_functions, skip_the_compiler
from trainkit.text import printable

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4  # <malloc.h>
M_ARENA_MAX = -8
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
LATE_START_SECONDS = 60.0

# By stream, stdout or stderr, why something that was printed there was lost first.
LOST: dict[str, OSError] = {}


def run(main: Callable[[], Any], prints_results: bool = False) -> None:
    """Call main, and print its errors for the user as one line on each machine.

    What cannot be printed does not end a run. With prints_results, for a program whose output is
    what it was started for, the exit code is then 1, unless the reader has read enough (`| head`).
    Else it is that of the error, 130 after a second Ctrl-C, and 1 after other exceptions, with a
    traceback, and one sentence if it is known what to do. No process waits for others.
    """
    set_up_process()
    try:
        end_with_launcher()
        main()
        code = 0
    except (UsageError, RunFailure, Stopped) as error:
        text, is_alone = str(error), isinstance(error, LoneFailure)
        if is_alone or isinstance(error, Stopped):  # the others are raised on all processes
            is_lost = isinstance(error, LostProcess | Stopped)
            text = contact.cause_of(error, text, is_lost)
        _end(f"error: {text}", error.exit_code, is_main_rank() or is_alone)
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        code = end.code or 0
    except KeyboardInterrupt:
        _end("error: interrupted at once, without saving", EXIT_INTERRUPTED, is_main_rank())
    except Exception as error:
        traceback.print_exc()
        text, reason = advise(error) or "", explain(error)
        is_on_all = bool(text)
        if reason and not is_on_all:
            text = (
                f"process {contact.own_rank()} {reason}; the checkpoints are intact: remove the "
                "cause, then start the same command with --resume auto"
            )
        if not is_on_all:
            text = contact.cause_of(error, text, str(reason).startswith("lost contact"))
        _end(f"error: {text}", EXIT_FAILURE, bool(text) and (is_main_rank() or not is_on_all))
    with contextlib.suppress(OSError, ValueError):  # a stream of another kind, or closed
        sys.stdout.flush()
    if prints_results and not isinstance(LOST.get("stdout", BrokenPipeError()), BrokenPipeError):
        _end(f"error: what was printed is lost: {LOST['stdout']}", EXIT_FAILURE, True)
    finish(code)


def set_up_process() -> None:
    """Apply the settings that cost no safety and change no number, each with its reason below."""
    keep_printing()
    keep_memory()
    skip_the_compiler()
    share_cores()
    gc.freeze()  # what was imported is no garbage, and need not be looked through again


def finish(code: int) -> NoReturn:
    """Exit with this code, or at once on a signal, as waiting for a thread of the script may hang.

    This skips the interpreter's teardown, which aborted 1 of some 200 finished processes
    (pytorch/pytorch pull request 179291).
    """
    for number in SIGNALS:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(number, lambda *_: os._exit(code))
    run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Output(io.FileIO):
    """Standard output or error, of which what cannot be written is dropped, and noted in LOST."""

    def write(self, data: Any) -> int:
        """Write the data; return how many bytes were written, or dropped."""
        try:
            while (num_bytes := super().write(data)) is None:  # another process has made this
                select.select([], [self], [])  # terminal one that never waits
            return num_bytes
        except OSError as problem:
            LOST.setdefault("stdout" if self.fileno() == 1 else "stderr", problem)
            return memoryview(data).nbytes


def keep_printing() -> None:
    """Let no failure of printing end the work; print letters that an encoding lacks as escapes."""
    sys.stdout, sys.stderr = (_unfailing(stream) for stream in (sys.stdout, sys.stderr))


def _unfailing(stream: Any) -> Any:
    if stream is None:  # it was closed when Python started
        return open(os.devnull, "w", encoding="utf-8")
    is_done = isinstance(getattr(getattr(stream, "buffer", None), "raw", None), Output)
    if is_done or type(stream) is not io.TextIOWrapper:
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(Output(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering or stream.write_through,  # python -u
    )


def refuse_pickled_code() -> None:
    """Make every torch.load of this process, also those in accelerate, refuse to unpickle code."""
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)  # with both set, torch refuses to load
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"


def compute_float32_in_full() -> None:
    """Compute float32 in full: by default convolutions on a GPU round to TF32, of 10 bits."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@contextlib.contextmanager
def same_bits() -> Iterator[None]:
    """In the body torch uses only algorithms that give the same bits each time, or raises."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    were_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(were_on)


def attend_without_cudnn() -> None:
    """Let attention on a GPU leave out cuDNN, which makes a plan for each new length of a batch."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def end_with_launcher() -> None:
    """Send this process SIGTERM when its launcher dies, so that the run saves and ends."""
    if sys.platform == "linux" and ("TORCHELASTIC_RUN_ID" in os.environ or by_accelerate()):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def keep_memory(return_blocks: bool = False) -> None:
    """Keep the memory of freed tensors, which glibc returns to the kernel in every step.

    A sharded run, and one with return_blocks, still returns blocks of a megabyte or more: otherwise
    the heap became four times as large as the model.
    """
    mapped = [(M_MMAP_MAX, 0)]
    if return_blocks or shards_wanted():
        mapped = [(M_MMAP_MAX, 2**16), (M_MMAP_THRESHOLD, 2**20), (M_ARENA_MAX, 1)]
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # musl, of Alpine, has none
        for name, value in (*mapped, (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26)):
            libc.mallopt(name, value)


def leave(code: int) -> NoReturn:
    """End this process without waiting for peers that may never come."""
    workers = multiprocessing.active_children()
    for worker in workers:
        worker.kill()
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if workers or distributed:
        # A normal exit would wait for loader workers and other processes, which may hang.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code == EXIT_USAGE and not is_main_rank():
        # Otherwise the launcher might end the main process before that can print the message.
        time.sleep(LATE_START_SECONDS)
    finish(code)


def _end(text: str, code: int, loud: bool) -> NoReturn:
    if loud:
        print(printable(text), file=sys.stderr)
    leave(code)
