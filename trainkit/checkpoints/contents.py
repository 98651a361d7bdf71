"""What a checkpoint holds of a run, and what must not change because no checkpoint holds it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from trainkit.checkpoints.hashing import hash_fixed, text_of
from trainkit.checkpoints.parts import Parts, check_loadable, load_tree
from trainkit.checkpoints.sharded import Tensors, frozen, state_of
from trainkit.checkpoints.state import State, entries_in, where_apart
from trainkit.errors import RunFailure, UsageError
from trainkit.hashes import digest
from trainkit.repairs.private_names import (
    prepared_optimizers,
    prepared_schedulers,
    tree_leaves,
    version_of,
)
from trainkit.repairs.replaced import take_registered
from trainkit.store.weights import numbered

NUM_BYTES = 64  # of each tensor, spread over it, that are compared


class Marks:
    """What tensors were like when this was made, to find those that have changed since.

    A tensor counts as changed if torch has counted a change in place, or if some of NUM_BYTES bytes
    that are spread over it are others. Of a sharded tensor these are the rows of this process.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = dict(tensors)
        self.first = self._now()

    def changed(self) -> set[str]:
        """The names of the tensors that have changed."""
        pairs = zip(self.tensors, self.first, self._now(), strict=True)
        return {name for name, old, now in pairs if old != now}

    def _now(self) -> list[tuple[int, bytes]]:
        samples = [_sample_of(tensor) for tensor in self.tensors.values()]
        if not samples:
            return []
        rows = torch.stack([sample.to(samples[0].device) for sample in samples]).cpu().numpy()
        pairs = zip(self.tensors.values(), rows, strict=True)
        return [(version_of(tensor), row.tobytes()) for tensor, row in pairs]


def _sample_of(tensor: Tensor) -> Tensor:
    """NUM_BYTES bytes spread over a tensor, of a sharded one over the rows of this process."""
    rows = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
    memory = rows.contiguous().flatten().view(torch.uint8)
    if not len(memory):
        return memory.new_zeros(NUM_BYTES)
    places = torch.linspace(0, len(memory) - 1, NUM_BYTES, dtype=torch.float64)
    return memory[places.long().to(memory.device)]


class Frozen:
    """The frozen weights (requires_grad=False) of the models of a run.

    They are left out of checkpoints only while they are as at the start: what a loop moves, such as
    a teacher that follows the student, a resume must have. `moved` has the names of those, for each
    model.
    """

    def __init__(self, models: Sequence[nn.Module]):
        self.models = models
        self.moved: list[set[str]] = [set() for _ in models]
        self.marks = [Marks(frozen(model)) for model in models]

    def state_of(self, model: nn.Module) -> Tensors:
        """The state of a model without those frozen weights that are as at the start, by name."""
        number = next(n for n, one in enumerate(self.models) if one is model)
        return state_of(model, self.moved[number])


