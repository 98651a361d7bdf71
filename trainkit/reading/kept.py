"""Compute rows once, by all processes, and keep them among the caches of `datasets`."""

import os
import shutil
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

    The processes share the batches, which do not depend on the number of processes. What they made
    in a round is a file of its own until all is there, so that a restart goes on. Every process
    must call this.

    Args:
        name: names the file in the cache: what the rows depend on.
        num_at_once: rows of a batch.
        compute: returns the rows of a slice, on any device. It is called without gradients.
    """
    path = Path(datasets.config.HF_DATASETS_CACHE, f"{name}.safetensors")
    rows = torch.zeros(shape)
    world = accelerator.num_processes
    rounds = torch.arange(len(rows)).split(num_at_once * NUM_ROUND * world)
    files = [path.with_suffix(".parts") / f"{batches[0]}-{batches[-1]}" for batches in rounds]
    are_kept = [False] * len(rounds)
    if accelerator.is_main_process:
        are_kept = read_kept_rows(rows, path, dict(zip(files, rounds, strict=True)))
    told = torch.tensor(are_kept, dtype=torch.float32, device=accelerator.device)
    kept = accelerator.reduce(told).bool().tolist()
    bar = tqdm(total=len(rows), desc=path.parent.name, leave=False, disable=all(kept) or no_bar())
    with bar, torch.no_grad():
        for batches, file, is_kept in zip(rounds, files, kept, strict=True):
            rank_batches = batches.split(num_at_once)[accelerator.process_index :: world]
            for batch in rank_batches if not is_kept else ():
                part = slice(int(batch[0]), int(batch[-1]) + 1)
                rows[part] = compute(part).float().cpu()
                bar.update(len(batch) * world)
            part = slice(int(batches[0]), int(batches[-1]) + 1)
            # Each row is 0 in all processes but one.
            rows[part] = accelerator.reduce(rows[part].to(accelerator.device)).cpu()
            if accelerator.is_main_process and not is_kept:
                save_rows(rows[part].clone(), file)
    if accelerator.is_main_process and not path.is_file():
        save_rows(rows, path)
        shutil.rmtree(path.with_suffix(".parts"), ignore_errors=True)
    return rows


def read_kept_rows(rows: torch.Tensor, path: Path, files: dict[Path, torch.Tensor]) -> list[bool]:
    """Read into `rows` what is in the cache, all of it or in parts; return which parts were there.

    files: which rows each part has.
    """
    if path.is_file():
        rows.copy_(load_file(path)["numbers"])
        return [True] * len(files)
    for file, of_file in files.items():
        if file.is_file():
            rows[of_file] = load_file(file)["numbers"]
    return [file.is_file() for file in files]


def save_rows(rows: torch.Tensor, path: Path) -> None:
    """Write rows where a later run reads them, as soon as all of them are there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, tag=f"{os.getpid()}-") as temporary:
        save_file({"numbers": rows}, temporary)


def no_bar() -> bool | None:
    """For tqdm(disable=...): a bar is drawn by one process of a machine, on a terminal."""
    return None if is_main_rank() else True
