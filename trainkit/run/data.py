"""Refuse data sets that have no index, make the fingerprint that a resume compares, and name what
draws random numbers that do not follow from the seed.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    default_collate,
)

from trainkit.checkpoints.content import held_in_memory, sample_parts, text_of
from trainkit.config import TrainingConfig
from trainkit.errors import UsageError
from trainkit.hashes import digest
from trainkit.launch import alike
from trainkit.numbers.loaders import (
    InMemory,
    WholeBatches,
    batch_method,
    has_transform,
    sets_with_epoch,
)
from trainkit.numbers.randoms import seed_host
from trainkit.repairs.names import prepared_loaders
from trainkit.run.shared_rows import (
    NUM_EVALUATED,
    NUM_TRAINED,
    shared_rows,
    texts_in_memory,
)

NUM_HASHED = 256  # samples hashed of a set that is not held in memory
NUM_TWICE = 32  # samples made twice: a transform that changes one of five is missed once in 1,000
NUM_AGAIN = 4  # samples made again at each save
NUM_COLLATED = 8  # samples of a batch that is collated twice
# What a message says of a set, by the method that makes its samples.
REMEDIES = {
    "__getitem__": "made twice with the same seeds, so a generator of its own draws, and a resume, "
    "workers and other processes give other numbers: seed it in __getitem__ from "
    "torch.initial_seed() (docs/loop.md)",
    "__getitems__": "made alone, so __getitems__ draws for several samples at once, and other "
    "processes and --accumulate give other numbers: draw for one sample, in __getitem__",
    "make_batch": "made twice, and make_batch is not seeded, so a resume gives other numbers: draw "
    "for one sample, in __getitem__, or in the loop by keyed_uniform (docs/loop.md)",
}


def check_indexable(dataset: Any, name: str) -> None:
    """Raise UsageError unless samples can be read by index."""
    for part in (getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())):
        if isinstance(dataset, Subset | ConcatDataset | StackDataset) and part is not None:
            check_indexable(part, name)
    # torch's Dataset has a __getitem__ that raises, and so has a stream, also one with len().
    reader = getattr(type(dataset), "__getitem__", Dataset.__getitem__)
    makes_whole = hasattr(dataset, "__getitems__") or hasattr(dataset, "make_batch")
    by_index = reader is not Dataset.__getitem__ or makes_whole
    if not (by_index and hasattr(dataset, "__len__")):
        raise UsageError(
            f"the {name} is a {type(dataset).__name__}, whose samples have no index, but an "
            "exact resume begins in the middle of an epoch: use a data set that has len() and is "
            "read by index, such as a list, numpy.memmap, datasets.Dataset or an index of files"
        )


def makes_batches(dataset: Dataset, method: str) -> bool:
    """True if the data set makes whole batches, without a collate_fn."""
    return method == "make_batch" or (method == "__getitems__" and isinstance(dataset, InMemory))


def spread_indices(dataset: Dataset, num: int) -> torch.Tensor:
    """`num` indices of samples spread over the data set, several times if it has fewer."""
    return torch.from_numpy(np.linspace(0, len(dataset) - 1, num).astype(np.int64))


def read_samples(dataset: Dataset, indices: torch.Tensor, seed: int = 0) -> Iterator[Any]:
    """Make the samples at these indices one by one, each with its own seed."""
    batches = WholeBatches(dataset, list, seed, torch.zeros((), dtype=torch.int64))
    return chain.from_iterable(map(batches.make, indices.split(1)))


def random_parts(dataset: Dataset) -> set[str]:
    """The entries of a sample that differ when a few samples are made twice with the same seeds.

    The second time each is made alone. Samples in memory are not random.
    """
    is_held = held_in_memory(dataset) is not None and not has_transform(dataset)
    if is_held or type(dataset) is InMemory:
        return set()
    if makes_batches(dataset, batch_method(dataset, True)):
        return random_parts_of_batch(dataset)
    # Samples of a set with a fingerprint may lie far away: the first ones are in one file.
    near = torch.arange(min(len(dataset), NUM_COLLATED))
    indices = near if hasattr(dataset, "fingerprint") else spread_indices(dataset, NUM_TWICE)
    once = WholeBatches(dataset, list, 0, torch.zeros((), dtype=torch.int64)).make(indices)
    pairs = zip(
        map(sample_parts, once), map(sample_parts, read_samples(dataset, indices)), strict=True
    )
    return set(chain.from_iterable(differing(*pair) for pair in pairs))


def random_parts_of_batch(dataset: Dataset) -> set[str]:
    """The entries of a batch that differ when a set that makes whole batches makes it again.

    Such a set must not draw from the generators that are seeded for a sample: so seeds differ here.
    A set with a fingerprint, whose samples may lie far away, is not asked.
    """
    if hasattr(dataset, "fingerprint"):
        return set()
    indices = torch.arange(min(len(dataset), NUM_COLLATED))
    made = []
    for seed in (0, 1):
        seed_host(seed)  # for make_batch, before which nothing is seeded
        batches = WholeBatches(dataset, None, seed, torch.zeros((), dtype=torch.int64))
        made.append(sample_parts(batches.make(indices)))
    return differing(*made)


def augmented(eval_set: Dataset) -> dict[str, str]:
    """A line for the plan if samples of the evaluation set are others with another seed."""
    is_held = held_in_memory(eval_set) is not None and not has_transform(eval_set)
    is_whole = makes_batches(eval_set, batch_method(eval_set, True))
    if is_held or is_whole or hasattr(eval_set, "fingerprint"):
        return {}
    indices = torch.arange(min(len(eval_set), NUM_COLLATED))
    made = (map(sample_parts, read_samples(eval_set, indices, seed)) for seed in (0, 1))
    drawn = set(chain.from_iterable(differing(*pair) for pair in zip(*made, strict=True)))
    text = (
        f"{say(drawn)} of a sample of the evaluation set depends on random numbers: as it should "
        "where tokens are hidden, but augmentation belongs into the training set alone"
    )
    return {"drawn": text} if drawn else {}


def shared_with_training(
    train_set: Dataset, eval_set: Dataset, made: list[list[str]]
) -> dict[str, str]:
    """A line for the plan if many samples of the evaluation set are in the training set.

    made: texts of samples of both sets, of those that are not held in memory.
    """
    trained = texts_in_memory(train_set, NUM_TRAINED)
    evaluated = texts_in_memory(eval_set, NUM_EVALUATED)
    if trained is None or evaluated is None:
        trained, evaluated = made
    return shared_rows(trained, len(train_set), evaluated)


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    """The names whose texts differ."""
    return {name for name in one | other if one.get(name) != other.get(name)}


def fingerprint_set(hashes: list[str], dataset: Dataset, drawn: set[str]) -> list[str]:
    """Add hashes of what identifies a data set; return the texts of samples that were made.

    These are all tensors of an InMemory set; what fingerprint() of a set returns; all of a set that
    is held in memory; of any other set the length and NUM_HASHED samples spread over it, without
    the entries that are random.
    """
    made: list[str] = []
    if isinstance(dataset, InMemory):
        hashes.append(digest(text_of(dataset.tensors)))
        return made
    if hasattr(dataset, "fingerprint"):
        hashes.append(digest(repr(dataset.fingerprint())))
        return made
    texts = held_in_memory(dataset)
    for text in texts or ():
        hashes.append(digest(text))
    if texts is None or has_transform(dataset):
        hashes.append(digest(f"{len(dataset)} without {sorted(drawn)}"))
        for sample in read_samples(dataset, spread_indices(dataset, NUM_HASHED).unique()):
            parts = sample_parts(sample).items()
            kept = [part for part in parts if part[0] not in drawn and "" not in drawn]
            made.append(repr(kept))
            hashes.append(digest(made[-1]))
    return [] if drawn else made


@contextmanager
def keeping_host_seeds() -> Iterator[None]:
    """After the body the generators that seed_host seeds go on as if there had been none."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def random_collation(accelerator: Accelerator) -> dict[str, str]:
    """A line for the plan if a collate_fn draws random numbers: two seeds give different batches.

    Samples that differ when they are made twice are left to random_parts.
    """
    drawn: set[str] = set()
    for loader in prepared_loaders(accelerator):
        whole = loader.dataset
        if makes_batches(whole.dataset, whole.method) or whole.collate_fn is default_collate:
            continue
        num = min(len(whole), NUM_COLLATED)
        # Samples of a set with a fingerprint may lie far away: only the first are read.
        ends = {0} if hasattr(whole.dataset, "fingerprint") else {0, len(whole) - num}
        for first in ends:
            indices = torch.arange(first, first + num)
            with keeping_host_seeds():
                batches = []
                for seed in (1, 2):  # made twice, because a collate_fn may change its samples
                    samples = [*read_samples(whole.dataset, indices)]
                    texts = [*map(sample_parts, samples)]
                    seed_host(seed)
                    batches.append((texts, sample_parts(whole.collate_fn(samples))))
            (one, batch), (other, again) = batches
            drawn |= differing(batch, again) if one == other else set()
    text = (
        f"draws random numbers for {say(drawn)} of a batch, so other processes and --accumulate "
        "give other numbers: draw them for each sample, in __getitem__ (docs/loop.md)"
    )
    return {"collate_fn": text} if drawn else {}


