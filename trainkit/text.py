"""Helpers for messages, used by all modules."""

import json
import unicodedata
from collections.abc import Sequence
from typing import Any


def printable(text: str) -> str:
    """Escape control characters: a label from a data set could otherwise control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def check_json(what: str, values: dict[str, Any]) -> None:
    """Raise RuntimeError unless the values survive a round trip through JSON."""
    for name, value in values.items():
        try:
            same = repr(json.loads(json.dumps({name: value}))) == repr({name: value})
        except (TypeError, ValueError):
            same = False
        if not same:
            raise RuntimeError(
                f"{what} holds {name!r}: {value!r}, which JSON does not preserve: use strings "
                "as keys, lists instead of tuples, and float(...) or .tolist() for other types"
            )


def nfc(text: str) -> str:
    """Return a text in the Unicode form in which texts are compared: macOS writes names in NFD."""
    return unicodedata.normalize("NFC", text)


def count(number: int, noun: str) -> str:
    """Return a number and its noun: 1 process, 2 processes."""
    plural = "es" if noun.endswith(("s", "batch")) else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def first_sentence(problem: BaseException) -> str:
    """Return the type of an exception and the first sentence of its message, on one line."""
    lines = str(problem).strip().splitlines() or ["no reason given"]
    reason = lines[0].removeprefix("Error tokenizing data. ")  # pandas: row and column come next
    return f"{type(problem).__name__}: {reason.split('. ')[0]}"


def shorten(names: Sequence[str], most: int = 3) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(names[:most])
    if len(names) > most:
        shown += f" and {len(names) - most:,} more"
    return shown
