"""Parse the command line: flags, and files of flags, become a dataclass."""

import contextlib
import dataclasses
import inspect
import io
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_type_hints

import tyro

from trainkit.errors import UsageError, as_usage_error

C = TypeVar("C")

# A comment, or (group 1) text that is not one: quoted, or a word with a # inside it.
COMMENT = re.compile(r"""('[^']*'|"(?:\\.|[^"\\])*"|(?:\\.|[^\s'"\\#])[^\s'"\\]*)|(?<!\S)#.*""")

# A path that was made from a URL, with one slash less; a letter alone is a drive of Windows.
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")

# The flags that people use, which --help shows before all others.
USED_MOST = "dataset data target model epochs batch_size learning_rate run_dir resume"


def parse(kind: type[C], argv: Sequence[str] | None = None) -> C:
    """Return a config of this dataclass, read from argv or, if that is None, the command line.

    @FILE stands for the words in a file, read as a shell would: quotes, # for comments. --help
    begins with the first line of the docstring of the module that defines the class. Raises
    UsageError for what cannot be read; validate() checks the values.
    """
    assert "__dataclass_fields__" in vars(kind), f"{kind.__name__} lacks @dataclass"
    docstring = sys.modules[kind.__module__].__doc__ or ""  # there is none under python -OO
    words = list(_read_files(sys.argv[1:] if argv is None else argv))
    script = Path(sys.argv[0]).name
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            config = tyro.cli(
                _in_order_of_help(kind),
                prog=script,
                description=docstring.partition("\n")[0],
                args=words,
                config=(tyro.conf.DisallowNone,),
            )
    except SystemExit as end:
        if not end.code:
            raise  # after --help
        raise UsageError(f"{_first_sentence(messages.getvalue())} (see {script} --help)") from None
    config.__class__ = kind
    if problems := find_urls(config):
        raise UsageError("; ".join(problems))
    return config


def find_urls(config: Any) -> list[str]:
    """A phrase for each URL that was given where a path on this machine is read or written."""
    problems = []
    for name, value in vars(config).items():
        for path in value if isinstance(value, list | tuple) else [value]:
            match = URL.match(path.as_posix()) if isinstance(path, Path) else None
            if match is None:
                continue
            rest = re.sub(r"^[^/]*@|\?.*", "", path.as_posix()[match.end() :])  # no passwords
            url = f"{match[1]}://{rest}"
            remedy = "copy it to this machine first, and give the path of that"
            if match[1].lower() == "file":
                remedy = f"write /{rest}"
            elif name == "run_dir":
                remedy = f"give a folder here, and copy it there with --mirror {url}"
            problems.append(f"{flag(name)} {url} is a URL, where a path is needed: {remedy}")
    return problems


def flag(name: str) -> str:
    """Return the flag of a field."""
    return f"--{name.replace('_', '-')}"


def _read_files(words: Iterable[str]) -> Iterator[str]:
    for word in words:
        if not word.startswith("@"):
            yield word
            continue
        with as_usage_error(f"{word} cannot be read"):
            text = Path(word[1:]).read_text().replace("\\\n", "")
            inside = shlex.split(COMMENT.sub(lambda comment: comment[1] or "", text))
        yield from _read_files(inside)


def _in_order_of_help(kind: type[C]) -> type[C]:
    """Return the dataclass with its fields in --help's order: a script's own before shared ones.

    A default of None is not shown.
    """
    depth = {n: d for d, base in enumerate(kind.__mro__) for n in inspect.get_annotations(base)}
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    order = sorted(fields, key=lambda name: (name not in USED_MOST.split(), depth[name]))
    hints = get_type_hints(kind, include_extras=True)
    unset = {
        # None first, and not with |: else tyro imports typeguard, 15 ms of a start.
        name: Annotated[Union[None, hints[name]], tyro.conf.arg(help_behavior_hint="")]  # noqa: RUF036, UP007
        for name in order
        if fields[name].default is None
    }
    ordered: dict[str, Any] = {"__dataclass_fields__": {name: fields[name] for name in order}}
    source = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**ordered, **source, "__annotations__": unset})


def _first_sentence(box: str) -> str:
    """Return tyro's message, without title, frame and colours, up to its first horizontal rule.

    The flags that it suggests below that rule are added.
    """
    rows = re.sub(r"\x1b\[[\d;]*m|[|\u2502]", "", box).partition("\n")[2].lstrip("- \n")
    text, below, *_ = re.split("\n[-\u2500 ]*\n", rows)
    meant = re.findall(r"^ +(--[\w-]+)", below, re.M) if "erhaps you meant" in below else ()
    sentence = " ".join(text.split()).rstrip(".")
    if meant:
        sentence += f"; perhaps you meant {' or '.join(meant)}"
    return sentence
