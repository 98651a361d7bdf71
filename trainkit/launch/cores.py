"""Share the cores of a machine with other programs, and say in the plan that they are busy."""

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

import torch

LOOK_SECONDS = 0.5
# For how much of the time a thread of this process was kept waiting for a core. On two cores it is
# 0.3 to 0.4 beside another program, 0.1 beside two loader workers of its own, where sleeping made a
# run slower, and 0.02 alone.
BUSY, QUIET = 0.2, 0.05
NUM_QUIET_LOOKS = 4  # in a row, before waiting threads spin again
SOFT = 1  # omp_pause_soft of <omp.h>
NAMED_CORES = 0.5  # others that use less are not worth a line

# Core-seconds that the machine and this process had used when this process started.
used_at_start: tuple[float, float, float] | None = None


def share_cores() -> None:
    """Let waiting threads sleep while other programs need the cores. This changes no number.

    Threads of OpenMP that wait for each other spin 300,000 times in GNU's library, some
    milliseconds, which is fastest on a quiet machine. Beside another program they spin while the
    thread that they wait for has no core: two runs at once took six times as long as one. The
    library spins only 100 times while a process has more threads of OpenMP than cores
    (GOMP_SPINCOUNT in its manual), also if those of another team only sleep. So a thread looks
    twice a second for how long the scheduler kept threads of this process waiting, and has a team
    that sleeps for as long as they are.

    It does nothing if OMP_WAIT_POLICY or GOMP_SPINCOUNT is set, or without GNU's library.
    """
    global used_at_start
    used_at_start = _used()
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    num_cores, num_threads = _num_cores(), torch.get_num_threads()
    has_library = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "GOMP_parallel")
    if has_library and not chosen and 1 < num_threads <= num_cores and _waited():
        size = num_cores - num_threads + 2
        threading.Thread(target=_watch, args=(size,), name="cores", daemon=True).start()


def describe_cores(num_processes: int) -> str | None:
    """Return a line of the plan if other programs leave too few cores for the threads of this run.

    num_processes: of this run on this machine.
    """
    num_threads, now = torch.get_num_threads(), _used()
    if num_threads == 1 or used_at_start is None or now is None:
        return None
    seconds, machine, own = (
        after - before for after, before in zip(now, used_at_start, strict=True)
    )
    if seconds < 0.1:  # the kernel counts in hundredths of a second
        return None
    num_cores = _num_cores()
    busy = (machine - own) / seconds
    free = num_cores - busy
    if num_processes > 1 or busy < NAMED_CORES or num_threads <= free:
        return None
    return (
        f"other programs use {busy:.1f} of {num_cores} cores: beside them it is faster with "
        f"OMP_NUM_THREADS={max(1, round(free))} in the environment, which changes the rounding"
    )


def _watch(size: int) -> None:
    """Have a sleeping team of this many threads for as long as others need the cores."""
    library = ctypes.CDLL(None)
    has_team, num_quiet = False, 0
    looked_at, before = time.monotonic(), _waited()
    while True:
        time.sleep(LOOK_SECONDS)
        now, waited = time.monotonic(), _waited()
        longest = max((waited[task] - before.get(task, waited[task]) for task in waited), default=0)
        share = longest / (now - looked_at)
        looked_at, before = now, waited
        num_quiet = num_quiet + 1 if share < QUIET else 0
        if share > BUSY and not has_team:
            library.GOMP_parallel(library.free, None, size, 0)  # each of its threads frees nothing
            has_team = True
        elif has_team and num_quiet >= NUM_QUIET_LOOKS:
            library.omp_pause_resource(SOFT, library.omp_get_initial_device())  # of this thread
            has_team = False


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
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _used() -> tuple[float, float, float] | None:
    """Now, and the core-seconds that the machine and this process have used; None if not known."""
    try:
        # user, nice, system, idle, iowait, irq, softirq: proc(5)
        times = [int(word) for word in Path("/proc/stat").read_text().split()[1:8]]
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    own = os.times()
    machine = (sum(times) - times[3] - times[4]) / ticks
    return time.monotonic(), machine, sum(own[:4])
