"""Read tables by pandas as they are written, and choose columns of them.

`where` names the table; the sentence of a UsageError begins with it.
"""

import codecs
import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from trainkit.errors import UsageError, as_usage_error
from trainkit.reading import splits
from trainkit.reading.flags import FileConfig
from trainkit.reading.paths import read_here_or_from_hub, refuse_pipe, select_read
from trainkit.reading.sheets import read_sheets
from trainkit.text import count, nfc, shorten

EXCEL = (".xlsx", ".xlsm")
ARROW = (".arrow", ".feather")
KINDS = (".csv", ".tsv", ".tab", ".txt", ".json", ".jsonl", ".ndjson", ".parquet", *ARROW, *EXCEL)
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")  # of text files; may follow their ending
MAX_SHOWN = 30  # columns in a message
MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


class Parts(NamedTuple):
    """The table of each split, or of all files as "train", and the names of what is in it.

    "" has the names of what is in no split. In attrs of a table, "separator" is that of text files.
    """

    tables: dict[str, pd.DataFrame]
    names: dict[str, str]


def read_table(name: str, where: str, **options: Any) -> pd.DataFrame:
    """Return all rows of read_parts as one table."""
    return pd.concat(read_parts(name, where, **options).tables.values(), ignore_index=True)


def read_parts(name: str, where: str, **options: Any) -> Parts:
    """Read a table file, a folder of such files or a Hub data set.

    Values stay as they are written: those of text files are texts, "" if missing. For the options
    see FileConfig; None means the default. Raises UsageError.
    """
    path = Path(name)
    is_here = os.path.exists(name)  # noqa: PTH110, which raises OSError for a name that is too long
    if not is_here or splits.is_saved(path):
        with read_here_or_from_hub(name, where):
            loaded = splits.load_parts(name)
            tables = {split: rows.to_pandas() for split, (_, rows) in loaded.items() if split}
        return Parts(tables, {split: names for split, (names, _) in loaded.items()})
    refuse_pipe(path, where)
    readers = _find_readers(path, where, **options)
    found = splits.find_splits([*readers])
    tables = {
        split: _join({name: readers[name]() for name in names}, where)
        for split, names in found.items()
        if split
    }
    return Parts(tables, {split: shorten(names) for split, names in found.items()})


def choose_evaluated_table(
    config: FileConfig,
    parts: Parts,
    is_labelled: Callable[[pd.DataFrame], bool],
    noun: str,
    named: Sequence[str | None],
) -> tuple[pd.DataFrame | None, str, dict[str, str]]:
    """Return the table to evaluate on, its name, and plan lines.

    It is that of --eval-data, or else a split of --data, or None: a share of the training rows.
    Raises UsageError if a column that is not `named` says that rows to train on are evaluated.
    """
    for column, cells in parts.tables["train"].items():
        if column not in named and splits.says_split(column, cells):
            raise UsageError(
                f"{config.where}: column {column!r} says which rows are evaluated: write the rows "
                "of each split into files of their own, called train and test"
            )
    split, unread = splits.choose_evaluated(
        parts.names, lambda split: is_labelled(parts.tables[split]), bool(config.eval_data)
    )
    where = parts.names[split] if split else ""
    if config.eval_data:
        where = f"--eval-data {config.eval_data}"
        parts = read_parts(config.eval_data, where, **config.read_options)
        split = next((split for split in splits.EVALUATED if split in parts.tables), "train")
        where += f", {parts.names[split]}" if len(parts.tables) > 1 else ""
    if not split:
        return None, "", splits.describe_given("", unread)
    table = parts.tables[split]
    return table, where, splits.describe_given(f"{where}: {count(len(table), noun)}", unread)


def _find_readers(
    path: Path, where: str, sheet: Sequence[str] | None = None, **options: Any
) -> dict[str, Callable[[], pd.DataFrame]]:
    """Return what reads each file of a folder, or sheet of an Excel file, by its name."""
    inside = [
        file for file in sorted(path.rglob("*")) if file.is_file() and ending_of(file) in KINDS
    ]
    names = select_read([file.relative_to(path).as_posix() for file in inside], where)
    readers: dict[str, Callable[[], pd.DataFrame]] = {}
    for name in names or [""]:  # a file
        if ending_of(path / name) in EXCEL:
            with as_usage_error(f"{where}: {(path / name).name} cannot be read"):
                sheets = read_sheets(path / name, sheet or [])
            for own, rows in sheets.items():
                key = f"{name}/{own}".strip("/") if len(sheets) > 1 else name
                readers[key] = partial(_read_file, path / name, where, rows=rows, **options)
        else:
            readers[name] = partial(_read_file, path / name, where, **options)
    return readers


def _join(tables: Mapping[str, pd.DataFrame], where: str) -> pd.DataFrame:
    first = next(iter(tables))
    for name, table in tables.items():
        if [*table] != [*tables[first]]:
            raise UsageError(
                f"{where}: {name} has other columns than {first}: all files of a folder, and "
                "sheets, must have the same"
            )
    return pd.concat(tables.values(), ignore_index=True)


def ending_of(path: Path) -> str:
    """Return the ending of a file, in small letters, without that of its compression."""
    name = Path(path.name.lower())
    return Path(name.stem if name.suffix in COMPRESSED else name).suffix


