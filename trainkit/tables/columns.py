"""Read the columns of a table as numbers, by rules that can be printed, saved and applied again."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from trainkit.reading.frames import MAX_SHOWN, as_text, typed
from trainkit.tables.amounts import find_form, read_amount, read_amounts
from trainkit.tables.words import number_texts, score_texts
from trainkit.text import shorten

# Columns that R and pandas write for the numbers or names of the rows.
INDEX = re.compile(r"Unnamed: \d[\d.]*|__index_level_\d+__|row[._ ]?names?", re.IGNORECASE)
# Forms of dates. True is ISO 8601, 2020-01-31. Texts with the name of a month are read by dateutil.
DAYS = ["%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%y", "%d/%m/%y", "%m/%d/%y"]
DATES = [True, "month", *(day + time for time in ("", " %H:%M", " %H:%M:%S") for day in DAYS)]
MONTH = r"(?i:.*\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b.*\d{4}.*)"
LIKE_A_DATE = r"\d{1,4}[-/.]\d{1,2}([-/.]\d{1,4})?(\D.*)?|\d{4}-?[QW]\d+|Q\d.*\d{4}|" + MONTH
# Whole numbers that are all in this range are Unix seconds of 1990 to 2040, or milliseconds.
UNIX_SECONDS = (631_152_000, 2_208_988_800)
UNITS = {"unix": 86_400, "unix ms": 86_400_000}  # per day
# Periods in days, and the day since 1970 at which each starts: midnight, a Monday, January 1.
CYCLES = {"hour": (1.0, 0.0), "weekday": (7.0, 4.0), "day of the year": (365.2425, 0.0)}
# Texts that were probably meant as numbers: 1_200, 1,234.5, $0, 12 km, 88 m2, 10:30.
LIKE_A_NUMBER = r"[^\w=]*\d[\W\d_T]*[A-Za-z]{0,3}\d?\s*"
MAX_CATEGORIES = 100  # a column with more different texts is a name or a comment, not a category
MAX_WHOLE = 2**53  # float64 cannot tell all whole numbers above apart
# Plain numbers that stay texts, because the plan may ask about them.
LEADING_ZERO = re.compile(r"\s*[-+]?0\d")
DECIMAL = re.compile(r"\.")
NONE_OR_THREE = re.compile(r"^[^.]*$|\.\d{3}\D*$")  # decimals
MAX_NUMBER = 1e38  # float32 ends at 3.4e38
# Texts that mean a missing value in a column of numbers or dates. In a column of texts only ""
# does, because None may be a category.
MISSING = ["", "#N/A", "N/A", "n/a", "NA", "NULL", "NaN", "None", "nan", "null"]
MAX_WORDS = 5  # different words among numbers that may mean one more; more than these are texts


@dataclass
class Column:
    """How one column of a table becomes numbers.

    Attributes:
        name: its name in the table.
        categories: the texts it may hold; each becomes one 0/1 number, and any other text gives
            zeros. None: the column holds one number.
        fill: the value that replaces a missing one. None: a missing value is an error.
        days: the form, from DATES or UNITS, of its dates, which become days since 1970-01-01 (UTC);
            False: it holds no dates.
        words: texts that counted as missing values, including "", and how many cells held each.
        cycles: names from CYCLES; each becomes the sine and the cosine of its phase.
        num_numbers: how many cells of a column of texts read as numbers.
        unit: of its numbers, as amounts.Form has it, "" if they have none but thousands
            separators or decimal commas; None: they are plain.
        decimal: the mark before their decimals, if unit is not None.
        example: a cell that is written so.
        scores: of free text, the target or class that each of its numbers says something of. None:
            it holds no free text.
        weights: of the pieces of its texts, as pieces.pack returns them.
        explained: what these say of the targets, in percent of what the other columns leave.
        problem: why it is left out, or "".
    """

    name: str
    categories: list[str] | None = None
    fill: float | str | None = None
    days: Any = False
    words: dict[str, int] | None = None
    cycles: list[str] = field(default_factory=list)
    num_numbers: int = 0
    unit: str | None = None
    decimal: str = "."
    example: str = ""
    scores: list[str] | None = None
    weights: str = ""
    explained: int = 0
    problem: str = ""

    @property
    def holds_texts(self) -> bool:
        """Whether its cells are texts: categories, or free text."""
        return self.categories is not None or self.scores is not None

    def feature_names(self) -> list[str]:
        """Return the names of the numbers it becomes: `area`, or `city=Bonn`, `city=Rome`."""
        if self.categories:
            return [f"{self.name}={category}" for category in self.categories]
        if self.scores is not None:
            return [f"{self.name}, its words for {score}" for score in self.scores]
        waves = [f"{self.name}, {cycle} {wave}" for cycle in self.cycles for wave in ("sin", "cos")]
        return [self.name, *waves]

    def expand(self, values: np.ndarray) -> np.ndarray:
        """Return the numbers, (rows, features), that values of parse_cells() become."""
        if self.categories:
            return (values[:, None] == self.categories).astype(np.float64)
        if self.scores is not None:
            texts = [text if isinstance(text, str) else "" for text in values]
            return score_texts(number_texts(texts), self.weights, len(self.scores))
        values = values.astype(np.float64)
        parts = [values]
        for period, start in (CYCLES[name] for name in self.cycles):
            phase = 2 * np.pi * ((values - start) / period % 1)
            parts += [np.sin(phase), np.cos(phase)]
        return np.stack(parts, axis=1)

    def facts(self) -> dict[str, Any]:
        """Return what a prediction needs of it, as keywords of this class."""
        values = dict(vars(self))
        if self.unit is None:  # as older runs have it
            for name in ("unit", "decimal", "example"):
                del values[name]
        if self.scores is None:
            for name in ("scores", "weights", "explained"):
                del values[name]
        return values

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        kind = "date, as days since 1970" if self.days else "number"
        if self.cycles:
            kind += f" and {', '.join(self.cycles)}"
        if self.categories:
            kind = f"category: {shorten([text[:20] for text in self.categories])}"
        if self.unit is not None:
            number = read_amount(self.example, self.unit, self.decimal)
            kind = f"number, {self.example!r} is {number:.10g}"
        if self.scores is not None:
            kind = "free text"
            if self.weights:
                kind += f", whose words tell {self.explained}% of what the other columns leave"
        if self.num_numbers:
            kind += f", with {self.num_numbers} cells that read as numbers"
        if self.scores is not None and self.words:
            kind += f", none where missing{list_counts(self.words)}"
        elif self.fill is not None and self.scores is None:
            kind += f", filled in where missing{list_counts(self.words or {})}"
        return kind


def list_counts(words: dict[str, int]) -> str:
    """Return `: 20 empty, 8 'NA'`, or nothing if there are no words."""
    counts = [f"{number} {repr(word) if word else 'empty'}" for word, number in words.items()]
    return f": {shorten(counts, MAX_SHOWN)}" if counts else ""


def read_numbers(values: pd.Series, with_words: bool = True) -> tuple[pd.Series, pd.Series]:
    """Return texts that all are plain numbers as float64, which thousands of columns need.

    The words of MISSING among them become NaN, and are returned too, as a series of their rows;
    with_words: else they count as other texts. Others stay texts: whole numbers with leading zeros,
    which may be codes, those with three decimals or none, of which the plan may ask whether .
    separates thousands, and those that float64 may not tell apart.
    """
    none = pd.Series(dtype=object)
    if values.dtype.kind in "biuf":
        return values, none
    cells = values.to_numpy(dtype=object)
    numbers = pd.to_numeric(cells, errors="coerce").astype(np.float64)
    present = np.isfinite(numbers)
    are_words = ~present & pd.notna(cells)
    words = cells[are_words]
    if len(words) and not (with_words and present.any() and {*words} <= {*MISSING}):
        return values, none
    if not (np.abs(numbers[present]) <= MAX_WHOLE).all():
        return values, none
    texts = [cell for cell in cells[present] if isinstance(cell, str)]
    are_whole = not (numbers[present] % 1).any()
    if are_whole and any(map(LEADING_ZERO.match, texts)):
        return values, none
    if any(map(DECIMAL.search, texts)) and all(map(NONE_OR_THREE.search, texts)):
        return values, none
    read = pd.Series(numbers, values.index, name=values.name)
    return read, pd.Series(words, values.index[are_words], dtype=object)


def target_column(values: pd.Series, classes: list[str] | None, decimal: str = ".") -> Column:
    """Return how a target is read: as one of these classes or, if None, as a number.

    decimal: see find_kind.
    """
    column = Column(str(values.name), classes)
    if classes is None:
        kind = find_kind(values, [], decimal)
        column.unit = kind.unit
        column.decimal = kind.decimal
        column.example = kind.example
    return column


def empty_cells(table: pd.DataFrame, missing: Sequence[str]) -> tuple[pd.DataFrame, dict[str, int]]:
    """Return the table with NaN in cells that are one of these, and how many each column had.

    missing: texts; one that is a number means this number however it is written.
    """
    numbers = pd.to_numeric(pd.Series(missing, dtype=object), errors="coerce").dropna().to_numpy()
    counts = {}
    table = table.copy()
    for name in table:
        values = table[name]
        read = pd.to_numeric(values, errors="coerce").to_numpy(dtype=float)
        is_one = np.isclose(read[:, None], numbers, rtol=1e-6, atol=0).any(1)
        is_one |= values.astype(object).map(str, na_action="ignore").isin(missing).to_numpy()
        if is_one.any():
            counts[str(name)] = int(is_one.sum())
            table[name] = values.mask(is_one)
    return table, counts


def parse_cells(values: pd.Series, column: Column) -> pd.Series:
    """Return the values as numbers, or as texts of a category; NaN where a value is neither."""
    if column.holds_texts:
        return values.astype(object).map(as_text, na_action="ignore")
    if column.days and column.days not in UNITS:
        return _read_dates(values.astype(str), column.days)
    if column.unit is not None:
        values = read_amounts(values, column.unit, column.decimal)
    elif values.dtype.kind not in "biuf":
        texts = values if isinstance(values.dtype, pd.StringDtype) else values.astype(str)
        values = pd.Series(_read_texts(texts.to_numpy(dtype=object)), values.index)
    numbers = values.astype(float)
    too_large = numbers.abs().to_numpy() > MAX_NUMBER
    if too_large.any():
        numbers = numbers.mask(too_large)
    return numbers / UNITS[column.days] if column.days else numbers


def _read_texts(cells: np.ndarray) -> np.ndarray:
    """Return texts as numbers, float64: 1 for true, 0 for false, NaN for all that are neither."""
    numbers = pd.to_numeric(cells, errors="coerce").astype(np.float64)
    words = np.isnan(numbers)
    if words.any():
        known = {"true": 1.0, "false": 0.0}
        numbers[words] = [known.get(str(cell).lower(), np.nan) for cell in cells[words]]
    return numbers


def _read_dates(texts: pd.Series, form: Any) -> pd.Series:
    if form == "month":
        texts = texts.where(texts.str.fullmatch(MONTH))
    style = {True: "ISO8601", "month": "mixed"}.get(form, form)
    dates = pd.to_datetime(texts, format=style, utc=True, errors="coerce")
    # In seconds, because in nanoseconds years end at 2262, and forever is often 9999-12-31.
    return (dates - pd.Timestamp(0, tz="UTC").as_unit("s")) / pd.Timedelta("1D")


def learn_column(
    values: pd.Series,
    train: np.ndarray,
    categorical: Sequence[str],
    missing: str | None,
    unread: Mapping[str, str],
    words: pd.Series | None = None,
    decimal: str = ".",
) -> Column:
    """Learn from its training rows how a feature is encoded, or why it is left out.

    Texts that hardly repeat are free text; unread: why its words are left out, by column. words:
    those that were written in cells without a number, as read_numbers returns them. decimal: see
    find_kind. A missing number becomes the mean, a missing category the most frequent one: with
    `missing` "impute", and also with None if the column lacks a value.
    """
    column = find_kind(values, categorical, decimal)
    if column.problem:
        return column
    parsed = parse_cells(values, column)
    present = parsed.iloc[train]
    if column.categories is None and parsed.count() == values.count():
        return _learn_numbers(column, present, values.index[values.isna()], missing, words)
    odd = values[parsed.isna()].astype(object).fillna("").astype(str)
    others = odd[~odd.isin(MISSING)]
    impute = missing == "impute" or (missing is None and len(odd) > 0)
    if impute:
        column.words = _count_words(odd, others, parsed.count())
    counts = present.value_counts().sort_index()
    if len(counts) == 1 or not len(counts) + len(others):
        column.problem = "left out: always the same"
        return column
    if column.categories is None:
        fill = float(present.mean())
    elif hardly_repeats(len(counts), present.count()):
        return _learn_texts(column, counts.index, len(train), missing, unread)
    else:
        # Of equally frequent texts the first in the alphabet, which is the same on every machine.
        column.categories = [*counts.index]
        fill = counts.idxmax()
    if column.days:
        column.cycles = find_cycles(present.dropna().to_numpy())
    column.fill = fill if impute else None
    return column


def _count_words(odd: pd.Series, others: pd.Series, num_read: int) -> dict[str, int] | None:
    """Return how often each word stands for a missing value, or None if they may be something else.

    In a column of numbers or dates those of MISSING do, and words without a digit, if at most one
    cell in ten holds one; with a digit 1,234 is a number, although it is not read as one.

    odd: the cells that are not read, as texts. others: those that are not in MISSING.
    """
    if 9 * len(others) > num_read or others.str.contains(r"\d").any():
        return None
    return odd.value_counts().to_dict()


def _learn_texts(
    column: Column, texts: pd.Index, num_rows: int, missing: str | None, unread: Mapping[str, str]
) -> Column:
    """Do what learn_column does for a column whose texts, these in the training rows, differ."""
    if texts.to_series().str.fullmatch(LIKE_A_DATE).mean() > 0.5:
        column.problem = "left out: dates in a form that is not read, so write 2020-01-31"
    elif column.name in unread:
        number = f"{len(texts)} different texts in {num_rows} training rows"
        column.problem = f"left out: {number}{unread[column.name]}"
    else:
        column.categories = None
        column.scores = []
        column.fill = None if missing in ("refuse", "drop") else ""
    return column


def _learn_numbers(
    column: Column,
    present: pd.Series,
    lacking: pd.Index,
    missing: str | None,
    words: pd.Series | None,
) -> Column:
    """Do what learn_column does for a column of numbers or dates of which each cell is read.

    present: its training rows. lacking: the rows without a number. words: what stood in some.
    """
    impute = missing == "impute" or (missing is None and len(lacking) > 0)
    if impute:
        written = {} if words is None else dict(zip(words.index, words, strict=True))
        column.words = dict(Counter(written.get(row, "") for row in lacking).most_common())
    numbers = present.dropna().to_numpy()
    if not len(numbers) or (numbers == numbers[0]).all():
        column.problem = "left out: always the same"
        return column
    if column.days:
        column.cycles = find_cycles(numbers)
    column.fill = float(present.mean()) if impute else None
    return column


def find_cycles(days: np.ndarray) -> list[str]:
    """Return those of CYCLES whose phase varies among these days."""
    waves = {name: (days - start) / period % 1 for name, (period, start) in CYCLES.items()}
    waves["weekday"] = waves["weekday"] * 7 // 1 / 7
    return [name for name, wave in waves.items() if len(np.unique(wave.round(2) % 1)) > 1]


def hardly_repeats(num_different: int, num_cells: int) -> bool:
    """Are these texts names or comments, of which a new row has another one?"""
    most = num_cells - 1 if num_different <= 10 else num_cells // 2
    return num_different > min(most, MAX_CATEGORIES)


def find_kind(values: pd.Series, categorical: Sequence[str], decimal: str = ".") -> Column:
    """Return a column of numbers, of dates, or of texts (without the texts).

    It holds texts if it is named in `categorical`, or if most values read neither as numbers nor as
    dates and do not look like numbers with a unit. Whole numbers that float64 cannot tell apart are
    texts too: they are ids. decimal: the mark of a column that leaves it open.
    """
    column = Column(str(values.name))
    if values.dtype.kind == "f":  # first, because a table may have thousands of these
        cells = values.dropna()
    else:
        cells = values[values.notna() & ~values.isin(MISSING)]
    if column.name in categorical or not len(cells):
        column.categories = []
        return column
    numbers = parse_cells(cells, column).dropna()
    if len(numbers) == len(cells):
        if numbers.abs().max() > MAX_WHOLE and numbers.nunique() < cells.astype(str).nunique():
            column.categories = []
        column.days = _unix_unit(numbers)
        if decimal == "," and values.dtype.kind not in "biuf":  # 1.234 may be a thousand
            form = find_form([*map(str, cells.unique())], decimal)
            if form is not None:
                column.unit, column.decimal, column.example = form
        return column
    texts = cells.astype(str)
    others = texts.drop(numbers.index)
    distinct = texts.drop_duplicates()
    sample = others.drop_duplicates()[:1000]
    read = [_read_dates(sample, form).notna().mean() for form in DATES]
    if max(read) > 0.5 and len(others) > len(numbers):
        if read.count(max(read)) > 1:
            asked = "the day or the month may come first"
            column.problem = f"left out: dates, but {asked}, so write 2020-01-31"
        column.days = DATES[int(np.argmax(read))]
        return column
    form = find_form(distinct.tolist(), decimal)
    if form is not None:
        column.unit, column.decimal, column.example = form
    elif 2 * distinct.isin(others).sum() > len(distinct) and not _have_a_unit(others):
        column.categories = []
        column.num_numbers = len(numbers)
    return column


def _have_a_unit(texts: pd.Series) -> bool:
    """Do these look like amounts: 12 km, 88 km, but not like labels: 1. Yes, 2. No?"""
    if not texts.str.fullmatch(LIKE_A_NUMBER).mean() >= 0.5:
        return False
    distinct = texts.drop_duplicates()
    units = distinct.str.replace(r"[\W\d_]", "", regex=True)
    return units.eq("").any() or units.nunique() < len(distinct)


def is_index(values: pd.Series) -> bool:
    """Does it number or name the rows: a name that R or pandas gives, or `index` that counts up?"""
    if INDEX.fullmatch(str(values.name)):
        return True
    if str(values.name).lower() not in ("index", "x"):
        return False
    numbers = pd.to_numeric(values, errors="coerce")
    whole = numbers.notna().all() and (numbers % 1 == 0).all()
    return bool(whole and numbers.iloc[0] in (0, 1) and numbers.diff()[1:].eq(1).all())


def _unix_unit(numbers: pd.Series) -> Any:
    """Return the key of UNITS if whole numbers are Unix times, otherwise False."""
    first, last = UNIX_SECONDS
    for name, unit in UNITS.items():
        seconds = numbers.to_numpy(float) * (UNITS["unix"] / unit)
        if first <= seconds.min() < seconds.max() <= last and (numbers % 1 == 0).all():
            return name
    return False


def encode(
    table: pd.DataFrame, columns: Sequence[Column]
) -> tuple[np.ndarray, list[tuple[int, str, str]]]:
    """Return the table as float64 (rows, features), in the order of `columns`, and its problems.

    A problem is a row, numbered as in the index of `table`, a column and a sentence.
    """
    blocks, problems = [np.empty((len(table), 0))], []
    for column in columns:
        values, wrong = read_column(table[column.name], column)
        problems += wrong
        blocks.append(column.expand(values.to_numpy()))
    return np.concatenate(blocks, axis=1, dtype=np.float64), problems


def read_column(values: pd.Series, column: Column) -> tuple[pd.Series, list[tuple[int, str, str]]]:
    """Return parse_cells() of one column, missing ones filled in, and the problems of encode()."""
    parsed = parse_cells(values, column)
    if parsed.notna().all():
        return parsed, []
    wrong = parsed.isna() & values.notna() & ~values.isin([*MISSING, *(column.words or [])])
    if column.fill is not None:
        if column.holds_texts:  # pandas makes numbers of a column without any
            parsed = parsed.astype(object)
        parsed = parsed.fillna(column.fill)
    problems = []
    for row in values.index[wrong | parsed.isna()]:
        wanted = "number like 1234.5 (at most 1e38)"
        if column.days:
            wanted = "date as in training"
        if column.unit is not None:
            wanted = f"number like {column.example}"
        why = f"'{values[row]!s:.40}' is not a {wanted}" if wrong[row] else "the value is missing"
        problems.append((row, column.name, why))
    return parsed, problems


def ask_words(
    table: pd.DataFrame, problems: Sequence[tuple[int, str, str]], known: Sequence[str]
) -> tuple[str, str]:
    """Return words that are no numbers or dates, and --missing-values as typed for them, or "", "".

    A word has no digit. problems: those of encode(). known: the values of the flag so far.
    """
    cells = {str(table[name][row]): None for row, name, _ in problems if pd.notna(table[name][row])}
    words = [cell for cell in cells if cell not in MISSING and not re.search(r"\d", cell)]
    if not 0 < len(words) <= MAX_WORDS:
        return "", ""
    return " or ".join(map(repr, words)), f"--missing-values={typed(*known, *words)}"
