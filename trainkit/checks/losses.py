"""Refuse what a copied loop does to its loss once too often, in the first steps of a run."""

from collections import deque
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from trainkit.errors import UsageError

MAX_NODES = 64  # of the graph of a loss are looked at, from its end


class Losses:
    """Looks at the backward passes of a micro-batch of --accumulate above 1, and at its loss.

    Attributes:
        flows: of each mean of the micro-batch, the gradient that came to it.
        is_quotient: the loss of the micro-batch ends with a division.
        seen: some numbers of the weights, as they were in its first backward pass.
    """

    def __init__(self, accelerator: Accelerator, weights: list[nn.Parameter], accumulate: int):
        self.accelerator = accelerator
        self.weights = weights
        self.accumulate = accumulate
        self.start_micro_batch()

    def start_micro_batch(self) -> None:
        self.flows: list[torch.Tensor] = []
        self.is_quotient = False
        self.seen: torch.Tensor | None = None

    def watch_mean(self, mean: torch.Tensor) -> None:
        """Remember the gradient that comes to a mean of run.step_mean in its backward pass."""
        if self.accumulate > 1 and mean.requires_grad:
            mean.register_hook(self._note_flow)

    def _note_flow(self, gradient: torch.Tensor) -> None:
        self.flows.append(gradient.detach())

    def note_backward(self, loss: Any) -> None:
        """Raise UsageError if the weights were changed since the last backward of a micro-batch.

        SAM does so: its second pass is at other weights, which then depend on --accumulate.
        """
        if self.accumulate == 1:
            return
        if isinstance(loss, torch.Tensor):
            self.is_quotient = self.is_quotient or ends_with_division(loss)
        if self.accelerator.sync_gradients:  # an optimizer may have been stepped
            return
        now = first_numbers(self.weights)
        if self.seen is not None and not torch.equal(self.seen, now):
            raise UsageError(
                f"--accumulate {self.accumulate}: the weights were changed between two backward "
                "passes of a micro-batch, as SAM does. They would move by the gradient of a "
                "micro-batch, not by that of the step: use --accumulate 1"
            )
        self.seen = now

    def finish_micro_batch(self, num_micro_batches: int) -> None:
        """Raise RuntimeError if the loss was divided by --accumulate, as Accelerate does it.

        A mean of as many terms as there are micro-batches looks the same and is let through.
        """
        if self.flows and self.is_quotient and num_micro_batches > 1:
            scaler = self.accelerator.scaler
            scale = 1.0 if scaler is None else scaler.get_scale()
            flows = torch.stack([flow.double().cpu() for flow in self.flows])
            divided = torch.full_like(flows, scale / num_micro_batches / self.accumulate)
            if len(flows) != self.accumulate and torch.allclose(flows, divided, rtol=1e-4, atol=0):
                raise RuntimeError(
                    f"the loss was divided by {self.accumulate}, which accelerator.backward(...) "
                    "does already: leave out the division by --accumulate, or, if it is meant "
                    "otherwise, divide the values before run.step_mean(...)"
                )
        self.start_micro_batch()


def ends_with_division(loss: torch.Tensor) -> bool:
    """Is there a division among the last operations that made a loss?"""
    nodes = deque([loss.grad_fn])
    for _ in range(MAX_NODES):
        node = nodes.popleft() if nodes else None
        if node is not None and node.name().startswith("DivBackward"):
            return True
        if node is not None:
            nodes.extend(following for following, _ in node.next_functions)
    return False


def first_numbers(weights: list[nn.Parameter]) -> torch.Tensor:
    """The first number of each weight, of those that this process has."""
    local = (getattr(weight.detach(), "to_local", weight.detach)() for weight in weights)
    return torch.stack([rows.flatten()[0].float() for rows in local if rows.numel()])
