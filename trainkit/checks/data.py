"""Refuse data sets that have no index, and make the fingerprint that a resume compares."""

import hashlib
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import Dataset

from trainkit.config import TrainingConfig
from trainkit.errors import UsageError
from trainkit.launch import nodes
from trainkit.loaders import InMemory, WholeBatches
from trainkit.private import tree_leaves

NUM_PROBED = 16  # samples hashed to identify a data set that makes its samples one by one


def check_indexable(dataset: Any, name: str) -> None:
    """Raise UsageError unless samples can be read by index."""
    by_index = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    if not (by_index and hasattr(dataset, "__len__")):
        raise UsageError(
            f"the {name} is a {type(dataset).__name__}, whose samples have no index, but an "
            "exact resume begins in the middle of an epoch: use a data set that has len() and is "
            "read by index, such as a list, numpy.memmap, datasets.Dataset or an index of files"
        )


def fingerprint_data(*sets: Dataset) -> str:
    """Return a hexadecimal md5 that identifies the data sets.

    It covers all tensors of an InMemory set; for a set with fingerprint(), the value it returns;
    for any other set, its length and NUM_PROBED samples spread over it.
    """
    digest = hashlib.md5(usedforsecurity=False)
    for dataset in sets:
        if isinstance(dataset, InMemory):
            leaves = dataset.tensors
        elif hasattr(dataset, "fingerprint"):
            leaves = [dataset.fingerprint()]
        else:
            probes = np.linspace(0, len(dataset) - 1, NUM_PROBED).astype(int).tolist()
            samples = WholeBatches(dataset, list, 0, torch.zeros((), dtype=torch.int64))
            leaves = [len(dataset), *tree_leaves(samples.make(torch.tensor(probes)))]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                leaf = leaf.cpu().numpy()
            if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
                digest.update(np.ascontiguousarray(leaf).view(np.uint8).data)
            else:
                digest.update(repr(leaf).encode())
    return digest.hexdigest()


def check_data(
    accelerator: Accelerator, config: TrainingConfig, train_set: Any, eval_set: Any
) -> str:
    """Return the fingerprint of the two sets. Every process must call this.

    Raises UsageError if they cannot be read by index, are too small, or differ between processes.
    """
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
            f"--batch-size {config.batch_size} is larger than the {num_train} training samples, "
            "and --drop-last leaves out a batch that is not full: use a smaller --batch-size, or "
            "--no-drop-last"
        )
    fingerprint = fingerprint_data(train_set, eval_set)
    nodes.check_same(accelerator, {"the data's md5": fingerprint})
    return fingerprint
