"""End the run if a loss, gradient or weight is not finite, before it reaches a checkpoint."""

import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from trainkit.errors import RunFailure
from trainkit.numbers.means import HostCopy
from trainkit.numbers.optim import total_norm, weights_of

MAX_SKIPPED = 30  # fp16 halves its loss scale at each skip, so 2**16 has become 2**-14
DIFFERENT = 1e-5  # relative difference of norms; equal GPUs give equal bits, others nearly
REMEDY = "try a smaller --learning-rate, a longer --warmup or --clip-norm 1"


class FiniteGuard:
    """Stops all processes at the first step whose gradient is not finite.

    Gradients are already averaged over the processes, so all of them see the same norm. On a GPU
    the norm is read one step late, because reading it makes the host wait for the device. By then
    the weights in memory may be lost, but the checkpoints are not. Under fp16 an overflow is not an
    error, because GradScaler skips the step; MAX_SKIPPED skipped steps in a row are an error.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.step = "step 0"  # the last one, with its learning rate
        # The norm of a step, being copied to the host, the losses of the step, and its text.
        self.pending: list[tuple[HostCopy, Sequence[torch.Tensor], str]] = []
        self.num_skipped = 0  # in a row, under fp16

    def check(self, grad_norm: torch.Tensor, losses: Sequence[torch.Tensor], step: str) -> None:
        """Call between backward and optimizer.step(), in every process, when gradients are synced.

        `losses` are this process's shares; error messages give their sums over the processes.
        `step` is a text that is another one in each step. Raises RunFailure on all processes.
        """
        self._read_pending(before=step)
        self.step = step
        if self.accelerator.scaler is not None:
            return
        self.pending.append((HostCopy(grad_norm), [*losses], step))
        if grad_norm.device.type == "cpu":
            self._read_pending()

    def count_skipped(self, skipped: bool, losses: Sequence[torch.Tensor]) -> None:
        """Raise RunFailure on all processes if fp16 skipped MAX_SKIPPED steps in a row."""
        self.num_skipped = self.num_skipped + 1 if skipped else 0
        if self.num_skipped == MAX_SKIPPED:
            self._fail(math.inf, losses, self.step)

    def finish(self, *optimizers: AcceleratedOptimizer) -> None:
        """Check the norms still being copied, and the weights. Call before a checkpoint."""
        self._read_pending()
        for optimizer in optimizers:
            norm = total_norm(weights_of(optimizer))
            rates = norm.new_tensor(sum(float(group["lr"]) for group in optimizer.param_groups))
            numbers = self.accelerator.gather(torch.stack((norm, rates))[None]).T
            norms = numbers[0].tolist()
            if not math.isfinite(sum(norms)):
                raise RunFailure(
                    f"the weights are not finite after {self.step}: their norm is "
                    f"{norms[0]:.4g}; the checkpoints are untouched: try a smaller --learning-rate"
                )
            lowest, highest = numbers.aminmax(dim=1)
            if (highest - lowest > DIFFERENT * highest).any():
                raise RunFailure(
                    f"the weights or learning rates differ between the processes after "
                    f"{self.step}, norms of the weights {min(norms):.4g} to {max(norms):.4g}: "
                    "change them in the same way on every process"
                )

    def _read_pending(self, before: str | None = None) -> None:
        while self.pending and self.pending[0][-1] != before:
            copied, losses, step = self.pending.pop(0)
            norm = copied.read().item()
            if not math.isfinite(norm):
                self._fail(norm, losses, step)

    def _fail(self, norm: float, losses: Sequence[torch.Tensor], step: str) -> NoReturn:
        # All processes come here in the same step, so they may communicate.
        shares = torch.stack([loss.float() for loss in losses])
        sums = self.accelerator.reduce(shares, reduction="sum").tolist()
        raise RunFailure(
            f"loss or gradient is not finite at {step}: loss "
            f"{' and '.join(f'{loss:.4g}' for loss in sums)}, gradient norm {norm:.4g}; the "
            f"checkpoints are untouched: {REMEDY}"
        )
