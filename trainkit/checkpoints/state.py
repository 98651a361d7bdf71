"""run.state: what a script carries from step to step besides what it has prepared."""

import copy
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trainkit.checkpoints.content import hash_tensor, text_of
from trainkit.errors import UsageError
from trainkit.repairs.private_names import version_of

DICTS = dict, OrderedDict, Counter
SEQUENCES = list, tuple, deque
NUMBERS = bool, int, float, complex, str, bytes, type(None)
MOST_TENSORS = 10_000  # saving and comparing them takes 0.8 s
MOST_LEVELS = 100  # a container that holds itself has more

Place = tuple[Any, ...]  # the keys and numbers that lead to a value


class State:
    """A dict of numbers, texts, None, tensors, arrays, and of lists, tuples, deques, dicts of them.

    A checkpoint has it whole, and a resume gives it back with its types. Where a dict, list, deque,
    tensor or array is there already, its content is put into it, so that a name which the script
    has for it stays right.

    Attributes:
        values: what the script reads and changes.
        saved: what a checkpoint held; None once put_back() has been called.
        noted: what it was when it had to stay so, None while it may change.
        kept: what it was after the steps before an evaluation.
    """

    def __init__(self) -> None:
        self.noted: tuple[list[tuple[str, str]], list[torch.Tensor]] | None = None
        self.kept: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """What torch.save may write: deques as lists. Raises UsageError for anything else."""
        self.check()
        deques = {at: x.maxlen for at, x in parts_of(self.values) if type(x) is deque}
        return {"values": _without_deques(self.values), "deques": deques}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take what state_dict() returned; an entry that it lacks stays."""
        self.saved = saved
        self._put(saved)

    def put_back(self) -> None:
        """Undo what was done to the entries of a checkpoint since it was loaded."""
        if self.saved is not None:
            self._put(self.saved)
            self.saved = None

    def _put(self, saved: dict[str, Any]) -> None:
        for name, value in saved["values"].items():
            self.values[name] = self._restored(value, (name,), self.values.get(name), saved)

    def _restored(self, value: Any, at: Place, old: Any, saved: dict[str, Any]) -> Any:
        """The saved value of a place, in the memory of what is there now if that can hold it."""
        kind = deque if at in saved["deques"] else type(value)
        is_like = type(old) is kind
        if isinstance(value, torch.Tensor):
            kept = (value.shape, value.dtype, value.device)
            if not is_like or (old.shape, old.dtype, old.device) != kept:
                return value.clone()
            with torch.no_grad():
                return old.copy_(value)
        if kind is np.ndarray:
            if not is_like or (old.shape, old.dtype) != (value.shape, value.dtype):
                return value.copy()
            old[...] = value
            return old
        if kind in DICTS:
            parts = old if is_like else {}
            pairs = {
                key: self._restored(part, (*at, key), parts.get(key), saved)
                for key, part in value.items()
            }
            if not is_like:
                return kind(pairs)
            old.clear()
            old.update(pairs)
            return old
        if kind in SEQUENCES:
            maxlen = saved["deques"].get(at)
            is_like = is_like and getattr(old, "maxlen", None) == maxlen
            parts = [*old] if is_like else []
            entries = [
                self._restored(part, (*at, n), parts[n] if n < len(parts) else None, saved)
                for n, part in enumerate(value)
            ]
            if is_like and kind is not tuple:
                old.clear()
                old.extend(entries)
                return old
            return deque(entries, maxlen) if kind is deque else kind(entries)
        return value

    def check(self) -> None:
        """Raise UsageError if it holds what no checkpoint could."""
        num_tensors = 0
        for at, value in parts_of(self.values):
            is_tensor = isinstance(value, torch.Tensor)
            num_tensors += is_tensor
            remedy = "keep numbers, texts, tensors, arrays, lists, tuples, deques and dicts there"
            if is_tensor and value.requires_grad:
                problem, remedy = "has a gradient", "keep what .detach() returns"
            elif is_tensor and (value.layout is not torch.strided or hasattr(value, "to_local")):
                problem = "is sharded or sparse, and only whole tensors can be compared and saved"
                remedy = "keep what .full_tensor() or .to_dense() returns"
            elif len(at) > MOST_LEVELS:
                problem, remedy = f"has more than {MOST_LEVELS} levels", "does it hold itself?"
            elif num_tensors > MOST_TENSORS:
                problem, remedy = f"is tensor number {num_tensors:,}", "torch.stack makes them one"
            elif isinstance(value, np.ndarray | np.generic) and value.dtype.hasobject:
                problem = "is an array of objects, which cannot be saved without pickle"
            elif not can_be_saved(value):
                problem = f"is a {type(value).__name__}, which cannot be saved without pickle"
            else:
                continue
            raise UsageError(f"{name_of(at)} {problem}: {remedy}")

    def note(self) -> None:
        """From here on a change is refused; a tensor that is replaced counts as changed."""
        self.noted = self._marks()
        self.kept = {}

    def allow_changes(self) -> None:
        """Allow changes until note() is called."""
        self.noted = None

    def check_unchanged(self, call: str, remedy: str) -> None:
        """Raise RuntimeError if it was changed where a resume would lose or repeat that."""
        if self.noted and self.noted[0] != self._marks()[0]:
            raise RuntimeError(
                f"run.state was changed after {call}, and a resume would lose or repeat that: do "
                f"it before, {remedy}"
            )

    def _marks(self) -> tuple[list[tuple[str, str]], list[torch.Tensor]]:
        """What shows a change, and the tensors, which live on so that their ids are not reused."""
        texts, tensors = [], []
        for at, value in parts_of(self.values):
            is_tensor = isinstance(value, torch.Tensor)
            tensors += [value] * is_tensor
            same = f"{id(value)} {version_of(value)}" if is_tensor else described(value)
            texts.append((name_of(at), same))
        return texts, tensors

    def keep(self) -> None:
        """Keep what it is, for go_back()."""
        self.kept = copy.deepcopy(self.values)

    def go_back(self) -> None:
        """Become what was kept, for a checkpoint from which a resume repeats what came since."""
        self.values = self.kept

    def hash(self) -> str:
        """A text that differs between processes if one byte does."""
        return text_of([*self.entries().items()])

    def entries(self) -> dict[str, tuple[str, str]]:
        """Of each value its description and, of a tensor, the hash of its bytes, by its name."""
        return {
            name_of(at): (described(x), hash_tensor(x) if isinstance(x, torch.Tensor) else "")
            for at, x in parts_of(self.values)
        }


def where_apart(everybody: Sequence[dict[str, tuple[str, str]]]) -> str:
    """Say where the entries of the processes differ; everybody has those of each."""
    first, nothing = everybody[0], ("missing", "")
    for rank, theirs in enumerate(everybody):
        for name in first | theirs:
            here, there = first.get(name, nothing), theirs.get(name, nothing)
            if here == there:
                continue
            what = f"is {here[0]} in process 0 and {there[0]} in process {rank}"
            if here[0] == there[0]:
                what = f"({here[0]}) has other numbers in process 0 than in process {rank}"
            return (
                f"{name} {what}, and a checkpoint holds one of them: make it of what all processes "
                "have, as run.mean(values) returns it, or write the rows of each process into one "
                "table by run.put(table, index, rows)"
            )
    return "run.state differs between processes, and a checkpoint holds one of them"


def can_be_saved(value: Any) -> bool:
    """Can torch.save write it, and torch.load(weights_only=True) read it?"""
    if type(value) in DICTS:
        return all(_is_key(key) for key in value)
    return type(value) in SEQUENCES + NUMBERS or isinstance(
        value, torch.Tensor | np.ndarray | np.generic
    )


def _is_key(key: Any) -> bool:
    return all(map(_is_key, key)) if type(key) is tuple else type(key) in NUMBERS


def parts_of(value: Any, at: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield each value with its place: containers first, then what is in them."""
    if at:
        yield at, value
    if len(at) <= MOST_LEVELS:
        pairs: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, Mapping):
            pairs = value.items()
        elif isinstance(value, SEQUENCES):
            pairs = enumerate(value)
        for key, part in pairs:
            yield from parts_of(part, (*at, key))


def name_of(at: Place) -> str:
    """What messages call the value at this place."""
    return "run.state" + "".join(f"[{key!r}]" for key in at)


def described(value: Any) -> str:
    """A number or text itself; of anything else what it is."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        sizes = " x ".join(map(str, value.shape)) or "one number"
        return f"{str(value.dtype).removeprefix('torch.')} of {sizes}"
    if isinstance(value, np.ndarray):
        return f"an array, {text_of(value)}"
    if isinstance(value, Mapping | list | tuple | deque):
        return f"a {kind} of {len(value)}"
    return repr(value)


def _without_deques(value: Any) -> Any:
    if type(value) in DICTS:
        return type(value)({key: _without_deques(part) for key, part in value.items()})
    if type(value) in SEQUENCES:
        return (tuple if type(value) is tuple else list)(map(_without_deques, value))
    return value.detach() if isinstance(value, torch.Tensor) else value
