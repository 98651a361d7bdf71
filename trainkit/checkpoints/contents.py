"""What a checkpoint holds of a run, and what must not change because no checkpoint holds it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from trainkit.checkpoints.changes import Marks
from trainkit.checkpoints.content import hash_fixed, text_of
from trainkit.checkpoints.parts import Parts, check_loadable, load_whole
from trainkit.checkpoints.sharded import Tensors, frozen, state_of
from trainkit.errors import RunFailure, UsageError
from trainkit.hashes import digest
from trainkit.repairs.private_names import (
    keystr,
    prepared_optimizers,
    prepared_schedulers,
    tree_leaves_with_path,
)
from trainkit.repairs.replaced import take_registered
from trainkit.store.weights import numbered
from trainkit.text import shorten


class Frozen:
    """The frozen weights (requires_grad=False) of the models of a run.

    They are left out of checkpoints only while they are as at the start: what a loop moves, such as
    a teacher that follows the student, a resume must have.

    Attributes:
        moved: for each model the names of those that have changed since watch().
    """

    def __init__(self, models: Sequence[nn.Module]):
        self.models = models
        self.moved: list[set[str]] = [set() for _ in models]
        self.watch()

    def watch(self) -> None:
        """From here on a change counts. Call it when they are as every start makes them."""
        self.marks = [Marks(frozen(model)) for model in self.models]

    def set_moved(self, moved: Sequence[Sequence[str]]) -> None:
        """Take over from a checkpoint which of them had changed, for each model."""
        self.moved = [set(names) for names in moved]

    def state_of(self, model: nn.Module) -> Tensors:
        """The state of a model without those frozen weights that are as at the start, by name."""
        number = next(n for n, one in enumerate(self.models) if one is model)
        return state_of(model, self.moved[number])


class Registered:
    """What accelerator.register_for_checkpointing(...) was given, in its order.

    Accelerate pickles such things, and unpickles whatever a file holds, which could execute code:
    here they are a part of the checkpoint. Raises UsageError if one could not be loaded.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.things = take_registered(accelerator)
        self.kinds = [type(thing).__name__ for thing in self.things]
        for kind, state in zip(self.kinds, self.state_dict(), strict=True):
            where = "registered with accelerator.register_for_checkpointing(...),"
            check_loadable(state, f"the state_dict() of the {kind}, {where}")

    def state_dict(self) -> list[Any]:
        """The state of each."""
        return [thing.state_dict() for thing in self.things]

    def load_state_dict(self, states: Sequence[Any]) -> None:
        """Give each its state."""
        for thing, state in zip(self.things, states, strict=True):
            thing.load_state_dict(state)

    def load(self, states: Sequence[Any]) -> None:
        """Give each its state of a file, whose tensors are moved to where those of now are."""
        load_whole(self, states)

    def entries(self) -> dict[str, dict[str, Any]]:
        """The entries of the state of each thing by their places, under its name in messages.

        The rows of sharded tensors, which differ between processes, are left out.
        """
        states = zip(self.kinds, self.state_dict(), strict=True)
        return {
            f"the registered {kind} (number {number})": {
                keystr(at): leaf
                for at, leaf in tree_leaves_with_path(state)
                if not hasattr(leaf, "to_local")
            }
            for number, (kind, state) in enumerate(states)
        }

    def check_kinds(self, saved: Sequence[str]) -> None:
        """Raise UsageError if the things of a checkpoint are not those of this run."""
        if [*saved] != self.kinds:
            before, now = (", ".join(kinds) or "nothing" for kinds in (saved, self.kinds))
            raise UsageError(
                f"the checkpoint holds {before} of accelerator.register_for_checkpointing(...) and "
                f"this run has registered {now}: register the same things in the same order, or "
                "start anew without --resume"
            )

    def check_late(self) -> None:
        """Raise RuntimeError if something was registered after run.begin(...)."""
        if late := take_registered(self.accelerator):
            raise RuntimeError(
                f"accelerator.register_for_checkpointing(...) got a {type(late[0]).__name__} after "
                "run.begin(...), which loads the checkpoint: register it before"
            )


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
        self.is_loadable = False  # not known before the first step has made the state of optimizers

    def parts(self) -> Parts:
        """The parts of a checkpoint by file name: see parts.py.

        The names are those that accelerator.save_state gives its files, and average.safetensors and
        registered.bin. They are made from numbers and never sorted, because model_10 would come
        before model_2.
        """
        kinds: dict[str, Sequence[Any]] = {
            "average.safetensors": self.averages,
            "model.safetensors": [self.frozen.state_of(model) for model in self.frozen.models],
            "optimizer.bin": prepared_optimizers(self.accelerator),
            "scheduler.bin": prepared_schedulers(self.accelerator),
            "registered.bin": [self.registered] if self.registered.things else [],
        }
        return {numbered(name, n): part for name, of in kinds.items() for n, part in enumerate(of)}

    def check(self) -> None:
        """Find the frozen weights that have moved. Every process must call this, after a step.

        Raises RunFailure on all of them if what is fixed has changed, or if what one checkpoint
        holds for all processes differs between them, and UsageError if a resume could not load it.
        """
        self._check_loadable()
        moved = [marks.changed() for marks in self.frozen.marks]
        entries = self.registered.entries() | self._moved_weights(moved)
        own = (moved, self._changed_fixed(), {name: hash_of(of) for name, of in entries.items()})
        everybody = gather_object([own]) if self.accelerator.num_processes > 1 else [own]
        for theirs, changed, others in everybody:
            if changed:
                raise RunFailure(
                    f"fixed[{changed!r}] of run.begin(...) has changed, and no checkpoint holds "
                    "it: if the loop moves it, leave it out of fixed= and call "
                    "accelerator.register_for_checkpointing(...) with it before run.begin(...); if "
                    "its own forward pass does, as with BatchNorm, call .eval() on it"
                )
            first = everybody[0][2]
            for name in first | others:
                if others.get(name) != first.get(name):
                    texts = {e: hash_of({e: x}) for e, x in entries.get(name, {}).items()}
                    raise RunFailure(what_differs(name, gather_object([texts])))
            for known, names in zip(self.frozen.moved, theirs, strict=True):
                known |= names

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

    def _moved_weights(self, moved: Sequence[set[str]]) -> dict[str, dict[str, Any]]:
        """The frozen weights that have moved, by what messages call them, but for sharded ones."""
        return {
            f"the frozen weight {name} of model {n}": {"": marks.tensors[name]}
            for n, (marks, names) in enumerate(zip(self.frozen.marks, moved, strict=True))
            for name in sorted(names)
            if not hasattr(marks.tensors[name], "to_local")
        }


