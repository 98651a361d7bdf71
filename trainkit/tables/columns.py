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

from trainkit.reading.frames import as_text
from trainkit.text import shorten

# Columns that R and pandas write for the numbers or names of the rows.
INDEX = re.compile(r"Unnamed: \d[\d.]*|__index_level_\d+__|row[._ ]?names?", re.IGNORECASE)
# Periods in days, and the day since 1970 at which each starts: midnight, a Monday, January 1.
CYCLES = {"hour": (1.0, 0.0), "weekday": (7.0, 4.0), "day of the year": (365.2425, 0.0)}
MAX_CATEGORIES = 100  # a column with more different texts is a name or a comment, not a category
MAX_NUMBER = 1e38  # float32 ends at 3.4e38
# Texts that mean a missing value in a column of numbers or dates. In a column of texts only ""
# does, because None may be a category.
MISSING = ["", "#N/A", "N/A", "n/a", "NA", "NULL", "NaN", "None", "nan", "null"]
MOST_OTHERS = 0.1  # of the cells of a column of numbers or dates, which then count as missing
# A number with a unit, at most: $1,721 or -$3, 56 %, 1'234.5 CHF, 12 km.
AMOUNT = re.compile(
    r"(-?)\s?([$\u00a2-\u00a5\u20a0-\u20cf]?)(-?)"
    r"(\d+|\d{1,3}(?:[,'\s]\d{3})+|(?=\.\d))(\.\d+)?"
    r"\s?([^\W\d_]{1,8}|[%$\u00a2-\u00a5\u20a0-\u20cf])?"
)
SWAPPED = str.maketrans(".,", ",.")
TOTAL = re.compile(r"((grand|sub)[ -]?)?totals?:?|sum|summe|gesamt", re.IGNORECASE)
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
    words: list[str] = field(default_factory=list)  # that count as missing, beside MISSING
    cycles: list[str] = field(default_factory=list)  # of CYCLES; each becomes a sine and a cosine
    example: str = ""  # a cell, if numbers are written with a unit or marks for thousands
    decimal: str = "."  # the mark before decimals, in that case
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
        parts = [values]
        for period, start in (CYCLES[name] for name in self.cycles):
            phase = 2 * np.pi * ((values - start) / period % 1)
            parts += [np.sin(phase), np.cos(phase)]
        return np.stack(parts, axis=1)

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        if self.categories is not None:
            return f"category: {shorten([text[:20] for text in self.categories])}"
        kind = "date, as days since 1970" if self.days else "number"
        if self.cycles:
            kind += f" and {', '.join(self.cycles)}"
        if amount := read_amount(self.example, self.decimal):
            kind += f", {self.example!r} is {amount[1]:.10g}"
        if self.fill is not None:
            kind += f", filled in where {' or '.join(['missing', *map(repr, self.words)])}"
        return kind


def read_amount(text: str, decimal: str) -> tuple[str, float] | None:
    """Return the unit and the number of a cell, or None if it is no number with this mark."""
    found = AMOUNT.fullmatch(text.translate(SWAPPED) if decimal == "," else text)
    if not found:
        return None
    sign, before, inner, whole, rest, after = found.groups("")
    number = float(f"0{re.sub('[^0-9]', '', whole)}{rest}")
    return before + after, -number if sign or inner else number


def _read_one(cell: Any, unit: str, decimal: str) -> float:
    """A number of Excel or Parquet needs no unit, but Excel keeps 40 % as 0.4."""
    if isinstance(cell, int | float) and unit != "%":
        return float(cell)
    found = read_amount(str(cell), decimal)
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
    if amount := values.dtype.kind == "O" and read_amount(column.example, column.decimal):
        known = {x: _read_one(x, amount[0], column.decimal) for x in values.dropna().unique()}
        numbers = values.map(known).to_numpy(dtype=np.float64)
    else:
        numbers = pd.to_numeric(values.to_numpy(), errors="coerce").astype(np.float64)
    return np.where(np.abs(numbers) <= MAX_NUMBER, numbers, np.nan)


def find_kind(values: pd.Series, categorical: Sequence[str], marks: str) -> Column:
    """Return a column of numbers or dates, if at most one cell in ten is neither, or of texts.

    marks: the decimal marks that it may have, the likely one first.
    """
    name = str(values.name)
    cells = values[values.notna() & ~values.isin(MISSING)]
    if name in categorical or pd.api.types.infer_dtype(cells) in ("boolean", "empty"):
        return Column(name, categories=[])
    if values.dtype.kind == "M":
        return Column(name, days=True)
    column = Column(name)
    has_marks = marks[0] == "," and cells.astype(str).str.contains(r"[.,]").any()
    if has_marks or np.isnan(read_cells(cells, column)).any():
        readings = []
        for decimal in marks:
            # The longest cell, which shows most.
            amounts = [x for x in cells.unique() if isinstance(x, str) and read_amount(x, decimal)]
            amount = Column(name, example=max(amounts, key=len, default=""), decimal=decimal)
            readings += [column, amount] if decimal == "." else [amount]
        # The first of those that read most cells.
        column = max(readings, key=lambda reading: np.isfinite(read_cells(cells, reading)).sum())
    readings = [column, Column(name, days=True)]
    good = (x for x in readings if np.isnan(read_cells(cells, x)).mean() <= MOST_OTHERS)
    return next(good, Column(name, categories=[]))


