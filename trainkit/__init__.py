"""The mechanics that both training scripts share: launch, arguments, order, checkpoints, history.

Import this package before torch: two of the settings below are read only while torch is loaded, and
a process whose launcher is killed meanwhile would train on as an orphan.
"""

import ctypes
import os
import signal
import sys

# Idle OpenMP threads sleep instead of spinning: spinning takes the cores from whatever else runs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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
