"""Rows of a table as numbers, by rules that can be written down, saved and applied again.

`where` names the table: with it the sentence of a UsageError begins.
"""

import argparse
import csv
import datetime
import gzip
import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet
import torch

from trainkit.errors import UsageError, as_usage_error
from trainkit.order import InMemory
from trainkit.text import count, shorten

# Each also with .gz behind it, but Parquet.
KINDS = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".ndjson", ".parquet")
SEPARATORS = ",;\t|"
INDEX = re.compile(r"Unnamed: \d[\d.]*|__index_level_\d+__")  # that pandas wrote with the table
MAX_CATEGORIES = 100  # a column with more different texts is a name or a comment, not a category
MISSING = [  # what pandas.read_csv takes for it
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN",
    "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
]  # fmt: skip
NESTED = (list, tuple, dict, set, bytes, np.ndarray, datetime.timedelta)
LARGEST = 1e38  # float32 ends at 3.4e38


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
        if not self.categories:
            return [self.name]
        return [f"{self.name}={category}" for category in self.categories]


def read_table(name: str, where: str, **options: Any) -> pd.DataFrame:
    """All rows of a table file, of a folder of such files or of a Hub data set.

    Raises UsageError.

    Options, None by default: separator (None: the one that splits the first line most) and encoding
    (None: UTF-8) of text files; dtype (None: numbers where all values read as numbers; "str": what
    is written, where whole numbers lose no digit because one is missing; "object": NA as well).
    """
    path = Path(name)
    # Without what is hidden: .ipynb_checkpoints/a.csv.
    inside = [p for p in sorted(path.rglob("*")) if "/." not in f"/{p.relative_to(path)}"]
    files = [file for file in inside or [path] if _kind(file) in KINDS]
    for one in inside:
        linked = one.is_dir() and one.is_symlink()
        if linked or (_kind(one) in KINDS and "=" in str(one.relative_to(path).parent)):
            raise UsageError(
                f"{where}: {one.relative_to(path)} in it is a link or a partition, which would "
                "not be read: put all files into one folder"
            )
    if not (files or path.exists()):
        with as_usage_error(f"{where} cannot be read"):
            import datasets

            return datasets.load_dataset(name, split="train").to_pandas()
    kinds = {_kind(file): file.name for file in files}
    if len(kinds) != 1:
        raise UsageError(
            f"{where} is not a table: there must be files of one kind of {', '.join(KINDS)}, not "
            f"{' and '.join(kinds.values()) or 'none'}"
        )
    tables = []
    for file in files:
        with as_usage_error(f"{where}: {file.name} cannot be read"):
            tables.append(_read_file(file, **options))
    for file, table in zip(files, tables, strict=True):
        if list(table.columns) != list(tables[0].columns):
            other = f"{file.name} has other columns than {files[0].name}, or another order"
            raise UsageError(f"{where}: {other}: let the folder hold the files of one table")
    table = pd.concat(tables, ignore_index=True)
    table.columns = [str(name).strip() for name in table.columns]  # 0, 1 of lists in JSON too
    table.attrs["files"] = shorten([file.name for file in inside and files])
    if not table.columns.is_unique:
        raise UsageError(f"{where}: the first line must name each column once")
    return table


