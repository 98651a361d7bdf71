"""What samples are like: made again, alone, with other seeds, and in both sets."""

from typing import Any

from trainkit import InMemory

import torch

from trainkit.checkpoints.hashing import sample_parts, text_of
from trainkit.numbers.loaders import WholeBatches
from trainkit.repairs.private_names import tree_leaves, tree_map_only

FEW = 3  # equal samples may be so by chance
SMALL_SHARE = 0.05
DISTINCT = 0.95  # of the training samples, or equal ones are in the nature of the data
MOST = 2000  # rows of each set are remembered


class SeenSamples:
    """Remembers of each set the indices and entries of the first batch, and rows as texts."""

    def __init__(self) -> None:
        self.first: dict[WholeBatches, tuple[torch.Tensor, dict[str, str]]] = {}
        self.rows: dict[WholeBatches, list[str]] = {}

    def note(self, whole: WholeBatches, indices: torch.Tensor, batch: Any) -> None:
        """Remember a batch of the first epoch."""
        if int(whole.epoch) == 0:
            self.first.setdefault(whole, (indices.clone(), entries_of(batch)))
            rows = self.rows.setdefault(whole, [])
            leaves = tree_leaves(batch[:-1] if isinstance(whole.dataset, InMemory) else batch)
            tensors = [t for t in leaves if isinstance(t, torch.Tensor) and len(t.shape)]
            if len(rows) < MOST and {len(tensor) for tensor in tensors} == {len(indices)}:
                rows += [text_of(list(row)) for row in zip(*tensors, strict=True)]

    def look(self, train: WholeBatches, evaluated: WholeBatches) -> dict[str, Any]:
        """Make the first batches again, now that the run is over, and say what differs."""
        if train not in self.first or evaluated not in self.first:
            return {}
        share = self._shared(train, evaluated)
        indices, before = self.first[train]
        train.epoch.fill_(0)
        batch = train.make(indices)
        once, again = entries_of(batch), entries_of(train.make(indices))
        if drawn := differing(once, again):
            return {"drawn": drawn}
        half = indices[: max(1, len(indices) // 2)]
        whole = entries_of(tree_map_only(torch.Tensor, lambda t: t[: len(half)], batch))
        is_padded = sizes_of(train.make(half)) != sizes_of(batch)
        by_batch = [] if is_padded else differing(whole, entries_of(train.make(half)))
        indices, _ = self.first[evaluated]
        once = entries_of(evaluated.make(indices))
        evaluated.seed += 1
        return {
            "changed": bool(differing(before, entries_of(batch))),
            "by_batch": by_batch,
            "drawn_to_evaluate": differing(once, entries_of(evaluated.make(indices))),
            "shared": share,
        }

    def _shared(self, train: WholeBatches, evaluated: WholeBatches) -> float:
        """Which share of the evaluation set is in the training set too, about; 0: none, or few."""
        trained, seen = set(self.rows[train]), set(self.rows[evaluated])
        num = len(trained & seen)
        if num < FEW or len(trained) < DISTINCT * len(self.rows[train]):
            return 0.0
        share = min(1.0, num / len(seen) * len(train) / len(trained))
        return share if share >= SMALL_SHARE else 0.0


def entries_of(batch: Any) -> dict[str, str]:
    """The text of each entry of a batch."""
    return sample_parts(tuple(batch) if isinstance(batch, list) else batch)


def sizes_of(batch: Any) -> list[torch.Size]:
    """The sizes of the tensors of a batch, without the number of samples."""
    return [t.shape[1:] for t in tree_leaves(batch) if isinstance(t, torch.Tensor)]


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """The names whose texts differ; "all" if a batch has no names."""
    return sorted(name or "all" for name in one | other if one.get(name) != other.get(name))
