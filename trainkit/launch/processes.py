"""What all processes do together: fail, wait, agree on metrics, exchange rows with gradients."""

import itertools
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from trainkit.errors import LostProcess, RunFailure, UsageError, explain
from trainkit.launch import contact
from trainkit.repairs.private_names import frame_of_thread, store_of_processes
from trainkit.text import first_sentence

SAME = 1e-6  # relative difference of a metric that processes have computed from the same values
# Every process makes the same calls in the same order, so they agree on the numbers.
NUMBERS = itertools.count()


@contextmanager
def deadline(timeout: timedelta, others: str = "the other processes") -> Iterator[None]:
    """End this process with one sentence if the body takes 5 seconds longer than timeout.

    gloo waits for a process that died five times as long as its timeout, and hears no signal.
    """

    def give_up() -> None:
        print(
            f"error: process {os.environ.get('RANK', '0')} could not reach {others} within "
            f"{timeout.total_seconds():.0f} s: read their output, or run trainkit.tools.doctor",
            file=sys.stderr,
        )
        os._exit(1)

    timer = threading.Timer(timeout.total_seconds() + 5, give_up)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def failing_together(
    accelerator: Accelerator, what: str, kind: type[Exception] = UsageError
) -> Iterator[None]:
    """Raise `kind` on all processes if the body fails on any, so that none waits for one that left.

    A UsageError or RunFailure stays what it is. Every process must enter this, and the body must
    not communicate.
    """
    error = None
    try:
        yield
    except LostProcess:
        raise  # the others cannot be told: one of them does not answer
    except UsageError as problem:
        error = str(problem)
    except RunFailure as problem:
        error, kind = str(problem), RunFailure
    except Exception as problem:
        reason = explain(problem)
        if reason is None and not isinstance(problem, OSError):
            traceback.print_exc()  # it may be a bug, so show where
        error = f"{what}: {reason or first_sentence(problem)}"
    raise_together(accelerator, error, kind)


def raise_together(
    accelerator: Accelerator, error: str | None, kind: type[Exception] = UsageError
) -> None:
    """Raise one error on all processes if any has one. Every process must call this."""
    errors = gather_object([(kind, error)]) if accelerator.num_processes > 1 else [(kind, error)]
    for kind, error in errors:
        if error is not None:
            raise kind(error)


def on_main(accelerator: Accelerator, what: str, call: Callable[[], Any]) -> list[Any]:
    """Call in a thread of the main process; return [the result] there, [] on the others.

    Every process must call this, and waits however long it takes; what it raises is raised on all.
    """
    jobs = [background(call)] if accelerator.is_main_process else []
    wait_together(accelerator, jobs)
    with failing_together(accelerator, what):
        return [job.result() for job in jobs]


def background(call: Callable[..., Any], *args: Any) -> Future:
    """Call in a thread, for which no process waits at its end, and return the result to come."""
    future: Future = Future()

    def work() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as problem:
            future.set_exception(problem)

    threading.Thread(target=work, daemon=True).start()
    return future


def wait_together(accelerator: Accelerator, jobs: Sequence[Future]) -> None:
    """Wait for the jobs of all processes, which do not count as lost however long it takes."""
    while any(gather_object([not all(job.done() for job in jobs)])):
        wait(jobs, 1)


def agree(accelerator: Accelerator, metrics: dict[str, Any]) -> dict[str, float]:
    """Return the main process's metrics, so that all processes decide alike which is best.

    Every process must call this. Raises RuntimeError on all if theirs differ by more than rounding.
    """
    plain = {  # tensors and arrays of one number become numbers
        name: v.item() if math.prod(getattr(v, "shape", (0,))) == 1 else v
        for name, v in metrics.items()
    }
    everybody = gather_object([plain])
    for name, value in (pair for theirs in everybody for pair in theirs.items()):
        if name in ("step", "epoch") or not isinstance(value, int | float):
            raise RuntimeError(
                f"run.end_epoch(...) got {name}: {value!r}: a metric must be a number, and must "
                "not be called step or epoch"
            )
        first = everybody[0].get(name, math.nan)
        is_close = math.isclose(first, value, rel_tol=SAME, abs_tol=1e-9)
        if not is_close and repr(first) != repr(value):  # two may be nan
            raise RuntimeError(
                f"{name} is {first:.8g} on process 0 and {value:.8g} on another: first combine "
                "what the processes have evaluated, as run.evaluate and run.predict do, or with "
                "accelerator.reduce"
            )
    return everybody[0]


