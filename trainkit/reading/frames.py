"""Read tables by pandas as they are written, and choose columns of them.

A file becomes a frame in _read_file. `where` names the table; the sentence of a UsageError begins
with it.
"""

import io
import itertools
import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trainkit.errors import UsageError, as_usage_error
from trainkit.reading import sheets, splits
from trainkit.reading.encodings import read_text
from trainkit.reading.paths import read_here_or_from_hub, refuse_pipe, select_read
from trainkit.text import count, nfc, shorten

EXCEL = (".xlsx", ".xlsm")
ARROW = (".arrow", ".feather")
KINDS = (".csv", ".tsv", ".tab", ".txt", ".json", ".jsonl", ".ndjson", ".parquet", *ARROW, *EXCEL)
# Text files may also be followed by one of these.
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
MAX_SHOWN = 30  # columns in a message


def read_table(name: str, where: str, **options: Any) -> pd.DataFrame:
    """Return all rows of read_parts as one table."""
    return pd.concat(read_parts(name, where, **options).values(), ignore_index=True)


def read_parts(name: str, where: str, **options: Any) -> dict[str, pd.DataFrame]:
    """Read a table file, a folder of such files or a Hub data set: each split, or all as "train".

    Values stay as they are written: those of text files are texts, "" if missing. separator: None
    means the one that splits the first line most often. encoding: see encodings.read_text. sheet:
    names of sheets of an Excel file, which are read as one table; None means the only one, or those
    that are called like splits. header_row: the line of the names, from 1. In attrs, "part" names
    the files or sheets of a table or its split, "unread" what is in no split, and "separator" is
    that of text files. Raises UsageError.
    """
    path = Path(name)
    is_here = os.path.exists(name)  # noqa: PTH110, which raises OSError for a name that is too long
    if not is_here or splits.is_saved(path):
        with read_here_or_from_hub(name, where):
            loaded = splits.load_parts(name)
            tables = {split: rows.to_pandas() for split, (_, rows) in loaded.items() if split}
        parts = {split: part for split, (part, _) in loaded.items()}
    else:
        inside = [f for f in sorted(path.rglob("*")) if _kind(f) in KINDS and f.is_file()]
        names = select_read([file.relative_to(path).as_posix() for file in inside], where)
        found = splits.find_splits(names or [""])
        reads = {split: (files, options) for split, files in found.items()}
        if path.is_file() and _kind(path) in EXCEL and not options.get("sheet"):
            with as_usage_error(f"{where} cannot be read"):
                own = splits.find_splits(sheets.name_sheets(path))
            if len(own) > 1:  # sheets that are called train and test
                found = own
                reads = {split: ([""], options | {"sheet": own[split]}) for split in own}
        parts = {split: shorten(names) for split, names in found.items()}
        tables = {
            split: _read_files([path / file for file in files], where, **how)
            for split, (files, how) in reads.items()
            if split
        }
    for split, table in tables.items():
        table.attrs |= {"where": where, "part": parts[split], "unread": parts.get("", "")}
    return tables


def choose_evaluated_table(
    parts: dict[str, pd.DataFrame],
    eval_data: str | None,
    is_labelled: Callable[[pd.DataFrame], bool],
    noun: str,
    named: Sequence[str | None] = (),
    **options: Any,
) -> tuple[pd.DataFrame | None, dict[str, str]]:
    """Return the table to evaluate on, None if a share of the training rows is, and plan lines.

    It is that of --eval-data, or else a split of read_parts. attrs["where"] of it is its name.
    Raises UsageError if a column that is not `named` says that rows to train on are evaluated.
    """
    whole = parts["train"]
    columns = {name: whole[name] for name in whole if splits.may_say_split(name)}
    if told := [name for name in splits.read_split_columns(columns) if name not in named]:
        raise UsageError(
            f"{whole.attrs['where']}: column {told[0]!r} says which rows are evaluated: write the "
            "rows of each split into files of their own, called train and test"
        )
    names = {split: table.attrs["part"] for split, table in parts.items() if len(parts) > 1}
    if whole.attrs["unread"]:
        names[""] = whole.attrs["unread"]
    split, unread = splits.choose_evaluated(
        names, lambda split: is_labelled(parts[split]), bool(eval_data)
    )
    chosen, name = (parts[split], names[split]) if split else (None, "")
    if eval_data:
        name = f"--eval-data {eval_data}"
        own = read_parts(eval_data, name, **options)
        chosen = next((own[split] for split in splits.EVALUATED if split in own), own["train"])
        if len(own) > 1:
            name += f", {chosen.attrs['part']}"
    if chosen is None:
        return None, splits.describe_given("", unread)
    chosen.attrs["where"] = name
    return chosen, splits.describe_given(f"{name}: {count(len(chosen), noun)}", unread)


