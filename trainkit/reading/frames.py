"""Read tables by pandas as they are written, and choose columns of them.

`where` names the table; the sentence of a UsageError begins with it.
"""

import io
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trainkit.errors import UsageError, as_usage_error
from trainkit.reading import splits
from trainkit.reading.encodings import read_text
from trainkit.reading.paths import read_here_or_from_hub, refuse_pipe, select_read
from trainkit.text import count, nfc, shorten

KINDS = (".csv", ".tsv", ".tab", ".txt", ".json", ".jsonl", ".ndjson", ".parquet", ".xlsx")
# Text files may also be followed by one of these.
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
MAX_SHOWN = 30  # columns in a message


def read_table(name: str, where: str, **options: Any) -> pd.DataFrame:
    """Read all rows of a table file, of a folder of such files or of a Hub data set.

    Values stay as they are written: those of text files are texts, "" if missing. Raises
    UsageError. separator: None means the one that splits the first line most often. encoding: see
    encodings.read_text. attrs["encodings"] says which files are in another one, and
    attrs["separator"] is that of the text files.
    """
    return _join_tables([*_read_all(name, where, **options).values()])


def read_parts(
    name: str, where: str, named: Sequence[str | None] = (), **options: Any
) -> dict[str, pd.DataFrame]:
    """Return read_table of each split that the user made, or "train" with all rows.

    attrs["part"] of a table is what it is called, attrs["files"] names its files, attrs["unread"]
    of "train" what is in no split, and attrs["split"] is a note about a column called split. One
    that says which rows are evaluated is left out, unless it is in `named`: the user wants it.
    """
    parts = _read_all(name, where, **options)
    table = parts["train"]
    names = [name for name in table if splits.may_say_split(name) and name not in named]
    found = splits.read_split_columns({name: table[name] for name in names})
    if found.rows and len(parts) == 1:
        parts = {split: table.iloc[rows] for split, rows in found.rows.items() if split}
        for split, part in parts.items():
            part.attrs["part"] = found.names[split]
        parts["train"].attrs["unread"] = found.names.get("", "")
    parts["train"].attrs["split"] = found.note
    return {
        split: part.drop(columns=found.columns, errors="ignore") for split, part in parts.items()
    }


def _read_all(name: str, where: str, **options: Any) -> dict[str, pd.DataFrame]:
    """Return the tables of read_parts by their files and parts alone, with all columns."""
    path = Path(name)
    is_here = os.path.exists(name)  # noqa: PTH110, which raises OSError for a name that is too long
    if not is_here or splits.is_saved(path):
        with read_here_or_from_hub(name, where):
            parts = splits.load_parts(name)
            unread, _ = parts.pop("", ("", None))
            tables = {split: rows.to_pandas() for split, (_, rows) in parts.items()}
        for split, table in tables.items() if len(tables) > 1 else ():
            table.attrs["files"] = table.attrs["part"] = parts[split][0]
        tables["train"].attrs["unread"] = unread
        return tables
    inside = [file for file in sorted(path.rglob("*")) if _kind(file) in KINDS and file.is_file()]
    names = select_read([file.relative_to(path).as_posix() for file in inside], where)
    if not names:
        return {"train": _read_files([path], where, **options)}
    found = splits.find_splits(names)
    unread = shorten(found.pop("", []))
    tables = {
        split: _read_files([path / name for name in files], where, **options)
        for split, files in found.items()
    }
    for split, files in found.items():
        shown = files if len(found) > 1 else [Path(file).name for file in files]
        tables[split].attrs["files"] = tables[split].attrs["part"] = shorten(shown)
    tables["train"].attrs["unread"] = unread
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
    """
    names = {split: table.attrs["part"] for split, table in parts.items() if len(parts) > 1}
    if parts["train"].attrs.get("unread"):
        names[""] = parts["train"].attrs["unread"]
    split, unread = splits.choose_evaluated(
        names, lambda split: is_labelled(parts[split]), bool(eval_data)
    )
    chosen, name = (parts[split], names[split]) if split else (None, "")
    if eval_data:
        name = f"--eval-data {eval_data}"
        own = read_parts(eval_data, name, named, **options)
        chosen = next((own[split] for split in splits.EVALUATED if split in own), own["train"])
        if len(own) > 1:
            name += f", {chosen.attrs['part']}"
    line = "" if chosen is None else f"{name}: {count(len(chosen), noun)}"
    lines = splits.describe_given(line, unread, parts["train"].attrs["split"])
    read = [*parts.values()]
    if chosen is not None:
        chosen.attrs["where"] = name
        read.append(chosen)
    if notes := [*dict.fromkeys(n for table in read for n in table.attrs.get("encodings", ()))]:
        lines["encoding"] = shorten(notes)
    return chosen, lines


def _read_files(files: Sequence[Path], where: str, **options: Any) -> pd.DataFrame:
    """Read files with the same columns as one table."""
    kinds = {*map(_kind, files)}
    if len(kinds) > 1 or not kinds <= {*KINDS}:
        raise UsageError(
            f"{where} is not a table: all files must be of one kind, one of {', '.join(KINDS)}"
        )
    tables = []
    for file in files:
        with as_usage_error(f"{where}: {file.name} cannot be read"):
            refuse_pipe(file, f"{where}: {file.name}")
            table = _read_file(file, **options)
            names = [nfc(str(name).strip()) for name in table]
            # A missing name becomes the one that pandas gives.
            names = [name or f"Unnamed: {n}" for n, name in enumerate(names)]
            if len({*names}) < len(names):
                twice = max(names, key=names.count)
                raise ValueError(
                    f"two columns are called {twice!r}: rename one, or add a first line of names"
                )
            table.columns = names
        tables.append(table)
        if [*table] != [*tables[0]]:
            raise UsageError(
                f"{where}: {file.name} has other columns than {files[0].name}: all "
                "files of a folder must have the same"
            )
    return _join_tables(tables)


def _join_tables(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of all tables as one, with the attrs of read_table."""
    joined = pd.concat(tables, ignore_index=True)
    notes = (note for table in tables for note in table.attrs.get("encodings", ()))
    joined.attrs["encodings"] = [*dict.fromkeys(notes)]
    joined.attrs["separator"] = tables[0].attrs.get("separator", "")
    return joined