class AllGather(torch.autograd.Function):
    """Tensors of equal sizes of all processes, (processes, ...): each adds to their gradients."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:
        shares = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(shares, own)
        return torch.stack(shares)

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> torch.Tensor:
        gradients = gradients.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(gradients)
        return gradients[torch.distributed.get_rank()]


def gather_rows(rows: torch.Tensor, nums: Sequence[int]) -> torch.Tensor:
    """The rows of all processes, `nums` of each, with gradients. Every process must call this."""
    if len(nums) == 1:
        return rows
    # All processes must send equally many rows, so shorter shares are padded with zeros.
    padded = torch.cat((rows, rows.new_zeros(max(nums) - len(rows), *rows.shape[1:])))
    shares = AllGather.apply(padded)
    return torch.cat([share[:num] for share, num in zip(shares, nums, strict=True)])


def start_beating(accelerator: Accelerator) -> Callable[[], None]:
    """Show the other processes that this one lives, until the returned function is called."""
    over = threading.Event()
    if accelerator.num_processes == 1:
        return over.set
    store = store_of_processes()
    rank, thread = accelerator.process_index, threading.get_ident()

    def beat() -> None:
        with suppress(RuntimeError):  # the store ends with the first process
            for number in itertools.count():
                frames = [*traceback.walk_stack(frame_of_thread(thread))]
                place = contact.place_in(reversed(frames))
                store.set(f"trainkit/life/{rank}", f"{number} {place}")
                if over.wait(contact.BEAT_SECONDS):
                    return

    threading.Thread(target=beat, daemon=True).start()
    return over.set


def wait_for_all(accelerator: Accelerator, timeout: timedelta) -> None:
    """Wait until every process has called this, as long as those that have not are alive.

    After `timeout` one that waits says where they are: they may wait for it in turn.
    Every process must call this. Raises LostProcess if one has not shown for `timeout` that it is.
    """
    if accelerator.num_processes == 1 or not torch.distributed.is_initialized():
        return
    store = store_of_processes()
    here = f"trainkit/arrived/{next(NUMBERS)}"
    store.add(f"{here}/{accelerator.process_index}", 1)
    store.add(here, 1)
    ranks = {*range(accelerator.num_processes)}
    seen: dict[int, tuple[str, float]] = {}
    say_at = time.monotonic() + timeout.total_seconds()
    wait = 0.001
    while store.add(here, 0) < len(ranks):
        time.sleep(wait)
        wait = min(1.1 * wait, 0.2)  # a tenth of the time waited at most, for a save as well
        if wait == 0.2:  # only then does anybody look: most arrive at once
            missing = {rank for rank in ranks if not store.add(f"{here}/{rank}", 0)}
            _check_beats(store, missing, seen, timeout)
            if time.monotonic() > say_at and accelerator.process_index == min(ranks - missing):
                say_at = math.inf
                contact.say_who_is_missing(store, missing)


def _check_beats(
    store: Any, missing: set[int], seen: dict[int, tuple[str, float]], limit: timedelta
) -> None:
    now = time.monotonic()
    for rank in missing:
        beats = contact.life_of(store, rank)
        if rank not in seen or seen[rank][0] != beats:
            seen[rank] = beats, now
        elif now - seen[rank][1] > limit.total_seconds():
            raise LostProcess(
                contact.first_failure()
                or f"process {rank} has not answered for {limit.total_seconds():.0f} s: read its "
                "output, then start the same command with --resume auto"
            )
