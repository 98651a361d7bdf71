"""fp16 on a CPU, by torch's own GradScaler."""

from typing import Any

import accelerate
import torch

SCALE = 2.0**21  # gradients overflow at first
GROWTH_INTERVAL = 3  # steps after which the scale is doubled


def accelerator_in_fp16(**options: Any) -> accelerate.Accelerator:
    """What Accelerator(mixed_precision="fp16") makes on a GPU."""
    accelerator = accelerate.Accelerator(**options)
    accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
    accelerator.scaler = torch.amp.GradScaler(
        "cpu", init_scale=SCALE, growth_interval=GROWTH_INTERVAL
    )
    return accelerator


def scaled_float32(**options: Any) -> accelerate.Accelerator:
    """A loss scale without the rounding of fp16."""
    options["kwargs_handlers"].append(accelerate.utils.AutocastKwargs(enabled=False))
    return accelerator_in_fp16(**options)
