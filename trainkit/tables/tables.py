"""Turn rows of a table into numbers, by rules that can be printed, saved and applied again.

`where` names the table; the sentence of a UsageError begins with it.
"""

import csv
import io
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
from tyro.constructors import PrimitiveConstructorSpec

from trainkit.config import Fraction, MayChange, Seed, TrainingConfig
from trainkit.errors import UsageError
from trainkit.loaders import InMemory
from trainkit.reading.frames import MAX_SHOWN, as_text, choose_columns, read_table, typed
from trainkit.text import count, shorten

INDEX = re.compile(r"Unnamed: \d[\d.]*|__index_level_\d+__")  # pandas' own
DATES = [True, "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y"]  # formats of dates; True: 2020-01-31
# Texts that were probably meant as numbers: 1_200, 1,234.5, $0, 12 km, 88 m2, 10:30.
LIKE_A_NUMBER = r"[^\w=]*\d[\W\d_T]*[A-Za-z]{0,3}\d?\s*"
MAX_CATEGORIES = 100  # a column with more different texts is a name or a comment, not a category
# Texts that mean a missing value in a column of numbers or dates. In a column of texts only ""
# does, because None may be a category.
MISSING = ["", "#N/A", "N/A", "n/a", "NA", "NULL", "NaN", "None", "nan", "null"]


def names(text: str) -> list[str]:
    """Split `a,b` into names; one that contains a comma is quoted: `"a, b",c`."""
    lines = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    return [name.strip() for line in lines for name in line if name.strip()]


