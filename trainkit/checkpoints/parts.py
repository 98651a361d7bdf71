"""The files in which a checkpoint holds the state of a run, and how they are written and read.

A part is the name of a file with what is in it: the tensors of a model or the averages of --ema by
name, an optimizer, or a schedule. accelerator.save_state writes those of a run that is not sharded.
Of a sharded run each process writes its own rows, with the planner and writer of
torch.distributed.checkpoint, whose save(...) would wait for the slowest disk in a collective; what
is not a tensor is in rest.bin. Any run reads either kind.
"""

import copyreg
import io
import pickle
import re
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.serialization import default_restore_location, safe_globals

from trainkit.checkpoints.sharded import Tensors, rows_of
from trainkit.errors import UsageError
from trainkit.numbers.optim import weights_of
from trainkit.repairs.private_names import (
    keystr,
    plain_name,
    tree_leaves_with_path,
    tree_map_only,
    tree_map_with_path,
)
from trainkit.store.manifest import is_listed
from trainkit.store.weights import numbered, separate
from trainkit.text import first_sentence

Parts = dict[str, Any]
REST = "rest.bin"  # what a sharded run saves that is not a tensor
DTYPES = [getattr(np.dtypes, name) for name in np.dtypes.__all__]
# What makes the arrays and numbers of numpy again when they are unpickled; bytes of empty ones.
REMADE = np.empty(0).__reduce__()[0], np.float64().__reduce__()[0]
SAFE = [bytes, np.ndarray, np.dtype, *REMADE, *DTYPES]


class Plainly:
    """How save_tree pickles: a deque as the call that makes it, as weights_only can read it."""

    class Pickler(pickle.Pickler):
        dispatch_table = copyreg.dispatch_table | {deque: lambda x: (deque, ([*x], x.maxlen))}


def check_loadable(state: Any, what: str) -> None:
    """Raise UsageError if a checkpoint with this state could not be loaded again."""
    file = io.BytesIO()
    try:
        torch.save(tree_map_only(Tensor, lambda _: None, state), file)
        file.seek(0)
        with safe_globals(SAFE):
            torch.load(file, weights_only=True)
    except Exception as problem:  # pickle raises many kinds
        named = re.search(r"GLOBAL (\S+)", str(problem))
        kind = f"a {named[1]}" if named else f"something ({first_sentence(problem)})"
        raise UsageError(
            f"{what} holds {kind}, which no resume would load, because that could execute code: "
            "let it hold numbers, texts, lists, tuples, dicts, sets, tensors and arrays, or call "
            "torch.serialization.add_safe_globals([...]) with a class that you trust"
        ) from None


def save_tree(state: Any, path: Path) -> None:
    """Write numbers, texts, tensors, arrays, and containers of them, as load_tree reads them."""
    torch.save(state, path, pickle_module=Plainly)


def load_tree(path: Path, device: torch.device | str = "cpu") -> Any:
    """What torch.save or save_tree wrote; what was not on the CPU is put on this device."""

    def put(storage: Any, saved_on: str) -> Any:
        return default_restore_location(storage, "cpu" if saved_on == "cpu" else str(device))

    with safe_globals([*SAFE, deque]):
        return torch.load(path, map_location=put, weights_only=True, mmap=True)


def before_save(
    parts: Callable[[], Parts], is_main: bool, models: list, weights: list, folder: str
) -> None:
    """Leave out frozen weights, and write the averages: a hook of accelerator.save_state.

    It would leave out one of the names of tied weights, and warn of it each time.
    """
    tensors = {name: separate(part) for name, part in parts().items() if isinstance(part, dict)}
    weights[:] = [tensors.pop(numbered("model.safetensors", n)) for n in range(len(models))]
    for name, part in tensors.items() if is_main else ():
        save_file(part, Path(folder, name))


def before_load(parts_of: Callable[[], Parts], models: list, folder: str) -> None:
    """Refuse files that are not of this run, which accelerator.load_state passes over.

    It also loads the averages.
    """
    parts = parts_of()
    names = [path.name for path in Path(folder).iterdir() if is_listed(f"state/{path.name}")]
    kinds = ("model", "average", "optimizer", "scheduler")
    if wrong := {name for name in names if name.startswith(kinds)} ^ parts.keys():
        raise UsageError(
            f"{folder}: {min(wrong)} is in the checkpoint or in this run, not in both: the script "
            "has prepared other models, optimizers or schedules"
        )
    for name, part in parts.items():
        if isinstance(part, dict):
            _load_tensors(part, load_file(Path(folder, name)), only_check=name.startswith("model"))


