"""run.state: what a script carries from step to step besides what it has prepared."""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from trainkit.checkpoints.hashing import text_of
from trainkit.errors import UsageError

DICTS = dict, OrderedDict, Counter
SEQUENCES = list, tuple, deque
PLAIN = bool, int, float, complex, str, bytes, type(None)


class State:
    """A dict of numbers, texts, None, tensors, arrays, and of lists, tuples, deques, dicts of them.

    A checkpoint has it whole, and a resume gives it back with its types. Where a dict, list, deque,
    tensor or array is there already, its content is put into it, so that a name which the script
    has for it stays right.

    Attributes:
        values: what the script reads and changes.
        saved: what a checkpoint held; None once put_back() has been called.
        noted: what it was when it had to stay so, None while it may change.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.saved: dict[str, Any] | None = None
        self.noted: dict[str, str] | None = None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds. Raises UsageError for what it cannot."""
        self.check()
        return self.values

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take what state_dict() returned; an entry that it lacks stays."""
        self.saved = saved
        for name, value in saved.items():
            self.values[name] = _put_into(self.values.get(name), value)

    def put_back(self) -> None:
        """Undo what was done to the entries of a checkpoint since it was loaded."""
        self.load_state_dict(self.saved or {})
        self.saved = None

    def check(self) -> None:
        """Raise UsageError if it holds what no checkpoint could."""
        for name, value in places_in(self.values, "run.state"):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise UsageError(f"{name} has a gradient: keep what .detach() returns")
            if not _can_be_saved(value):
                raise UsageError(
                    f"{name} is a {type(value).__name__} that no checkpoint holds: keep numbers, "
                    "texts, whole tensors, arrays of numbers, lists, tuples, deques and dicts there"
                )

    def note(self) -> None:
        """From here on a change is refused."""
        self.noted = entries_in(self.values, "run.state")

    def allow_changes(self) -> None:
        """Allow changes until note() is called."""
        self.noted = None

    def check_unchanged(self, call: str, remedy: str) -> None:
        """Raise RuntimeError if it was changed where a resume would lose or repeat that."""
        if self.noted is not None and self.noted != entries_in(self.values, "run.state"):
            raise RuntimeError(
                f"run.state was changed after {call}, and a resume would lose or repeat that: do "
                f"it before, {remedy}"
            )


def _put_into(old: Any, value: Any) -> Any:
    """The value, in the memory of what is there now if that can hold it."""
    is_like = type(old) is type(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        if not is_like or _kind_of(old) != _kind_of(value):
            return value.clone() if isinstance(value, torch.Tensor) else value.copy()
        with torch.no_grad():
            old[...] = value
        return old
    if isinstance(value, DICTS):
        there = old if is_like else {}
        pairs = {key: _put_into(there.get(key), x) for key, x in value.items()}
        if not is_like:
            return type(value)(pairs)
        old.clear()
        old.update(pairs)
        return old
    if isinstance(value, SEQUENCES):
        there = [*old][: len(value)] if is_like else []
        entries = [_put_into(*both) for both in zip_longest(there, value)]
        if isinstance(value, deque):
            is_like = is_like and old.maxlen == value.maxlen
            value = deque(entries, value.maxlen)
        else:
            value = type(value)(entries)
        if not is_like or isinstance(value, tuple):
            return value
        old.clear()
        old.extend(entries)
        return old
    return value


def _kind_of(values: torch.Tensor | np.ndarray) -> tuple:
    return values.shape, values.dtype, getattr(values, "device", None)


def _can_be_saved(value: Any) -> bool:
    """Can torch.save write it, and torch.load(weights_only=True) read it?"""
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and not hasattr(value, "to_local")
    if isinstance(value, np.ndarray | np.generic):
        return not value.dtype.hasobject
    if type(value) in DICTS:
        return all(_is_key(key) for key in value)
    return type(value) in SEQUENCES + PLAIN


def _is_key(key: Any) -> bool:
    return all(map(_is_key, key)) if type(key) is tuple else type(key) in PLAIN


def places_in(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each value with what messages call it: containers first, then what is in them."""
    yield name, value
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, SEQUENCES):
        pairs = enumerate(value)
    for key, inner in pairs:
        yield from places_in(inner, f"{name}[{key!r}]")


def entries_in(value: Any, name: str) -> dict[str, str]:
    """What each value in this one is, by its name; of tensors and arrays a hash of all bytes."""
    kinds = (Mapping, *SEQUENCES)
    return {
        at: f"a {type(x).__name__} of {len(x)}" if isinstance(x, kinds) else text_of(x)
        for at, x in places_in(value, name)
    }


def where_apart(everybody: Sequence[Mapping[str, str]]) -> str:
    """Say where the entries of the processes differ; everybody has those of each."""
    rank = next(n for n, theirs in enumerate(everybody) if theirs != everybody[0])
    first, theirs = everybody[0], everybody[rank]
    name = next(name for name in {**first, **theirs} if first.get(name) != theirs.get(name))
    return (
        f"{name} is {first.get(name, 'missing')} in process 0 and {theirs.get(name, 'missing')} in "
        f"process {rank}, and a checkpoint holds one of them: make it of what all processes have, "
        "as run.mean(values) returns it, or write the rows of each process into one table by "
        "run.put(table, index, rows); put BatchNorm in it, whose running means are those of a "
        "share of the batch, into evaluation mode after model.train()"
    )
