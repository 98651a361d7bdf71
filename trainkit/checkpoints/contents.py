"""What a checkpoint holds of a run, and what must not change because no checkpoint holds it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from trainkit.checkpoints.changes import Marks
from trainkit.checkpoints.content import hash_fixed
from trainkit.checkpoints.frozen import Frozen
from trainkit.checkpoints.registered import Registered, names_of_float_buffers
from trainkit.checkpoints.sharded import Tensors
from trainkit.errors import RunFailure
from trainkit.repairs.private_names import prepared_optimizers, prepared_schedulers
from trainkit.store.weights import numbered
from trainkit.text import shorten


class Contents:
    """The contents of the checkpoints of one run.

    Args:
        averages: for each model, the averages of its weights that --ema keeps, by name.
        fixed: what is used and not trained, by name: see Run.begin.
        hashes: of what is fixed, as fingerprint_run returns them.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        frozen: Frozen,
        averages: Sequence[Tensors] = (),
        fixed: Mapping[str, Any] = MappingProxyType({}),
        hashes: Mapping[str, str] = MappingProxyType({}),
    ):
        self.accelerator = accelerator
        self.frozen = frozen
        self.averages = averages
        self.registered = Registered(accelerator)
        self.fixed = [
            (name, module, Marks(tensors_of(module)), hashes[f"fixed[{name}]"])
            for name, module in fixed.items()
            if isinstance(module, nn.Module)
        ]

    def parts(self, registered: Tensors) -> dict[str, Any]:
        """The parts of a checkpoint by file name: tensors by name, an optimizer or a schedule.

        The names are those that accelerator.save_state gives its files, and average.safetensors and
        registered.safetensors. They are made from numbers and never sorted, because model_10 would
        come before model_2.
        """
        kinds: dict[str, Sequence[Any]] = {
            "average.safetensors": self.averages,
            "model.safetensors": [self.frozen.state_of(model) for model in self.frozen.models],
            "optimizer.bin": prepared_optimizers(self.accelerator),
            "scheduler.bin": prepared_schedulers(self.accelerator),
            "registered.safetensors": [registered] if registered else [],
        }
        return {numbered(name, n): part for name, of in kinds.items() for n, part in enumerate(of)}

    def note(self) -> None:
        """Remember what is held as it is now, which is as the newest checkpoint has it."""
        self.noted_states, tensors = self._held()
        self.noted = Marks(tensors)

    def changed(self) -> set[str]:
        """The names of what this process no longer holds as it was noted."""
        states, tensors = self._held()
        pairs = zip(self.noted_states, states, strict=False)
        others = {name for (_, old), (name, new) in pairs if old != new}
        return others | self.noted.changed_in(tensors)

    def _held(self) -> tuple[list[tuple[str, Any]], Tensors]:
        """Each state that is not a tensor, with what messages call it, and the tensors by name."""
        packed, registered = self.registered.states()
        kinds = (f"the registered {kind}" for kind in self.registered.kinds)
        states = [*zip(kinds, packed, strict=True)]
        tensors: Tensors = {}
        for file, part in self.parts(registered).items():
            if isinstance(part, dict):
                tensors |= {f"{name} of {file}": value for name, value in part.items()}
        for number, optimizer in enumerate(prepared_optimizers(self.accelerator)):
            options = options_of(optimizer)
            states += [(f"{name} of optimizer {number}", options[name]) for name in options]
        return states, tensors

    def check(self) -> None:
        """Find the frozen weights that have moved. Every process must call this.

        Raises RunFailure on all of them if what is fixed has changed, or if what one checkpoint
        holds for all processes differs between them.
        """
        moved = self.frozen.find_moved()
        own = (moved, self._changed_fixed(), self._digests(moved))
        everybody = gather_object([own]) if self.accelerator.num_processes > 1 else [own]
        for theirs, changed, digests in everybody:
            if changed:
                raise RunFailure(
                    f"fixed[{changed!r}] of run.begin(...) has changed, and no checkpoint holds "
                    "it: if the loop moves it, leave it out of fixed= and call "
                    "accelerator.register_for_checkpointing(...) with it before run.begin(...); if "
                    "its own forward pass does, as with BatchNorm, call .eval() on it"
                )
            first = everybody[0][2]
            for name in first | digests:
                if digests.get(name) != first.get(name):
                    raise RunFailure(self._what_differs(name))
            for known, names in zip(self.frozen.moved, theirs, strict=True):
                known |= names

    def _what_differs(self, name: str) -> str:
        """Say of what differs between processes which part does, and what to do.

        Every process must call this, with the same name.
        """
        place, remedy = "", "change it by the same numbers on all processes"
        if name in self.registered.names():
            number = self.registered.names().index(name)
            everybody = gather_object([self.registered.entries()[number]])
            first = everybody[0]
            differing = [
                entry
                for entry in dict.fromkeys(entry for theirs in everybody for entry in theirs)
                if any(theirs.get(entry) != first.get(entry) for theirs in everybody)
            ]
            if differing:
                place = f" in {shorten(differing)}"
            if self._are_buffers(number, differing):
                remedy += (
                    ". A forward pass in training mode changes such a buffer by this process's "
                    "share of a batch, as BatchNorm does: put BatchNorm into evaluation mode after "
                    "model.train(), use GroupNorm or LayerNorm, or copy "
                    'accelerator.reduce(buffer, "mean") of each float buffer'
                )
        return (
            f"{name} differs between processes{place}, and a checkpoint holds one of them: {remedy}"
        )

    def _are_buffers(self, number: int, entries: Sequence[str]) -> bool:
        """Are these entries of a registered thing buffers of it, or named like those of a model?"""
        buffers = self.registered.names_of_buffers(number)
        for model in self.frozen.models:
            buffers += names_of_float_buffers(model)
        ends = tuple(f".{name}" for name in buffers)
        return bool(entries) and all(f".{entry}".endswith(ends) for entry in entries)

    def _changed_fixed(self) -> str:
        """The name of a module that is fixed and has changed, "" if none has."""
        for name, module, marks, before in self.fixed:
            if marks.changed() and hash_fixed(name, module) != before:
                return name
        return ""

    def _digests(self, moved: Sequence[set[str]]) -> dict[str, str]:
        """Texts that must be equal on all processes, by the name of what they are of."""
        texts = self.registered.digests()
        for number, (marks, names) in enumerate(zip(self.frozen.marks, moved, strict=True)):
            for name in sorted(names):
                weight = marks.tensors[name]
                if not hasattr(weight, "to_local"):  # the rows of processes differ
                    text = Marks({name: weight}).hash()
                    texts[f"the frozen weight {name} of model {number}"] = text
        return texts


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
    """The options of its parameter groups by name, such as the learning rates, as texts."""
    options: dict[str, list[str]] = {}
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params":
                options.setdefault(name, []).append(repr(value))
    return options


def tensors_of(module: nn.Module) -> Tensors:
    """The tensors in the state of a module."""
    return {n: x for n, x in module.state_dict().items() if isinstance(x, Tensor)}