def _read_files(
    files: Sequence[Path], where: str, sheet: Sequence[str] | None = None, **options: Any
) -> pd.DataFrame:
    """Read files, or sheets of them, with the same columns as one table."""
    kinds = {*map(_kind, files)}
    if len(kinds) > 1 or not kinds <= {*KINDS}:
        raise UsageError(
            f"{where} is not a table: all files must be of one kind, one of {', '.join(KINDS)} "
            "(unpack an archive into a folder first)"
        )
    tables = []
    chosen = sheet if sheet and kinds <= {*EXCEL} else [None]
    for file, sheet_name in itertools.product(files, chosen):
        with as_usage_error(f"{where}: {file.name} cannot be read"):
            refuse_pipe(file, f"{where}: {file.name}")
            table = _read_file(file, sheet=sheet_name, **options)
            names = [nfc(str(name).strip()) for name in table]
            # A missing name becomes the one that pandas gives.
            names = [name or f"Unnamed: {n}" for n, name in enumerate(names)]
            if len({*names}) < len(names):
                twice = max(names, key=names.count)
                raise ValueError(
                    f"two columns are called {twice!r}: rename one, or add a first line of names, "
                    "or say in which line they are by --header-row N"
                )
            table.columns = pd.Index(names, dtype=object)
        name = f"sheet {sheet_name!r}" if sheet_name else file.name
        tables.append(table)
        if [*table] != [*tables[0]]:
            raise UsageError(
                f"{where}: {name} has other columns than {chosen[0] or files[0].name}: all "
                "files of a folder, and sheets, must have the same"
            )
    return pd.concat(tables, ignore_index=True)


def _kind(path: Path) -> str:
    name = Path(path.name.lower())
    return Path(name.stem if name.suffix in COMPRESSED else name).suffix


def _read_file(path: Path, sheet: str | None, **given: Any) -> pd.DataFrame:
    """Read one file, or a sheet of it, as a frame. The names of its columns are as in the file."""
    from pyarrow import feather, parquet  # here: a run on synthetic data starts without it

    kind = _kind(path)
    first = given.get("header_row") or 1
    if kind == ".parquet" or kind in ARROW:
        # An index that pandas wrote is read too, because it may be a column that somebody named.
        table = feather.read_table(path) if kind in ARROW else parquet.ParquetFile(path).read()
        return table.to_pandas(ignore_metadata=True, integer_object_nulls=True)
    if kind in EXCEL:
        names, *rows = sheets.read_sheet(path, sheet)[first - 1 :]
        # The names are read as a row, because pandas would rename the second of two equal ones.
        return pd.DataFrame([names, *rows], dtype=object)[1:].set_axis(names, axis=1)
    text = read_text(str(path), given.get("encoding"))
    if kind == ".json":
        return _read_json(json.loads(text), path)
    if "json" in kind:
        lines = filter(str.strip, text.split("\n"))
        return pd.DataFrame([json.loads(line) for line in lines], dtype=object)
    begin = text.split("\n", first + 50)[first - 1 :] or [""]
    separator = given.get("separator") or _find_separator(begin)
    options = {"dtype": object, "keep_default_na": False, "header": None, "skiprows": first - 1}
    what = f"{path} cannot be read (--header-row N says in which line the names of the columns are)"
    with as_usage_error(what):
        cells = pd.read_csv(io.StringIO(text), sep=separator, **options)
    table = cells[1:].set_axis([*cells.iloc[0]], axis=1)
    table.attrs["separator"] = separator
    return table


