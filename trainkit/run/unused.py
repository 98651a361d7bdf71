"""Name the weights that get no gradient: they are not trained, and stop DistributedDataParallel."""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import nn

from trainkit.numbers.optim import weights_of
from trainkit.repairs.names import without_compiler
from trainkit.text import count

WORDS = (
    "got no gradient, so the optimizer does not train them: use them in the loss, or leave them "
    "out of the optimizer and call requires_grad_(False) before accelerator.prepare(...). Where "
    "only some steps use them, add 0 * sum(p.sum() for p in part.parameters()) to the loss"
)


class Unused:
    """Watches which weights of the optimizers get no gradient.

    DistributedDataParallel waits for all gradients of a backward pass, so it is an error there at
    once. Elsewhere such a weight may belong to a part that only some steps use, such as an expert:
    a line at the end of the epoch names those that had none until then.

    Args:
        wrapped: what accelerator.prepare returned for each model.

    Attributes:
        left: the weights without a gradient so far, by name.
    """

    def __init__(self, accelerator: Accelerator, wrapped: Sequence[nn.Module]):
        self.wrapped = wrapped
        self.left: dict[str, nn.Parameter] = {}
        handler = accelerator.ddp_handler
        self.is_meant = handler is not None and handler.find_unused_parameters
        self.has_said = False

    def look(self, *optimizers: torch.optim.Optimizer) -> None:
        """Note weights without a gradient, when all of a step are there.

        Raises RuntimeError if DistributedDataParallel waits for some of them.
        """
        if self.is_meant:
            return
        clipped = {weight for weight in weights_of(*optimizers) if weight.requires_grad}
        for wrapped in self.wrapped:
            model = without_compiler(wrapped)
            named = [pair for pair in model.named_parameters() if pair[1] in clipped]
            without = {bare_name(name): weight for name, weight in named if weight.grad is None}
            if waits_for_all(model) and 0 < len(without) < len(named):
                raise RuntimeError(f"{name_first(without)} {WORDS}")
            self.left |= without

    def watch_on(self) -> None:
        """After the first steps forget, without a cost in the others, each that gets a gradient."""
        self.left = {name: weight for name, weight in self.left.items() if weight.grad is None}
        for name, weight in self.left.items():
            self._forget_when_used(name, weight)

    def _forget_when_used(self, name: str, weight: nn.Parameter) -> None:
        def forget(_: torch.Tensor) -> None:
            self.left.pop(name, None)
            handle.remove()

        handle = weight.register_post_accumulate_grad_hook(forget)

    def note(self) -> str:
        """A line at the end of the first epoch; "" if there is none."""
        text = f"note: {name_first(self.left)} {WORDS}" if self.left and not self.has_said else ""
        self.has_said = True
        return text


def waits_for_all(model: nn.Module) -> bool:
    """Does DistributedDataParallel wait for a gradient of each weight of this model?"""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return False
    return not (model.find_unused_parameters or model.static_graph)


def bare_name(name: str) -> str:
    """The name of a weight without that of DistributedDataParallel around its model."""
    return name.removeprefix("module.")


def name_first(weights: dict[str, nn.Parameter]) -> str:
    """How many there are, with the name of the first."""
    return f"{count(len(weights), 'weight')} of the model, such as {next(iter(weights))},"
