"""Name the buffers that forward changes from its own share of a batch, such as running means."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from trainkit.checkpoints.changes import Marks
from trainkit.repairs.names import registered_things
from trainkit.text import count

NUM_SEEN = 1024  # numbers looked at of each buffer
SAME = 1e-6  # relative difference of what processes have computed from the same values


class Buffers:
    """Compares the buffers of the models between the processes, and before and after micro-batches.

    DistributedDataParallel lets every process continue with those of process 0, which has seen its
    own share alone; and a mean that moves in each micro-batch moves as often as --accumulate says.
    Whole numbers may count up in each micro-batch. Only the first steps are looked at.

    Attributes:
        before: of each buffer, a number that its content gives, when the micro-batch began.
        num_moved: of each buffer, in how many micro-batches of the step it changed.
        registered, marks: the modules that the script has registered, such as a teacher, and what
            each was like when the micro-batch began.
        num_followed: of each of them, in how many micro-batches of the step the loop changed it.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        models: Sequence[nn.Module],
        accumulate: int,
        say: Callable[[str], object],
    ):
        self.accelerator = accelerator
        self.models = models
        self.accumulate = accumulate
        self.say = say
        self.is_needed = accelerator.num_processes * accumulate > 1
        self.before: dict[str, float] = {}
        self.now: dict[str, float] | None = None
        self.num_moved: dict[str, int] = {}
        things = registered_things(accelerator) if accumulate > 1 else []
        self.registered = [thing for thing in things if isinstance(thing, nn.Module)]
        self.marks: list[Marks] = []
        self.num_followed = [0 for _ in self.registered]
        self.handles: list[Any] = []
        if self.is_needed and accelerator.is_fsdp2:
            # Before the hook of a sharded model, which gives all processes those of process 0.
            self.handles = [m.register_forward_hook(self._look, prepend=True) for m in models]

    def _look(self, *_: Any) -> None:
        self.now = self._contents()

    def start_micro_batch(self) -> None:
        """Remember the buffers."""
        if self.is_needed:
            self.before = self._contents()
            self.now = None
            self.marks = [Marks(floats_of(module)) for module in self.registered]

    def finish_micro_batch(self) -> None:
        """See which buffers have changed."""
        if not self.is_needed:
            return
        if self.now is None:
            self.now = self._contents()
        for name, value in self.now.items():
            if differ(value, self.before.get(name, value)):
                self.num_moved[name] = self.num_moved.get(name, 0) + 1
        for number, marks in enumerate(self.marks):
            self.num_followed[number] += bool(marks.changed())

    def finish_step(self) -> None:
        """Print a line about buffers that differ. Every process must call this."""
        if not self.is_needed:
            return
        everybody = gather_object([self.now])
        names = [
            name
            for name, value in (everybody[0] or {}).items()
            if any(differ(value, (theirs or {}).get(name, value)) for theirs in everybody)
        ]
        floats = {name for name, buffer in self._named() if buffer.is_floating_point()}
        often = [name for name, num in self.num_moved.items() if num > 1 and name in floats]
        self.num_moved.clear()
        followed = [num > 1 for num in self.num_followed]
        self.num_followed = [0 for _ in self.registered]
        if any(followed):
            kind = type(self.registered[followed.index(True)]).__name__
            self.say(
                f"note: the loop changes the registered {kind} in each micro-batch of "
                f"--accumulate {self.accumulate}, so the numbers depend on how a batch is split: "
                "change it once in a step, `if accelerator.sync_gradients:`"
            )
            self.registered = []
        if names or often:
            self.say(note_of(names, often))
            self.close()

    def close(self) -> None:
        """Look no more."""
        self.is_needed = False
        for handle in self.handles:
            handle.remove()

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return [pair for model in self.models for pair in model.named_buffers()]

    def _contents(self) -> dict[str, float]:
        """A number for each buffer, which another order of the same numbers changes too."""
        found = {}
        for name, buffer in self._named():
            if buffer.is_complex() or buffer.is_nested or buffer.layout is not torch.strided:
                continue
            flat = buffer.detach().flatten()
            flat = flat[:: max(1, flat.numel() // NUM_SEEN)].double().cpu()
            found[name] = (flat * torch.linspace(1, 2, len(flat), dtype=flat.dtype)).sum().item()
        return found


def floats_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The weights and buffers of a module that are no counts."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor for name, tensor in tensors if tensor.is_floating_point()}


def differ(one: float, other: float) -> bool:
    """Are these two numbers not the same but for rounding? NaN is itself."""
    both_nan = one != one and other != other
    return not both_nan and not abs(one - other) <= SAME * max(abs(one), abs(other))


def note_of(shared: Sequence[str], often: Sequence[str]) -> str:
    """Say which buffers change with a share of a batch, and what to do."""
    names = shared or often
    others = f" and {count(len(names) - 1, 'other buffer')}" if len(names) > 1 else ""
    if shared:
        reason = (
            "forward changes it from this process's share of a batch, and that of process 0 is "
            "kept: add up over the processes what it is changed by (accelerator.reduce)"
        )
    else:
        reason = "forward changes it in each micro-batch: use --accumulate 1, or change it once"
    return (
        f"note: {names[0]}{others}: the numbers depend on how a batch is split, because {reason}. "
        "In place of BatchNorm use GroupNorm or LayerNorm, or put it into evaluation mode"
    )
