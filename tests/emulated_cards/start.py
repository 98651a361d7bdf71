"""Run a script, twice the same bits on a card of this machine: python start.py SCRIPT ARGS.

The environment has FAULT, as JSON, null or:
rank: of the process that has the fault; all of them if it is missing;
signal: [optimizer step, number of a signal that it then sends to itself].
"""

import itertools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when it first multiplies
torch.use_deterministic_algorithms(True, warn_only=True)
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)

fault = json.loads(os.environ["FAULT"])
if fault and fault.get("rank") in (None, int(os.environ.get("RANK", "0"))):
    (step, number), steps = fault["signal"], itertools.count(1)

    def after_step(*_: Any):
        if next(steps) == step:
            os.kill(os.getpid(), number)

    register_optimizer_step_post_hook(after_step)

runpy.run_path(sys.argv[0], run_name="__main__")
