"""Orders of the samples, where a run stands in them, and when it evaluates."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from trainkit.config import TrainingConfig
from trainkit.errors import UsageError
from trainkit.numbers.randoms import key, mix, permute

# order(epoch, start, stop) returns the sample indices at start <= position < stop, int64.
Order = Callable[[int, int, int], torch.Tensor]
WINDOW = 50  # batches: by_length sorts this many at a time


def weighted(weights: Sequence[float] | torch.Tensor, num_samples: int, seed: int) -> Order:
    """Draw a sample by weight, with replacement, for each position; holds one float64 per sample.

    Raises UsageError for weights that cannot be used.
    """
    values = torch.as_tensor(weights, dtype=torch.float64).cpu()
    good = values.shape == (num_samples,) and values.min() >= 0
    sums = values.cumsum(0) if good else torch.zeros(1)
    if not 0 < sums[-1] < math.inf:
        raise UsageError(
            f"weights= of shape {tuple(values.shape)} must be {num_samples} numbers of at least 0, "
            "not all of them 0: one for each training sample"
        )

    def order(epoch: int, start: int, stop: int) -> torch.Tensor:
        numbers = mix(torch.arange(start, stop) + key("order", seed, epoch)) & (2**53 - 1)
        return torch.searchsorted(sums, numbers * (sums[-1] / 2**53), right=True)

    return order


def by_length(lengths: Sequence[int] | torch.Tensor, batch_size: int, seed: int) -> Order:
    """Yield each sample once per epoch, in batches whose samples have similar lengths.

    The shuffled samples are split into windows of WINDOW batches, each window is sorted by length
    and split into batches, and the batches are shuffled. A short batch comes last, of whatever
    lengths. It holds one epoch in memory, 8 bytes for each sample.
    """
    sizes = torch.as_tensor(lengths)
    num_samples = len(lengths)
    num_batches = num_samples // batch_size

    @lru_cache(maxsize=1)
    def whole(epoch: int) -> torch.Tensor:
        samples = permute(torch.arange(num_samples), num_samples, key("order", seed, epoch))
        full, rest = samples.split([num_batches * batch_size, num_samples % batch_size])
        windows = [
            part[sizes[part].argsort(stable=True)] for part in full.split(WINDOW * batch_size)
        ]
        batches = torch.cat([*windows, full[:0]]).view(num_batches, batch_size)
        shuffle = permute(torch.arange(num_batches), num_batches, key("batches", seed, epoch))
        return torch.cat([batches[shuffle].flatten(), rest[sizes[rest].argsort(stable=True)]])

    return lambda epoch, start, stop: whole(epoch)[start:stop]


def num_used(num_samples: int, batch_size: int, drop_last: bool) -> int:
    """The number of samples used in an epoch."""
    return num_samples - (num_samples % batch_size if drop_last else 0)


@dataclass
class Progress:
    """Position of a run."""

    step: int = 0  # optimizer steps since the start of the run
    epoch: int = 0  # epochs completed
    step_in_epoch: int = 0  # steps of this epoch that are done, with those that fp16 skipped
    num_skipped: int = 0  # steps, not counted in `step`, that fp16 skipped
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    metrics_step: int = 0  # the step of that evaluation
    best: float | None = None  # the best value of the metric of --keep-best
    best_step: int = 0
    best_name: str | None = None  # its name and direction, for example "eval_loss:min"
    num_worse: int = 0  # evaluations since the best one
    ended: bool = False  # by run.stop() or --patience, whether or not epochs are left


class Length:
    """How long a run is, and when it evaluates.

    Attributes:
        num_used: samples used in an epoch.
        steps_per_epoch: optimizer steps in an epoch.
        last_step: the last step of the run, from --epochs and --stop-after-steps.
        log_every: steps between rows of metrics.jsonl.
    """

    def __init__(self, config: TrainingConfig, num_samples: int):
        self.config = config
        self.num_used = num_used(num_samples, config.batch_size, config.drop_last)
        self.steps_per_epoch = math.ceil(self.num_used / config.batch_size)
        num_steps = config.epochs * self.steps_per_epoch
        self.last_step = min(num_steps, config.stop_after_steps or num_steps)
        self.log_every = config.log_every or min(50, max(1, num_steps // 50))

    def num_done(self, progress: Progress) -> int:
        """The number of samples trained on so far in this epoch."""
        return min(progress.step_in_epoch * self.config.batch_size, self.num_used)

    def num_in_step(self, progress: Progress) -> int:
        """The number of samples of the step that comes next."""
        return min(self.config.batch_size, self.num_used - self.num_done(progress))

    def is_over(self, progress: Progress) -> bool:
        """Is there nothing left to train?"""
        at_end = progress.epoch == self.config.epochs or progress.step == self.last_step
        return progress.ended or at_end

    def must_evaluate(self, progress: Progress) -> bool:
        """Is an evaluation due before the next step, and was it not done before a resume?"""
        every = self.config.eval_every
        due = progress.step_in_epoch == self.steps_per_epoch or (
            every and progress.step % every == 0
        )
        due = due or self.is_over(progress)  # the last one, also if it was interrupted
        return bool(due) and progress.step > progress.metrics_step