class WatchedSets:
    """Tells of a set that the loop changes: neither a resume nor a loader worker has that.

    A few samples are made again with the seeds of the start. Left out are sets with a fingerprint,
    whose samples may lie far away, with set_epoch, and such as draw from a generator of their own.
    """

    def __init__(self, sets: Sequence[Any]):
        self.sets = dict(zip(("training set", "evaluation set"), sets, strict=True))
        self.texts: dict[str, str] = {}
        self.told = sets_with_epoch(sets[0])
        self.epochs = self._epochs()
        for name, dataset in self.sets.items():
            if not hasattr(dataset, "fingerprint") and not sets_with_epoch(dataset):
                first = text_of_samples(dataset)
                again = text_of_samples(dataset)
                if first and first == again:
                    self.texts[name] = first

    def _epochs(self) -> list[dict[str, Any]]:
        """Of each set that is told the epoch what it keeps under a name with "epoch"."""
        return [
            {
                name: value
                for name, value in getattr(part, "__dict__", {}).items()
                if "epoch" in name and isinstance(value, int | float)
            }
            for part in self.told
        ]

    def keep_epochs(self) -> None:
        """Remember what the loaders have told the sets; what differs later, the script has told."""
        self.epochs = self._epochs()

    def note_epoch(self, epoch: int) -> list[str]:
        """A line, once, if the script has told a set another epoch; call before it is read."""
        before = self._epochs()
        if before == self.epochs:
            return []
        for part in self.told:
            part.set_epoch(epoch)
        if before == self._epochs():
            return []
        self.told = []
        self.epochs = []
        return [
            "note: set_epoch(...) of the training set was called with another number than the "
            f"epoch of the run, which is {epoch}, counted from 0, and is what counts: the loader "
            "calls set_epoch with it, so leave the call out (docs/loop.md)"
        ]

    def notes(self) -> list[str]:
        """A line for each set that has changed, once."""
        lines = []
        for name, before in [*self.texts.items()]:
            now = text_of_samples(self.sets[name])
            if now and now != before:
                del self.texts[name]
                lines.append(
                    f"note: the samples of the {name} have changed since run.begin(...): a resume "
                    "and loader workers have those of the start, so keep what the loop changes in "
                    "buffers of a prepared module (docs/resume.md)"
                )
        return lines


