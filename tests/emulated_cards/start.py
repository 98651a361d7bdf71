"""Run a script, twice the same bits on a card of this machine: python start.py SCRIPT ARGS.

With one fault in it if the environment has FAULT, as JSON:
rank: of the process that has the fault; all of them if it is missing. And one of
signal: [optimizer step, number of a signal that it then sends to itself];
scale_loss: [call of accelerator.backward, from 1; what its loss is multiplied by].
"""

import itertools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when it first multiplies
torch.use_deterministic_algorithms(True, warn_only=True)
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)

fault = json.loads(os.environ.get("FAULT", "{}"))
if fault and fault.get("rank") in (None, int(os.environ.get("RANK", "0"))):
    step, number = fault.get("signal", [None, None])
    factor_of = dict([fault.get("scale_loss", [None, None])])
    steps, calls = itertools.count(1), itertools.count(1)
    backward = accelerate.Accelerator.backward

    def after_step(*_: Any) -> None:
        if next(steps) == step:
            os.kill(os.getpid(), number)

    def scaled(self: accelerate.Accelerator, loss: Any, **kwargs: Any) -> None:
        backward(self, loss * float(factor_of.get(next(calls), 1)), **kwargs)

    register_optimizer_step_post_hook(after_step)
    accelerate.Accelerator.backward = scaled

runpy.run_path(sys.argv[0], run_name="__main__")
