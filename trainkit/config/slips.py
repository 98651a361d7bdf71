"""What is said of words of the command line that cannot be read, in the words of their user."""

import argparse
import inspect
import re
import shlex
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tyro.conf import Positional
from tyro.constructors import PrimitiveConstructorSpec

T = TypeVar("T", int, float)

ONE = {int: "a whole number, such as 12", float: "a number, such as 0.5", Path: "a path"}
SEVERAL = {int: "whole numbers", float: "numbers", Path: "paths"}


def explain_slip(said: str, words: Sequence[str], kind: type) -> str:
    """Return what tyro said of these words, or a sentence about the value of the flag it names.

    Of types that have no word for users, and of what is no matter of a type, it is what tyro said.
    """
    hints = get_type_hints(kind, include_extras=True)
    unknown = "Unrecognized options: "
    if said.startswith(unknown):
        if any(Positional in get_args(hint) for hint in hints.values()):
            # Words without a flag are right there, at the start.
            stray = said.removeprefix(unknown)
            if re.search("(^|, )-", stray):
                return said
            return f"{stray} belongs to no flag: leave it out, or put it before all flags"
        return _explain_stray_word(words, hints) or said
    named = re.match(r"(?:Error parsing|Missing value|invalid choice).*?(--[\w-]+)['.:]", said)
    name = _field_of(named[1]) if named else "no flag"
    if name not in hints or name not in map(_field_of, words):
        return said
    shown = f"--{name.replace('_', '-')}"
    wanted = describe(hints[name])
    values = _values_of(name, words, hints[name])
    if not values:
        return f"{shown} needs a value{f': {wanted}' if wanted else ''}"
    if not wanted and values[0].startswith("-"):
        return f"{shown} needs a value; one that begins with - is written {shown}={values[0]}"
    return f"{shown} {shlex.join(values)} must be {wanted}" if wanted else said


def describe(hint: Any) -> str:
    """What a value of this type is to a user; an empty text if there is no word for it."""
    inner, by_commas = _without_notes(hint)
    origin, parts = get_origin(inner), get_args(inner)
    if origin is Literal:
        choices = [str(part) for part in parts if part is not None]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if inspect.isclass(inner) and issubclass(inner, Enum):
        return f"one of {', '.join(inner.__members__)}"
    if origin in (Union, UnionType):
        return ", or ".join(filter(None, map(describe, parts)))
    if origin is tuple and ... not in parts:
        alike = SEVERAL.get(parts[0], "") if len(set(parts)) == 1 else ""
        return f"{len(parts)} {alike or 'values'}, with blanks between them"
    if origin in (list, tuple, set, frozenset, Sequence):
        several = SEVERAL.get(_without_notes(parts[0])[0])
        between = "commas" if by_commas else "blanks"
        return f"{several} with {between} between them" if several else ""
    return ONE.get(inner, "")


def read_as(kind: type[T]) -> Callable[[str], T]:
    """The type= of argparse that says in the same words what a value must be."""

    def read(text: str) -> T:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} must be {ONE[kind]}") from None

    return read


def _without_notes(hint: Any) -> tuple[Any, bool]:
    """The type inside of Annotated and | None, and whether a rule of its own reads one word."""
    is_one_word = False
    while True:
        parts = [part for part in get_args(hint) if part is not NoneType]
        if get_origin(hint) is Annotated:
            is_one_word |= any(isinstance(part, PrimitiveConstructorSpec) for part in parts)
            hint = parts[0]
        elif get_origin(hint) in (Union, UnionType) and len(parts) == 1:
            hint = parts[0]
        else:
            return hint, is_one_word


def _field_of(word: str) -> str:
    """The field that a word of the command line names."""
    return word.partition("=")[0].removeprefix("--").replace("-", "_")


def _num_values(hint: Any) -> int:
    """How many words a flag of this type takes at most."""
    inner, is_one_word = _without_notes(hint)
    if inner is bool:
        return 0
    if is_one_word or get_origin(inner) not in (list, tuple, set, frozenset, Sequence):
        return 1
    parts = get_args(inner)
    return len(parts) if get_origin(inner) is tuple and ... not in parts else 2**31


def _values_of(name: str, words: Sequence[str], hint: Any) -> list[str]:
    """The values that this flag has where it stands last."""
    values: list[str] = []
    place = max(at for at, word in enumerate(words) if _field_of(word) == name)
    if "=" in words[place]:
        values = [words[place].partition("=")[2]]
    for word in words[place + 1 :]:
        if word.startswith("--") or len(values) >= _num_values(hint):
            break
        values.append(word)
    return values


def _explain_stray_word(words: Sequence[str], hints: dict[str, Any]) -> str:
    """A sentence about the first value that no flag takes; none if a flag is what is unknown."""
    flag, left = "", 0
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            name = _field_of(flag)
            is_off = name.startswith("no_") and name not in hints
            name = name.removeprefix("no_") if is_off else name
            if name not in hints:
                return ""
            left = _num_values(hints[name]) - bool(equals)
            if left >= 0:
                continue
            word = value
        elif re.match("-[A-Za-z]", word):
            return ""
        elif left > 0:
            left -= 1
            continue
        shown = shlex.quote(word)
        if flag and _num_values(hints[name]) == 0:
            on = f"--{name.replace('_', '-')}"
            return f"{flag} {shown}: this flag takes no value, write {on} or --no-{on[2:]}"
        after = f" after {flag}" if flag else ""
        return (
            f"{shown}{after} belongs to no flag: leave it out, give it a flag, or put a value with "
            "blanks into quotes"
        )
    return ""