def _kind(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _read_file(
    path: Path, separator: str | None = None, encoding: str | None = None, dtype: Any = None
) -> pd.DataFrame:
    if _kind(path) == ".parquet":
        rows = pyarrow.parquet.read_table(path)
        rows = rows.to_pandas(ignore_metadata=True, integer_object_nulls=dtype is not None)
        return _missing_as_in_csv(rows, dtype)
    open_text = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with open_text(path, "rt", encoding=encoding or "utf-8") as file:
            text = file.read().removeprefix("\ufeff")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:  # or UTF-16 that passes for UTF-8
        raise UsageError(
            f"{path} is not {encoding or 'UTF-8'} text: save it as that, or train with --encoding "
            "and the name of its encoding, such as cp1252 or utf-16"
        )
    if "json" in _kind(path):
        return _missing_as_in_csv(
            pd.DataFrame(_read_json(text, path), dtype=dtype and object), dtype
        )
    return _read_csv(text, path, separator, dtype)


def _read_csv(text: str, path: Path, separator: str | None, dtype: Any) -> pd.DataFrame:
    # pandas would rename a column that is named twice.
    headers = {
        sep: next(csv.reader(io.StringIO(text), delimiter=sep), [])
        for sep in separator or SEPARATORS
    }
    separator = max(headers, key=lambda sep: len(headers[sep]))
    if not text.partition("\n")[2].strip():
        raise UsageError(f"{path}: there are no rows below the first line")
    table = pd.read_csv(
        io.StringIO(text),
        sep=separator,
        header=None,
        skiprows=1,
        dtype=dtype,
        keep_default_na=dtype != "object",
        low_memory=False,
    )
    if table.shape[1] != len(headers[separator]):
        raise UsageError(
            f"{path}: the first line names {len(headers[separator])} columns, and the rows have "
            f"{table.shape[1]}: name each column there, and nothing else, or give --separator"
        )
    names = [name.strip() for name in headers[separator]]
    unnamed = "Unnamed: {}.1" if any(map(INDEX.match, names)) else "Unnamed: {}"
    table.columns = [name or unnamed.format(n) for n, name in enumerate(names)]
    return table


def _read_json(text: str, path: Path) -> Any:
    """Rows in a list, columns in an object, one row, or a row on each line."""
    try:
        content = json.loads(text, object_pairs_hook=_row)
    except ValueError:
        if text.lstrip().startswith("["):
            raise
    else:
        columns = content.values() if _kind(path) == ".json" and isinstance(content, dict) else []
        table = columns and all(isinstance(column, list | dict) for column in columns)
        return content if table or isinstance(content, list) else [content]
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        with as_usage_error(f"{path}, line {number} cannot be read"):
            rows += [json.loads(line, object_pairs_hook=_row)] if line.strip() else []
    return rows


def _missing_as_in_csv(table: pd.DataFrame, dtype: Any) -> pd.DataFrame:
    """The table with texts missing that CSV files have for that: one rule for all kinds."""
    texts = table.select_dtypes(exclude="number")  # 10,000 columns of numbers took 6 s
    if dtype != "object" and len(texts.columns):
        table[texts.columns] = texts.mask(texts.isin(MISSING))
    return table


def _row(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"a row names a column twice: {shorten([repr(n) for n, _ in pairs], 10)}")
    return dict(pairs)


def check_columns(table: pd.DataFrame, names: Sequence[str], where: str) -> None:
    """Raise UsageError if a column is not there."""
    for name in names:
        if name not in table.columns:
            columns = shorten([*map(repr, table.columns)], 10)
            raise UsageError(f"{where}: there is no column {name!r}, only {columns}")


def parse_column(values: pd.Series, where: str, category: bool | None = None) -> pd.Series:
    """A column as numbers, or as texts if it is a category; NaN where a value is missing.

    category: None: it is one if no value reads as a number. Raises UsageError about a value that is
    not a number, or about texts that are no categories.
    """
    if values.dtype.kind in "biuf" and not category:
        return values.astype(float) if values.dtype in (np.bool_, np.float16) else values
    objects = values.astype(object)
    texts = objects.map(_as_text, na_action="ignore")
    nested = objects.map(lambda value: isinstance(value, NESTED))
    _refuse_row(nested, texts, where, "{!r} is not a number, nor a text")
    if category:
        return texts
    if texts.dropna().isin(["True", "False"]).all():
        return texts.map({"True": 1.0, "False": 0.0})
    numbers = pd.to_numeric(texts, errors="coerce")
    bad = numbers.isna() & texts.notna()
    if category is None and bad.sum() == texts.count() > 0:
        different = texts.dropna().drop_duplicates()
        # What was meant as a number: 1_200, 1,234.5, $0, 12 km, 2020-01-02T10:00.
        bad = different.str.fullmatch(r"[^\w=]*\d[\W\d_T]*[A-Za-z]{0,3}\s*")
        if 2 * bad.sum() < len(different):
            return texts
    _refuse_row(
        bad,
        texts,
        where,
        "{!r} is not a number: write plain numbers (1234.5, a year, days)"
        + (", or if the column is a category, train with --categorical" * (category is None)),
    )
    return numbers


def _as_text(value: Any) -> str:
    """One text for what readers of files make of it: 1 of 1.0 too, True of TRUE."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value)
    return text.capitalize() if text.lower() in ("true", "false") else text


def _refuse_row(bad: pd.Series, values: pd.Series, where: str, why: str) -> None:
    """Raise UsageError about the first bad row, if there is one; rows are counted from 1."""
    if bad.any():
        row = bad.idxmax()
        raise UsageError(
            f"{where}, column {values.name!r}, row {row + 1}: {why.format(values[row])}"
        )


def learn_column(train: pd.Series, where: str, impute: bool) -> Column | None:
    """How a feature is encoded, from its parsed training rows; None if it is constant.

    impute: a missing number becomes the mean, a missing category the most frequent one. Raises
    UsageError.
    """
    if train.nunique(dropna=impute) < 2:
        return None
    if train.dtype.kind in "biuf":
        return Column(train.name, fill=float(train.mean()) if impute else None)
    counts = train.value_counts().sort_index()
    if len(counts) > MAX_CATEGORIES or len(counts) == train.count():
        raise UsageError(
            f"{where}: column {train.name!r} holds {len(counts)} different texts in {len(train)} "
            "training rows, which is no category: leave it out with --features"
        )
    # Of equally frequent ones the first in the alphabet: the same on every machine.
    return Column(train.name, [*counts.index], counts.idxmax() if impute else None)


def encode(table: pd.DataFrame, columns: Sequence[Column], where: str) -> np.ndarray:
    """The table as float64 of shape (rows, features), in the order of `columns`.

    The index of `table` holds row numbers from 0. Raises UsageError that names column and row.
    """
    blocks = []
    for column in columns:
        check_columns(table, [column.name], where)
        values = parse_column(table[column.name], where, bool(column.categories))
        if column.fill is not None:
            values = values.fillna(column.fill)
        why = (
            "the value is missing: fill it in or drop the row, as --missing drop does in training; "
            "--missing impute fills in features"
        )
        _refuse_row(values.isna(), values, where, why)
        block = values.to_numpy()[:, None]
        if column.categories:
            block = block == column.categories
        else:
            why = "{} is too large (at most 1e38): write it in a larger unit"
            _refuse_row(values.abs() > LARGEST, values, where, why)
        blocks.append(block)
    return np.concatenate(blocks, axis=1, dtype=np.float64)


def load_table(args: argparse.Namespace) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The table of --data, without rows that --missing drops, and what a reader of it must know.

    Its index holds row numbers from 0. Raises UsageError.
    """
    where = f"--data {args.data}"
    options = {
        "separator": args.separator,
        "encoding": args.encoding,
        "dtype": "str" if args.categorical else None,  # 01234 does not become 1234
    }
    table = read_table(args.data, where, **options)
    files = table.attrs.get("files")
    check_columns(table, [*args.target, *(args.features or []), *args.categorical], where)
    if args.features:
        table = table[[*dict.fromkeys([*args.features, *args.target])]]
    missing = table.isna()
    known = {
        "data": Path(args.data).name + (f" ({files})" if files else ""),
        "read_options": options,
        "missing": f"{count(missing.sum().sum(), 'value')} in "
        f"{count(missing.any(axis=1).sum(), 'row')}",
        "truth": None,
    }
    return table.dropna() if args.missing == "drop" else table, known


def make_sets(
    table: pd.DataFrame, targets: list[str], args: argparse.Namespace, standardise: bool
) -> tuple[InMemory, InMemory, dict[str, Any]]:
    """The training set (features, targets) and the evaluation set (and row numbers).

    Also what a prediction for a new row must know. What is learned from rows (categories, means) is
    learned from the training rows alone. Raises UsageError.
    """
    where = f"--data {args.data or 'synthetic'}"
    train, test = split_rows(len(table), args)
    chosen = args.features or [n for n in table.columns.drop(targets) if not INDEX.fullmatch(n)]
    if lost := [name for name in args.categorical if name not in chosen]:
        raise UsageError(f"{where}: --categorical {lost[0]!r} is none of the features")
    learned = {}
    for name in chosen:
        values = parse_column(table[name], where, name in args.categorical or None)
        learned[name] = learn_column(values.iloc[train], where, args.missing == "impute")
    columns = [column for column in learned.values() if column]
    if not columns:
        raise UsageError(f"{where}: there is no feature column whose values differ")
    about = {
        "columns": [asdict(column) for column in columns],
        "left_out": [name for name in table.columns if not (learned.get(name) or name in targets)],
    }
    tensors = []
    for kind, encoded in (("feature", columns), ("target", [*map(Column, targets)])):
        names = [name for column in encoded for name in column.feature_names()]
        values = encode(table, encoded, where)
        known = values[train]
        same = np.ptp(known, axis=0) < 1 / LARGEST
        if same.any():
            raise UsageError(
                f"{where}: {kind} {names[same.argmax()]!r} is the same in all {len(train)} "
                "training rows, as far as float64 can tell: leave it out"
            )
        mean, std = known.mean(0), known.std(0)
        about[f"{kind}_range"] = np.stack((known.min(0), known.max(0)), 1).tolist()
        about[f"{kind}_whole"] = (known == known.round()).all(0).tolist()
        about["baseline"] = mean.tolist()  # of the targets, which come last: what R2 compares with
        if not standardise:
            mean, std = np.zeros_like(mean), np.ones_like(std)
        tensors.append(torch.from_numpy((values - mean) / std).float())
        about |= {f"{kind}s": names, f"{kind}_mean": mean.tolist(), f"{kind}_std": std.tolist()}
    train_set = InMemory(*(tensor[train] for tensor in tensors))
    tensors.append(torch.from_numpy(table.index.to_numpy(copy=True)))
    return train_set, InMemory(*(tensor[test] for tensor in tensors)), about


def describe(about: dict[str, Any], args: argparse.Namespace) -> dict[str, str]:
    """Lines of the plan: what was taken for what."""
    categories = [
        f"{column['name']} ({shorten([text[:20] for text in column['categories']])})"
        for column in about["columns"]
        if column["categories"]
    ]
    left_out = shorten([*map(repr, about["left_out"])], 10) or "none"
    lines = {
        "data": about["data"],
        "features": f"{len(about['features'])} (left out, constant or an index: {left_out})",
    }
    if categories:
        lines["categories"] = shorten(categories)
    if args.missing != "refuse":
        lines["missing"] = f"{about.get('missing', 'none')}, to {args.missing}"
    return lines | {"targets": ", ".join(about["targets"])}


def split_rows(num_rows: int, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """The positions of the training and of the test rows. Raises UsageError if one is empty."""
    num_test = round(args.test_fraction * num_rows)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(args.data_seed))
    test, train = (part.sort().values.numpy() for part in order.tensor_split([num_test]))
    if not args.test_fraction:
        test = train
    if not len(test) * len(train):
        raise UsageError(
            f"--data {args.data or 'synthetic'}: of {num_rows} rows {len(train)} are left to train "
            f"on and {len(test)} to evaluate on (--test-fraction {args.test_fraction}, "
            f"--missing {args.missing})"
        )
    return train, test
