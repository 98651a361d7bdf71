"""Weights as safetensors files: written at the end of a run, read by --start-from."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from trainkit.errors import UsageError, as_usage_error
from trainkit.repairs.private_names import plain_name
from trainkit.store.atomic import replacing


def numbered(name: str, number: int) -> str:
    """model.bin, model_1.bin, model_2.bin, ...: how Accelerate names several files of a kind."""
    stem, dot, ending = name.partition(".")
    return f"{stem}_{number}{dot}{ending}" if number else name


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> None:
    """Write a safetensors file that loads in plain PyTorch, durably.

    `metadata` is JSON in one entry, "trainkit": safetensors writes several in random order.
    """
    with replacing(path) as temporary:
        save_file(separate(tensors), temporary, {"trainkit": json.dumps(metadata)})


def check_writable(tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> None:
    """Raise what write_tensors would raise for such types and metadata, without the values."""
    empty = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}
    save(empty, {"trainkit": json.dumps(metadata)})


def separate(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors that share memory, as tied weights do, because safetensors refuses those."""
    rows = {n: t.to_local() if hasattr(t, "to_local") else t for n, t in tensors.items()}
    owners = {*{part.untyped_storage().data_ptr(): name for name, part in rows.items()}.values()}
    return {n: (t if n in owners else t.clone()).contiguous() for n, t in tensors.items()}


def check_weights_file(path: Path) -> None:
    """Raise UsageError if the file of --start-from is not there or is not a safetensors file."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise UsageError(f"--start-from {path} cannot be read: it is not a file")
    made = "docs/resume.md makes a safetensors file of a .pt, a .ckpt or an index of shards"
    with as_usage_error(f"--start-from {path} cannot be read ({made})"), safe_open(path, "pt"):
        pass


def read_weights(path: Path, model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors of a safetensors file that fit the model, and a line about those that do not.

    They must match in name, shape and kind of number. Raises UsageError if none does.
    """

    def kind(value: torch.Tensor) -> tuple:
        return value.shape, value.is_complex(), value.is_floating_point()

    with as_usage_error(f"--start-from {path} cannot be read"):
        saved = {plain_name(name): value for name, value in load_file(path).items()}
    state = model.state_dict()
    fits = {
        n: v.to(state[n].dtype)
        for n, v in saved.items()
        if n in state and kind(v) == kind(state[n])
    }
    if not fits:
        raise UsageError(
            f"--start-from {path}: none of its {len(saved)} tensors has the name, shape and kind "
            f"of numbers of one of the model's, such as {next(iter(state))}"
        )
    missed = ", ".join(n for n in state if n not in fits) or "none"
    unused = ", ".join(n for n in saved if n not in fits) or "none"
    return fits, (
        f"started from {path}: {len(fits)} of {len(state)} tensors matched; left as initialised: "
        f"{missed}; not used: {unused}"
    )
