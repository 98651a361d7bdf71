"""run.evaluate: means over an evaluation set, each sample counted once by all processes."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from trainkit.checks.prepared import check_evaluated, check_loader
from trainkit.metrics import RunningMeans, sum_and_count
from trainkit.private import prepared_models

CALL = "run.evaluate(...)"


def evaluate(
    accelerator: Accelerator,
    loader: DataLoader,
    judge: Callable[[Any], dict[str, torch.Tensor]],
    stopping: Callable[[], bool],
) -> dict[str, float] | None:
    """See Run.evaluate. None if stopping() was true after a batch, on all processes alike."""
    check_loader(accelerator, loader, training=False)
    models = prepared_models(accelerator)
    modes = {layer: layer.training for model in models for layer in model.modules()}
    means, num_rows = RunningMeans(accelerator), Counter[str]()  # of what is not masked
    for model in models:
        model.eval()
    with torch.no_grad():  # what inference_mode makes, FSDP could not train with afterwards
        for batch in loader:
            values = judge(batch)
            where = values.pop("where", None)
            for name, value in values.items():
                if value.ndim == 0:
                    raise RuntimeError(
                        f"{CALL} got a single number for {name}: let it be one value for each "
                        'sample, as losses with reduction="none" are'
                    )
                if where is None:
                    num_rows[name] += len(value)
                means.add(name, *sum_and_count(CALL, value, where))
            if stopping():
                return None
    for layer, mode in modes.items():
        layer.training = mode
    check_evaluated(accelerator, num_rows, loader)
    return means.means("eval") | {"eval_samples": len(loader.dataset)}
