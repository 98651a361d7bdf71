"""Is this the world that the YAML asked for, and how does a run end when it is not?"""

import argparse
import errno
import gc
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object

from trainkit.optim import peak_learning_rate

EXIT_USAGE = 2
EXIT_TARGET_MISSED = 3
EXIT_STOPPED = 75
EXIT_INTERRUPTED = 130

LATE_START_SECONDS = 60.0

SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class UsageError(ValueError):
    """Wrong arguments, data, folder or launch: one sentence for the person who typed it."""


class RunFailure(RuntimeError):
    """Something broke that no argument caused (disk, numbers): one sentence, exit code 1."""


def run(main: Callable[[], Any]) -> None:
    """Call main and turn its errors for people into one line from the main process.

    UsageError ends with exit code 2, RunFailure with 1, a second Ctrl-C with 130. What befalls one
    process alone is said by that process in one sentence, exit code 1: a lost peer, a dead loader
    worker, no memory, a full disk. Every other exception keeps its traceback.
    """
    gc.freeze()  # what was imported stays: neither the collector nor the exit has to look at it
    try:
        main()
    except UsageError as error:
        if is_main_rank():
            print(f"error: {error}", file=sys.stderr, flush=True)
        _leave(EXIT_USAGE)
    except RunFailure as error:
        if is_main_rank():
            print(f"error: {error}", file=sys.stderr, flush=True)
        _leave(1)
    except KeyboardInterrupt:
        if is_main_rank():
            print("error: interrupted at once, without saving", file=sys.stderr, flush=True)
        _leave(EXIT_INTERRUPTED)
    except (RuntimeError, OSError) as error:
        reason = _explain(error)
        if reason is None:
            raise
        rank = os.environ.get("RANK", "0")
        print(
            f"error: process {rank} {reason}: {_first_sentence(error)}; every checkpoint under its "
            "final name is whole: start the same command again with --resume auto",
            file=sys.stderr,
            flush=True,
        )
        _leave(1)


def is_main_rank() -> bool:
    """True on the process that may print on its machine, also before there is an Accelerator."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))) == 0


def check_launch() -> None:
    """Refuse a launch that cannot become what it asks for. Call before Accelerator(...).

    Raises UsageError on every process alike.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    num_devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    # The launchers say "CPU" in two ways: accelerate's one-process launcher exports
    # ACCELERATE_USE_CPU; the N-process one does not, so its YAML hides all cards with gpu_ids.
    use_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1")
    use_cpu = use_cpu or os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("-1")
    by_launcher = "ACCELERATE_MIXED_PRECISION" in os.environ

    if "WORLD_SIZE" not in os.environ and "MASTER_ADDR" in os.environ:
        # accelerate's one-process launcher exports MASTER_ADDR only if num_processes > 1.
        raise UsageError(
            "the YAML asks for more than one process but only this one was started ("
            "distributed_type NO and MULTI_CPU start no more): use MULTI_GPU, as in "
            "accelerate_configs/2cpu.yaml, or unset MASTER_ADDR if you exported it yourself"
        )
    if "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" in os.environ:
        raise UsageError(
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is set and would win over --accumulate without "
            "a word: unset it"
        )
    if world_size > 1 and "RANK" not in os.environ:
        raise UsageError(
            f"WORLD_SIZE is {world_size} but no launcher started this process (RANK is not set): "
            "start it with accelerate launch, or unset WORLD_SIZE"
        )
    if by_launcher and not use_cpu and num_devices == 0:
        raise UsageError(
            f"this launch asks for {_count(local_world_size, 'GPU')} and torch sees none here: run "
            "`python` without a launcher for one CPU process, use accelerate_configs/2cpu.yaml or "
            "1cpu_bf16.yaml, or repair the driver (nvidia-smi)"
        )
    if not use_cpu and 0 < num_devices < local_world_size:
        raise UsageError(
            f"{local_world_size} processes were started on this machine, which has "
            f"{_count(num_devices, 'GPU')}: use a YAML with num_processes: {num_devices}, or check "
            "gpu_ids and CUDA_VISIBLE_DEVICES"
        )
    if precision == "fp16" and (use_cpu or num_devices == 0):
        raise UsageError(
            "fp16 needs a GPU; on a CPU accelerate would train in float32 without a word: use "
            "mixed_precision: bf16 or no"
        )


