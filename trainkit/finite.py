"""Numbers that are not finite are noticed before they reach the weights."""

import math
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from trainkit.errors import RunFailure

MAX_SKIPPED = 30  # fp16 halves its loss scale at each skip: 2**16 is 2**-14 then
REMEDY = "try a smaller --learning-rate, a longer --warmup or --clip-norm 1"


@dataclass
class Position:
    """The step that is being made, and its learning rate: what an error message names."""

    step: int = 0
    learning_rate: float = 0.0

    def __str__(self) -> str:
        return f"step {self.step}, learning rate {self.learning_rate:.4g}"


class FiniteGuard:
    """Stops all processes at the first step whose gradient is not finite, weights untouched.

    Gradients are already averaged over the processes, so all of them see the same norm. Reading
    the norm makes the host wait for the device in every step. A fused optimizer on CUDA is instead
    told to skip the update on the device if the norm is not finite (the contract that it has with
    torch.amp.GradScaler), and the norm is read while the next step runs. Under fp16 GradScaler does
    all that itself and an overflow is no error; MAX_SKIPPED in a row are one.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.position = Position()
        # Per optimizer: loss and norm on their way to the host, when they are there, their step.
        self.pending: dict[int, tuple[torch.Tensor, torch.Event, Position]] = {}
        self.num_skipped: dict[int, int] = {}  # in a row, under fp16

    def check(
        self,
        optimizer: AcceleratedOptimizer,
        grad_norm: torch.Tensor,
        loss: torch.Tensor,
        position: Position,
    ) -> None:
        """Call between backward and optimizer.step(), in every process, when gradients are synced.

        `loss` is this process's share: the sum over the processes is reported. Raises RunFailure on
        all processes.
        """
        self._read_pending(id(optimizer))
        self.position = position
        if self.accelerator.scaler is not None:
            skipped = optimizer.step_was_skipped  # the step before this one
            num_skipped = self.num_skipped.get(id(optimizer), 0) + 1 if skipped else 0
            self.num_skipped[id(optimizer)] = num_skipped
            if num_skipped >= MAX_SKIPPED:
                self._fail(position, loss, grad_norm)
        elif self.skips_on_device(optimizer):
            optimizer.optimizer.found_inf = (~torch.isfinite(grad_norm)).float()
            values = torch.stack((loss.detach().float(), grad_norm.float()))
            copy = torch.empty(2, pin_memory=values.device.type == "cuda")
            copy.copy_(values, non_blocking=True)
            event = torch.Event(device=values.device)
            event.record()
            self.pending[id(optimizer)] = copy, event, position
        elif not math.isfinite(grad_norm.item()):
            self._fail(position, loss, grad_norm)

    def skips_on_device(self, optimizer: AcceleratedOptimizer) -> bool:
        """True if the optimizer itself leaves the weights as they are when told of a bad norm.

        Only CUDA's fused kernels are known to; those of other devices do in newer releases alone.
        """
        on_cuda = self.accelerator.device.type == "cuda"  # first: the other takes 5 us on a CPU
        return on_cuda and all(group.get("fused") for group in optimizer.param_groups)

    def finish(self, *optimizers: AcceleratedOptimizer) -> None:
        """Look at what is still on its way, and at the weights. Call before a checkpoint."""
        for optimizer in optimizers:
            self._read_pending(id(optimizer))
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            norm = torch.nn.utils.get_total_norm(weights).item()
            if not math.isfinite(norm):
                raise RunFailure(
                    f"the weights are not finite after {self.position}: their norm is {norm:.4g}; "
                    "the checkpoints are untouched: try a smaller --learning-rate"
                )

    def check_mean(self, mean_loss: float, position: Position) -> None:
        """Raise RunFailure if a logged mean over all processes is not finite."""
        if not math.isfinite(mean_loss):
            raise RunFailure(
                f"the mean loss is {mean_loss:.4g} at {position}; the checkpoints are untouched: "
                f"{REMEDY}"
            )

    def _read_pending(self, optimizer: int) -> None:
        if optimizer in self.pending:
            copy, event, position = self.pending.pop(optimizer)
            event.synchronize()
            if not math.isfinite(copy[1].item()):
                self._fail(position, copy[0], copy[1])

    def _fail(self, position: Position, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        # All processes come here in the same step, so they may communicate.
        loss = self.accelerator.reduce(loss.detach().float().to(self.accelerator.device))
        self._raise(position, loss.item(), grad_norm.item())

    def _raise(self, position: Position, loss: float, grad_norm: float) -> None:
        raise RunFailure(
            f"loss or gradient is not finite at {position}: loss {loss:.4g}, gradient norm "
            f"{grad_norm:.4g}; the weights and checkpoints hold the last good step: {REMEDY}"
        )