class Contents:
    """The contents of the checkpoints of one run.

    What accelerator.register_for_checkpointing(...) was given is here and no longer known to
    Accelerate, which would unpickle whatever a file holds. Raises UsageError if the state of such a
    thing could not be loaded.

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
        self.state = State()
        given = take_registered(accelerator)
        # timm's PlateauLRScheduler leaves the count of the schedule in it out of its state.
        inner = (part for thing in given for part in getattr(thing, "__dict__", {}).values())
        self.things = [*given, *(part for part in inner if isinstance(part, LRScheduler))]
        self.kinds = [type(thing).__name__ for thing in self.things]
        self.fixed = [
            (name, module, Marks(tensors_of(module)), hashes[f"fixed[{name}]"])
            for name, module in fixed.items()
            if isinstance(module, nn.Module)
        ]
        self.is_loadable = False  # not known before the first step has made the state of optimizers
        for kind, state in zip(self.kinds, self._states(), strict=True):
            what = f"the state_dict() of the {kind}, registered with "
            what += "accelerator.register_for_checkpointing(...),"
            check_loadable(state, what)
            if any(hasattr(leaf, "full_tensor") for leaf in tree_leaves(state)):
                raise UsageError(
                    f"{what} holds sharded tensors: give it to accelerator.prepare(...), or let it "
                    "hold whole ones, as of weight.full_tensor()"
                )

    def parts(self) -> Parts:
        """The parts of a checkpoint by file name: see parts.py.

        The names are those that accelerator.save_state gives its files, and average.safetensors.
        They are made from numbers and never sorted, because model_10 would come before model_2.
        """
        kinds: dict[str, Sequence[Any]] = {
            "average.safetensors": self.averages,
            "model.safetensors": [self.frozen.state_of(model) for model in self.frozen.models],
            "optimizer.bin": prepared_optimizers(self.accelerator),
            "scheduler.bin": prepared_schedulers(self.accelerator),
        }
        return {numbered(name, n): part for name, of in kinds.items() for n, part in enumerate(of)}

    def registered(self) -> list[Any]:
        """What registered.bin holds: the states of what was registered, and run.state."""
        return [*self._states(), self.state.state_dict()]

    def load_registered(self, folder: Path) -> None:
        """Give each thing its state of registered.bin."""
        states = load_tree(folder / "registered.bin", self.accelerator.device)
        for thing, state in zip((*self.things, self.state), states, strict=True):
            thing.load_state_dict(state)

    def _states(self) -> list[Any]:
        """The state of each thing. Every process must call this: it may be a sum of theirs."""
        return [thing.state_dict() for thing in self.things]

    def check(self) -> None:
        """Find the frozen weights that have moved. Every process must call this, after a step.

        Raises RunFailure on all of them if what is fixed has changed, or if what one checkpoint
        holds for all processes differs between them, UsageError if a resume could not load it, and
        RuntimeError if something was registered after run.begin(...).
        """
        if late := take_registered(self.accelerator):
            raise RuntimeError(
                f"accelerator.register_for_checkpointing(...) got a {type(late[0]).__name__} after "
                "run.begin(...), which loads the checkpoint: register it before"
            )
        self._check_loadable()
        self.state.check()
        moved = [marks.changed() for marks in self.frozen.marks]
        entries = self._entries(moved) if self.accelerator.num_processes > 1 else {}
        own = (moved, self._changed_fixed(), digest(text_of(sorted(entries.items()))))
        everybody = gather_object([own])
        for theirs, changed, _ in everybody:
            if changed:
                raise RunFailure(
                    f"fixed[{changed!r}] of run.begin(...) has changed, and no checkpoint holds "
                    "it: if the loop moves it, leave it out of fixed= and call "
                    "accelerator.register_for_checkpointing(...) with it before run.begin(...); if "
                    "its own forward pass does, as with BatchNorm, call .eval() on it"
                )
            for known, names in zip(self.frozen.moved, theirs, strict=True):
                known |= names
        if len({hashed for *_, hashed in everybody}) > 1:
            raise RunFailure(where_apart(gather_object([entries])))

    def _check_loadable(self) -> None:
        """Refuse, when it is first called, optimizers and schedules that no resume could load."""
        if not self.is_loadable:
            optimizers = [wrapped.optimizer for wrapped in prepared_optimizers(self.accelerator)]
            schedules = [wrapped.scheduler for wrapped in prepared_schedulers(self.accelerator)]
            for thing in optimizers + schedules:
                check_loadable(thing.state_dict(), f"the state of {type(thing).__name__}")
            self.is_loadable = True

    def _changed_fixed(self) -> str:
        """The name of a module that is fixed and has changed, "" if none has."""
        for name, module, marks, before in self.fixed:
            if marks.changed() and hash_fixed(name, module) != before:
                return name
        return ""

    def _entries(self, moved: Sequence[set[str]]) -> dict[str, str]:
        """What a checkpoint has once for all processes, by what messages call it."""
        held = {"run.state": self.state.values}
        for n, (kind, state) in enumerate(zip(self.kinds, self._states(), strict=True)):
            held[f"the registered {kind} (number {n})"] = state
        for n, (marks, names) in enumerate(zip(self.frozen.marks, moved, strict=True)):
            for name in names:
                if not hasattr(marks.tensors[name], "to_local"):  # rows, which may differ
                    held[f"the frozen weight {name} of model {n}"] = marks.tensors[name]
        return {at: x for name, value in held.items() for at, x in entries_in(value, name).items()}


def tensors_of(module: nn.Module) -> Tensors:
    """The tensors in the state of a module."""
    return {n: x for n, x in module.state_dict().items() if isinstance(x, Tensor)}
