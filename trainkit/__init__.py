"""The mechanics that both training scripts share: launch, arguments, order, checkpoints, history.

Import this package before torch: two of the settings below are read only while torch is loaded.
"""

import os
import sys

# Idle OpenMP threads sleep instead of spinning. On two cores beside another busy process, spinning
# threads make a step ten times slower; alone, sleeping costs nothing (benchmarks/RECORDS.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Every torch.load in this process, accelerate's included, refuses to unpickle code.
os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"

# Accelerate's optimizer.step() looks for this package on the disk twice in every step, which takes
# longer than a small model's whole update (benchmarks/loop_overhead.py). None says: not there.
sys.modules.setdefault("lomo_optim", None)
