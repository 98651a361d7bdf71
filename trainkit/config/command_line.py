"""Parse the command line: flags, and files of flags, become a dataclass, or one sentence."""

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args

import tyro
from tyro.constructors import (
    MISSING_NONPROP,
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from trainkit.errors import UsageError, as_usage_error

C = TypeVar("C")

COMMENT = re.compile(r"(?<!\S)#.*")

# A path that was made from a URL, with one slash less; a letter alone is a drive of Windows.
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/+")

NOT_SHOWN = tyro.conf.arg(help_behavior_hint="")  # hides the default in --help


def parse(kind: type[C], argv: Sequence[str] | None = None) -> C:
    """Return a config of this dataclass, read from argv or, if that is None, the command line.

    @FILE stands for the words in a file: quotes as in a shell, # after a space for comments. --help
    begins with the first line of the docstring of the module that defines the class. Raises
    UsageError for what cannot be read; validate() checks the values.
    """
    assert "__dataclass_fields__" in vars(kind), f"{kind.__name__} lacks @dataclass"
    docstring = sys.modules[kind.__module__].__doc__ or ""  # there is none under python -OO
    words = list(_read_files(sys.argv[1:] if argv is None else argv))
    script = Path(sys.argv[0]).name
    moved = getattr(kind, "MOVED", {})
    for name in (word.partition("=")[0] for word in words):
        if name in moved and not hasattr(kind, name[2:].replace("-", "_")):
            raise UsageError(f"{name}: {moved[name]}")
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            config = tyro.cli(
                kind,
                registry=_with_unset(kind),
                prog=script,
                description=docstring.partition("\n")[0],
                args=words,
                config=(tyro.conf.DisallowNone,),
            )
    except SystemExit as end:
        if not end.code:
            raise  # after --help
        said = _first_sentence(messages.getvalue())
        raise UsageError(f"{said} (see {script} --help)") from None
    if problems := find_urls(config) + find_empty(words, config):
        raise UsageError("; ".join(problems))
    return config


def find_empty(words: Sequence[str], config: Any) -> list[str]:
    """A phrase for each value that is empty, as --data "$DATA" is if DATA is not set.

    Such a path would be the working directory. A list may be empty.
    """
    lists = {flag(name) for name, value in vars(config).items() if isinstance(value, list)}
    empty = {before for before, word in pairwise(["a word", *words]) if not word}
    empty |= {word[:-1] for word in words if re.fullmatch(r"--[\w-]+=", word)}
    return [f"{name} is empty: give it a value, or leave it out" for name in empty - lists]


def find_urls(config: Any) -> list[str]:
    """A phrase for each URL that was given where a path on this machine is read or written."""
    return [
        f"{flag(name)} is a URL, where a path is needed: copy it to this machine first; "
        "--mirror URL takes checkpoints there"
        for name, value in vars(config).items()
        for path in (value if isinstance(value, list | tuple) else [value])
        if isinstance(path, Path) and URL.match(path.as_posix())
    ]


def flag(name: str) -> str:
    """Return the flag of a field."""
    return f"--{name.replace('_', '-')}"


def _read_files(words: Iterable[str]) -> Iterator[str]:
    for word in words:
        if not word.startswith("@"):
            yield word
            continue
        with as_usage_error(f"{word} cannot be read"):
            text = Path(word[1:]).read_text("utf-8").replace("\\\n", "")
            inside = shlex.split(COMMENT.sub("", text))
        yield from _read_files(inside)


def _with_unset(kind: type) -> ConstructorRegistry:
    """Return a rule for tyro: a field whose default is UNSET may be None, hidden in --help."""
    info = StructTypeInfo.make(kind, MISSING_NONPROP, in_union_context=False)
    spec = ConstructorRegistry.get_struct_spec(info)
    assert isinstance(spec, StructConstructorSpec)
    wrapped = replace(spec, fields=tuple(map(_without_unset, spec.fields)))
    registry = ConstructorRegistry()
    registry.struct_rule(lambda asked: wrapped if asked.type is kind else None)
    return registry


def _without_unset(field: StructFieldSpec) -> StructFieldSpec:
    # Under python -O tyro keeps the rules of an earlier call, so a field may already be wrapped.
    if field.default is not None or NOT_SHOWN in get_args(field.type):
        return field
    hint: Any = Annotated[field.type, NOT_SHOWN]
    # In a union tyro does not show the errors of a field that has a constructor of its own.
    if not any(isinstance(part, PrimitiveConstructorSpec) for part in get_args(field.type)):
        # None first, and not with |: else tyro imports typeguard, 15 ms of a start.
        hint = Annotated[Union[(None, field.type)], NOT_SHOWN]  # noqa: RUF036, UP007
    return replace(field, type=hint)


def _first_sentence(box: str) -> str:
    """Return tyro's message without title, frame and colours, and the flags that it suggests."""
    rows = re.sub(r"\x1b\[[\d;]*m|[|\u2502]", "", box).partition("\n")[2].lstrip("- \n")
    text, below, *_ = re.split("\n[-\u2500 ]*\n", rows)
    meant = re.findall(r"^ +(--[\w-]+)", below, re.M) if "erhaps you meant" in below else ()
    sentence = " ".join(text.split()).rstrip(".")
    if meant:
        sentence += f"; perhaps you meant {' or '.join(meant)}"
    return sentence
