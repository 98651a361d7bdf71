"""Name what the loop changes in variables of the script, which no checkpoint holds.

A queue of negatives, slow weights in a list, a temperature that falls, a schedule that was not
prepared or a generator of one's own begin anew when a run is resumed, and the numbers differ from
there without an error.
"""

import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainkit.checkpoints.changes import Marks, is_dense, rows_here
from trainkit.hashes import digest
from trainkit.repairs.names import (
    prepared_models,
    prepared_optimizers,
    prepared_schedulers,
    with_parts,
)
from trainkit.run.carried import Carried, carried_by, is_as_written, kept_by_functions
from trainkit.text import shorten

NUM_SEEN, DEPTH = 100, 3  # of the entries of a list or dict, and of those within each other
MOST_LEAVES = 1000  # of a variable that are looked at
LONG = 1000  # characters of a text
SMALL = 2**16  # numbers of a tensor that may be copied to look at it
OF_FRAME = 3  # references to the variables of a frame: its own, a name and an argument
KIT = str(Path(__file__).parents[1])
PACKAGES = "site-packages", "dist-packages", "<frozen"


@dataclass
class Seen:
    """What a variable held.

    Attributes:
        text: it differs if what is held does; "" for nothing.
        kind: of thing.
        is_plain: it is a tensor, or a list or dict, which an evaluation may make anew; or a number
            that begins anew in each epoch.
        is_anew: it begins anew in each epoch, so that at the end of one nothing is lost.
    """

    text: str = ""
    kind: Any = None
    is_plain: bool = True
    is_anew: bool = False


EMPTY = Seen()
NUMBER = "number"  # the kind of a single number or text
ITERATOR = "iterator"
DRAWS = count()


class Variables:
    """Looks at the variables of the functions of a script that are being called, and its globals.

    Every process must call its methods, as a state_dict() of the script may communicate. Only what
    decides numbers is looked at: tensors and arrays of floats; what has a state_dict; generators;
    and single numbers and texts that a loop reads before it sets them (carried.py). What a
    checkpoint holds is left out, and so are data sets, and lists and dicts that were empty at
    first, in which a script collects what it shows.

    Args:
        registered: what accelerator.register_for_checkpointing was given.

    Attributes:
        before: what they held before the first step; of plain things, before those of this epoch.
        plain: the names of those, as they were before the first step: all processes look alike.
        said: the names that a line has named.
    """

    def __init__(self, accelerator: Accelerator, registered: Sequence[Any]):
        self.accelerator = accelerator
        self.registered = registered
        self.before: dict[str, Seen] | None = None
        self.plain: list[str] = []
        self.said: set[str] = set()

    def start(self) -> None:
        """Remember what they hold before the steps; a function of the script calls the caller."""
        if self.before is None:
            self.before = self._look()
            self.plain = [name for name, seen in self.before.items() if seen.is_plain]
            return
        # Even if `plain` is empty, as others may have names, such as those of the main process.
        now = self._look()
        for name in self.plain:
            self.before[name] = now.get(name, EMPTY)

    def notes(self, is_epoch_over: bool = False) -> list[str]:
        """A line about those that have changed, once for each.

        is_epoch_over: what begins anew in the next epoch is not lost.
        """
        before = self.before or {}
        now = self._look()
        changed = {name for name in before if is_changed(before[name], now.get(name, EMPTY))}
        if is_epoch_over:
            changed -= {name for name in self.plain if before[name].is_anew}
        names = [name for name in before if name in changed - self.said]
        self.said |= changed
        drawn = [name for name in names if before[name].kind == ITERATOR]
        names = [name for name in names if name not in drawn]
        notes = []
        if drawn:
            notes.append(
                f"note: the loop draws from {_quoted(drawn)}, and no checkpoint holds how far: a "
                "resume begins it anew. Make one data set of it and the one that is trained on "
                "(docs/loop.md, two loaders at once)"
            )
        if not names:
            return notes
        return [
            *notes,
            f"note: the loop has changed {_quoted(names)}, which no "
            "checkpoint holds: if later steps depend on it, a resume differs, as it begins with "
            "what the script makes. Keep tensors in buffers of a prepared module and numbers in "
            "run.state, give the rest to "
            "accelerator.register_for_checkpointing(...), and draw from torch, numpy and random "
            "themselves (docs/resume.md, anything else that the loop changes)",
        ]

    def _look(self) -> dict[str, Seen]:
        held = self._held_memory()
        saved = {id(thing) for thing in self._saved_things()}
        loops = LoopsOfScript()
        variables = [*variables_of_script(lambda value: id(value) in saved)]
        loops.learn_other_names(variables)
        found: dict[str, Seen] = {}
        for name, value in (*variables, *self._attributes(loops)):
            try:
                # Always first, so that what a state_dict() communicates depends on no source.
                seen = look_at(value, held)
                seen = loops.look_at(name, value, seen)
            except Exception:  # whatever it is: a note never ends a run
                seen = None
            if seen:
                found[name] = seen
        return found | {text: next_draw(is_anew=True) for text in loops.zipped}

    def _attributes(self, loops: "LoopsOfScript") -> Iterator[tuple[str, Any]]:
        """The tensors of the models that are neither weights nor buffers, and numbers they keep."""
        for model in prepared_models(self.accelerator):
            for place, layer in model.named_modules():
                for name, value in vars(layer).items():
                    if isinstance(value, torch.Tensor) or name in loops.attributes:
                        path = f"{place}.{name}".lstrip(".")
                        yield f"{path} of the {type(model).__name__}", value

    def _saved_things(self) -> list[Any]:
        """What a checkpoint holds as a whole, as the script may name it."""
        optimizers = prepared_optimizers(self.accelerator)
        schedules = prepared_schedulers(self.accelerator)
        saved = [*self.registered, *optimizers, *schedules]
        saved += [wrapped.optimizer for wrapped in optimizers]
        return saved + [part for wrapped in schedules for part in with_parts(wrapped.scheduler)]

    def _held_memory(self) -> set[int | None]:
        """The addresses of the memory of all tensors that are in a checkpoint."""
        leaves = [leaf for thing in self.registered for leaf in leaves_of(thing)]
        for model in prepared_models(self.accelerator):
            leaves += tensors_in(model)
        for wrapped in prepared_optimizers(self.accelerator):
            leaves += [
                value for state in wrapped.optimizer.state.values() for value in state.values()
            ]
        return {address_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}


