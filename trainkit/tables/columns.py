"""Read the columns of a table as numbers, by rules that can be printed, saved and applied again.

A column holds numbers, dates of ISO 8601, or else categories. What is neither, or hardly repeats,
is left out, and the plan says so.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from trainkit.reading.frames import MAX_SHOWN, as_text
from trainkit.text import shorten

# Columns that R and pandas write for the numbers or names of the rows.
INDEX = re.compile(r"Unnamed: \d[\d.]*|__index_level_\d+__|row[._ ]?names?", re.IGNORECASE)
# Periods in days, and the day since 1970 at which each starts: midnight, a Monday, January 1.
CYCLES = {"hour": (1.0, 0.0), "weekday": (7.0, 4.0), "day of the year": (365.2425, 0.0)}
MAX_CATEGORIES = 100  # a column with more different texts is a name or a comment, not a category
MAX_WHOLE = 2**53  # float64 cannot tell all whole numbers above apart
MAX_NUMBER = 1e38  # float32 ends at 3.4e38
# Texts that mean a missing value in a column of numbers or dates. In a column of texts only ""
# does, because None may be a category.
MISSING = ["", "#N/A", "N/A", "n/a", "NA", "NULL", "NaN", "None", "nan", "null"]
MOST_OTHERS = 0.1  # of the cells of a column of numbers or dates, which then count as missing
# A number with a unit, at most: $1,721 or -$3, 56 %, 1.234,5 EUR, 12 km.
SIGNS = r"$\u00a2-\u00a5\u20a0-\u20cf"
AMOUNT = re.compile(
    rf"([-+\u2212]?)\s*([A-Z]{{0,3}}[{SIGNS}])?\s*([-+\u2212]?)"
    rf"(\d(?:[\d.,'\u2019 \u00a0\u2009\u202f]*\d)?|[.,]\d+)\s*([^\W\d_]{{1,8}}|[%\u2030{SIGNS}])?"
)
# Its whole part, with groups of three digits or none.
WHOLE = re.compile(r"\d*|\d{1,3}([.,'\u2019 \u00a0\u2009\u202f])\d{3}(?:\1\d{3})*")
# Numbers that surveys and programs write for a missing value: 99, -999 and their like.
CODES = [int(sign + digit * width) for sign in "+-" for digit in "789" for width in range(2, 7)]


@dataclass
class Column:
    """How one column of a table becomes numbers.

    It holds categories, each of which becomes one 0/1 number (any other text or none gives zeros),
    or dates, which become days since 1970-01-01 (UTC), or else numbers.
    """

    name: str
    categories: list[str] | None = None
    fill: float | None = None  # replaces a missing number; None: a missing number is an error
    days: bool = False
    words: dict[str, int] | None = None  # that counted as missing, with "", and in how many cells
    cycles: list[str] = field(default_factory=list)  # of CYCLES; each becomes a sine and a cosine
    num_numbers: int = 0  # cells of a column of texts that read as numbers
    unit: str | None = None  # as $ or %, or "" if there are marks alone, as in 1,234.5; None: plain
    decimal: str = "."  # the mark before decimals, if unit is not None
    example: str = ""  # a cell that is written so
    problem: str = ""  # why it is left out

    def feature_names(self) -> list[str]:
        """Return the names of the numbers it becomes: `area`, or `city=Bonn`, `city=Rome`."""
        if self.categories is not None:
            return [f"{self.name}={category}" for category in self.categories]
        waves = [f"{self.name}, {cycle} {wave}" for cycle in self.cycles for wave in ("sin", "cos")]
        return [self.name, *waves]

    def expand(self, values: np.ndarray) -> np.ndarray:
        """Return the numbers, (rows, features), that values of read_cells() become."""
        if self.categories is not None:
            known = np.array(self.categories, dtype=object)
            return (values[:, None] == known).astype(np.float64)
        values = values.astype(np.float64)
        parts = [values]
        for period, start in (CYCLES[name] for name in self.cycles):
            phase = 2 * np.pi * ((values - start) / period % 1)
            parts += [np.sin(phase), np.cos(phase)]
        return np.stack(parts, axis=1)

    def saved(self) -> dict[str, Any]:
        """Return what a prediction needs of it, as keywords of this class."""
        plain = ("unit", "decimal", "example") if self.unit is None else ()
        return {name: value for name, value in vars(self).items() if name not in plain}

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        kind = "date, as days since 1970" if self.days else "number"
        if self.cycles:
            kind += f" and {', '.join(self.cycles)}"
        if self.categories is not None:
            kind = f"category: {shorten([text[:20] for text in self.categories])}"
        if self.unit is not None:
            number = read_amount(self.example, self.decimal)
            kind = f"number, {self.example!r} is {number and number[1]:.10g}"
        if self.num_numbers:
            kind += f", with {self.num_numbers} cells that read as numbers"
        if self.fill is not None:
            kind += f", filled in where missing{list_counts(self.words or {})}"
        return kind


def list_counts(words: dict[str, int]) -> str:
    """Return `: 20 empty, 8 'NA'`, or nothing if there are no words."""
    counts = [f"{number} {repr(word) if word else 'empty'}" for word, number in words.items()]
    return f": {shorten(counts, MAX_SHOWN)}" if counts else ""


def read_amount(text: str, decimal: str) -> tuple[str, float] | None:
    """Return the unit and the number of a cell, or None if it is no number with this mark."""
    found = AMOUNT.fullmatch(text.strip())
    whole, mark, rest = found[4].partition(decimal) if found else ("", "", "")
    if not found or not WHOLE.fullmatch(whole) or (mark and not rest.isdigit()):
        return None
    number = float(f"{re.sub(r'[^0-9]', '', whole)}.{rest}")
    is_negative = found[1] + found[3] in ("-", "\u2212")
    return (found[2] or "") + (found[5] or ""), -number if is_negative else number


def _read_numbers(values: pd.Series, unit: str | None, decimal: str) -> np.ndarray:
    """Return the cells as float64, NaN where one is no number that is written so."""
    if values.dtype.kind in "iuf":
        numbers = values.to_numpy(dtype=np.float64)
    elif unit is None:
        cells = values.to_numpy(dtype=object)
        numbers = pd.to_numeric(cells, errors="coerce").astype(np.float64)
    else:
        known = {cell: _read_one(cell, unit, decimal) for cell in values.dropna().unique()}
        numbers = values.map(known).to_numpy(dtype=np.float64)
    return np.where(np.abs(numbers) <= MAX_NUMBER, numbers, np.nan)


def _read_one(cell: Any, unit: str, decimal: str) -> float:
    """A number of Excel or Parquet needs no unit, but Excel keeps 40 % as 0.4."""
    if isinstance(cell, int | float) and unit != "%":
        return float(cell)
    found = read_amount(cell, decimal) if isinstance(cell, str) else None
    return found[1] if found and found[0] == unit else float("nan")


def _read_days(values: pd.Series) -> np.ndarray:
    dates = pd.to_datetime(values.astype(str), format="ISO8601", utc=True, errors="coerce")
    # In seconds, because in nanoseconds years end at 2262, and forever is often 9999-12-31.
    days = (dates - pd.Timestamp(0, tz="UTC").as_unit("s")) / pd.Timedelta("1D")
    return days.to_numpy(dtype=np.float64)


def read_cells(values: pd.Series, column: Column) -> np.ndarray:
    """Return the cells as float64, or as texts of a category; NaN where a cell is neither."""
    if column.categories is not None:
        return values.astype(object).map(as_text, na_action="ignore").to_numpy(dtype=object)
    if column.days:
        return _read_days(values)
    return _read_numbers(values, column.unit, column.decimal)


def find_kind(values: pd.Series, categorical: Sequence[str], marks: Sequence[str]) -> Column:
    """Return a column of numbers, of dates, or of texts (without the texts).

    It holds numbers or dates if at most one cell in ten reads as neither; such cells count as
    missing. marks: the decimal marks it may have, the likely one first. Whole numbers that float64
    cannot tell apart are texts: they are ids.
    """
    column = Column(str(values.name))
    if values.dtype.kind in "fM" and column.name not in categorical:
        column.days = values.dtype.kind == "M"
        return column
    cells = values[values.notna() & ~values.isin(MISSING)]
    column.categories = []
    is_boolean = cells.dtype.kind == "b" or {*cells.unique()[:3].astype(str)} <= {"True", "False"}
    if column.name in categorical or not len(cells) or is_boolean:
        return column
    plain = _read_numbers(cells, None, ".")
    column.num_numbers = int(np.isfinite(plain).sum())
    found = Column(column.name)
    numbers = plain
    is_open = marks[0] == "," and cells.astype(str).str.contains(r"[.,]").any()
    if column.num_numbers < len(cells) or is_open:
        found, numbers = _find_amounts(cells, plain, marks)
    if _are_most(cells, numbers):
        if not np.nanmax(np.abs(numbers)) > MAX_WHOLE:
            return found
        is_lost = len(np.unique(numbers)) < cells.astype(str).nunique()
        return column if is_lost else found
    if _are_most(cells, _read_days(cells)):
        return Column(column.name, days=True)
    return column


def _find_amounts(
    cells: pd.Series, plain: np.ndarray, marks: Sequence[str]
) -> tuple[Column, np.ndarray]:
    """Return the reading, plain or with a unit and one of the marks, that most cells have."""
    name = str(cells.name)
    readings = []
    texts = [cell for cell in cells.unique() if isinstance(cell, str)]
    for decimal in marks:
        if decimal == ".":
            readings.append((Column(name), plain))
        read = {text: read_amount(text, decimal) for text in texts}
        units = Counter(amount[0] for amount in read.values() if amount)
        unit = units.most_common(1)[0][0] if units else ""
        good = [text for text, amount in read.items() if amount and amount[0] == unit]
        column = Column(name, unit=unit, decimal=decimal, example=max(good, key=len, default=""))
        readings.append((column, _read_numbers(cells, unit, decimal)))
    return max(readings, key=lambda reading: np.isfinite(reading[1]).sum())  # the first of equals


def _are_most(cells: pd.Series, numbers: np.ndarray) -> bool:
    """Do these cells read as numbers, and are the others words, or few among the different ones?"""
    others = cells[np.isnan(numbers)].astype(str)
    if len(others) > MOST_OTHERS * len(cells):
        return False
    has_digits = others.str.contains(r"\d").any()
    return not has_digits or others.nunique() <= MOST_OTHERS * cells.nunique()


def learn_column(
    values: pd.Series, train: np.ndarray, categorical: Sequence[str], marks: Sequence[str]
) -> Column:
    """Learn from its training rows how a feature is encoded, or why it is left out.

    A missing number becomes the mean. categorical, marks: see find_kind.
    """
    column = find_kind(values, categorical, marks)
    cells = read_cells(values, column)
    lacking = pd.isna(cells)
    present = cells[train][~lacking[train]]
    if column.categories is not None:
        column.categories = sorted({*present})
        number = len(column.categories)
        most = len(present) - 1 if number <= 10 else len(present) // 2
        if number + lacking[train].any() < 2:
            column.problem = "left out: always the same"
        elif number > min(most, MAX_CATEGORIES):  # of which a new row has another one
            column.problem = f"left out: {number} different texts, such as {present[0][:40]!r}"
            if 2 * column.num_numbers > len(present):
                column.problem += (
                    f", of which {column.num_numbers} cells read as numbers: do others mean a "
                    "missing value? Then name them with --missing-values"
                )
    elif not len(present) or not np.ptp(present):
        column.problem = "left out: always the same"
    elif column.days:
        column.cycles = find_cycles(present)
    if column.categories is None and not column.problem and lacking.any():
        column.fill = float(present.mean())
        words = values[lacking].astype(object).fillna("").map(str)
        column.words = dict(Counter(words).most_common())
    return column


def find_cycles(days: np.ndarray) -> list[str]:
    """Return those of CYCLES whose phase varies among these days."""
    waves = {name: (days - start) / period % 1 for name, (period, start) in CYCLES.items()}
    waves["weekday"] = waves["weekday"] * 7 // 1 / 7
    return [name for name, wave in waves.items() if len(np.unique(wave.round(2) % 1)) > 1]


def empty_cells(table: pd.DataFrame, missing: Sequence[str]) -> tuple[pd.DataFrame, dict[str, int]]:
    """Return the table with NaN in cells that are one of these, and how many each column had."""
    texts = {as_text(text) for text in missing}
    found = table.astype(object).map(lambda cell: pd.notna(cell) and as_text(cell) in texts)
    counts = found.sum()
    return table.mask(found.astype(bool)), {n: int(c) for n, c in counts.items() if c}


def ask_missing(numbers: np.ndarray) -> dict[int, int]:
    """Return what may mean a missing value, and in how many rows.

    It is in CODES, repeats, and lies further from all others than these are apart.
    """
    different, counts = np.unique(numbers[np.isfinite(numbers)], return_counts=True)
    is_code = np.isin(different, CODES)
    others = different[~is_code]
    if len(others) < 2 or not is_code.any():
        return {}
    distance = np.maximum(others[0] - different, different - others[-1])
    found = is_code & (counts > 1) & (distance > np.ptp(others))
    return {int(different[n]): int(counts[n]) for n in found.nonzero()[0]}


def encode(
    table: pd.DataFrame, columns: Sequence[Column]
) -> tuple[np.ndarray, list[tuple[int, str, str]]]:
    """Return the table as float64 (rows, features), and its problems: row, column, sentence."""
    blocks, problems = [np.empty((len(table), 0))], []
    for column in columns:
        values = table[column.name]
        cells = read_cells(values, column)
        lacking = pd.isna(cells) if column.categories is None else np.zeros(len(cells), bool)
        if lacking.any():
            known = [*MISSING, *(column.words or [])]
            wrong = lacking & (values.notna() & ~values.isin(known)).to_numpy()
            wanted = "date like 2020-01-31" if column.days else "number like 1234.5 (at most 1e38)"
            if column.unit is not None:
                wanted = f"number like {column.example}"
            for n in (wrong | (lacking & (column.fill is None))).nonzero()[0]:
                said = f"'{values.iloc[n]!s:.40}' is not a {wanted}"
                row = values.index[n]
                problems.append((row, column.name, said if wrong[n] else "the value is missing"))
            cells = np.where(lacking, np.nan if column.fill is None else column.fill, cells)
        blocks.append(column.expand(cells))
    return np.concatenate(blocks, axis=1, dtype=np.float64), problems