@contextmanager
def deadline(timeout: timedelta) -> Iterator[None]:
    """End this process with one sentence if the body takes 5 seconds more than timeout.

    For meeting other processes: gloo waits five times its timeout for a first connection with one
    that died meanwhile, and lets no signal through.
    """

    def give_up() -> None:
        print(
            f"error: process {os.environ.get('RANK', '0')} did not meet the other processes within "
            f"{timeout.total_seconds():.0f} s (see their output, or ask trainkit.doctor)",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = threading.Timer(timeout.total_seconds() + 5, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_world(accelerator: Accelerator) -> None:
    """Refuse a world that is not the one the launcher announced. Call after Accelerator(...)."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != accelerator.num_processes:
        raise UsageError(
            f"{world_size} processes were started but Accelerate sees {accelerator.num_processes}: "
            "they would train as strangers and overwrite each other; use a YAML from "
            "accelerate_configs/"
        )
    if accelerator.distributed_type not in SUPPORTED:
        raise UsageError(
            f"distributed_type {accelerator.distributed_type.value} is not supported: use NO for "
            "one process or MULTI_GPU for DistributedDataParallel, as in accelerate_configs/"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.scaler is None:
        raise UsageError(
            f"fp16 was asked for but on {accelerator.device.type} Accelerate trains in float32: "
            "use mixed_precision: bf16 or no"
        )


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn whatever the body raises into a UsageError that begins with `what`."""
    try:
        yield
    except UsageError:
        raise
    except Exception as problem:
        # datasets wraps what a reader of files found in words of its own.
        raise UsageError(f"{what}: {_first_sentence(problem.__cause__ or problem)}") from problem


@contextmanager
def failing_together(
    accelerator: Accelerator, what: str, kind: type[Exception] = UsageError
) -> Iterator[None]:
    """Raise `kind` on all processes if the body fails on any: no process waits for one that left.

    The message is that of a UsageError, else `what` and the reason. Every process must enter this,
    and the body must not communicate.
    """
    error = None
    try:
        yield
    except UsageError as problem:
        error = str(problem)
    except Exception as problem:
        error = f"{what}: {_first_sentence(problem)}"
    raise_together(accelerator, error, kind)


def raise_together(
    accelerator: Accelerator, error: str | None, kind: type[Exception] = UsageError
) -> None:
    """Raise one error on all processes if any has one. Every process must call this."""
    errors = gather_object([error]) if accelerator.num_processes > 1 else [error]
    first = next((message for message in errors if message is not None), None)
    if first is not None:
        raise kind(first)


def first_here_then_everywhere(accelerator: Accelerator, load: Callable[[], Any]) -> Any:
    """Return load(), called first by one process per file system, so that it fills a cache once.

    Every process must call this. A UsageError on any process is raised on all of them.
    """
    result, error = None, None
    # Nested, because rank 0 is first where all machines share a disk, and each machine's local rank
    # 0 where they do not. Nothing may leave the body early: the others wait behind a barrier.
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        try:
            result = load()
        except UsageError as problem:
            error = str(problem)
    raise_together(accelerator, error)
    return result


def print_plan(
    accelerator: Accelerator, args: argparse.Namespace, steps_per_epoch: int, plan: dict[str, str]
) -> None:
    """Print what is about to happen, one line per item, on the main process."""
    per_process = args.batch_size // accelerator.num_processes // args.accumulate
    plan = {
        "device": describe_world(accelerator),
        **plan,
        "batch": f"{args.batch_size} per step = {_count(accelerator.num_processes, 'process')} x "
        f"{_count(args.accumulate, 'micro-batch')} x {per_process}",
        "updates": f"{args.epochs * steps_per_epoch} = {_count(args.epochs, 'epoch')} x "
        f"{_count(steps_per_epoch, 'step')}",
        "optimizer": f"{args.optimizer}, {args.schedule} learning rate, "
        f"{peak_learning_rate(args):g} at its peak",
        "run folder": str(args.run_dir),
    }
    width = max(len(name) for name in plan)
    for name, value in plan.items():
        accelerator.print(f"{name:<{width}}  {value}", flush=True)


def describe_world(accelerator: Accelerator) -> str:
    """One line: device, number of processes, precision and threads."""
    device = accelerator.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name(accelerator.device)
    precision = {"no": "float32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    threads = f", {_count(torch.get_num_threads(), 'thread')} each" if device == "cpu" else ""
    return f"{_count(accelerator.num_processes, 'process')} on {device}, {precision}{threads}"


def describe_run(accelerator: Accelerator, args: argparse.Namespace) -> dict[str, Any]:
    """What made a result: arguments, versions, revision, world and hardware."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "arguments": vars(args),
        "git_revision": git_revision(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("torch", "accelerate")},
        },
        "world": describe_world(accelerator),
        "num_processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "host": platform.node(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def git_revision() -> str | None:
    """The commit of the script's folder, "-dirty" if files were edited; None without git."""
    if not shutil.which("git"):
        return None
    git = ["git", "-C", str(Path(sys.argv[0]).resolve().parent), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") or noun == "micro-batch" else "s")
    return f"{number} {noun if number == 1 else plural}"


def _first_sentence(problem: Exception) -> str:
    lines = str(problem).strip().splitlines() or ["no reason given"]
    reason = lines[0].removeprefix("Error tokenizing data. ")  # pandas: row and column come next
    return f"{type(problem).__name__}: {reason.split('. ')[0]}"


def _explain(error: RuntimeError | OSError) -> str | None:
    """What befell this process, or None if that is not known."""
    text = str(error).lower()
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return "found the disk full" if full else None
    if isinstance(error, torch.OutOfMemoryError):
        return "ran out of memory, try a larger --accumulate or a smaller --batch-size"
    if text.startswith("dataloader worker"):
        return "lost a loader worker (the kernel kills one when memory runs out)"
    if torch.distributed.is_available():
        words = ("gloo", "connection", "timed out", "timeout", "nccl")
        lost = isinstance(error, torch.distributed.DistError)
        if torch.distributed.is_initialized():
            if lost or any(word in text for word in words):
                return "lost contact with another process of this run"
        elif lost or "connectfullmesh" in text:
            return "did not meet the other processes (see their output, or ask trainkit.doctor)"
    return None


def _leave(code: int) -> None:
    """End this process without waiting for peers that may never come."""
    sys.stdout.flush()
    sys.stderr.flush()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # The interpreter's exit would join communication threads that wait for the other processes.
        os._exit(code)
    if code == EXIT_USAGE and not is_main_rank():
        # The main process may still be importing what this one has imported: were this one to end
        # first, the launcher would end the other before it could speak. After that it ends this.
        time.sleep(LATE_START_SECONDS)
    sys.exit(code)