class LoopsOfScript:
    """What the loops of the script carry from one turn to the next, as far as its source says it.

    Attributes:
        by_steps: names that the loop over the steps of an epoch carries.
        kept: names that other loops carry, or functions with `global` or `nonlocal`.
        temporary: names that a step sets before it reads them.
        anew: names that an epoch sets before its steps.
        drawn: names of what is given to next().
        zipped: what is gone through beside the batches.
        attributes: of objects, those that a function reads before it sets them.
    """

    def __init__(self) -> None:
        frames = frames_of_script()
        around = [carried_by(frame) for frame in frames]
        self.kept, self.attributes = set[str](), frozenset[str]()
        if frames and is_as_written(frames[0].f_code):
            shared, self.attributes = kept_by_functions(frames[0].f_code.co_filename)
            self.kept |= shared
        self.by_steps, self.temporary, self.anew = set[str](), set[str](), set[str]()
        self.drawn = set[str]()
        self.zipped = around[0].zipped if around else ()
        hidden: set[str] = set()
        given: set[str] = set()
        is_over_steps = True
        for number, (frame, carried) in enumerate(zip(frames, around, strict=True)):
            is_called_anew = any(outer.num_loops for outer in around[number + 1 :])
            # What a loop carries and gives to a function is often an argument of the same name.
            self.kept |= carried.all_carried() & given
            self._add(carried, hidden, is_over_steps, is_called_anew)
            given = arguments_of(frame) | (given - {*frame.f_code.co_varnames})
            hidden |= {*frame.f_code.co_varnames, *frame.f_code.co_cellvars}
            # A generator hands the batches on to a loop of its caller.
            is_generator = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
            is_over_steps &= is_generator or not carried.num_loops

    def _add(
        self, carried: Carried, hidden: set[str], is_over_steps: bool, is_called_anew: bool
    ) -> None:
        def seen(names: frozenset[str]) -> set[str]:
            return {name for name in names if name.partition(".")[0] not in hidden}

        (self.by_steps if is_over_steps else self.kept).update(seen(carried.by_steps))
        self.kept |= seen(carried.by_others)
        self.drawn |= seen(carried.drawn)
        (self.temporary if is_over_steps else self.anew).update(seen(carried.temporary) - self.kept)
        self.anew |= seen(carried.anew)
        if is_over_steps and is_called_anew:
            self.anew |= seen(carried.made)

    def learn_other_names(self, variables: Sequence[tuple[str, Any]]) -> None:
        """Of one object, as `self` in a method and `trainer` in what calls it."""
        objects = dict(variables)
        for path in [*self.anew]:
            object_of, dot, last = path.partition(".")
            if dot and object_of in objects:
                value = objects[object_of]
                self.anew |= {f"{name}.{last}" for name in objects if objects[name] is value}

    def look_at(self, name: str, value: Any, seen: Seen | None) -> Seen | None:
        """What a variable holds: a number, a text or an iterator that is carried, or `seen`."""
        path, of_model, _ = name.partition(" of the ")
        object_of, _, last = path.rpartition(".")
        of = "" if of_model else object_of
        if {path, of} & self.temporary:
            return None
        is_anew = bool({path, of} & self.anew)
        paths = {path, f"{path}[]"} if isinstance(value, dict | list) else {path}
        is_attribute = bool(object_of or of_model) and bool({last, f"{last}[]"} & self.attributes)
        is_kept = bool(paths & self.kept) or is_attribute
        if not is_kept and not paths & self.by_steps:
            return replace(seen, is_plain=True, is_anew=True) if seen and is_anew else seen
        is_anew |= not is_kept
        if path in self.drawn and isinstance(value, Iterator):
            return next_draw(is_anew)
        return number_in(value, is_anew) or seen


