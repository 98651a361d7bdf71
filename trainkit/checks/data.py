"""Data sets that a run can read by index, and by which it is known again when it is resumed."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from trainkit.errors import UsageError
from trainkit.loaders import InMemory, WholeBatches
from trainkit.private import tree_leaves

NUM_PROBED = 16  # samples that identify a data set which makes its samples one by one


def check_indexable(dataset: Any, name: str) -> None:
    """Raise UsageError unless samples can be read by their index."""
    by_index = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    if not (by_index and hasattr(dataset, "__len__")):
        raise UsageError(
            f"the {name} is a {type(dataset).__name__}, whose samples have no index: an exact "
            "resume begins in the middle of an epoch, so use what has len() and reads by index: a "
            "list, numpy.memmap, datasets.Dataset, an index of files"
        )


def data_md5(*sets: Dataset) -> str:
    """Hexadecimal md5 that identifies data sets: of all tensors of an InMemory set.

    Of one with fingerprint(): of what that returns. Of any other: of its length and of NUM_PROBED
    samples spread over it.
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


def files_of(*sets: Dataset) -> dict[str, str]:
    """What data sets with fingerprint() say of each of their files, so that one can be named."""
    return {k: v for x in sets if hasattr(x, "fingerprint") for k, v in x.fingerprint().items()}