def text_of_samples(dataset: Any) -> str:
    """Text of NUM_AGAIN samples spread over a set; "" if they cannot be made."""
    with keeping_host_seeds():
        try:
            indices = spread_indices(dataset, NUM_AGAIN).unique()
            return text_of([*map(sample_parts, read_samples(dataset, indices))])
        except Exception:  # whatever it is: a note never ends a run
            return ""


def say(names: set[str]) -> str:
    """The entries of a sample or batch, for a message."""
    return ", ".join(sorted(names - {""})) or "all"


def load_checked(
    accelerator: Accelerator, config: TrainingConfig, load_data: Callable[[TrainingConfig], tuple]
) -> tuple[tuple, str, dict[str, str]]:
    """Return load_data(config), and what check_data says of the sets that it begins with.

    One process per file system calls load_data first, to fill caches. Every process must call this.

    Raises UsageError if load_data does not return a tuple or a list that begins with two sets.
    """
    data = alike.first_on_each_node(accelerator, lambda: load_data(config), config.time_limit)
    is_sequence = isinstance(data, tuple | list)
    if not is_sequence or len(data) < 2:
        # A set that can be sliced would pass for two sets that have a sample each.
        held = f" of {len(data)}" if is_sequence else ""
        raise UsageError(
            f"the function of run.load(...) returned a {type(data).__name__}{held}: let it return "
            "the training set and the evaluation set, in this order, and after them what else the "
            "script needs"
        )
    config.validate(accelerator.num_processes, is_loaded=True)  # it may have set some values
    return data, *check_data(accelerator, config, *data[:2])


def check_data(
    accelerator: Accelerator, config: TrainingConfig, train_set: Any, eval_set: Any
) -> tuple[str, dict[str, str]]:
    """Return the fingerprint of the two sets, a hash, and lines for the plan about random numbers.

    Every process must call this.

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
    hashes: list[str] = []
    plan = {}
    made: list[list[str]] = []
    for name, dataset in (("training set", train_set), ("evaluation set", eval_set)):
        # The union of all processes: a process may see no difference by chance.
        drawn = set(gather_object([*random_parts(dataset)]))
        made.append(fingerprint_set(hashes, dataset, drawn))
        if drawn:
            remedy = REMEDIES[batch_method(dataset, True)]
            plan[f"random {name[:-4]}"] = (
                f"{say(drawn)} of a sample of the {name} differs when it is {remedy}"
            )
    fingerprint = digest("".join(hashes))
    alike.check_same(accelerator, {"the hash of the data": fingerprint})
    plan |= shared_with_training(train_set, eval_set, made)
    if "random evaluation" not in plan:
        plan |= augmented(eval_set)
    return fingerprint, plan