def arguments_of(frame: FrameType) -> set[str]:
    code = frame.f_code
    return {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}


def number_in(value: Any, is_anew: bool) -> Seen | None:
    """What a number, a text, or a dict or list of them, holds; None of anything else."""
    is_one = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.requires_grad
    if is_one or isinstance(value, np.generic):
        value = value.item()
    leaves = islice(leaves_of(value, has_states=False), MOST_LEAVES)
    numbers = [repr_of(leaf) for leaf in leaves if is_number(leaf)]
    return Seen(repr(numbers), NUMBER, is_anew, is_anew) if numbers else None


def repr_of(number: bool | int | float | complex | str) -> str:
    """What differs if the number or text does, without a copy of a long text."""
    if isinstance(number, str) and len(number) > LONG:
        return f"{len(number)} {hash(number)}"
    return repr(number)


def is_number(value: Any) -> bool:
    """Is this a single number, or a text?"""
    return isinstance(value, bool | int | float | complex | str)


def next_draw(is_anew: bool) -> Seen:
    """What an iterator holds, which is taken to move between two looks."""
    return Seen(str(next(DRAWS)), ITERATOR, is_anew, is_anew)


def _quoted(names: Sequence[str]) -> str:
    return shorten([f"`{name}`" for name in names])


def is_changed(before: Seen, now: Seen) -> bool:
    """Does a variable hold another content of the same kind, or anything after nothing?"""
    if now.text == "" or now.text == before.text:
        return False
    return before.text == "" or before.kind == now.kind


def look_at(value: Any, held: set[int | None]) -> Seen | None:
    """What a variable holds; None if that is nothing that decides numbers.

    held: addresses of the memory of tensors that are in a checkpoint.
    """
    if value is None:
        return EMPTY
    if isinstance(value, deque) and not value:
        return EMPTY
    if isinstance(value, type | Dataset | DataLoader):
        return None
    if state := state_of_generator(value):
        # One that the loop seeds anew draws the same after a resume.
        seed = value.initial_seed() if isinstance(value, torch.Generator) else 0
        return Seen(digest(state), (type(value), seed), is_plain=False)
    leaves = [*islice(leaves_of(value), MOST_LEAVES)]
    has_state = hasattr(value, "load_state_dict")
    numbers = [leaf for leaf in leaves if isinstance(leaf, int | float)] if has_state else []
    tensors = [leaf for leaf in map(as_tensor, leaves) if leaf is not None]
    tensors = [tensor for tensor in tensors if has_state or decides(tensor)]
    tensors = [tensor for tensor in tensors if address_of(tensor) not in held]
    if not tensors and not numbers:
        return None
    shapes = [[str(tensor.dtype), *tensor.shape] for tensor in tensors]
    size = len(value) if isinstance(value, dict | list | tuple | deque) else 0
    marks = Marks({str(number): tensor for number, tensor in enumerate(tensors)})
    # Batches have other shapes, as the last one does; what has begun to grow goes on to.
    kind = shapes if isinstance(value, torch.Tensor | np.ndarray | dict) else type(value)
    text = digest(repr((size, shapes, numbers)) + marks.hash())
    return Seen(text, kind, is_plain=not has_state)


