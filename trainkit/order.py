"""What comes when, as pure functions of (seed, epoch, sample, step): no state that could be lost.

A resumed run, a run with other workers and a run with another number of processes therefore see the
same samples in the same order with the same augmentation.
"""

import os
from collections.abc import Iterable, Iterator

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset, Sampler

from trainkit.checkpoint import Progress

NO_SAMPLE = -1  # an index that fills a short batch up to its full size; a Dataset drops it


class EpochBatches(Sampler):
    """Batches of sample indices whose order depends on (seed, epoch) alone.

    A batch is an int64 tensor of `batch_size` indices over all processes; Accelerate gives each
    process its slice (split_batches=True). The last batch of an epoch, where it is short, is either
    dropped or filled with NO_SAMPLE: never with duplicates, and never with fewer batches on some
    process, which would leave the others waiting.

    Args:
        num_samples: size of the data set.
        batch_size: samples per optimizer step over all processes.
        seed: of the shuffle; None yields the samples in their own order.
        drop_last: leave out the last num_samples % batch_size samples of each epoch.
        accumulate: micro-batches per optimizer step; divides batch_size.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int | None = None,
        drop_last: bool = False,
        accumulate: int = 1,
    ):
        assert batch_size % accumulate == 0
        self.num_samples = num_samples
        self.batch_size = batch_size // accumulate  # read by Accelerate, which splits it
        self.seed = seed
        self.drop_last = False  # read by Accelerate: every batch that arrives there is full
        self.num_used = num_samples - (num_samples % batch_size if drop_last else 0)
        self.epoch = 0
        self.start = 0

    def set_position(self, epoch: int, num_done: int) -> None:
        """Make the next iteration yield `epoch` from its sample number `num_done` on."""
        self.epoch, self.start = epoch, min(num_done, self.num_used)

    def __len__(self) -> int:
        return -(-(self.num_used - self.start) // self.batch_size)

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = self.order(self.epoch)[: self.num_used]
        for first in range(self.start, self.num_used, self.batch_size):
            batch = order[first : first + self.batch_size]
            if len(batch) < self.batch_size:
                batch = torch.nn.functional.pad(
                    batch, (0, self.batch_size - len(batch)), value=NO_SAMPLE
                )
            yield batch

    def order(self, epoch: int) -> torch.Tensor:
        """All sample indices in the order of `epoch`, int64."""
        if self.seed is None:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(_key(self.seed, epoch))
        return torch.randperm(self.num_samples, generator=generator)


def make_loader(dataset: Dataset, batches: EpochBatches, num_workers: int) -> DataLoader:
    """A DataLoader whose dataset makes a whole batch at once, in __getitems__(indices)."""
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=tuple,  # a batch arrives as a tuple of tensors already
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        # A signal to the process group (Slurm, Ctrl-C) must not kill the workers of the last steps.
        worker_init_fn=_leave_process_group,
        generator=torch.Generator(),  # else each iterator draws a seed from the global generator
    )


def _leave_process_group(worker: int) -> None:
    os.setpgid(0, 0)


def remaining_batches(loader: DataLoader, progress: Progress, batch_size: int) -> Iterable:
    """The batches of epoch progress.epoch that come after its first progress.batch ones.

    `loader` is a prepared loader over EpochBatches. The order starts at the position instead of
    being skipped through, so a resume in the middle of an epoch costs nothing.
    """
    batches = loader.batch_sampler
    batches = getattr(batches, "batch_sampler", batches)  # inside Accelerate's shard, if any
    batches.set_position(progress.epoch, progress.batch * batch_size)
    return loader


def keyed_uniform(seed: int, epoch: int, indices: torch.Tensor, num: int) -> torch.Tensor:
    """Uniform numbers in [0, 1) that depend only on (seed, epoch, sample index, column).

    The same bits on every device and for every batch that a sample may fall into: a counter-based
    generator, the 64-bit finalizer of splitmix64 (Steele, Lea, Flood 2014).

    Args:
        indices: int64 of shape (n,).

    Returns:
        float32 of shape (n, num) on the device of `indices`.
    """
    columns = torch.arange(num, device=indices.device)
    x = indices.unsqueeze(1) * num + columns + _signed(_key(seed, epoch))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shift_right(x, shift)) * _signed(factor)
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 40).float() / 2**24  # 24 bits: all that a float32 below 1 can hold


def seed_dropout(accelerator: Accelerator, seed: int, progress: Progress) -> None:
    """Seed what a forward pass draws (dropout) by (seed, epoch, batch, micro-batch, process).

    Call it before each forward pass. Different processes draw different masks, so with dropout the
    numbers depend on the number of processes; without it this changes nothing.
    """
    micro_batch = accelerator.step % accelerator.gradient_accumulation_steps
    key = _key(seed, progress.epoch, progress.batch, micro_batch, accelerator.process_index)
    # The device's generator alone: torch.manual_seed walks through every kind of device, and one
    # that is not initialised keeps each call, with its stack, for later.
    if accelerator.device.type == "cpu":
        torch.default_generator.manual_seed(key)
    else:
        torch.get_device_module(accelerator.device).manual_seed(key)


def _key(*numbers: int) -> int:
    """Mix integers into one 63-bit key; every number changes about half of its bits."""
    key = 0
    for number in numbers:
        key = (key + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        key ^= key >> 31
    return key >> 1


def _signed(number: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return number - 2**64 if number >= 2**63 else number


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: int64's own would copy the sign into the high bits."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
