"""Refuse data sets that have no index, and make the fingerprint that a resume compares."""

from collections.abc import Callable
from operator import length_hint
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset

from trainkit.checkpoints.hashing import held_in_memory, sample_parts, text_of
from trainkit.config import TrainingConfig
from trainkit.errors import UsageError
from trainkit.hashes import digest
from trainkit.launch import nodes
from trainkit.numbers.loaders import InMemory, WholeBatches, has_transform

# Samples hashed of a set that is not held in memory. They are made twice, which may take seconds.
NUM_HASHED = 8


def check_indexable(dataset: Any, name: str) -> None:
    """Raise UsageError unless samples can be read by index."""
    for part in (getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())):
        if isinstance(dataset, Subset | ConcatDataset | StackDataset) and part is not None:
            check_indexable(part, name)
    # torch's Dataset has a __getitem__ that raises, and so has a stream, also one with len().
    reader = getattr(type(dataset), "__getitem__", Dataset.__getitem__)
    makes_whole = hasattr(dataset, "__getitems__") or hasattr(dataset, "make_batch")
    by_index = reader is not Dataset.__getitem__ or makes_whole
    is_indexed = by_index and hasattr(dataset, "__len__")
    # litdata and streaming give a stream a length for each process, and an index of its own; a set
    # around it passes that length on.
    held = getattr(dataset, "__dict__", {}).values() if is_indexed else ()
    streams = [
        part
        for part in (dataset, *held)
        if isinstance(part, IterableDataset)
        and (part is dataset or length_hint(part, -1) == len(dataset))
    ]
    if streams or not is_indexed:
        kind = type(streams[0] if streams else dataset).__name__
        raise UsageError(
            f"the {name} is a {kind}, whose samples have no index that is the "
            "same in any number of processes, but an exact resume begins in the middle of an "
            "epoch: use a data set that has len() and is read by index, such as a list, "
            "numpy.memmap, datasets.Dataset or trainkit.rows.ParquetRows; the tar files of "
            "webdataset are read by index by wids.ShardListDataset, MDS by its reader "
            "(docs/loop.md)"
        )


def fingerprint_set(dataset: Any) -> tuple[list[str], list[dict[str, str]], set[str]]:
    """What identifies a data set: hashes, and the entries of some samples, of which some are drawn.

    Of a set that is not held in memory there are NUM_HASHED samples spread over it, and the names
    of the entries that differ if a sample is made twice.
    """
    if isinstance(dataset, InMemory):
        return [digest(text_of(dataset.tensors))], [], set()
    if hasattr(dataset, "fingerprint"):
        return [digest(repr(dataset.fingerprint()))], [], set()
    texts = held_in_memory(dataset)
    hashes = [*map(digest, texts or ())]
    if texts is not None and not has_transform(dataset):
        return hashes, [], set()
    spread = np.linspace(0, len(dataset) - 1, NUM_HASHED).astype(np.int64)
    indices = torch.from_numpy(spread).unique()
    batches = WholeBatches(dataset, list, 0, torch.zeros((), dtype=torch.int64))
    once, again = (
        [sample_parts(sample) for one in indices.split(1) for sample in batches.make(one)]
        for _ in range(2)
    )
    drawn = {
        name
        for one, other in zip(once, again, strict=True)
        for name in one | other
        if one.get(name) != other.get(name)
    }
    return [*hashes, digest(f"{len(dataset)}")], once, drawn


def load_checked(
    accelerator: Accelerator, config: TrainingConfig, load_data: Callable[[TrainingConfig], tuple]
) -> tuple[Any, dict[str, str]]:
    """Return load_data(config), and hashes of the sets that it begins with, by name.

    A set with fingerprint() has one for each of its files, so that a message can name the file.
    """
    data = nodes.first_on_each_node(accelerator, lambda: load_data(config), config.time_limit)
    if not isinstance(data, tuple | list) or len(data) < 2:
        raise UsageError(
            f"the function of run.load(...) returned a {type(data).__name__}: let it return the "
            "training set and the evaluation set, in this order, and after them what else the "
            "script needs"
        )
    config.validate(accelerator.num_processes, is_loaded=True)  # it may have set some values
    hashes = {"data": check_data(accelerator, config, *data[:2])}
    for dataset in data[:2]:
        hashes |= dataset.fingerprint() if hasattr(dataset, "fingerprint") else {}
    return data, hashes


def check_data(
    accelerator: Accelerator, config: TrainingConfig, train_set: Any, eval_set: Any
) -> str:
    """Return the fingerprint of the two sets, a hash. Every process must call this."""
    check_indexable(train_set, "training set")
    check_indexable(eval_set, "evaluation set")
    num_train, num_eval = len(train_set), len(eval_set)
    if num_train < 1 or num_eval < 1:
        raise UsageError(
            f"there are {num_train} samples to train on and {num_eval} to evaluate on: at least "
            "one of each is needed"
        )
    if config.drop_last and config.batch_size > num_train:
        raise UsageError(
            f"--batch-size {config.batch_size} is larger than the {num_train} training samples: "
            "use a smaller one, or --no-drop-last"
        )
    texts = []
    for dataset in (train_set, eval_set):
        hashes, samples, own = fingerprint_set(dataset)
        # The union of all processes: a process may see no difference by chance.
        drawn = set(gather_object([*own]))
        kept = [
            {name: text for name, text in parts.items() if name not in drawn} for parts in samples
        ]
        texts.append(repr([hashes, sorted(drawn), kept]))
    fingerprint = digest("".join(texts))
    nodes.check_same(accelerator, {"the hash of the data": fingerprint})
    return fingerprint
