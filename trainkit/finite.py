"""Numbers that went bad are noticed before they reach the weights."""

import math

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from trainkit.checkpoint import Progress
from trainkit.launch import RunFailure


class FiniteGuard:
    """Stops all processes at the first step whose gradient is not finite, weights untouched.

    Gradients are already averaged over the processes, so all of them see the same norm. On a CPU
    the norm is there to be read. On a GPU reading it would make the host wait in every step, so the
    fused optimizer is told to skip the update on the device if the norm is not finite (the contract
    it has with torch.amp.GradScaler), and the norm is read while the next step runs. Under fp16
    GradScaler does all that itself; only a loss that is not finite is an error there.
    """

    def __init__(self, accelerator: Accelerator, optimizer: AcceleratedOptimizer):
        self.accelerator, self.optimizer = accelerator, optimizer
        self.pending: tuple[torch.Tensor, torch.cuda.Event, str] | None = None

    def check(
        self, grad_norm: torch.Tensor, loss: torch.Tensor, progress: Progress, learning_rate: float
    ) -> None:
        """Call between backward and optimizer.step(), in every process, when gradients are synced.

        Raises RunFailure on all processes.
        """
        where = f"step {progress.step + 1}, learning rate {learning_rate:.4g}"
        if self.accelerator.scaler is not None:
            return
        if grad_norm.device.type == "cpu":
            if not math.isfinite(grad_norm.item()):
                self._fail(where, loss, grad_norm)
            return
        self.finish()
        self.optimizer.optimizer.found_inf = (~torch.isfinite(grad_norm)).float()
        values = torch.stack((loss.detach().float(), grad_norm.float()))
        copy = torch.empty(2, pin_memory=values.device.type == "cuda")
        copy.copy_(values, non_blocking=True)
        event = torch.Event(device=values.device)
        event.record()
        self.pending = (copy, event, where)

    def finish(self) -> None:
        """Look at what is still on its way. Call before a checkpoint."""
        if self.pending is not None:
            copy, event, where = self.pending
            self.pending = None
            event.synchronize()
            if not math.isfinite(copy[1].item()):
                self._fail(where, copy[0], copy[1])

    def check_mean(self, mean_loss: float, progress: Progress, learning_rate: float) -> None:
        """Raise RunFailure if a logged mean over all processes is not finite."""
        if not math.isfinite(mean_loss):
            where = f"step {progress.step}, learning rate {learning_rate:.4g}"
            self._fail(where, torch.tensor(mean_loss), torch.tensor(math.nan))

    def _fail(self, where: str, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        raise RunFailure(
            f"the numbers went bad at {where}: loss {loss.item():.4g}, gradient norm "
            f"{grad_norm.item():.4g}; the weights and checkpoints hold the last good step: try a "
            "smaller --learning-rate, a longer --warmup or --clip-norm 1"
        )
