"""What samples are like: made again, alone, with other seeds, and in both sets."""

from typing import Any

from trainkit import InMemory

import torch

from trainkit.checkpoints.content import sample_parts, text_of
from trainkit.numbers.loaders import WholeBatches
from trainkit.repairs.private_names import tree_leaves

FEW = 3  # equal samples may be so by chance
SMALL_SHARE = 0.05
DISTINCT = 0.95  # of the training samples, or equal ones are in the nature of the data
MOST = 2000  # rows of each set are remembered


class SeenSamples:
    """Remembers the first batch of each set, and the rows of those of the first epoch.

    Attributes:
        first: the indices and the entries of the first batch of a set.
        rows: texts of the rows of its batches.
    """

    def __init__(self):
        self.first: dict[WholeBatches, tuple[torch.Tensor, dict[str, str]]] = {}
        self.rows: dict[WholeBatches, list[str]] = {}

    def note(self, whole: WholeBatches, indices: torch.Tensor, batch: Any) -> None:
        """Remember a batch of the first epoch."""
        if int(whole.epoch) == 0:
            self.first.setdefault(whole, (indices.clone(), entries_of(batch)))
            rows = self.rows.setdefault(whole, [])
            if len(rows) < MOST:
                rows += row_texts(whole, indices, batch)

    def look(self, train: WholeBatches, evaluated: WholeBatches) -> dict[str, Any]:
        """Make the first batches again, now that the run is over, and say what differs."""
        if train not in self.first or evaluated not in self.first:
            return {}
        shared = self._shared(train, evaluated)
        indices, before = self.first[train]
        train.epoch.fill_(0)
        batch = train.make(indices)
        once, again = entries_of(batch), entries_of(train.make(indices))
        drawn = differing(once, again)
        found: dict[str, Any] = {"drawn": drawn, "changed": bool(differing(before, once))}
        if not drawn:
            found["by_batch"] = self._drawn_by_batch(train, indices, batch)
            indices, _ = self.first[evaluated]
            once = entries_of(evaluated.make(indices))
            evaluated.seed += 1
            found["drawn_to_evaluate"] = differing(once, entries_of(evaluated.make(indices)))
            found["shared"] = shared
        return found

    def _drawn_by_batch(self, whole: WholeBatches, indices: torch.Tensor, batch: Any) -> list[str]:
        """The entries of half a batch that differ though they have the same sizes."""
        half = len(indices) // 2
        if not half:
            return []
        found = []
        for number, (all_of_it, part) in enumerate(
            zip(tree_leaves(batch), tree_leaves(whole.make(indices[:half])), strict=False)
        ):
            if all(isinstance(each, torch.Tensor) and each.ndim for each in (all_of_it, part)):
                first = all_of_it[:half]
                if part.shape == first.shape and text_of(part) != text_of(first):
                    found.append(f"[{number}]")
        return found

    def _shared(self, train: WholeBatches, evaluated: WholeBatches) -> float:
        """Which share of the evaluation set is in the training set too, about; 0: none, or few."""
        trained, seen = self.rows[train], set(self.rows[evaluated])
        distinct = set(trained)
        num = len(distinct & seen)
        if num < FEW or len(distinct) < DISTINCT * len(trained):
            return 0.0
        share = min(1.0, num / len(seen) * len(train) / len(distinct))
        return share if share >= SMALL_SHARE else 0.0


def entries_of(batch: Any) -> dict[str, str]:
    """The text of each entry of a batch."""
    return sample_parts(tuple(batch) if isinstance(batch, list) else batch)


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """The names whose texts differ; "all" if a batch has no names."""
    return sorted(name or "all" for name in one | other if one.get(name) != other.get(name))


def row_texts(whole: WholeBatches, indices: torch.Tensor, batch: Any) -> list[str]:
    """A text for each sample of a batch, of all its tensors but the indices of an InMemory set."""
    leaves = tree_leaves(batch[:-1] if isinstance(whole.dataset, InMemory) else batch)
    tensors = [t for t in leaves if isinstance(t, torch.Tensor) and len(t.shape) > 0]
    tensors = [tensor for tensor in tensors if len(tensor) == len(indices)]
    return [text_of(list(row)) for row in zip(*tensors, strict=True)]
