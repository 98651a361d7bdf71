"""Say that samples of the evaluation set are trained on, by a look at some of both sets."""

from collections.abc import Sequence
from typing import Any

import torch

from trainkit.checkpoints.content import held_in_memory, text_of
from trainkit.numbers.loaders import InMemory, has_transform

NUM_TRAINED, NUM_EVALUATED = 1024, 256  # samples looked at of a set that is held in memory
FEW = 3  # of them may be equal by chance
SMALL_SHARE = 0.05
DISTINCT = 0.95  # of the training samples, or equal ones are in the nature of the data


def texts_in_memory(dataset: Any, num: int) -> list[str] | None:
    """Texts of some samples of a set that is held in memory; None for other sets."""
    is_held = isinstance(dataset, InMemory) or held_in_memory(dataset) is not None
    if not is_held or has_transform(dataset) or not hasattr(dataset, "__getitem__"):
        return None
    indices = torch.arange(len(dataset))
    if len(dataset) > num:
        generator = torch.Generator().manual_seed(0)
        indices = torch.randint(len(dataset), (num,), generator=generator).unique()
    return [text_of(dataset[index]) for index in indices.tolist()]


def shared_rows(trained: Sequence[str], num_train: int, evaluated: Sequence[str]) -> dict[str, str]:
    """A line for the plan if many samples of the evaluation set are in the training set.

    Args:
        trained, evaluated: texts of samples of both sets.
        num_train: how many samples the training set has.
    """
    distinct = set(trained)
    num = sum(text in distinct for text in evaluated)
    if num < FEW or len(distinct) < DISTINCT * len(trained):
        return {}
    share = min(1.0, num / len(evaluated) * num_train / len(trained))
    if share < SMALL_SHARE:
        return {}
    text = (
        f"about {100 * share:.0f} % of the evaluation set is in the training set too, so its "
        "metrics say little about new data: split the samples before anything is copied"
    )
    return {"same samples": text}
