"""Rows of a table as numbers, by rules that can be written down, saved and applied again."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from trainkit.launch import UsageError

MAX_CATEGORIES = 100  # a column with more different texts is a name or a comment, not a category


@dataclass
class Column:
    """How one column of a table becomes numbers.

    Attributes:
        name: in the table.
        categories: the texts it may hold, one 0/1 number each; a text that is none of them gives
            zeros. None: the column holds one number.
        fill: what stands in for a missing value. None: a missing value is an error.
    """

    name: str
    categories: list[str] | None = None
    fill: float | str | None = None

    def feature_names(self) -> list[str]:
        """The names of the numbers it becomes: `area`, or `city=Bonn`, `city=Rome`."""
        if self.categories is None:
            return [self.name]
        return [f"{self.name}={category}" for category in self.categories]


def check_columns(table: pd.DataFrame, names: Iterable[str], where: str) -> None:
    """Raise UsageError if a column is not there."""
    for name in names:
        if name not in table.columns:
            raise UsageError(f"{where}: there is no column {name!r}, only {list(table.columns)}")


def is_text(values: pd.Series) -> bool:
    """True if no value reads as a number, so that the column can only be a category."""
    present = values.dropna()
    texts = present.map(lambda value: isinstance(value, str)).all()
    return len(present) > 0 and bool(texts) and pd.to_numeric(present, errors="coerce").isna().all()


def learn_column(
    train: pd.DataFrame, name: str, where: str, *, categorical: bool, impute: bool
) -> Column | None:
    """How a feature column is encoded, learned from the training rows; None if it is constant.

    impute: a missing number becomes the mean, a missing category the most frequent one. Raises
    UsageError.
    """
    if not categorical:
        values = numbers(train[name], where)
        if values.nunique() < 2 and (impute or not values.isna().any()):
            return None
        return Column(name, fill=float(values.mean()) if impute else None)
    counts = train[name].map(str, na_action="ignore").value_counts()
    if len(counts) > MAX_CATEGORIES:
        raise UsageError(
            f"{where}: column {name!r} holds {len(counts)} different texts, which is no category: "
            "name the columns to learn from with --features"
        )
    if len(counts) < 2 and (impute or not train[name].isna().any()):
        return None
    categories = sorted(counts.index)
    # The first in the alphabet among equally frequent ones: the same on every machine.
    most_frequent = min(categories, key=lambda text: (-counts[text], text))
    return Column(name, categories, fill=most_frequent if impute else None)


def encode(table: pd.DataFrame, columns: Iterable[Column], where: str) -> np.ndarray:
    """The table as float64 of shape (rows, features), in the order of `columns`.

    The index of `table` holds row numbers from 0. Raises UsageError that names column and row.
    """
    columns = list(columns)
    check_columns(table, (column.name for column in columns), where)
    blocks = [np.empty((len(table), 0))]
    for column in columns:
        values = table[column.name]
        if column.categories is None:
            values = numbers(values, where)
        else:
            values = values.map(str, na_action="ignore").astype(object)
        if column.fill is not None:
            values = values.fillna(column.fill)
        _refuse_row(values.isna(), where, column.name, "the value is missing (see --missing)")
        if column.categories is None:
            blocks.append(values.to_numpy()[:, None])
        else:
            blocks.append(values.to_numpy()[:, None] == np.array(column.categories, dtype=object))
    return np.concatenate(blocks, axis=1, dtype=np.float64)


def numbers(values: pd.Series, where: str) -> pd.Series:
    """A column as float64 with NaN where a value is missing. Raises UsageError."""
    name, kind = values.name, values.dtype
    if pd.api.types.is_datetime64_any_dtype(kind) or pd.api.types.is_timedelta64_dtype(kind):
        raise UsageError(f"{where}: column {name!r} holds {kind}, not numbers: name the columns to "
                         "learn from with --features")  # fmt: skip
    if pd.api.types.is_object_dtype(kind):
        nested = ~values.map(pd.api.types.is_scalar).astype(bool)
        _refuse_row(nested, where, name, "the value is neither a number nor a text")
    result = pd.to_numeric(values, errors="coerce").astype(np.float64)
    bad = result.isna() & values.notna()
    _refuse_row(bad, where, name, "{!r} is not a number (a category? see --categorical)", values)
    _refuse_row(result.abs() == np.inf, where, name, "the value is not finite")
    return result


def _refuse_row(
    bad: pd.Series, where: str, name: str, why: str, values: pd.Series | None = None
) -> None:
    """Raise UsageError about the first bad row, if there is one; rows are counted from 1."""
    if bad.any():
        row = bad.idxmax()
        value = values[row] if values is not None else None
        raise UsageError(f"{where}, column {name!r}, row {row + 1}: {why.format(value)}")
