"""Numbers as people write them: $1,721, 40%, 1.234,56 EUR, (1,200), 36 months."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd

# The signs of currencies, and the names of those that stand before a number, as in USD 5 and R$ 5.
SIGNS = (
    r"$\u00a2-\u00a5\u058f\u060b\u09f2\u09f3\u0e3f\u17db\u20a0-\u20cf\ufdfc\ufe69\uff04\uffe0\uffe1"
    r"\uffe5\uffe6"
)
NAMES = (
    r"AED|ARS|AUD|BRL|CAD|CHF|CLP|CNY|COP|CZK|DKK|EGP|EUR|GBP|HKD|HUF|IDR|ILS|INR|JPY|KES|KRW|MXN"
    r"|MYR|NGN|NOK|NZD|PEN|PHP|PKR|PLN|RMB|RON|RUB|SAR|SEK|SGD|THB|TRY|TWD|UAH|USD|VND|ZAR|Rs\.?"
    r"|Fr\.|kr\.?"
)
BLANK = r"[ \u00a0\u2009\u202f]"
MINUS = r"[-+\u2212]?"
# A unit has a letter or a sign, and a digit at its end alone: m2, km/h, EUR per night.
UNIT = (
    rf"(?=\D*(?:[^\W\d_]|[%\u2030\u00b0'\"{SIGNS}]))"
    r"[^\d\s().,:;=<>&|+\-][^\d():;=<>&|,]{0,19}?(?:(?<=[^\W\d_])\d)?"
)
CELL = re.compile(
    rf"(?P<open>\()?{BLANK}*(?P<minus>{MINUS}){BLANK}*"
    rf"(?P<before>[A-Z]{{0,3}}[{SIGNS}]|(?:{NAMES})(?![A-Za-z]))?"
    rf"{BLANK}*(?P<second>{MINUS}){BLANK}*"
    r"(?P<number>\d(?:[\d.,'\u2019 \u00a0\u2009\u202f]*\d)?|[.,]\d+)"
    rf"{BLANK}*(?P<after>{UNIT})?(?P<close>\))?"
)
# Thousands are set apart by blanks or apostrophes, or by the mark that is not the decimal one. In
# India groups of two digits lie between: 1,23,456.
GROUPS = r"[1-9]\d{0,2}(?:(?P<gap>['\u2019 \u00a0\u2009\u202f])\d{3})(?:(?P=gap)\d{3})*"
WITH_POINT = re.compile(rf"(?:\d+|[1-9]\d{{0,2}}(?:,\d{{2,3}})*,\d{{3}}|{GROUPS})?(?:\.\d+)?")
WITH_COMMA = re.compile(rf"(?:\d+|[1-9]\d{{0,2}}(?:\.\d{{3}})+|{GROUPS})?(?:,\d+)?")
PATTERNS = {".": WITH_POINT, ",": WITH_COMMA}
PLAIN = re.compile(r"[-+]?\d*\.?\d+")
ENGLISH = re.compile(r"[-+\u2212(]*([A-QS-Z]{1,2})?[$\u00a3]")  # not R$, of Brazil
MAX_LENGTH = 60  # of a cell that is looked at
MAX_WORD = 5  # letters of a word of a unit that has several: sq ft, EUR per m2, not Main Street
NUM_LOOKED_AT = 1000  # different cells, for the unit
MIN_SHARE = 0.8  # of them that have it; the others are named as mistakes, or are missing values


class Form(NamedTuple):
    """How all numbers of a column are written.

    unit: before or after each, "" for none. decimal: the mark before the decimals, . or a comma.
    example: the longest cell.
    """

    unit: str
    decimal: str
    example: str


def find_form(texts: Sequence[str], decimal: str = ".") -> Form | None:
    """Return how most of these different cells are written, or None if they are not such numbers.

    None is also returned for plain numbers, which need no form. decimal: the mark before the
    decimals if the cells leave it open, as 1,234 and 1.234 do, which may be thousands.
    """
    unit, cells = find_unit(texts)
    decimal = prove_mark(cells) or decimal
    are_plain = not unit and all(map(PLAIN.fullmatch, cells))
    if are_plain and (decimal == "." or not any("." in text for text in cells)):
        return None
    good = [text for text in cells if PATTERNS[decimal].fullmatch(cells[text].number)]
    if not good or len(good) < MIN_SHARE * len(cells):
        return None
    return Form(unit, decimal, max(good, key=len))


def find_unit(texts: Sequence[str]) -> tuple[str, dict[str, "Cell"]]:
    """Return the unit that most of these different cells have, and the parts of those that have it.

    There are none if most are not such numbers.
    """
    looked_at = texts[:NUM_LOOKED_AT]
    units = Counter(cell.unit for cell in map(take_apart, looked_at) if cell)
    unit, most = units.most_common(1)[0] if units else ("", 0)
    if most < MIN_SHARE * len(looked_at):
        return "", {}
    taken_apart = {text: take_apart(text) for text in texts}
    return unit, {text: cell for text, cell in taken_apart.items() if cell and cell.unit == unit}


def prove_mark(cells: dict[str, "Cell"]) -> str:
    """Return the decimal mark with which most of these cells can be read, "" if both are as good.

    Amounts behind a sign of the dollar or the pound are written as in English.
    """
    numbers = [cell.number for cell in cells.values()]
    fits = {
        mark: sum(bool(pattern.fullmatch(number)) for number in numbers)
        for mark, pattern in PATTERNS.items()
    }
    if fits["."] != fits[","]:
        return max(fits, key=fits.__getitem__)
    is_english = any("," in number for number in numbers) and all(map(ENGLISH.match, cells))
    return "." if is_english else ""


class Cell(NamedTuple):
    """A cell that is one number: whether it is below zero, the number as written, and its unit."""

    is_negative: bool
    number: str
    unit: str


def take_apart(text: str) -> Cell | None:
    """Return the parts of a cell, or None if it is not one number with at most one unit."""
    found = CELL.fullmatch(text) if len(text) <= MAX_LENGTH else None
    if found is None or bool(found["open"]) != bool(found["close"]):
        return None
    signs = found["minus"] + found["second"]
    if len(signs) > 1 or (signs and found["open"]):
        return None
    words = (found["after"] or "").split()
    if len(words) > 1 and max(map(len, words)) > MAX_WORD:
        return None
    unit = " ".join(f"{found['before'] or ''} {found['after'] or ''}".split())
    unit = re.sub(r"(?<=[a-z]{2})s$|\.$", "", unit)  # 1 month, 36 months; Rs. 5, Rs 5
    return Cell(bool(found["open"]) or signs in ("-", "\u2212"), found["number"], unit)


def read_amount(value: Any, unit: str, decimal: str) -> float:
    """Return a cell as a number, NaN if it is not written in this form.

    A cell that is a number itself, as in Excel and Parquet, needs no unit. In Excel 40% is 0.4
    though, so where percent was written it is none.
    """
    if isinstance(value, str):
        cell = take_apart(value.strip())
        if cell is None or cell.unit != unit or not PATTERNS[decimal].fullmatch(cell.number):
            return float("nan")
        digits = re.sub(rf"[^\d{decimal}]", "", cell.number).replace(decimal, ".")
        return -float(digits) if cell.is_negative else float(digits)
    is_share = any(sign in unit for sign in "%\u2030")
    return float("nan") if is_share else float(value)


def read_amounts(values: pd.Series, unit: str, decimal: str) -> pd.Series:
    """Return cells as numbers, float64; see read_amount."""
    known = {value: read_amount(value, unit, decimal) for value in values.dropna().unique()}
    return values.map(known).astype(float)