def _find_separator(lines: Sequence[str]) -> str:
    """Return what splits the first line most often: , ; tab or |, or else blanks, as a pattern.

    Blanks do if all lines, but for the last one, have as many words.
    """
    separator = max(",;\t|", key=lines[0].count)
    words = {len(re.findall(r'"[^"]*"|\S+', line)) for line in lines[:-1] if line.strip()}
    return separator if separator in lines[0] or len(words) != 1 or words == {1} else r"\s+"


def _read_json(value: Any, path: Path) -> pd.DataFrame:
    """Return the rows of a list of objects, also within an object, or of columns by their names."""
    if not isinstance(value, dict):
        return pd.DataFrame(value, dtype=object)
    if {"columns", "data"} <= value.keys():  # orient="split" of pandas
        return pd.DataFrame(value["data"], columns=value["columns"], dtype=object)
    lists = [part for part in value.values() if isinstance(part, list)]
    if len(lists) == 1 and {*map(type, lists[0])} == {dict}:
        return pd.DataFrame(lists[0], dtype=object)
    if {*map(type, value.values())} == {dict} or {*map(type, value.values())} == {list}:
        with suppress(ValueError):  # columns that are not equally long
            return pd.DataFrame(value, dtype=object)
    raise UsageError(
        f"{path} is an object of JSON with {shorten([*map(repr, value)], MAX_SHOWN)}, and no "
        "table: write the rows into a list of objects, [{...}, ...]"
    )


def find_nested(table: pd.DataFrame) -> list[str]:
    """Return the columns that hold bytes, or lists or objects of values."""
    nested = {bytes, dict, list, np.ndarray}
    columns = pd.DataFrame(table).items()  # without attrs, which pandas would copy for each column
    return [n for n, x in columns if x.dtype == object and not nested.isdisjoint(map(type, x))]


def choose_columns(table: pd.DataFrame, names: Sequence[str], where: str) -> pd.DataFrame:
    """Return these columns, without spaces round texts, in NFC, and NaN in empty cells."""
    names = [*dict.fromkeys(names)]
    for name in names:
        if name not in table.columns:
            known = shorten([*table], MAX_SHOWN)
            if len(table.columns) == 1 or "Unnamed: " in known:
                known += ": --separator says what is between columns, --header-row where names are"
            raise UsageError(f"{where}: there is no column {name!r}, only {known}")
    if nested := find_nested(table[names]):
        raise UsageError(
            f"{where}: column {nested[0]!r} holds bytes, lists or objects of values, which are "
            "neither numbers nor texts: choose other columns"
        )
    columns = {}
    for name, values in pd.DataFrame(table[names]).items():
        # "Oslo " is Oslo, and " NA" is missing
        if pd.api.types.is_string_dtype(values.dtype):  # object too
            cells = [nfc(cell.strip()) if isinstance(cell, str) else cell for cell in values]
            cells = [np.nan if isinstance(cell, str) and not cell else cell for cell in cells]
            values = pd.Series(cells, table.index, dtype=object)
        columns[name] = values
    # Names as objects, because a table of thousands of columns is read column by column.
    return pd.DataFrame(columns, table.index, pd.Index([*columns], dtype=object))


def typed(*names: str) -> str:
    """Return column names as typed after a flag; one with a comma is in two pairs of quotes."""
    return shlex.quote(",".join(f'"{name}"' if "," in name else name for name in names))


def as_text(value: Any) -> str:
    """Return one text for all forms in which files give a value: 1 for 1.0, True for TRUE."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = re.sub(r"^(-?\d+)\.0+$", r"\1", str(value).strip())
    return text.capitalize() if text.lower() in ("true", "false") else text
