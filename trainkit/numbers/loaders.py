"""The order of the samples is a pure function of (seed, epoch, position): no state is saved.

So a resumed run, and runs with other numbers of workers or processes, see the same samples in the
same order, with the same random numbers for each sample.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from trainkit.config import TrainingConfig
from trainkit.launch.signals import outlive_signals
from trainkit.numbers.orders import Order, num_used, weighted
from trainkit.numbers.randoms import KNOWN, NUM_HELD, KnownOrder, key, permute, seed_host

NUM_COMPUTED = 2**16  # how many positions of an order are computed at a time
MAX_DEVICE_BYTES = 2**30  # data sets up to this size are moved to the device once


class Slots:
    """The slots of a batch, and the sample indices in them. A short batch fills only some slots.

    len() counts the slots, because Accelerate gives each process a slice of every batch and needs
    all batches to be equally long.
    """

    def __init__(self, values: torch.Tensor | Sequence[int], num_slots: int):
        self.values = torch.as_tensor(values)
        self.num_slots = num_slots

    def __len__(self) -> int:
        return self.num_slots

    def __getitem__(self, part: slice) -> "Slots":
        start, stop, _ = part.indices(self.num_slots)
        share = share_of_batch(len(self.values), self.num_slots, start, stop)
        return Slots(self.values[slice(*share)], stop - start)

    def __reduce__(self) -> tuple:
        # A list: a tensor would go to a loader worker by shared memory and a socket, slower.
        return Slots, (self.values.tolist(), self.num_slots)


def share_of_batch(num_samples: int, num_slots: int, start: int, stop: int) -> tuple[int, int]:
    """Return (start, stop) of the samples of a batch that are in its slots start:stop.

    With 8 slots and 4 processes, 7 samples are shared out as 2, 2, 2, 1, so that all shares but the
    last are full, and 5 samples as 2, 1, 1, 1, because full shares would leave none for the last.
    """
    if num_samples > num_slots - (stop - start):
        return start, min(stop, num_samples)
    return -(-num_samples * start // num_slots), -(-num_samples * stop // num_slots)


class EpochBatches(Sampler):
    """Batches of sample indices whose order is a function of (seed, epoch, position) alone.

    A batch is a `Slots`, a micro-batch for all processes; Accelerate gives each process its slice
    (split_batches=True). A short last batch of an epoch is dropped or shared out as it is: no
    sample comes twice, and all processes have equally many batches.

    Args:
        batch_size: samples per optimizer step over all processes, or in a batch to evaluate.
        seed: of the shuffle; None yields the samples in their own order.
        order: see make_loaders; None yields each sample once.
        num_processes: no batch to evaluate has fewer samples, if that is possible, so that no
            process gets a padding sample, which a metric of the script's own would count.

    Attributes:
        device: of the indices.
        is_custom: the order is the script's own, or depends on the version of this code, as it does
            with more than NUM_HELD samples. A checkpoint then records a hash of it.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int | None = None,
        order: Order | None = None,
        drop_last: bool = False,
        accumulate: int = 1,
        num_processes: int = 1,
    ):
        assert batch_size % accumulate == 0
        self.num_samples = num_samples
        self.batch_size = batch_size // accumulate  # of a micro-batch; Accelerate reads it
        self.seed = seed
        self.num_processes = num_processes
        self.order = order or self._shuffled
        self.is_custom = order is not None or num_samples > NUM_HELD
        self.drop_last = False  # Accelerate reads it; Slots make every batch look full
        self.num_used = num_used(num_samples, batch_size, drop_last)
        self.device = torch.device("cpu")
        self.start = 0
        self.is_read_by_run = True
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # seen by loader workers

    def set_position(self, epoch: int, num_done: int) -> None:
        """Let the next iteration start in `epoch` after the first `num_done` samples, at once."""
        self.epoch.fill_(epoch)
        self.start = min(num_done, self.num_used)

    @contextmanager
    def read_by_run(self) -> Iterator[None]:
        """Let Run iterate the loader in the body: it knows which samples are padding."""
        self.is_read_by_run = True
        try:
            yield
        finally:
            self.is_read_by_run = False

    def __len__(self) -> int:
        return -(-(self.num_used - self.start) // self.batch_size)

    def spans(self) -> Iterator[range]:
        """Yield the positions of each batch. The last but one gives what the last lacks."""
        ends = [*range(self.start + self.batch_size, self.num_used, self.batch_size)]
        num_last = (self.num_used - self.start) % self.batch_size
        missing = self.num_processes - num_last if num_last else 0
        if ends and 0 < missing <= self.batch_size - self.num_processes:
            ends[-1] -= missing
        if self.start < self.num_used:
            ends.append(self.num_used)
        yield from map(range, [self.start, *ends], ends)

    def __iter__(self) -> Iterator[Slots]:
        if not self.is_read_by_run:
            raise RuntimeError(
                "a loader of make_loaders(...) was iterated by hand, which would count padding "
                "samples: use run.steps(train_loader) to train, and run.predict(loader, function) "
                "to collect what function(batch) returns for each sample"
            )
        epoch = int(self.epoch)
        num_computed = self.batch_size * max(1, NUM_COMPUTED // self.batch_size)
        part, known = torch.empty(0), range(0)  # the order, as far as it is computed
        for span in self.spans():
            if span.stop > known.stop:
                known = range(span.start, min(span.start + num_computed, self.num_used))
                part = self.order(epoch, known.start, known.stop).to(self.device)
                KNOWN.append(KnownOrder(part))
            yield Slots(part[span.start - known.start : span.stop - known.start], self.batch_size)

    def _shuffled(self, epoch: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Each sample once, reshuffled in each epoch; with seed None in their own order."""
        positions = torch.arange(start, self.num_samples if stop is None else stop)
        if self.seed is None:
            return positions
        return permute(positions, self.num_samples, key("order", self.seed, epoch))


class InMemory(TensorDataset):
    """Tensors of equal length. A batch is the rows of each tensor at its indices, and the indices.

    A single item is one row of each tensor, without the index.
    """

    def __getitems__(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # index_select copies whole rows, which tensor[indices] does not
        return *(tensor.index_select(0, indices) for tensor in self.tensors), indices

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def to(self, device: torch.device) -> "InMemory":
        """The same data set on another device."""
        return InMemory(*(tensor.to(device) for tensor in self.tensors))


class WholeBatches(Dataset):
    """The data set that a loader reads. Each item is a whole batch of `dataset`, or a short one.

    A process that gets no sample of a short batch gets a padding sample, the first one of the set,
    so that it takes part in the step; Run does not count it. The generators of torch, numpy and
    random are seeded before each call: of `dataset.__getitem__` by (seed, epoch, sample index), so
    that random transforms give the same with any number of workers and processes; of
    `dataset.__getitems__` by (seed, epoch, first sample index, length). `dataset.make_batch` must
    not use random numbers.

    Args:
        epoch: of the samples, shared with loader workers.
        tells_epoch: call dataset.set_epoch(epoch), if there is one, in the process that makes
            samples: a worker never sees a call in the training process.
    """

    def __init__(
        self,
        dataset: Dataset,
        collate_fn: Callable[[list], Any] | None,
        seed: int,
        epoch: torch.Tensor,
        tells_epoch: bool = False,
    ):
        self.dataset = dataset
        self.collate_fn = collate_fn or default_collate
        self.seed = seed
        self.epoch = epoch
        self.tells_epoch = tells_epoch and hasattr(dataset, "set_epoch")
        self.told_epoch = -1
        self.method = batch_method(dataset, may_make_batch=collate_fn is None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Slots) -> Any:
        return self.make(indices.values if len(indices.values) else torch.tensor([0]))

    def make(self, indices: torch.Tensor) -> Any:
        """Return the batch of the samples at `indices`, int64 of shape (n,), n > 0."""
        epoch = int(self.epoch)
        if self.tells_epoch and epoch != self.told_epoch:
            self.dataset.set_epoch(epoch)
            self.told_epoch = epoch
        if self.method == "make_batch":
            return self.dataset.make_batch(indices)
        if self.method == "__getitems__":
            if getattr(type(self.dataset), self.method) is not InMemory.__getitems__:  # it may draw
                self._seed(int(indices[0]), len(indices))
            if isinstance(self.dataset, InMemory):
                return self.dataset.__getitems__(indices.to(self.dataset.tensors[0].device))
            samples = self.dataset.__getitems__(indices.tolist())
        else:
            samples = []
            for index in indices.tolist():
                self._seed(index)
                samples.append(self.dataset[index])
        return self.collate_fn(samples)

    def _seed(self, *position: int) -> None:
        seed_host(key("sample", self.seed, int(self.epoch), *position))


def has_transform(dataset: Dataset) -> bool:
    """True for a datasets.Dataset with with_transform or set_transform."""
    form = getattr(dataset, "format", None)
    return isinstance(form, dict) and form.get("type") == "custom"


def batch_method(dataset: Dataset, may_make_batch: bool) -> str:
    """The name of the method that makes samples, from the most derived class that has one.

    __getitems__ of Subset and StackDataset merely delegates, and a datasets.Dataset gives all
    samples to its transform at once, but random transforms must be seeded for each sample.
    """
    passes_on = isinstance(dataset, Subset | StackDataset) or has_transform(dataset)
    names = ["make_batch"] * may_make_batch + ["__getitems__"] * (not passes_on) + ["__getitem__"]
    for kind in type(dataset).__mro__:
        for name in names:
            if name in vars(kind):
                return name
    raise RuntimeError(f"{type(dataset).__name__} has no method __getitem__ or __getitems__")


def make_loaders(
    accelerator: Accelerator,
    train_set: Dataset,
    eval_set: Dataset,
    config: TrainingConfig,
    collate_fn: Callable[[list], Any] | None = None,
    weights: Sequence[float] | torch.Tensor | None = None,
    order: Order | None = None,
) -> tuple[DataLoader, DataLoader]:
    """Make the loaders to train (shuffled) and to evaluate (in order), for accelerator.prepare.

    A data set has `__len__`, and `__getitem__` or `__getitems__`, which takes a list of indices. If
    it also has `make_batch` and no collate_fn is given, that makes whole batches from a tensor of
    indices, in the training process; --num-workers is then ignored. A set with make_batch, `nbytes`
    of at most MAX_DEVICE_BYTES and a `to(device)` of its own class is moved to a GPU once, as
    InMemory is. If the training set has set_epoch, its loader calls it with the epoch in the
    process that makes samples. Batch sizes are over all processes; --eval-batch-size is rounded up
    to a multiple of their number.

    Args:
        collate_fn: makes a batch from a list of samples, but not of InMemory.
        weights: how often each training sample is drawn, with replacement, relative to the others.
        order: a pure function order(epoch, start, stop), which returns the indices, int64, at
            start <= position < stop of an epoch, with as many positions as training samples.

    Raises UsageError for weights that cannot be used.
    """
    if weights is not None:
        order = weighted(weights, len(train_set), config.seed)
    train_batches = EpochBatches(
        len(train_set),
        config.batch_size,
        seed=config.seed,
        order=order,
        drop_last=config.drop_last,
        accumulate=config.accumulate,
    )
    num_processes = accelerator.num_processes
    eval_batch_size = -(-config.eval_batch_size // num_processes) * num_processes
    eval_batches = EpochBatches(len(eval_set), eval_batch_size, num_processes=num_processes)
    return (
        make_loader(accelerator, train_set, train_batches, config, collate_fn),
        make_loader(accelerator, eval_set, eval_batches, config, collate_fn),
    )


def make_loader(
    accelerator: Accelerator,
    dataset: Any,
    batches: EpochBatches,
    config: TrainingConfig,
    collate_fn: Callable[[list], Any] | None,
) -> DataLoader:
    """Make a loader of these batches, which have a seed if they are to train with."""
    batches.is_read_by_run = False  # until Run reads it
    makes_batches = batch_method(dataset, may_make_batch=collate_fn is None) == "make_batch"
    # make_batch only copies rows: that is faster here than passing a batch from a worker.
    num_workers = 0 if makes_batches else config.num_workers
    is_movable = type(dataset) is InMemory and num_workers == 0
    if makes_batches:
        # Not a `to` that is inherited: it returns a set of the class that it comes from, whose
        # batches are others.
        is_movable = hasattr(dataset, "nbytes") and "to" in vars(type(dataset))
    is_on_card = accelerator.device.type == "cuda"
    if is_on_card and is_movable and dataset.nbytes <= MAX_DEVICE_BYTES:
        dataset = dataset.to(accelerator.device)
        batches.device = accelerator.device
    return DataLoader(
        WholeBatches(dataset, collate_fn, config.seed, batches.epoch, batches.seed is not None),
        batch_sampler=batches,
        collate_fn=already_made,
        num_workers=num_workers,
        timeout=config.timeout if num_workers else 0,  # a batch is lost if /dev/shm is full
        persistent_workers=num_workers > 0,
        pin_memory=is_on_card and batches.device.type == "cpu",
        worker_init_fn=outlive_signals,
        generator=torch.Generator(),  # else each iterator uses the global generator
    )


def already_made(batch: Any) -> Any:
    """The collate_fn of a loader whose data set makes whole batches."""
    return batch


def batches_of(loader: Any) -> EpochBatches | None:
    """The EpochBatches of a prepared loader; None if make_loaders did not make it."""
    batches = getattr(loader, "batch_sampler", None)
    batches = getattr(batches, "batch_sampler", batches)  # Accelerate may have wrapped it
    return batches if isinstance(batches, EpochBatches) else None