def hash_of(entries: Mapping[str, Any]) -> str:
    """A hash of entries by name; of tensors of those bytes that Marks compares."""
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, Tensor)}
    others = {name: entry for name, entry in entries.items() if name not in tensors}
    return digest(text_of(others) + Marks(tensors).hash())


def what_differs(name: str, everybody: Sequence[Mapping[str, str]]) -> str:
    """Say which entries differ between processes; everybody has the texts of each process."""
    entries = dict.fromkeys(entry for theirs in everybody for entry in theirs if entry)
    differing = [e for e in entries if len({theirs.get(e) for theirs in everybody}) > 1]
    place = f" in {shorten(differing)}" if differing else ""
    remedy = "change it by the same numbers on all processes"
    if any("running_" in entry for entry in differing):
        remedy += (
            ". A forward pass in training mode changes the running means of BatchNorm by this "
            "process's share of a batch: put BatchNorm into evaluation mode after model.train(), "
            "use GroupNorm or LayerNorm, or copy "
            'accelerator.reduce(buffer, "mean") of each float buffer'
        )
    return f"{name} differs between processes{place}, and a checkpoint holds one of them: {remedy}"


def tensors_of(module: nn.Module) -> Tensors:
    """The tensors in the state of a module."""
    return {n: x for n, x in module.state_dict().items() if isinstance(x, Tensor)}