def learn_column(
    values: pd.Series, train: np.ndarray, categorical: Sequence[str], marks: str
) -> Column:
    """Learn from its training rows how a feature is encoded, or why it is left out."""
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
            words = present[pd.isna(pd.to_numeric(present, errors="coerce"))]
            example = [*words, *present][0]
            column.problem = f"left out: {number} different texts, such as {example[:40]!r}"
    elif not len(present) or not np.ptp(present):
        column.problem = "left out: always the same"
    else:
        column.cycles = find_cycles(present) if column.days else []
        if lacking.any():
            column.fill = float(present.mean())
            column.words = sorted({*map(str, values[lacking].dropna())} - {*MISSING})
    return column


def find_cycles(days: np.ndarray) -> list[str]:
    """Return those of CYCLES whose phase varies among these days."""
    waves = {name: (days - start) / period % 1 for name, (period, start) in CYCLES.items()}
    waves["weekday"] = waves["weekday"] * 7 // 1 / 7
    return [name for name, wave in waves.items() if len(np.unique(wave.round(2) % 1)) > 1]


def empty_cells(table: pd.DataFrame, missing: Sequence[str]) -> pd.DataFrame:
    """Return the table with NaN in cells that are one of these texts."""
    texts = table.astype(object).map(as_text, na_action="ignore") if missing else table
    return table.mask(texts.isin([*map(as_text, missing)]))


def ask_missing(numbers: np.ndarray) -> dict[int, int]:
    """Return codes that repeat, further from all others than these are apart, with their counts."""
    counts = Counter(numbers[np.isfinite(numbers)].tolist())
    codes = {*counts} & {*CODES}
    if not codes or len(counts) < len(codes) + 2:
        return {}
    low, high = min({*counts} - codes), max({*counts} - codes)
    far = [code for code in codes if max(low - code, code - high) > high - low]
    return {int(code): counts[code] for code in sorted(far) if counts[code] > 1}


def ask_totals(table: pd.DataFrame, targets: Sequence[Column]) -> dict[int, str]:
    """Return the rows that may be sums of others, from 0, and why.

    A cell among the first three says so, or a target lies twice as far from all others as these are
    apart.
    """
    found: dict[int, str] = {}
    for name in table.columns[:3]:
        cells = table[name].astype(object)
        is_total = cells.map(lambda cell: isinstance(cell, str) and bool(TOTAL.fullmatch(cell)))
        found |= {int(n): repr(cells.iloc[n]) for n in is_total.to_numpy().nonzero()[0]}
    for column in targets if len(table) > 9 else []:
        numbers = read_cells(table[column.name], column)
        order = numbers.argsort()
        for far, others in ((order[-1], order[:-1]), (order[0], order[1:])):
            if np.abs(numbers[far] - numbers[others]).min() > 2 * np.ptp(numbers[others]) > 0:
                found.setdefault(int(far), f"{column.name} {numbers[far]:.10g}")
    return found


def encode(
    table: pd.DataFrame, columns: Sequence[Column]
) -> tuple[np.ndarray, list[tuple[int, str, str]]]:
    """Return the table as float64 (rows, features), and its problems: row, column, sentence."""
    blocks, problems = [np.empty((len(table), 0))], []
    for column in columns:
        values = table[column.name]
        cells = read_cells(values, column)
        lacking = pd.isna(cells)
        if column.categories is None and lacking.any():
            wrong = lacking & (values.notna() & ~values.isin([*MISSING, *column.words])).to_numpy()
            wanted = f"number like {column.example or '1234.5 (at most 1e38)'}"
            wanted = "date like 2020-01-31" if column.days else wanted
            for n in (wrong | (lacking & (column.fill is None))).nonzero()[0]:
                said = f"'{values.iloc[n]!s:.40}' is not a {wanted}"
                said = said if wrong[n] else "the value is missing"
                problems.append((values.index[n], column.name, said))
            cells = np.where(lacking, np.nan if column.fill is None else column.fill, cells)
        blocks.append(column.expand(cells))
    return np.concatenate(blocks, axis=1, dtype=np.float64), problems
