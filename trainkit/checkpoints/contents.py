"""What a checkpoint holds of a run, and what must not change because no checkpoint holds it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from trainkit.checkpoints.content import hash_fixed, text_of
from trainkit.checkpoints.parts import Parts, check_loadable, load_tree
from trainkit.checkpoints.sharded import Tensors, frozen, state_of
from trainkit.checkpoints.state import State, where_apart
from trainkit.errors import RunFailure, UsageError
from trainkit.hashes import digest
from trainkit.repairs.private_names import (
    keystr,
    prepared_optimizers,
    prepared_schedulers,
    tree_leaves,
    tree_leaves_with_path,
    tree_map_only,
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

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.tensors = dict(tensors)
        self.versions = [version_of(tensor) for tensor in self.tensors.values()]
        self.sizes: list[int] = []
        self.first = self._bytes()

    def changed(self) -> set[str]:
        """The names of the tensors that have changed."""
        versions = [version_of(tensor) for tensor in self.tensors.values()]
        pairs = zip(self.tensors, self.versions, versions, strict=True)
        found = {name for name, old, new in pairs if old != new}
        if torch.equal(self.first, now := self._bytes()):
            return found
        parts = zip(self.tensors, self.first.split(self.sizes), now.split(self.sizes), strict=True)
        return found | {name for name, old, new in parts if not torch.equal(old, new)}

    def hash(self) -> str:
        """A hash of the bytes that are compared, as they were."""
        return digest(self.first.numpy())

    def _bytes(self) -> torch.Tensor:
        samples = [_sample_of(tensor) for tensor in self.tensors.values()]
        self.sizes = [len(sample) for sample in samples]
        if not samples:
            return torch.empty(0, dtype=torch.uint8)
        return torch.cat([sample.to(samples[0].device) for sample in samples]).cpu()


def _sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes spread over a tensor, of a sharded one over the rows of this process."""
    rows = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
    if rows.dim() == 4 and rows.is_contiguous(memory_format=torch.channels_last):
        rows = rows.permute(0, 2, 3, 1)  # without a copy
    memory = rows.contiguous().flatten().view(torch.uint8)
    # An odd distance: it meets the low bytes of some numbers, which every change moves.
    return memory[:: max(1, len(memory) // NUM_BYTES) | 1]


class Frozen:
    """The frozen weights (requires_grad=False) of the models of a run.

    They are left out of checkpoints only while they are as at the start: what a loop moves, such as
    a teacher that follows the student, a resume must have. `moved` has the names of those, for each
    model.
    """

    def __init__(self, models: Sequence[nn.Module]):
        self.models = models
        self.moved: list[set[str]] = [set() for _ in models]
        self.watch()

    def watch(self) -> None:
        """From here on a change counts. Call it when they are as every start makes them."""
        self.marks = [Marks(frozen(model)) for model in self.models]

    def state_of(self, model: nn.Module) -> Tensors:
        """The state of a model without those frozen weights that are as at the start, by name."""
        number = next(n for n, one in enumerate(self.models) if one is model)
        return state_of(model, self.moved[number])


class Registered:
    """What accelerator.register_for_checkpointing(...) was given, in its order, and run.state.

    Accelerate would unpickle whatever a file holds: here their states are in registered.bin, equal
    on all processes. Raises UsageError if one could not be loaded.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.things = take_registered(accelerator)
        self.kinds = [type(thing).__name__ for thing in self.things]
        self.state = State()
        for kind, state in zip(self.kinds, self.states(), strict=True):
            what = f"the state_dict() of the {kind}, registered with "
            what += "accelerator.register_for_checkpointing(...),"
            check_loadable(state, what)
            if any(hasattr(leaf, "full_tensor") for leaf in tree_leaves(state)):
                raise UsageError(
                    f"{what} holds sharded tensors: give it to accelerator.prepare(...), or let it "
                    "hold whole ones, as of weight.full_tensor()"
                )

    def states(self) -> list[Any]:
        """The state of each thing. Every process must call this: it may be a sum of theirs."""
        return [thing.state_dict() for thing in self.things]

    def load(self, folder: Path) -> None:
        """Give each its state of a checkpoint."""
        states = load_tree(folder / "registered.bin", self.accelerator.device)
        for thing, state in zip((*self.things, self.state), states, strict=True):
            thing.load_state_dict(state)

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

    def check(self) -> None:
        """Find the frozen weights that have moved. Every process must call this, after a step.

        Raises RunFailure on all of them if what is fixed has changed, or if what one checkpoint
        holds for all processes differs between them, and UsageError if a resume could not load it.
        """
        self._check_loadable()
        self.registered.state.check()
        moved = [marks.changed() for marks in self.frozen.marks]
        is_one = self.accelerator.num_processes == 1
        hashes = ("", {}) if is_one else (self.registered.state.hash(), self._hashes(moved))
        own = (moved, self._changed_fixed(), *hashes)
        everybody = [own] if is_one else gather_object([own])
        for theirs, changed, state, others in everybody:
            if changed:
                raise RunFailure(
                    f"fixed[{changed!r}] of run.begin(...) has changed, and no checkpoint holds "
                    "it: if the loop moves it, leave it out of fixed= and call "
                    "accelerator.register_for_checkpointing(...) with it before run.begin(...); if "
                    "its own forward pass does, as with BatchNorm, call .eval() on it"
                )
            if differing := dict(everybody[0][3].items() ^ others.items()):
                raise RunFailure(
                    f"{min(differing)} differs between processes, and a checkpoint holds one of "
                    "them: change it by the same numbers on all processes, and put BatchNorm in "
                    "it, whose running means are those of a share of the batch, into evaluation "
                    "mode after model.train()"
                )
            if state != everybody[0][2]:
                raise RunFailure(where_apart(gather_object([self.registered.state.entries()])))
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

    def _hashes(self, moved: Sequence[set[str]]) -> dict[str, str]:
        """Of what a checkpoint holds once for all processes, by what messages call it."""
        states = zip(self.registered.kinds, self.registered.states(), strict=True)
        held = {f"the registered {kind} (number {n})": x for n, (kind, x) in enumerate(states)}
        for n, (marks, names) in enumerate(zip(self.frozen.marks, moved, strict=True)):
            for name in names:
                if not hasattr(marks.tensors[name], "to_local"):  # rows, which may differ
                    held[f"the frozen weight {name} of model {n}"] = [marks.tensors[name]]
        return {name: hash_of(state) for name, state in held.items()}


def hash_of(state: Any) -> str:
    """A hash of a state; of its tensors those bytes that Marks compares."""
    leaves = {keystr(at): leaf for at, leaf in tree_leaves_with_path(state)}
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
    rest = text_of(tree_map_only(Tensor, lambda _: None, state))
    return digest(rest + Marks(tensors).hash())


def tensors_of(module: nn.Module) -> Tensors:
    """The tensors in the state of a module."""
    return {n: x for n, x in module.state_dict().items() if isinstance(x, Tensor)}