def write_shards(accelerator: Accelerator, parts: Parts, folder: Path) -> None:
    """Write what this process has of a sharded state into a folder. It does not communicate."""
    tensors: Tensors = {}
    rest = {}
    for filename, part in parts.items():
        name = filename.partition(".")[0]
        if isinstance(part, dict):
            tensors |= {f"{name}.{key}": value for key, value in part.items()}
            continue
        state = part.state_dict()
        leaves = tree_leaves_with_path(state)
        tensors |= {name + keystr(at): x for at, x in leaves if isinstance(x, Tensor)}
        rest[name] = tree_map_only(Tensor, lambda _: torch.empty(0), state)
    own = {n: x.detach() for n, x in tensors.items() if _is_own(accelerator, x)}
    if accelerator.is_main_process:
        torch.save(rest, folder / REST)
    if own:
        _write_shard(separate(own), accelerator.process_index, folder)


def _is_own(accelerator: Accelerator, tensor: Any) -> bool:
    """Does this process write this tensor? Of several copies of a model the first one does."""
    if not hasattr(tensor, "full_tensor"):
        return accelerator.is_main_process
    mesh, is_empty = tensor.device_mesh, tensor.to_local().numel() == 0 < tensor.numel()
    return (mesh.ndim == 1 or mesh.get_local_rank(0) == 0) and not is_empty


def _write_shard(tensors: Tensors, rank: int, folder: Path) -> None:
    """Write the rows that this process has as torch.distributed.checkpoint does, but alone."""
    from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageWriter

    planner = DefaultSavePlanner()
    planner.set_up_planner(tensors, is_coordinator=rank == 0)
    shard = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    shard.sync_files = False  # the thread that hashes the files does it
    plan = planner.create_local_plan()
    plan = shard.prepare_global_plan([plan] * (rank + 1))[rank]  # numbers the file
    shard.write_data(planner.finish_plan(plan), planner).wait()


def read_shards(parts: Parts, folder: Path) -> None:
    """Load what write_shards(...) wrote, on any number of processes, without communicating."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    reader = HuggingFaceStorageReader(str(folder))
    saved = reader.read_metadata().state_dict_metadata
    rest = load_tree(folder / REST)
    stateful = {n.partition(".")[0]: x for n, x in parts.items() if not isinstance(x, dict)}
    if rest.keys() != stateful.keys():
        raise UsageError(
            f"{folder} is of {', '.join(rest)} and this run has {', '.join(stateful)}: the script "
            "has prepared other optimizers or schedules"
        )
    tensors: Tensors = {}
    for filename, part in parts.items():
        name = filename.partition(".")[0]
        if isinstance(part, dict):
            tensors |= {f"{name}.{key}": value for key, value in part.items()}
            continue
        for at, value in tree_leaves_with_path(rest[name]):
            key = name + keystr(at)
            if isinstance(value, Tensor) and key in saved:
                place, size = _weight_of(part, at), saved[key].size
                if place is None or place.shape != size:  # a count of steps
                    place = torch.empty(size)
                tensors[key] = torch.empty_like(place.detach(), dtype=saved[key].properties.dtype)
    _check_shapes(tensors, {name: value.size for name, value in saved.items()})
    with warnings.catch_warnings(action="ignore"):  # that each process reads by itself
        load(tensors, storage_reader=reader, no_dist=True)
    for name, part in stateful.items():
        part.load_state_dict(
            tree_map_with_path(lambda at, x, n=name: tensors.get(n + keystr(at), x), rest[name])
        )


def read_whole(parts: Parts, folder: Path) -> None:
    """Load what accelerator.save_state and before_save wrote into a sharded run."""
    files = {
        name: (load_file if isinstance(part, dict) else load_tree)(folder / name)
        for name, part in parts.items()
    }
    for name, part in parts.items():
        if isinstance(part, dict):
            _load_tensors(part, files[name])
        else:
            part.load_state_dict(
                tree_map_with_path(lambda at, x, p=part: rows_of(_weight_of(p, at), x), files[name])
            )


def _weight_of(part: Any, at: tuple) -> Tensor | None:
    """The weight whose state is at this place in the state of an optimizer; it is sharded alike."""
    is_state = isinstance(part, torch.optim.Optimizer) and at[0].key == "state"
    return weights_of(part)[at[1].key] if is_state else None


def _load_tensors(tensors: Tensors, saved: Tensors, only_check: bool = False) -> None:
    """Copy saved tensors into those of this run, which must have their names and shapes."""
    saved = {plain_name(name): value for name, value in saved.items()}
    _check_shapes(tensors, {name: value.shape for name, value in saved.items()})
    for name in () if only_check else tensors:
        tensors[name].copy_(rows_of(tensors[name], saved[name]))


def _check_shapes(tensors: Tensors, saved: dict[str, torch.Size]) -> None:
    ours = {name: value.shape for name, value in tensors.items()}
    for name in sorted(ours | saved):
        if ours.get(name) != saved.get(name):
            raise UsageError(f"the weight {name} of the checkpoint does not match this run")