def _kind(path: Path) -> str:
    name = Path(path.name.lower())
    return Path(name.stem if name.suffix in COMPRESSED else name).suffix


def _read_file(path: Path, separator: Any = None, encoding: Any = None, **_: Any) -> pd.DataFrame:
    import pyarrow.parquet  # here: a run on synthetic data starts without it

    kind = _kind(path)
    if kind == ".parquet":
        # An index that pandas wrote is read too, because it may be a column that somebody named.
        table = pyarrow.parquet.ParquetFile(path).read()
        return table.to_pandas(ignore_metadata=True, integer_object_nulls=True)
    if kind == ".xlsx":
        return _name_columns(pd.read_excel(path, header=None, dtype=object, keep_default_na=False))
    text, note = read_text(str(path), encoding)
    if "json" in kind:
        decode = partial(json.loads, parse_int=_read_whole)
        lines = filter(str.strip, text.split("\n"))
        rows = decode(text) if kind == ".json" else [*map(decode, lines)]
        table = pd.DataFrame(rows, dtype=object)
    else:
        first = text.partition("\n")[0]
        separator = separator or max(",;\t|", key=first.count)
        # The names are read as a row, because pandas would rename the second of two equal ones.
        options = {"dtype": str, "keep_default_na": False, "header": None, "sep": separator}
        try:
            cells = pd.read_csv(io.StringIO(text), **options)
        except pd.errors.ParserError as problem:
            rule = "the first line must name all columns, and quotation marks come in pairs"
            raise ValueError(f"{str(problem).strip()}: {rule}") from None
        table = _name_columns(cells)
        table.attrs["separator"] = separator
    table.attrs["encodings"] = [f"{path.name} {note}"] if note else []
    return table


def _read_whole(text: str) -> float:
    """Return a whole number of JSON; no float is as large as one of more digits than these."""
    return int(text) if len(text) < 300 else math.inf


def _name_columns(rows: pd.DataFrame) -> pd.DataFrame:
    """Take the names of the columns from the first row. Raises ValueError if that holds data."""
    names = [str(name).strip() for name in rows.iloc[0]]
    numbers = pd.to_numeric(pd.Series(names), errors="coerce")
    table = rows[1:]
    if (numbers % 1 > 0).any() and all(
        pd.notna(number) or name in {*table[column].astype(str)}
        for name, number, column in zip(names, numbers, rows, strict=True)
    ):
        raise ValueError(
            f"the first line must name the columns, but it holds data, {shorten(names)}: add a "
            "line of names above it"
        )
    return table.set_axis(names, axis=1)


def choose_columns(table: pd.DataFrame, names: Sequence[str], where: str) -> pd.DataFrame:
    """Return these columns, without spaces round texts, in NFC, and NaN in empty cells."""
    for name in names:
        if name not in table.columns:
            raise UsageError(
                f"{where}: there is no column {name!r}, only {shorten([*table], MAX_SHOWN)}"
            )
        values = table[name]
        if values.dtype == object and {*map(type, values)} & {bytes, dict, list, np.ndarray}:
            raise UsageError(
                f"{where}: column {name!r} holds bytes or lists of values, which are neither "
                "numbers nor texts: choose other columns with --features"
            )
    chosen = table[[*dict.fromkeys(names)]].copy()
    for name in chosen:  # "Oslo " is Oslo, and " NA" is missing
        if pd.api.types.is_string_dtype(chosen[name].dtype):  # object too
            cells = [nfc(cell.strip()) if isinstance(cell, str) else cell for cell in chosen[name]]
            chosen[name] = pd.Series(cells, chosen.index, dtype=object)
    return chosen.mask(chosen.isin([""]))


def typed(*names: str) -> str:
    """Return column names as typed after a flag; one with a comma is in two pairs of quotes."""
    return shlex.quote(",".join(f'"{name}"' if "," in name else name for name in names))


def as_text(value: Any) -> str:
    """Return one text for all forms in which files give a value: 1 for 1.0, True for TRUE."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = re.sub(r"^(-?\d+)\.0+$", r"\1", str(value).strip())
    return text.capitalize() if text.lower() in ("true", "false") else text