def _read_file(path: Path, where: str, **options: Any) -> pd.DataFrame:
    if ending_of(path) not in KINDS:
        raise UsageError(
            f"{where} is not a table, {', '.join(KINDS)}, nor a folder of them (unpack an archive "
            "into a folder first)"
        )
    with as_usage_error(f"{where}: {path.name} cannot be read"):
        table = _read_cells(path, **options)
        names = [nfc(str(name).strip()) for name in table]
        # A missing name becomes the one that pandas gives.
        names = [name or f"Unnamed: {n}" for n, name in enumerate(names)]
        if len({*names}) < len(names):
            twice = max(names, key=names.count)
            raise ValueError(f"two columns are called {twice!r}: rename one (see --header-row)")
        table.columns = pd.Index(names, dtype=object)
        return table


def _read_cells(
    path: Path,
    header_row: int | None = None,
    separator: str | None = None,
    encoding: str | None = None,
    rows: list[list[Any]] | None = None,
) -> pd.DataFrame:
    """Read a file; rows: those of a sheet. The names of its columns are as in the file."""
    from pyarrow import feather, parquet  # here: a run on synthetic data starts without it

    kind, first = ending_of(path), header_row or 1
    if rows:
        filled = [row for row in rows[first:] if {*row} != {""}]
        return pd.DataFrame(filled, columns=rows[first - 1], dtype=object)
    if kind == ".parquet" or kind in ARROW:
        # An index that pandas wrote is read too, because it may be a column that somebody named.
        table = feather.read_table(path) if kind in ARROW else parquet.ParquetFile(path).read()
        return table.to_pandas(ignore_metadata=True, integer_object_nulls=True)
    text = read_text(str(path), encoding)
    if kind == ".json":
        return _read_json(json.loads(text))
    if "json" in kind:
        lines = filter(str.strip, text.split("\n"))
        return pd.DataFrame([json.loads(line) for line in lines], dtype=object)
    names = text.split("\n", first)[first - 1]
    separator = separator or max(",;\t|", key=names.count)
    options = {"dtype": object, "keep_default_na": False, "header": None, "skiprows": first - 1}
    with as_usage_error(f"{path} cannot be read (--header-row says where its names are)"):
        cells = pd.read_csv(io.StringIO(text), sep=separator, **options)
    table = cells[1:].set_axis([*cells.iloc[0]], axis=1)
    table.attrs["separator"] = separator
    return table


def _read_json(value: Any) -> pd.DataFrame:
    """Return the rows of a list of objects, also of one within an object, or of columns."""
    parts = [*value.values()] if isinstance(value, dict) else []
    lists = [part for part in parts if isinstance(part, list)]
    if len(lists) == 1 and {*map(type, lists[0])} == {dict}:  # as in {"data": [...], "total": 2}
        value = lists[0]
    elif parts and ({*map(type, parts)} not in ({dict}, {list}) or len({*map(len, parts)}) > 1):
        raise ValueError("it is an object of JSON: write the rows as a list of objects, [{...}]")
    return pd.DataFrame(value, dtype=object)


def read_text(path: str, given: str | None = None) -> str:
    """Return the text of a file, which may be compressed.

    A byte order mark decides. A file without one that is valid UTF-8 beyond ASCII is read as UTF-8
    whatever is given, because text in an older encoding hardly ever is. Raises LookupError for an
    encoding that does not exist, UsageError for a file that is not in it. given: None means UTF-8.
    """
    import fsspec  # here: a run on synthetic data starts without it

    with fsspec.open(path, "rb", compression="infer") as file:
        content = file.read()
    marked = [name for mark, name in MARKS.items() if content.startswith(mark)]
    # ASCII is asked as it is given, because UTF-16 without a mark may look like it.
    tried = marked or ([given] if given and content.isascii() else ["utf-8", given or "utf-8"])
    for encoding in tried:
        try:
            return content.decode(encoding)
        except UnicodeDecodeError:
            continue
    raise UsageError(
        f"{path} is not in UTF-8, or not in the given --encoding: try --encoding cp1252 or utf-16"
    )


def find_nested(table: pd.DataFrame) -> list[str]:
    """Return the columns that hold bytes, or lists or objects of values."""
    nested = {bytes, dict, list, np.ndarray}
    columns = table.items()
    return [n for n, x in columns if x.dtype == object and not nested.isdisjoint(map(type, x))]


def choose_columns(table: pd.DataFrame, names: Sequence[str], where: str) -> pd.DataFrame:
    """Return these columns, without spaces round texts, in NFC, and NaN in empty cells."""
    names = [*dict.fromkeys(names)]
    if unknown := [name for name in names if name not in table]:
        raise UsageError(
            f"{where}: there is no column {unknown[0]!r}, only {shorten([*table], MAX_SHOWN)} "
            "(--separator says what is between columns, such as '\\s+' for blanks, --header-row "
            "where their names are)"
        )
    if nested := find_nested(table[names]):
        raise UsageError(
            f"{where}: column {nested[0]!r} holds bytes, lists or objects of values, which are "
            "neither numbers nor texts: choose other columns"
        )
    columns = {}
    for name, values in table[names].items():
        if pd.api.types.is_string_dtype(values.dtype):  # object too
            # "Oslo " is Oslo, and " NA" is missing
            cells = [nfc(x.strip()) or np.nan if isinstance(x, str) else x for x in values]
            values = pd.Series(cells, table.index, dtype=object)
        columns[name] = values
    # Names as objects, because a table of thousands of columns is read column by column.
    return pd.DataFrame(columns, table.index, pd.Index([*columns], dtype=object))


def as_text(value: Any) -> str:
    """Return one text for all forms in which files give a value: 1 for 1.0, True for TRUE."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = re.sub(r"^(-?\d+)\.0+$", r"\1", str(value).strip())
    return text.capitalize() if text.lower() in ("true", "false") else text
