"""Run a script with one fault in it: python faulty.py PLAN SCRIPT ARGS, where PLAN is JSON.

rank: of the process that has the fault; all of them if it is missing. And one of
kill: the optimizer step after which it kills itself with SIGKILL;
signal: [optimizer step, number of a signal that it then sends to itself];
scale_loss: [call of accelerator.backward, from 1; what its loss is multiplied by].
"""

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import accelerate
from torch.optim.optimizer import register_optimizer_step_post_hook

plan = json.loads(sys.argv[1])
sys.argv = sys.argv[2:]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)

if plan.get("rank") in (None, int(os.environ.get("RANK", "0"))):
    step, number = plan.get("signal", [plan.get("kill"), signal.SIGKILL])
    steps = calls = 0

    def after_step(*_: Any) -> None:
        global steps
        steps += 1
        if steps == step:
            os.kill(os.getpid(), number)

    register_optimizer_step_post_hook(after_step)
    call, factor = plan.get("scale_loss", [None, 1.0])
    backward = accelerate.Accelerator.backward

    def scaled(self: accelerate.Accelerator, loss: Any, **kwargs: Any) -> None:
        global calls
        calls += 1
        backward(self, loss * float(factor) if calls == call else loss, **kwargs)

    accelerate.Accelerator.backward = scaled

runpy.run_path(sys.argv[0], run_name="__main__")