def leaves_of(value: Any, depth: int = DEPTH, has_states: bool = True) -> Iterator[Any]:
    """The tensors, numbers and others in a value, the first of each list or dict in it.

    has_states: ask for states too, which may communicate; in a state there are no others.
    """
    if isinstance(value, nn.Module):
        yield from tensors_in(value)
    elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        if has_states:
            yield from leaves_of(value.state_dict(), has_states=False)
    elif isinstance(value, dict | list | tuple | deque):  # no Mapping that reads a file
        parts = value.values() if isinstance(value, dict) else value
        for part in islice(parts, NUM_SEEN if depth else 0):
            yield from leaves_of(part, depth - 1, has_states)
    else:
        yield value


def tensors_in(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def as_tensor(leaf: Any) -> torch.Tensor | None:
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f" and leaf.flags.writeable:
        leaf = torch.from_numpy(leaf)
    is_near = isinstance(leaf, torch.Tensor) and (
        leaf.numel() <= SMALL or is_dense(rows_here(leaf))
    )
    return leaf if is_near else None


def decides(tensor: torch.Tensor) -> bool:
    """Is this more than a number to be shown, and no result of a forward pass?"""
    is_state = tensor.is_floating_point() and tensor.numel() > 1
    return (is_state or tensor.requires_grad) and tensor.grad_fn is None


def address_of(tensor: torch.Tensor) -> int | None:
    """Where the memory of a tensor begins; None of one without such memory, as a sparse one is."""
    try:
        return rows_here(tensor).untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None


def state_of_generator(value: Any) -> str:
    """The state of a generator of random numbers; "" of what is none."""
    if isinstance(value, torch.Generator):
        return str(value.get_state().tolist())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    return repr(value.getstate()) if isinstance(value, random.Random) else ""


def variables_of_script(
    is_left_out: Callable[[Any], bool] = lambda value: False,
) -> Iterator[tuple[str, Any]]:
    """The names and values of the functions of the script that are being called, then its globals.

    The script is the module of the nearest function outside of the kit and of installed packages.
    Of an object of a class of the script, such as a trainer, each attribute is one too.
    """
    frames = frames_of_script()
    script = frames[0].f_globals if frames else {}
    names: set[str] = set()
    for variables in [*(locals_of(frame) for frame in frames), script]:
        for name, value in [*variables.items()]:
            is_new = name not in names and not name.startswith("__")
            names.add(name)
            if is_new and not is_left_out(value):
                yield name, value
                for attribute, part in attributes_of(value, script.get("__name__")):
                    if not is_left_out(part):
                        yield f"{name}.{attribute}", part


def attributes_of(value: Any, script: str | None) -> list[tuple[str, Any]]:
    """What an object of a class of the script has."""
    is_own = type(value).__module__ == script and not isinstance(value, nn.Module | Dataset)
    return [*vars(value).items()] if is_own and hasattr(value, "__dict__") else []


def locals_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a function that is being called."""
    variables = frame.f_locals
    found = dict(variables)
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_function and isinstance(variables, dict) and sys.getrefcount(variables) <= OF_FRAME:
        # Up to Python 3.12 it is a copy that the frame keeps, and so a batch, and its outputs. The
        # script has it too if it called locals().
        variables.clear()
    return found


def frames_of_script() -> list[FrameType]:
    """The functions of the script that are being called, from the nearest."""
    frames = [*callers()]
    return [frame for frame in frames if frame.f_globals is frames[0].f_globals]


def callers() -> Iterator[FrameType]:
    """The functions that are being called, from the nearest, without the kit and packages."""
    frame = inspect.currentframe()
    while frame:
        file = frame.f_code.co_filename
        if not file.startswith(KIT) and not any(place in file for place in PACKAGES):
            yield frame
        frame = frame.f_back
