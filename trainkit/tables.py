"""Rows of a table as numbers, by rules that can be written down, saved and applied again."""

import argparse
import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import charset_normalizer
import datasets
import numpy as np
import pandas as pd
import pyarrow.parquet
import torch

from trainkit.errors import UsageError, as_usage_error, is_main_rank
from trainkit.order import InMemory
from trainkit.rundir import write_durably

TEXT, JSON = (".csv", ".tsv", ".txt"), (".json", ".jsonl", ".ndjson")
KINDS = (*TEXT, *JSON, ".parquet")  # each also with .gz behind it, but Parquet
SEPARATORS = ",;\t|"
LIKELY = ["utf_16", "utf_16_le", "utf_16_be", "utf_32", "cp1252"]  # tried before all others
INDICES = {"Unnamed: 0", "__index_level_0__"}  # an index that pandas wrote with the table
MAX_CATEGORIES = 100  # a column with more different texts is a name or a comment, not a category
TRUTH = {"True": 1.0, "False": 0.0}
NO_BOMB = 2**32  # bytes in memory, up to which a Parquet file may be as small as it likes
# 12_000, 1,234.5, $0, 12 km, 01/02/2020, 3 Jan 2020 10:00
NUMBER_LIKE = re.compile(
    r"(?=.*\d)([\d\s.,_':/+()%$\u20ac\u00a3\u00a5-]|(?<=\d)T(?=\d)|(jan|feb|mar|apr|may|jun|jul|aug|sep"
    r"|oct|nov|dec)[a-z]*)+[a-z]{0,3}",
    re.IGNORECASE,
)


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


def read_table(
    name: str, where: str, separator: str | None = None, encoding: str | None = None
) -> tuple[pd.DataFrame, str]:
    """All rows of a table file, of a folder of such files or of a Hub data set. UsageError.

    The values of text files are texts, so that one that is no number is found with row and column.
    The second item says how such files were read: separator and encoding, None: recognised.
    """
    path = Path(name)
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = [file for file in files if _kind(file) in KINDS]
    if len({_kind(file) for file in files}) > 1:  # a README beside the tables
        files = [file for file in files if _kind(file) != ".txt"]
    if not path.exists() and files:
        raise UsageError(f"{where}: there is no such file")
    if path.exists() and len({_kind(file) for file in files}) != 1:
        raise UsageError(f"{where} is not a table: there must be files of one kind of "
                         f"{', '.join(KINDS)}")  # fmt: skip
    tables: list[pd.DataFrame] = []
    said = ""
    for file in files:
        with as_usage_error(f"{where} cannot be read{f' ({file})' * path.is_dir()}"):
            table, said = _read_file(file, separator, encoding)
            table.columns = [str(column).strip() for column in table.columns]
            if not table.columns.is_unique or table.columns.empty:
                raise UsageError(f"{where}: the first line must name each column once")
            if tables and [*table.columns] != [*tables[0].columns]:
                raise UsageError(f"{where}: {file.name} and {files[0].name} differ in columns")
        tables.append(table)
    if tables:
        return pd.concat(tables, ignore_index=True), said
    if not (sys.stderr.isatty() and is_main_rank()):
        datasets.disable_progress_bars()
    with as_usage_error(f"{where} cannot be read"):
        return datasets.load_dataset(name, split="train").to_pandas(), said


