"""Errors for the user: one sentence and one exit code, the same on all processes."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from trainkit.text import first_sentence

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_TARGET_MISSED = 3
EXIT_STOPPED = 75
EXIT_INTERRUPTED = 130

# The signals that make a run save a checkpoint and stop. Windows has only two of them.
STOPPING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
SIGNALS = tuple(getattr(signal, name) for name in STOPPING if hasattr(signal, name))

SHM = "/dev/shm"
ENLARGE_SHM = (
    "through which processes and loader workers pass batches: enlarge it (docker run --shm-size), "
    "or use fewer --num-workers, or --num-workers 0"
)
# Messages of torch, safetensors, gloo, NCCL and the system when something happens to one process
# only, and what they mean. Each pattern is searched in the exception's type and message.
FAILURES = {
    r"shared memory|</torch_\w+>": f"had no room in {SHM}, {ENLARGE_SHM}",
    "OutOfMemoryError|DefaultCPUAllocator: can't": "ran out of memory: if it was during training, "
    "use a larger --accumulate or a smaller --batch-size, otherwise a smaller model or less data",
    r"DataLoader worker .* signal: Killed": "lost a loader worker, which was killed, probably "
    "because the memory is full: give the job more, or use fewer --num-workers or a smaller "
    "--batch-size",
    "DataLoader worker .* signal: Bus": f"lost a loader worker, for which {SHM} was too small, "
    f"{ENLARGE_SHM}",
    r"DataLoader worker .* ((?:by signal|with exit code):? [^.]+)": "lost a loader worker ({}): "
    "look for what ends a process, such as os._exit, in what the data set calls, or try "
    "--num-workers 0",
    "DataLoader worker|DataLoader timed out": "got no batch from a loader worker "
    "(see its output): if batches take long, raise --timeout",
    "Expected more than 1 value per channel": "gave BatchNorm a single sample, which has no "
    "variance (its share of a short last batch, or a micro-batch of it): use --drop-last or "
    "another --batch-size, or GroupNorm or LayerNorm",
    "No space left|File too large|quota exceeded|iostream error|fail at inline_container": "found "
    "the disk full",
    r"Dist\w*Error|RuntimeError: (\[[^\]]*gloo/|(?i:gloo |nccl ))": "lost contact with another "
    "process of this run, or never reached it: read its output, run trainkit.tools.doctor, or look "
    "for a call that not all processes make alike, as under `if accelerator.is_main_process:`",
}

# Messages of torch, equal on all processes, that name neither the thing nor the way out.
ADVICE = {
    "got mixed torch.Tensor and DTensor": "sharded weights, of which each process has a part, were "
    "combined with a tensor that is whole: use `weight.full_tensor() if "
    'hasattr(weight, "full_tensor") else weight`, on every process, or give a '
    "teacher, with requires_grad_(False), to accelerator.prepare(...) as well",
    "out of bounds for storage of size 0": "a gradient of a gradient, as of a gradient penalty, "
    "goes through sharded weights twice, and they are given back after the first time: call "
    "model.set_reshard_after_backward(False) on what accelerator.prepare(...) returned",
    "nested_\\w+_backward|SymIntArrayRef expected to contain only concrete": "torch has no "
    "gradient for this operation on a nested tensor: call torch.nested.to_padded_tensor(x, 0.0) "
    "before it",
}


class UsageError(ValueError):
    """Wrong arguments, data, folder or launch. The message is one sentence for the user."""

    exit_code = EXIT_USAGE


class RunFailure(RuntimeError):
    """A failure that no argument caused, such as a full disk or NaN. One sentence, exit code 1."""

    exit_code = EXIT_FAILURE


class LoneFailure(RunFailure):
    """A failure of a single process, or of its loader worker. That process prints the message."""

    def __init__(self, text: str):
        # A loader worker passes on its whole traceback, which ends with the message.
        super().__init__(text.strip().rpartition("LoneFailure: ")[2])


class LostProcess(LoneFailure):
    """Another process does not answer any more, so nothing can be told to all of them."""


class Stopped(SystemExit):
    """A signal arrived before the first step. Nothing needs saving, so the process ends at once."""

    exit_code = EXIT_STOPPED


def stopped_early(number: int) -> str:
    """Say that a signal arrived before the first step."""
    return (
        f"stopped by {signal.Signals(number).name} before the first step, with nothing to save: "
        "start the same command with --resume auto"
    )


def by_nohup(number: int) -> bool:
    """True for SIGHUP if nohup started this process, which must then outlive its terminal."""
    return signal.Signals(number).name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN


def is_main_rank() -> bool:
    """True on the one process per machine that may print; works before an Accelerator exists."""
    rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    return rank in ("0", "") or os.environ.get("RANK") == "0" or "WORLD_SIZE" not in os.environ


@contextmanager
def as_usage_error(what: str) -> Iterator[None]:
    """Turn exceptions but UsageError and RunFailure into a UsageError that begins with `what`."""
    try:
        yield
    except (UsageError, RunFailure):
        raise
    except Exception as problem:
        # datasets wraps the error of a file reader in one of its own.
        cause = problem.__cause__ or problem
        raise UsageError(f"{what}: {first_sentence(cause)}") from problem


def explain(problem: Exception) -> str | None:
    """Say what happened to this process only, for example a lost peer; None if it is not known."""
    text = f"{type(problem).__name__}: {problem}"
    if problem.__cause__ is not None and "exited unexpectedly" in text:
        text = f"{text}\n{problem.__cause__}"  # how the worker ended
    if " in DataLoader worker process " in text:  # torch raises it again, with its traceback
        return f"got no batch: the data set raised {text.strip().splitlines()[-1]}"
    for pattern, sentence in FAILURES.items():
        if found := re.search(pattern, text):
            return sentence.format(*found.groups())
    return None


def advise(problem: Exception) -> str | None:
    """Say what to do where torch refuses an operation of the script; None if it is not known."""
    found = (text for pattern, text in ADVICE.items() if re.search(pattern, str(problem)))
    return next(found, None)
