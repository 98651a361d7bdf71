"""Helpers for messages, used by all modules."""

import json
import math
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


def write_number(value: float, digits: int, separator: str = ",") -> str:
    """Write a number as people do: 6,712 and 0.0123, not 6.7e+03 and 1.23e-02.

    Zeros at the end are left out. Beyond 10^15 and below 10^-9 it is written with an exponent.
    """
    size = abs(value)
    if not 1e-9 <= size < 1e15:  # or NaN
        return f"{value:.{digits}g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    text = f"{value:{separator}.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
