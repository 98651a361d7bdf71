"""Run in float64 what is written for float32, so that two runs can be compared on any CPU.

In one step two correct runs differ by float32's rounding, 1e-7. Training then amplifies it (a ReLU
or a maximum goes the other way), after twenty steps to 1e-5 on one CPU and 1e-3 on another: no
tolerance is right everywhere. In float64 the same amplification starts at 1e-16, so that correct
runs agree far better than SAME, and a wrong scale, rate, sample or order is far outside of it.
"""

import io
import os
from pathlib import Path

import torch
from safetensors.torch import load, save

SAME = 1e-9  # relative for losses, absolute for weights
TESTS = Path(__file__).parent
# With this environment every Python process, also one that a launcher starts, computes in float64.
IN_DOUBLE = {"PYTHONPATH": os.pathsep.join(map(str, (TESTS / "in_double", TESTS, TESTS.parent)))}


def use_double():
    """Make float64 the default of this process, and the meaning of torch.float32 and x.float().

    There is no way back. What reads and writes files looks torch.float32 up at its first use and
    must know the original.
    """
    load(save({"x": torch.zeros(1)}))
    file = io.BytesIO()
    torch.save(torch.zeros(1), file)
    file.seek(0)
    torch.load(file, weights_only=True)
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
