"""Which samples come when, as pure functions of (seed, epoch, sample, step): no state to lose.

A resumed run, a run with other workers and a run with another number of processes therefore see the
same samples in the same order with the same augmentation.
"""

import argparse
import hashlib
import math
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from trainkit.errors import SIGNALS, UsageError
from trainkit.internals import tree_leaves, tree_map_only

MAX_DEVICE_BYTES = 2**30  # data sets up to this size are moved to the device once
NUM_PROBED = 16  # samples that identify a data set which makes its samples one by one


class Indices:
    """Sample indices of one batch; len() is its nominal size: Accelerate needs equal batches.

    Accelerate gives each process its slice of a batch. A short batch is dealt out in order, the
    last process getting what is left; or evenly, where that would leave a process without a sample.
    One gets none only if there are fewer samples than processes, and the main process always gets
    one.
    """

    def __init__(self, values: torch.Tensor, size: int):
        self.values, self.size = values, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> "Indices":
        first, last, _ = part.indices(self.size)
        ends = dealt(len(self.values), self.size, first, last)
        return Indices(self.values[slice(*ends)], last - first)


def dealt(num_samples: int, size: int, first: int, last: int) -> tuple[int, int]:
    """First and last of the samples that are the part first:last of a batch of size `size`."""
    if num_samples > size - (last - first):
        return first, last  # the last part gets what is left
    return -(-num_samples * first // size), -(-num_samples * last // size)


class EpochBatches(Sampler):
    """Batches of sample indices whose order depends on (seed, epoch) alone.

    A batch is an `Indices` over all processes; Accelerate gives each process its slice
    (split_batches=True). The last batch of an epoch, where it is short, is either dropped or dealt
    out as it is: no sample comes twice, and no process has fewer batches than another, which would
    leave the others waiting.

    Args:
        num_samples: size of the data set.
        batch_size: samples per optimizer step over all processes.
        seed: of the shuffle; None yields the samples in their own order.
        weights: float64, one per sample: an epoch draws num_samples samples by them, with
            replacement; None: each sample comes once.
        drop_last: leave out the last num_samples % batch_size samples of each epoch.
        accumulate: micro-batches per optimizer step; divides batch_size.

    Attributes:
        device: where the indices are.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int | None = None,
        weights: torch.Tensor | None = None,
        drop_last: bool = False,
        accumulate: int = 1,
    ):
        assert batch_size % accumulate == 0
        self.num_samples = num_samples
        self.batch_size = batch_size // accumulate  # read by Accelerate, which splits it
        self.seed, self.weights = seed, weights
        self.drop_last = False  # read by Accelerate: every batch that arrives there is full
        self.num_used = num_used(num_samples, batch_size, drop_last)
        self.device = torch.device("cpu")
        self.start = 0
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # loader workers see it

    def set_position(self, epoch: int, num_done: int) -> None:
        """Make the next iteration yield `epoch` from its sample number `num_done` on.

        The order starts there instead of being skipped through, so that a resume in the middle of
        an epoch costs nothing.
        """
        self.epoch.fill_(epoch)
        self.start = min(num_done, self.num_used)

    def __len__(self) -> int:
        return -(-(self.num_used - self.start) // self.batch_size)

    def __iter__(self) -> Iterator[Indices]:
        order = self.order(int(self.epoch))[: self.num_used].to(self.device)
        for first in range(self.start, self.num_used, self.batch_size):
            yield Indices(order[first : first + self.batch_size], self.batch_size)

    def order(self, epoch: int) -> torch.Tensor:
        """All sample indices in the order of `epoch`, int64."""
        if self.seed is None:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(key(self.seed, epoch))
        if self.weights is None:
            return torch.randperm(self.num_samples, generator=generator)
        return torch.multinomial(self.weights, self.num_samples, True, generator=generator)


def num_used(num_samples: int, batch_size: int, drop_last: bool) -> int:
    """Samples that an epoch uses."""
    return num_samples - (num_samples % batch_size if drop_last else 0)


class InMemory(TensorDataset):
    """Tensors of equal length; a batch is a row of each for each index, and the indices last.

    Only a batch has the indices; a single item is a row of each tensor.

    A whole batch is one index_select per tensor: no Python code runs per sample.
    """

    def __getitems__(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # index_select copies whole rows, which tensor[indices] does not
        return *(tensor.index_select(0, indices) for tensor in self.tensors), indices

    def to(self, device: torch.device) -> "InMemory":
        """The same on another device."""
        return InMemory(*(tensor.to(device) for tensor in self.tensors))


class WholeBatches(Dataset):
    """What a loader reads: one item of it is a whole batch of `dataset`, also a short one.

    Of a short batch a process may get no sample at all. It then gets a batch of zero rows, so that
    it takes part in the step. Before each sample that `dataset.__getitem__` makes, the generators
    of torch, numpy and random are seeded by (seed, epoch, sample index): random transforms give the
    same in every run, whatever the workers and processes are. Before each batch that
    `dataset.__getitems__` makes they are seeded by (seed, epoch, first sample index, length): the
    same in every run with this number of processes and micro-batches.
    """

    def __init__(
        self,
        dataset: Dataset,
        collate_fn: Callable[[list], Any] | None,
        seed: int,
        epoch: torch.Tensor,
        share: int | None = None,
    ):
        self.dataset, self.collate_fn = dataset, collate_fn or default_collate
        self.seed, self.epoch = seed, epoch
        self.share = share  # nominal size of a process's part of a batch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Indices) -> Any:
        if self.share not in (None, len(indices)):
            raise RuntimeError(
                "every process would read all of this loader: iterate the one that "
                "accelerator.prepare has returned for it"
            )
        if len(indices.values):
            return self.make(indices.values)
        return tree_map_only(torch.Tensor, lambda rows: rows[:0], self.make(torch.tensor([0])))

    def make(self, indices: torch.Tensor) -> Any:
        """The batch of these samples, int64 of shape (n,), n > 0."""
        if isinstance(self.dataset, InMemory):
            return self.dataset.__getitems__(indices.to(self.dataset.tensors[0].device))
        # Subset and StackDataset have __getitems__ only to pass it on: random_split is no reason to
        # leave random transforms unseeded.
        passes_on = isinstance(self.dataset, Subset | StackDataset)
        if hasattr(self.dataset, "__getitems__") and not passes_on:
            self._seed(int(indices[0]), len(indices))
            samples = self.dataset.__getitems__(indices.tolist())
        else:
            samples = [self._sample(index) for index in indices.tolist()]
        return self.collate_fn(samples)

    def _sample(self, index: int) -> Any:
        self._seed(index)
        return self.dataset[index]

    def _seed(self, *position: int) -> None:
        seed_host(key(self.seed, int(self.epoch), *position))


def seed_host(number: int) -> None:
    """Seed the generators of torch on the CPU, numpy and random."""
    torch.default_generator.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def check_indexable(dataset: Any, name: str) -> None:
    """Raise UsageError unless samples can be read by their index."""
    by_index = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    if isinstance(dataset, IterableDataset) or not (by_index and hasattr(dataset, "__len__")):
        raise UsageError(
            f"the {name} is a {type(dataset).__name__}, whose samples have no index: an exact "
            "resume begins in the middle of an epoch, so use what has len() and reads by index: a "
            "list, numpy.memmap, datasets.Dataset, an index of files"
        )


def make_loaders(
    accelerator: Accelerator,
    train_set: Dataset,
    eval_set: Dataset,
    args: argparse.Namespace,
    collate_fn: Callable[[list], Any] | None = None,
    weights: Sequence[float] | torch.Tensor | None = None,
) -> tuple[DataLoader, DataLoader]:
    """The loaders for training, shuffled, and for evaluation, in order; prepare both.

    A data set has `__len__` and `__getitem__`, or `__getitems__`, which takes a list of indices.
    collate_fn makes a batch of a list of samples (None: PyTorch's own); with InMemory it is not
    used. Batch sizes are over all processes; --eval-batch-size is rounded up to a multiple of them.
    weights, one per training sample: how often each is drawn, with replacement, in relation to the
    others. Raises UsageError for weights that cannot be used.
    """
    draws = None
    if weights is not None:
        draws = torch.as_tensor(weights, dtype=torch.float64).cpu()
        good = draws.shape == (len(train_set),) and bool((draws >= 0).all())
        if not good or not 0 < draws.sum() < math.inf:
            raise UsageError(
                f"weights= of shape {tuple(draws.shape)} must be {len(train_set)} numbers of at "
                "least 0, not all of them 0: one for each training sample"
            )
    num_processes = accelerator.num_processes
    eval_batch_size = -(-args.eval_batch_size // num_processes) * num_processes
    train_batches = EpochBatches(
        len(train_set),
        args.batch_size,
        seed=args.seed,
        weights=draws,
        drop_last=args.drop_last,
        accumulate=args.accumulate,
    )
    eval_batches = EpochBatches(len(eval_set), eval_batch_size)
    return (
        make_loader(accelerator, train_set, train_batches, args, collate_fn),
        make_loader(accelerator, eval_set, eval_batches, args, collate_fn),
    )


def make_loader(
    accelerator: Accelerator,
    dataset: Dataset,
    batches: EpochBatches,
    args: argparse.Namespace,
    collate_fn: Callable[[list], Any] | None,
) -> DataLoader:
    """A loader of these batches; a data set in memory is moved to the device if it fits."""
    if isinstance(dataset, InMemory) and args.num_workers == 0:
        num_bytes = sum(tensor.nbytes for tensor in dataset.tensors)
        if accelerator.device.type == "cuda" and num_bytes <= MAX_DEVICE_BYTES:
            batches.device, dataset = accelerator.device, dataset.to(accelerator.device)
    return DataLoader(
        WholeBatches(
            dataset,
            collate_fn,
            args.seed,
            batches.epoch,
            batches.batch_size // accelerator.num_processes,
        ),
        batch_sampler=batches,
        collate_fn=whole,
        num_workers=args.num_workers,
        timeout=args.timeout * (args.num_workers > 0),  # a full /dev/shm swallows a batch
        persistent_workers=args.num_workers > 0,
        pin_memory=accelerator.device.type == "cuda" and batches.device.type == "cpu",
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # else each iterator draws from the global generator
    )


def whole(batch: Any) -> Any:
    """collate_fn of a loader whose data set makes whole batches."""
    return batch


def batches_of(loader: Any) -> EpochBatches | None:
    """The EpochBatches of a prepared loader; None if make_loaders did not make it."""
    batches = getattr(loader, "batch_sampler", None)
    batches = getattr(batches, "batch_sampler", batches)  # Accelerate may have put it into a shard
    return batches if isinstance(batches, EpochBatches) else None


def _ignore_signals(worker: int) -> None:
    """What stops the run (Ctrl-C, Slurm, pkill -f) must not kill the workers of its last steps."""
    for number in {*SIGNALS} - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # neither on Windows nor on a Mac
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_wait_for_parent, daemon=True).start()
    if hasattr(os, "setpgid"):  # not on Windows
        os.setpgid(0, 0)


def _wait_for_parent() -> None:
    """End this worker when the training process, which would else wait for it, sends SIGTERM."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def keyed_uniform(seed: int, epoch: int, indices: torch.Tensor, num: int) -> torch.Tensor:
    """Uniform numbers in [0, 1) that depend only on (seed, epoch, sample index, column, num).

    The same bits on every device and for every batch that a sample may fall into: a counter-based
    generator, the 64-bit finalizer of splitmix64 (Steele, Lea, Flood 2014).

    Args:
        indices: int64 of shape (n,).

    Returns:
        float32 of shape (n, num) on the device of `indices`.
    """
    return _uniform(key(seed, epoch), indices, num)


class Dropout(nn.Dropout):
    """nn.Dropout with the same masks at any number of processes and micro-batches.

    In a model that Run trains, a mask depends on seed, epoch, step and the sample's place in the
    step, whoever has the sample; elsewhere this is nn.Dropout. Inputs are (samples, ...), with the
    same sizes on all processes. It draws once per micro-batch and raises RuntimeError if called
    again, as gradient checkpointing does: use nn.Dropout there.
    """

    # In a run: key of step and layer, and where in the step its first sample is; int64 (2,).
    place: torch.Tensor | None = None
    drawn = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.place is None or not self.training or self.p == 1:
            return super().forward(inputs)
        if self.drawn:
            raise RuntimeError(
                "order.Dropout was used twice for a batch, or outside of run.steps(): use "
                "nn.Dropout there"
            )
        self.drawn = True
        rows = self.place[1] + torch.arange(len(inputs), device=inputs.device)
        numbers = _uniform(self.place[0], rows, math.prod(inputs.shape[1:]))
        return inputs * (numbers >= self.p).view_as(inputs) / (1 - self.p)


def seed_dropout(
    layers: Sequence[Dropout], device: torch.device, first: int, *position: int
) -> None:
    """Seed what a forward pass draws by seed, epoch and step, and by where its samples begin.

    The masks of these layers are the same at any number of processes and micro-batches. Whatever
    else draws, nn.Dropout too, depends on `first` and so on both.
    """
    # The device's generator alone: torch.manual_seed walks through every kind of device, and one
    # that is not initialised keeps each call, with its stack, for later.
    if device.type == "cpu":
        torch.default_generator.manual_seed(key(*position, first))
    else:
        torch.get_device_module(device).manual_seed(key(*position, first))
    for number, layer in enumerate(layers):
        if layer.place is None:
            layer.place = torch.zeros(2, dtype=torch.int64, device=device)
        layer.place[0], layer.place[1] = key(*position, number), first
        layer.drawn = False


def release_dropout(layers: Sequence[Dropout]) -> None:
    """Make them nn.Dropout again."""
    for layer in layers:
        layer.place = None


def data_md5(*sets: Dataset) -> str:
    """Hexadecimal md5 that identifies data sets: of all tensors of an InMemory set.

    Of any other set: of its length and of NUM_PROBED samples spread over it.
    """
    digest = hashlib.md5(usedforsecurity=False)
    for dataset in sets:
        if isinstance(dataset, InMemory):
            leaves = dataset.tensors
        else:
            probes = np.linspace(0, len(dataset) - 1, NUM_PROBED).astype(int).tolist()
            samples = WholeBatches(dataset, list, 0, torch.zeros((), dtype=torch.int64))
            leaves = [len(dataset), *tree_leaves(samples.make(torch.tensor(probes)))]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                leaf = leaf.cpu().contiguous().numpy()
            if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
                digest.update(np.ascontiguousarray(leaf).view(np.uint8).data)
            else:
                digest.update(repr(leaf).encode())
    return digest.hexdigest()


def key(*numbers: int) -> int:
    """Mix integers into one 63-bit key; every number changes about half of its bits."""
    mixed = 0
    for number in numbers:
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed >> 1


def _uniform(offset: int | torch.Tensor, rows: torch.Tensor, num: int) -> torch.Tensor:
    columns = torch.arange(num, device=rows.device)
    x = rows.unsqueeze(1) * num + columns + offset
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):  # key()'s, int64
        x = (x ^ _shift_right(x, shift)) * factor
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 40).float() / 2**24  # 24 bits: all that a float32 below 1 can hold


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: int64's own would copy the sign into the high bits."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
