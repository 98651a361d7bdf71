"""Numbers that went bad are noticed before they reach the weights."""

import math

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from trainkit.checkpoint import Progress
from trainkit.launch import RunFailure

MAX_SKIPPED = 30  # fp16 halves its loss scale, 2**16 at first, at each skip: no overflow survives


class FiniteGuard:
    """Stops all processes at the first step whose gradient is not finite, weights untouched.

    Gradients are already averaged over the processes, so all of them see the same norm. On a CPU
    the norm is there to be read. On a GPU reading it would make the host wait in every step, so the
    fused optimizer is told to skip the update on the device if the norm is not finite (the contract
    it has with torch.amp.GradScaler), and the norm is read while the next step runs. Under fp16
    GradScaler does all that itself and an overflow is no error; MAX_SKIPPED in a row are one.
    """

    def __init__(self, accelerator: Accelerator, optimizer: AcceleratedOptimizer):
        self.accelerator, self.optimizer = accelerator, optimizer
        self.deferred = accelerator.device.type != "cpu"
        self.position = (0, 0.0)  # step and learning rate
        self.pending: tuple[torch.Tensor, torch.Event, tuple[int, float]] | None = None
        self.num_skipped = 0  # in a row, under fp16

    def check(
        self, grad_norm: torch.Tensor, loss: torch.Tensor, progress: Progress, learning_rate: float
    ) -> None:
        """Call between backward and optimizer.step(), in every process, when gradients are synced.

        `loss` is this process's share: the sum over the processes is reported. Raises RunFailure on
        all processes.
        """
        self._read_pending()
        self.position = (progress.step + 1, learning_rate)
        if self.accelerator.scaler is not None:
            skipped = self.optimizer.step_was_skipped  # the step before this one
            self.num_skipped = self.num_skipped + 1 if skipped else 0
            if self.num_skipped >= MAX_SKIPPED:
                self._fail(self.position, loss, grad_norm)
        elif self.deferred:
            self.optimizer.optimizer.found_inf = (~torch.isfinite(grad_norm)).float()
            values = torch.stack((loss.detach().float(), grad_norm.float()))
            copy = torch.empty(2, pin_memory=values.device.type == "cuda")
            copy.copy_(values, non_blocking=True)
            event = torch.Event(device=values.device)
            event.record()
            self.pending = (copy, event, self.position)
        elif not math.isfinite(grad_norm.item()):
            self._fail(self.position, loss, grad_norm)

    def finish(self) -> None:
        """Look at what is still on its way, and at the weights. Call before a checkpoint."""
        self._read_pending()
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        norm = torch.nn.utils.get_total_norm(weights)
        if not math.isfinite(norm.item()):
            raise RunFailure(
                f"the weights went bad at {_describe(self.position)}: their norm is "
                f"{norm.item():.4g}; the checkpoints are untouched: try a smaller --learning-rate"
            )

    def check_mean(self, mean_loss: float, progress: Progress, learning_rate: float) -> None:
        """Raise RunFailure if a logged mean over all processes is not finite."""
        if not math.isfinite(mean_loss):
            self._raise((progress.step, learning_rate), mean_loss, math.nan)

    def _read_pending(self) -> None:
        if self.pending is not None:
            (copy, event, position), self.pending = self.pending, None
            event.synchronize()
            if not math.isfinite(copy[1].item()):
                self._fail(position, copy[0], copy[1])

    def _fail(
        self, position: tuple[int, float], loss: torch.Tensor, grad_norm: torch.Tensor
    ) -> None:
        # All processes come here in the same step, so they may communicate.
        loss = self.accelerator.reduce(loss.detach().float().to(self.accelerator.device))
        self._raise(position, loss.item(), grad_norm.item())

    def _raise(self, position: tuple[int, float], loss: float, grad_norm: float) -> None:
        raise RunFailure(
            f"the numbers went bad at {_describe(position)}: loss {loss:.4g}, gradient norm "
            f"{grad_norm:.4g}; the weights and checkpoints hold the last good step: try a smaller "
            "--learning-rate, a longer --warmup or --clip-norm 1"
        )


def _describe(position: tuple[int, float]) -> str:
    return f"step {position[0]}, learning rate {position[1]:.4g}"
