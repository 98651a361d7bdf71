"""The mechanics that both training scripts share: launch, arguments, order, checkpoints, history.

Import this package before torch: two of the settings below are read only while torch is loaded.
"""

import os

# Idle OpenMP threads sleep instead of spinning. On two cores beside another busy process, spinning
# threads make a step ten times slower; alone, sleeping costs nothing (benchmarks/RECORDS.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Every torch.load in this process, accelerate's included, refuses to unpickle code.
os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