def comma_separated(kind: type) -> PrimitiveConstructorSpec[list]:
    """Tell tyro how a flag that is one word, a,b, becomes a list of this type."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="A,B",
        instance_from_str=lambda words: [kind(name) for name in names(words[0])],
        is_instance=lambda value: isinstance(value, list),
        str_from_instance=lambda value: [",".join(map(str, value))],
    )


Names = Annotated[list[str], comma_separated(str)]


@dataclass
class TableConfig(TrainingConfig):
    """The flags of a script that reads a table; columns are written as a,b."""

    data: MayChange[str | None] = None
    """CSV, JSON or Parquet file, a folder of them, or Hub id"""
    target: Names | None = None
    """columns to predict, as a,b; a name with a comma in double quotes: 'a,"b, c"'"""
    features: Names | None = None
    """columns to predict from, written like --target (default: all that can be used)"""
    categorical: Names = field(default_factory=list)
    """columns that are categories although their values read as numbers"""
    missing: Literal["refuse", "impute", "drop"] | None = None
    """of a feature: refuse it, fill in the training mean, drop the row (default: impute)"""
    separator: str | None = None
    """of the values in text files (default: , ; tab or |)"""
    encoding: str | None = None
    """of text files, such as cp1252 or utf-16 (default: UTF-8)"""
    test_fraction: Fraction = 0.2
    """of the rows, to evaluate on; 0: on all"""
    data_seed: Seed = 0
    """of the split, and of synthetic data"""


@dataclass
class Column:
    """How one column of a table becomes numbers.

    Attributes:
        name: its name in the table.
        categories: the texts it may hold; each becomes one 0/1 number, and any other text gives
            zeros. None: the column holds one number.
        fill: the value that replaces a missing one. None: a missing value is an error.
        days: the format, from DATES, of its dates, which become days since 1970-01-01 (UTC);
            False: it holds no dates.
        words: texts that counted as missing values, including "", and how many cells held each.
    """

    name: str
    categories: list[str] | None = None
    fill: float | str | None = None
    days: Any = False
    words: dict[str, int] | None = None

    def feature_names(self) -> list[str]:
        """Return the names of the numbers it becomes: `area`, or `city=Bonn`, `city=Rome`."""
        if not self.categories:
            return [self.name]
        return [f"{self.name}={category}" for category in self.categories]

    def __str__(self) -> str:
        kind = "date, as days since 1970" if self.days else "number"
        if self.categories:
            kind = f"category: {shorten([text[:20] for text in self.categories])}"
        filled = f", filled in where missing{_list_counts(self.words or {})}"
        return kind + filled * (self.fill is not None)


def _list_counts(words: dict[str, int]) -> str:
    counts = [f"{number} {repr(word) if word else 'empty'}" for word, number in words.items()]
    return f": {shorten(counts, MAX_SHOWN)}" * bool(counts)


def parse(values: pd.Series, column: Column) -> pd.Series:
    """Return the values as numbers, or as texts of a category; NaN where a value is neither."""
    if column.categories is not None:
        return values.astype(object).map(as_text, na_action="ignore")
    if values.dtype.kind in "biuf" and not column.days:
        numbers = values.astype(float)
    else:
        texts = values.astype(str)
        if column.days:
            form = "ISO8601" if column.days is True else column.days
            dates = pd.to_datetime(texts, format=form, utc=True, errors="coerce")
            # In seconds, because in nanoseconds years end at 2262, and forever is often 9999-12-31.
            start = pd.Timestamp(0, tz="UTC").as_unit("s")
            numbers = (dates - start) / pd.Timedelta("1D")
        else:
            texts = texts.str.lower().replace({"true": "1", "false": "0"})
            numbers = pd.to_numeric(texts, errors="coerce").astype(float)
    return numbers.where(numbers.abs() <= 1e38)  # float32 ends at 3.4e38


def learn_column(values: pd.Series, train: np.ndarray, config: TableConfig) -> Column | str:
    """Learn from its training rows how a feature is encoded, or return why it is left out.

    It is a category if --categorical says so, or if no value reads as a number or as a date. A
    missing number becomes the mean, a missing category the most frequent one: with --missing
    impute, and also without --missing if the column lacks a value. In a column of numbers or dates
    the words of MISSING count as missing values. Words without a digit do too, if at most one cell
    in ten holds one.
    """
    if INDEX.fullmatch(values.name) and not config.features:
        return "left out: an index"
    column = Column(values.name, [] if values.name in config.categorical else None)
    if not parse(values, column).count():
        texts = values[~values.isin(MISSING)].dropna().astype(str).drop_duplicates()
        read = [parse(texts, Column("", days=form)).notna().mean() for form in DATES]
        if max(read) > 0.5:
            if read.count(max(read)) > 1:
                return "left out: the day or the month may come first, so write 2020-01-31"
            column.days = DATES[np.argmax(read)]
        elif not texts.str.fullmatch(LIKE_A_NUMBER).mean() >= 0.5:  # NaN if there are no texts
            column.categories = []
    parsed = parse(values, column)
    known, odd = parsed.iloc[train], values[parsed.isna()].astype(object).fillna("").astype(str)
    others = odd[~odd.isin(MISSING)]
    impute = config.missing == "impute" or (config.missing is None and len(odd) > 0)
    # Words with a digit are not missing values: 1,234 is a number, although it is not read as one.
    if impute and 9 * len(others) <= parsed.count() and not others.str.contains(r"\d").any():
        column.words = odd.value_counts().to_dict()
    counts = known.value_counts().sort_index()
    if len(counts) == 1 or not len(counts) + len(others):
        return "left out: always the same"
    if column.categories is None:
        fill = float(known.mean())
    elif len(counts) > MAX_CATEGORIES or len(counts) == known.count():
        return f"left out: {len(counts)} different texts in {len(train)} training rows"
    else:
        # Of equally frequent texts the first in the alphabet, which is the same on every machine.
        column.categories, fill = [*counts.index], counts.idxmax()
    column.fill = fill if impute else None
    return column


def encode(
    table: pd.DataFrame, columns: Sequence[Column]
) -> tuple[np.ndarray, list[tuple[int, str, str]]]:
    """Return the table as float64 (rows, features), in the order of `columns`, and its problems.

    A problem is a row, numbered as in the index of `table`, a column and a sentence.
    """
    blocks, problems = [], []
    for column in columns:
        values = table[column.name]
        numbers = parse(values, column)
        wrong = numbers.isna() & values.notna() & ~values.isin([*MISSING, *(column.words or [])])
        if column.fill is not None:
            numbers = numbers.fillna(column.fill)
        for row in table.index[wrong | numbers.isna()]:
            wanted = "date as in training" if column.days else "number like 1234.5 (at most 1e38)"
            why = (
                f"'{values[row]!s:.40}' is not a {wanted}" if wrong[row] else "the value is missing"
            )
            problems.append((row, column.name, why))
        block = numbers.to_numpy()[:, None]
        blocks.append(block == column.categories if column.categories else block)
    return np.concatenate(blocks, axis=1, dtype=np.float64), problems


def load_table(config: TableConfig) -> tuple[pd.DataFrame, list[str], dict[str, Any]]:
    """Return the table of --data without dropped rows, the targets, and how the table was read.

    The index of the table holds row numbers from 0. Raises UsageError.
    """
    assert config.data is not None
    where = f"--data {config.data}"
    options = {"separator": config.separator, "encoding": config.encoding}
    table = read_table(config.data, where, **options)
    if table.shape[1] == 1:
        raise UsageError(
            f"{where}: there is one column, {table.columns[0]!r}, and two are needed: if it is "
            "several, name what lies between them with --separator, such as ' '"
        )
    if not config.target:
        raise UsageError(
            f"{where}: choose the column to predict with --target: "
            f"{shorten([*map(typed, table)], MAX_SHOWN)}"
        )
    choose_columns(table, config.categorical, where)
    table = choose_columns(table, [*(config.features or table), *config.target], where)
    needed, what = (
        (table, "value") if config.missing == "drop" else (table[config.target], "target")
    )
    kinds = [learn_column(needed[name], np.arange(len(table)), config) for name in needed]
    numbers = [getattr(kind, "categories", 0) is None for kind in kinds]
    missing = needed.isna() | (needed.isin(MISSING) & numbers)
    used = table[~missing.any(axis=1)]
    words = needed.astype(object).fillna("").where(missing).stack().value_counts().to_dict()
    dropped = f", {count(len(table) - len(used), 'row')} dropped: no {what}{_list_counts(words)}"
    known = {
        "data": Path(config.data).name + table.attrs.get("files", ""),
        "read_options": options,
        "dropped": dropped * (len(used) < len(table)),
        "truth": None,
    }
    return used, config.target, known


def make_sets(
    table: pd.DataFrame, targets: list[str], known: dict[str, Any], config: TableConfig
) -> tuple[InMemory, InMemory, dict[str, Any]]:
    """Return the training set (features, targets), the evaluation set (with row numbers), `about`.

    about: `known`, what a prediction for a new row needs, and the lines of the plan. What is
    learned from rows (categories, means) is learned from the training rows alone. Raises a
    UsageError that says of each column whether it can be used.
    """
    train, test = split_rows(len(table), config)
    learned = {
        name: learn_column(table[name], train, config) for name in table if name not in targets
    }
    features = [column for column in learned.values() if isinstance(column, Column)]
    values, problems = encode(table, [*features, *map(Column, targets)])
    if problems or not features:
        refused = {name: f"row {row + 1}: {why}" for row, name, why in reversed(problems)}
        raise UsageError(_judge({**learned, **refused}, table, config))
    about = known | {
        "columns": [*map(vars, features)],
        "left_out": [name for name, column in learned.items() if isinstance(column, str)],
    }
    inputs = [name for column in features for name in column.feature_names()]
    tensors = []
    parts = np.split(values, [len(inputs)], axis=1)
    for kind, names, part in zip(("feature", "target"), (inputs, targets), parts, strict=True):
        rows = part[train]
        mean, std = rows.mean(0), rows.std(0)
        about[f"{kind}_range"] = np.stack((rows.min(0), rows.max(0)), 1).tolist()
        about[f"{kind}_whole"] = (rows == rows.round()).all(0).tolist()
        about["baseline"] = mean.tolist()  # R2 compares with that of the targets, which come last
        if not np.ptp(rows, axis=0).all():
            raise UsageError(f"--data {config.data}: a {kind} is the same in all training rows")
        if config.data is None:  # synthetic data are not standardised
            mean, std = np.zeros_like(mean), np.ones_like(std)
        tensors.append(torch.from_numpy((part - mean) / std).float())
        about |= {f"{kind}s": names, f"{kind}_mean": mean.tolist(), f"{kind}_std": std.tolist()}
    said = {name: f"{learned.get(name, 'number')}{_doubt(table[name])}" for name in table}
    about["plan"] = _plan(about, said)
    if config.data is not None:
        del about["data"]  # a resume compares what is in the file, which may have another name
    train_set = InMemory(*(tensor[train] for tensor in tensors))
    tensors.append(torch.from_numpy(table.index.to_numpy(copy=True)))
    return train_set, InMemory(*(tensor[test] for tensor in tensors)), about


def _plan(about: dict[str, Any], said: dict[str, str]) -> dict[str, str]:
    special = [f"{name} ({text})" for name, text in said.items() if text != "number"]
    return {
        "data": f"{about['data']}{about.pop('dropped', '')}",
        "features": f"{len(about['features'])}, from {count(len(about['columns']), 'column')}",
        "columns": shorten(special, MAX_SHOWN) or "numbers",
        "targets": ", ".join(about["targets"]),
    }


def _doubt(values: pd.Series) -> str:
    """Ask whether . separates thousands if values have no or three decimals: 850 and 1.180."""
    if values.dtype.kind != "O":
        return ""
    texts = values[pd.to_numeric(values, errors="coerce").abs() >= 1].astype(str)
    decimals = texts.str.extract(r"\.(\d*)\s*$", expand=False).fillna("").str.len()
    asked = ", whole or with three decimals: is . a thousands separator?"
    return asked * ({*decimals} == {0, 3})


def _judge(learned: dict[str, Any], table: pd.DataFrame, config: TableConfig) -> str:
    """Return a list of all columns, the refused ones first, and a command that works."""
    good = [name for name, column in learned.items() if isinstance(column, Column)]
    lines = [f"  {name}: {learned[name]}" for name in sorted(learned, key=good.__contains__)]
    text = "\n".join([f"--data {config.data} cannot be used as it is:", *lines[:MAX_SHOWN]])
    if not good or {*(config.target or [])} & learned.keys():
        return (
            f"{text}\nWrite numbers like 1234.5, with a decimal point, without currency, unit, % "
            "or thousands separator"
        )
    refused = [name for name in learned if "is not a number" in str(learned[name])]
    if kinds := [name for name in refused if table[name].nunique() <= MAX_CATEGORIES]:
        text += f"\nIf their values are kinds, not amounts, add --categorical {typed(*kinds)}"
    return f"{text}\nThis works: {shlex.join(['python', *sys.argv])} --features {typed(*good)}"


def split_rows(num_rows: int, config: TableConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the training and test rows. Raises UsageError if either is empty."""
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(config.data_seed))
    parts = order.tensor_split([round(config.test_fraction * num_rows)])
    test, train = (part.sort().values.numpy() for part in parts)
    if not config.test_fraction:
        test = train
    if not len(test) * len(train):
        raise UsageError(
            f"--data {config.data or 'synthetic'}: of {num_rows} rows {len(train)} are left to "
            f"train on and {len(test)} to evaluate on (--test-fraction {config.test_fraction})"
        )
    return train, test
