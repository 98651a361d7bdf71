"""Share the cores of a machine with other programs."""

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

import torch

LOOK_SECONDS = 0.5
# For how much of the time a thread of this process was kept waiting for a core: on two cores 0.3 to
# 0.4 beside another program, 0.1 beside two loader workers of its own, and 0.02 alone.
BUSY, QUIET = 0.2, 0.05
NUM_QUIET_LOOKS = 4  # in a row, before waiting threads spin again
SOFT = 1  # omp_pause_soft of <omp.h>


def share_cores() -> None:
    """Let waiting threads sleep while other programs need the cores. This changes no number.

    Threads of GNU's OpenMP spin while they wait for one that has no core: two runs at once took
    36 s and not 11. The library hardly spins while a process has more of its threads than there are
    cores, also if some of them only sleep (GOMP_SPINCOUNT in its manual). So a thread looks how
    long threads of this process waited for a core, and keeps sleeping threads while that is long.
    """
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    num_cores, num_threads = _num_cores(), torch.get_num_threads()
    has_library = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "GOMP_parallel")
    if has_library and not chosen and 1 < num_threads <= num_cores and _waited():
        size = num_cores - num_threads + 2
        threading.Thread(target=_watch, args=(size,), name="cores", daemon=True).start()


def _watch(size: int) -> None:
    library = ctypes.CDLL(None)
    are_asleep, num_quiet = False, 0
    looked_at, before = time.monotonic(), _waited()
    while True:
        time.sleep(LOOK_SECONDS)
        now, waited = time.monotonic(), _waited()
        longest = max((waited[task] - before.get(task, waited[task]) for task in waited), default=0)
        share = longest / (now - looked_at)
        looked_at, before = now, waited
        num_quiet = num_quiet + 1 if share < QUIET else 0
        if share > BUSY and not are_asleep:
            library.GOMP_parallel(library.free, None, size, 0)  # it calls free(NULL)
            are_asleep = True
        elif are_asleep and num_quiet >= NUM_QUIET_LOOKS:
            library.omp_pause_resource(SOFT, library.omp_get_initial_device())  # of this thread
            are_asleep = False


def _waited() -> dict[str, float]:
    """Seconds for which each thread of this process was ready to run and had no core."""
    waited = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            waited[path.parent.name] = int(path.read_text().split()[1]) / 1e9
        except (OSError, IndexError):  # the thread has just ended
            continue
    return waited


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