def _kind(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _read_file(path: Path, separator: str | None, encoding: str | None) -> tuple[pd.DataFrame, str]:
    if _kind(path) == ".parquet":
        about = pyarrow.parquet.read_metadata(path)
        if 8 * about.num_rows * about.num_columns > NO_BOMB + 500 * path.stat().st_size:
            raise ValueError(f"its {about.num_rows} rows would take more than 500 times its size: "
                             "write it with fewer rows or columns")  # fmt: skip
        return pyarrow.parquet.read_table(path).to_pandas(ignore_metadata=True), ""
    content = path.read_bytes()
    if path.name.lower().endswith(".gz"):
        limit = 2**24 + 500 * len(content)  # no table shrinks so much, but a bomb does
        with gzip.open(path) as file:
            content = file.read(limit)
        if len(content) == limit:
            raise ValueError("it unpacks to more than 500 times its size: unpack it yourself")
    text, encoding = decode(content, encoding)
    if _kind(path) in JSON:
        try:
            rows = json.loads(text)
        except ValueError:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        # pandas writes {column: {row: value}}; one line {column: value} is a table of one row.
        columns = isinstance(rows, dict) and all(isinstance(x, dict | list) for x in rows.values())
        return pd.DataFrame(rows if columns or isinstance(rows, list) else [rows]), ""
    separator = separator or find_separator(text)
    header = next(csv.reader(io.StringIO(text, newline=None), delimiter=separator), [])
    table = pd.read_csv(io.StringIO(text), sep=separator, dtype=str)
    if not isinstance(table.index, pd.RangeIndex):
        raise ValueError("its rows have more values than its first line has names")
    # pandas renames what it finds twice, so the names are taken from the line itself.
    table.columns = [name or f"Unnamed: {number}" for number, name in enumerate(header)]
    usual = (separator, encoding) == (",", "utf-8-sig")
    return table, "" if usual else f", separator {separator!r}, encoding {encoding}"


def decode(content: bytes, encoding: str | None) -> tuple[str, str]:
    """The text of a file and its encoding; None: UTF-8 if it can be, else what it looks like."""
    first = 0
    try:
        text = content.decode(encoding or "utf-8-sig")
        if encoding or "\0" not in text:
            return text, encoding or "utf-8-sig"
    except UnicodeDecodeError as problem:
        if encoding:
            raise
        first = max(0, problem.start - 2**15) // 4 * 4
    sample = content[first : first + 2**16]
    best = charset_normalizer.from_bytes(sample, cp_isolation=LIKELY).best()
    best = best or charset_normalizer.from_bytes(sample).best()
    if best is None:
        raise ValueError("its encoding is not recognised: name it with --encoding")
    return content.decode(best.encoding), best.encoding


def find_separator(text: str) -> str:
    """The one that splits the first line, and the next ones into as many parts as that.

    csv.Sniffer takes a comma inside quotes for one that separates.
    """
    lines = text[: 2**16].splitlines()[:50]

    def rank(separator: str) -> tuple[bool, bool, int]:
        widths = [len(row) for row in csv.reader(lines, delimiter=separator) if row] or [0]
        return widths[0] > 1, len(set(widths)) == 1, widths[0]

    return max(SEPARATORS, key=rank)


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


def check_category(values: pd.Series, where: str) -> None:
    """Raise UsageError if a column of texts should have been numbers, or tells all rows apart."""
    texts = pd.Series(values.dropna().unique())
    numbers = texts[texts.map(lambda text: NUMBER_LIKE.fullmatch(text.strip()) is not None)]
    if 2 * len(numbers) >= len(texts):
        why = ("{!r} reads like a number or a date: write plain numbers (1234.5, a year, days), or "
               "name the column in --categorical, or leave it out with --features")  # fmt: skip
        _refuse_row(values == numbers.iloc[0], where, values.name, why, values)
    if len(texts) == values.count() > 1:
        raise UsageError(f"{where}: column {values.name!r} holds a different text in each row, "
                         "which is no category: leave it out with --features")  # fmt: skip


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
    if (values.isin([*TRUTH]) | values.isna()).all():
        values = values.map(TRUTH)
    result = pd.to_numeric(values, errors="coerce").astype(np.float64)
    bad = result.isna() & values.notna()
    why = "{!r} is not a number (a category? see --categorical)"
    if bad.any() and NUMBER_LIKE.fullmatch(str(values[bad.idxmax()]).strip()):
        why = "{!r} reads like a number or a date: write plain numbers (1234.5, a year, days)"
    _refuse_row(bad, where, name, why, values)
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


def load_table(args: argparse.Namespace) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The table of --data, without rows that --missing drops, and what a reader of it must know.

    Its index holds row numbers from 0. Raises UsageError.
    """
    where = f"--data {args.data}"
    table, said = read_table(args.data, where, args.separator, args.encoding)
    check_columns(table, [*args.target, *(args.features or []), *args.categorical], where)
    if args.features is None:
        if left_out := sorted(INDICES.intersection(table.columns).difference(args.target)):
            said += f", without {left_out[0]!r}, an index that pandas wrote"
            table = table.drop(columns=left_out)
    else:
        table = table[[*dict.fromkeys([*args.features, *args.target])]]
    if args.missing == "drop":
        table = table.dropna()
    options = {"separator": args.separator, "encoding": args.encoding}
    return table, {"source": f"{args.data}{said}", "read_options": options, "truth": None}


def make_sets(
    table: pd.DataFrame, targets: list[str], args: argparse.Namespace, standardise: bool
) -> tuple[InMemory, InMemory, dict[str, Any]]:
    """The training and the evaluation set, each features, targets and row numbers in the table.

    Also what a prediction for a new row must know. What is learned from rows (categories, means) is
    learned from the training rows alone. Raises UsageError.
    """
    where = f"--data {args.data or 'synthetic'}"
    train, test = split(len(table), args)
    chosen = args.features or [name for name in table.columns if name not in targets]
    learned = []
    for name in chosen:
        categorical = name in args.categorical
        if not categorical and is_text(table[name]):
            check_category(table[name], where)
            categorical = True
        learned.append(learn_column(table.iloc[train], name, where, categorical=categorical,
                                    impute=args.missing == "impute"))  # fmt: skip
    columns = [column for column in learned if column is not None]
    if not columns:
        raise UsageError(f"{where}: there is no feature column whose values differ")
    values = {
        "feature": encode(table, columns, where),
        "target": encode(table, [Column(name) for name in targets], where),
    }
    constant = values["target"][train].max(0) == values["target"][train].min(0)
    if constant.any():
        raise UsageError(f"{where}: target column {targets[constant.argmax()]!r} is the same in "
                         f"all {len(train)} training rows")  # fmt: skip
    about = {
        "columns": [asdict(column) for column in columns],
        "features": [name for column in columns for name in column.feature_names()],
        "constant": [name for name, column in zip(chosen, learned, strict=True) if column is None],
        "targets": targets,
        "baseline": values["target"][train].mean(0).tolist(),  # what R2 compares with
    }
    tensors = []
    for kind, numbers in values.items():
        mean, std = np.zeros(numbers.shape[1]), np.ones(numbers.shape[1])
        if standardise:
            mean, std = numbers[train].mean(0), numbers[train].std(0)
        tensors.append(torch.from_numpy((numbers - mean) / std).float())
        about |= {f"{kind}_mean": mean.tolist(), f"{kind}_std": std.tolist()}
    train_set = InMemory(*(tensor[train] for tensor in tensors))
    rows = torch.from_numpy(table.index.to_numpy(copy=True))
    return train_set, InMemory(*(tensor[test] for tensor in (*tensors, rows))), about


def add_predictions(
    path: Path, about: dict[str, Any], predict: Callable[[torch.Tensor], np.ndarray]
) -> str:
    """Write TABLE_predictions.csv, the rows of a table and a column for each target.

    Returns its path, and in brackets what is strange. A text that a spreadsheet would run as a
    formula gets an apostrophe in front. Raises UsageError.
    """
    if not path.exists():
        raise UsageError(f"{path} cannot be read: there is no such file")
    table, _ = read_table(str(path), str(path), **about.get("read_options", {}))
    columns = [Column(**column) for column in about["columns"]]
    predictions = predict(torch.from_numpy(encode(table, columns, str(path))))
    notes = ""
    for column in columns:
        texts = {*table[column.name].dropna().map(str)} if column.categories else set()
        if new := sorted(texts.difference(column.categories or ())):
            notes += f"  (column {column.name!r}: {new[0]!r} was not in the training rows)"
    for name in table.columns[[not pd.api.types.is_numeric_dtype(kind) for kind in table.dtypes]]:
        table[name] = table[name].map(_not_a_formula)
    for name, values in zip(about["targets"], predictions.T, strict=True):
        if f"predicted_{name}" in table.columns:
            raise UsageError(f"{path}: rename its column 'predicted_{name}'")
        table[f"predicted_{name}"] = values
    stem = path.name[: path.name.lower().rindex(_kind(path))] if path.is_file() else path.name
    output = path.with_name(f"{stem}_predictions.csv")
    write_durably(output, table.rename(columns=_not_a_formula).to_csv(index=False).encode())
    return f"{output}{notes}"


def _not_a_formula(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    value = value.replace("\r", "\n")  # which the writer puts into quotes
    risky = re.match(r"\s*[=+@-]|[\t\n]", value)
    return f"'{value}" if risky and np.isnan(pd.to_numeric(value, errors="coerce")) else value


def split(num_rows: int, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """The positions of the training and of the test rows. Raises UsageError if one is empty."""
    num_test = round(args.test_fraction * num_rows)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(args.data_seed))
    order = order.numpy()
    train, test = np.sort(order[num_test:]), np.sort(order[:num_test])
    if args.test_fraction == 0:
        test = train
    if min(len(test), len(train)) < 1:
        raise UsageError(
            f"--data {args.data or 'synthetic'}: of {num_rows} rows {len(train)} are left to train "
            f"on and {len(test)} to evaluate on (--test-fraction {args.test_fraction}, "
            f"--missing {args.missing})"
        )
    return train, test
