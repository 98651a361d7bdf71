"""The mechanics that both training scripts share: launch, arguments, order, checkpoints, history.

Import this package before torch: two of the settings below are read only while torch is loaded, and
a process whose launcher is killed meanwhile would train on as an orphan.
"""

import ctypes
import os
import signal
import sys

# Idle OpenMP threads look for work for some microseconds and then sleep: spinning on would take the
# cores from whatever else runs (benchmarks/busy_machine.py).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# Keep the memory of freed tensors: glibc would give large ones back to the kernel in every step and
# wait for new, zeroed pages in the next, up to a third of the time of a small model. So none is
# mapped on its own, the heap grows by 64 MB at a time, and it shrinks only from 2 GB on.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # <malloc.h>
if sys.platform == "linux" and hasattr(LIBC := ctypes.CDLL(None), "mallopt"):
    for parameter, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26)):
        LIBC.mallopt(parameter, value)

# Every torch.load in this process, accelerate's included, refuses to unpickle code.
os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"

# Accelerate's optimizer.step() looks for this package on the disk, twice in every step. None says:
# not there.
sys.modules.setdefault("lomo_optim", None)

# The death of a launcher reaches the process that it started as SIGTERM, which saves and ends it.
# Only under a launcher: `nohup python train_mnist.py &` must outlive its shell.
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
LAUNCHED = any(n in os.environ for n in ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"))
if LAUNCHED and sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
