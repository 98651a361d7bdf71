"""What all processes do together: fail, wait, agree on metrics, exchange rows with gradients."""

import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from trainkit.errors import LostProcess, RunFailure, UsageError, explain
from trainkit.text import first_sentence

SAME = 1e-6  # relative difference of a metric that processes have computed from the same values


@contextmanager
def deadline(timeout: timedelta, others: str = "the other processes") -> Iterator[None]:
    """End this process with one sentence if the body takes 5 seconds longer than timeout.

    It is for the first connection with other processes: if one of them died, gloo waits for it five
    times as long as its timeout, and signals are not handled meanwhile.
    """

    def give_up() -> None:
        print(
            f"error: process {os.environ.get('RANK', '0')} could not reach {others} "
            f"within {timeout.total_seconds():.0f} s: read their output, or run "
            "trainkit.tools.doctor",
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

    The message is that of a UsageError or RunFailure (which it then is, whatever `kind` is); for
    other exceptions it is `what` and the reason. Every process must enter this, and the body must
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
    """Call in a thread of the main process, and return [the result] there, [] on the others.

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


def wait_together(
    accelerator: Accelerator, jobs: Sequence[Future], seconds: float = math.inf
) -> None:
    """Wait for the jobs of all processes, which do not count as lost however long it takes."""
    end = time.monotonic() + seconds
    while any(gather_object([time.monotonic() < end and not all(job.done() for job in jobs)])):
        wait(jobs, 1)


def agree(accelerator: Accelerator, metrics: dict[str, Any]) -> dict[str, float]:
    """Return the main process's metrics, so that all processes decide alike which is best.

    Every process must call this. Raises RuntimeError on all of them if theirs differ by more than
    rounding.
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
    for rank, others in enumerate(everybody):
        for name, value in everybody[0].items():
            other = others.get(name, math.nan)
            both_nan = math.isnan(value) and math.isnan(other)
            if not both_nan and not math.isclose(value, other, rel_tol=SAME, abs_tol=1e-9):
                raise RuntimeError(
                    f"{name} is {value:.8g} on process 0 and {other:.8g} on process {rank}: first "
                    "combine what the processes have evaluated, as run.evaluate and run.predict "
                    "do, or with accelerator.reduce"
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
