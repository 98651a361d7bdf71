"""Wait for work that one process does alone, however long it takes, while that process lives.

Collectives have a limit, --timeout, because a lost process must be noticed. Data that take longer
to decode, a picture that takes longer to draw or a folder to write would exceed it. So each process
counts in the store of the process group, in a thread, and whoever waits looks at these counts.
"""

import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from trainkit.errors import LostProcess
from trainkit.repairs.names import frame_of_main_thread, store_of_processes

BEAT_SECONDS = 1.0
SAY_SECONDS = (10.0, 60.0, 300.0, 1800.0)  # after these a line says what the first step waits for
CODE = Path(__file__).resolve().parents[1]
# Every process makes the same calls in the same order, so they agree on the numbers.
NUMBERS = itertools.count()


def start_beating(accelerator: Accelerator) -> Callable[[], None]:
    """Show the other processes that this one lives, until the returned function is called."""
    over = threading.Event()
    if accelerator.num_processes == 1:
        return over.set
    store = store_of_processes()
    key = f"trainkit/beats/{accelerator.process_index}"

    def beat() -> None:
        try:
            while not over.wait(BEAT_SECONDS):
                store.add(key, 1)
        except RuntimeError:
            return  # the store ends with the first process, and then there is nobody to show it

    threading.Thread(target=beat, daemon=True).start()
    return over.set


def wait_for_all(accelerator: Accelerator, timeout: timedelta) -> None:
    """Wait until every process has called this, as long as those that have not are alive.

    Every process must call this. Raises LostProcess if one has not shown for `timeout` that it is.
    """
    if accelerator.num_processes == 1 or not torch.distributed.is_initialized():
        return
    store = store_of_processes()
    here = f"trainkit/arrived/{next(NUMBERS)}"
    store.add(f"{here}/{accelerator.process_index}", 1)
    store.add(here, 1)
    seen: dict[int, tuple[int, float]] = {}
    wait = 0.001
    while store.add(here, 0) < accelerator.num_processes:
        time.sleep(wait)
        wait = min(1.1 * wait, 0.2)  # a tenth of the time waited at most, for a save as well
        if wait == 0.2:  # only then does anybody look: most arrive at once
            _check_beats(store, here, accelerator.num_processes, seen, timeout)


def _check_beats(
    store: Any, here: str, num_processes: int, seen: dict[int, tuple[int, float]], limit: timedelta
) -> None:
    now = time.monotonic()
    for rank in range(num_processes):
        if store.add(f"{here}/{rank}", 0):
            continue
        beats = store.add(f"trainkit/beats/{rank}", 0)
        if rank not in seen or seen[rank][0] != beats:
            seen[rank] = beats, now
        elif now - seen[rank][1] > limit.total_seconds():
            raise LostProcess(
                f"process {rank} has not answered for {limit.total_seconds():.0f} s: read its "
                "output, then start the same command with --resume auto"
            )


def say_what_takes_long(
    accelerator: Accelerator, is_over: Callable[[], bool]
) -> Callable[[], None]:
    """Say on stderr what the main process is doing if the first step is a long time in coming.

    It ends when is_over() is true, or when the returned function is called.
    """
    stopped = threading.Event()
    if not accelerator.is_main_process:
        return stopped.set

    def watch() -> None:
        waited = 0.0
        for seconds in SAY_SECONDS:
            if stopped.wait(seconds - waited) or is_over():
                return
            waited = seconds
            print(f"no step yet after {seconds:.0f} s: {_say_where()}", file=sys.stderr)

    threading.Thread(target=watch, daemon=True).start()
    return stopped.set


def _say_where() -> str:
    """Name the function of the script in which the main thread is, and that of trainkit."""
    stack = traceback.extract_stack(frame_of_main_thread())
    script = os.path.realpath(getattr(sys.modules["__main__"], "__file__", None) or "")
    of_script = [each for each in stack if os.path.realpath(each.filename) == script]
    of_trainkit = [each for each in stack if CODE in Path(each.filename).parents]
    named = [
        f"{each[-1].name} ({Path(each[-1].filename).name}, line {each[-1].lineno})"
        for each in (of_script, of_trainkit)
        if each
    ]
    return f"at work in {', in '.join(named)}" if named else "at work outside of the script"
