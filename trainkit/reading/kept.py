"""Compute rows once, by all processes, and keep them among the caches of `datasets`."""

import os
from collections.abc import Callable
from pathlib import Path

import datasets
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from trainkit.errors import is_main_rank
from trainkit.store.atomic import replacing

NUM_ROUND = 8  # batches that a process computes before it meets the others, within --timeout


def compute_once(
    accelerator: Accelerator,
    name: str,
    shape: tuple[int, int],
    num_at_once: int,
    compute: Callable[[slice], torch.Tensor],
) -> torch.Tensor:
    """Return float32 rows of this shape: those in the cache, or else computed and written there.

    The processes share the batches of num_at_once rows. Every process must call this. name: of the
    file in the cache. compute: returns the rows of a slice, on any device, without gradients.
    """
    path = Path(datasets.config.HF_DATASETS_CACHE, f"{name}.safetensors")
    rows = torch.zeros(shape)
    world, device = accelerator.num_processes, accelerator.device
    is_there = accelerator.is_main_process and path.is_file()
    if is_there:
        rows.copy_(load_file(path)["numbers"])
    is_kept = bool(accelerator.reduce(torch.tensor(float(is_there), device=device)))
    bar = tqdm(total=len(rows), desc=path.parent.name, leave=False, disable=is_kept or no_bar())
    with bar, torch.no_grad():
        for batches in torch.arange(len(rows)).split(num_at_once * NUM_ROUND * world):
            own = batches.split(num_at_once)[accelerator.process_index :: world]
            for batch in own if not is_kept else ():
                part = slice(int(batch[0]), int(batch[-1]) + 1)
                rows[part] = compute(part).float().cpu()
                bar.update(len(batch) * world)
            part = slice(int(batches[0]), int(batches[-1]) + 1)
            # Each row is 0 in all processes but one.
            rows[part] = accelerator.reduce(rows[part].to(device)).cpu()
    if accelerator.is_main_process and not is_kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, tag=f"{os.getpid()}-") as temporary:
            save_file({"numbers": rows}, temporary)
    return rows


def no_bar() -> bool | None:
    """For tqdm(disable=...): a bar is drawn by one process of a machine, on a terminal."""
    return None if is_main_rank() else True
