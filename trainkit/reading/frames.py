"""Read tables by pandas as they are written, and choose columns of them.

A file becomes a frame in _read_file. `where` names the table; the sentence of a UsageError begins
with it.
"""

import io
import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
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
    """Return all rows of read_parts as one table."""
    return pd.concat(read_parts(name, where, **options).values(), ignore_index=True)


def read_parts(name: str, where: str, **options: Any) -> dict[str, pd.DataFrame]:
    """Read a table file, a folder of such files or a Hub data set: each split, or all as "train".

    Values stay as they are written: those of text files are texts, "" if missing. separator: None
    means the one that splits the first line most often. encoding: see encodings.read_text. In
    attrs, "part" names the files of a table or its split, "unread" what is in no split, and
    "separator" is that of text files. Raises UsageError.
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
        parts = {split: shorten(files) for split, files in found.items()}
        tables = {
            split: _read_files([path / file for file in files], where, **options)
            for split, files in found.items()
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
    return pd.concat(tables, ignore_index=True)


def _kind(path: Path) -> str:
    name = Path(path.name.lower())
    return Path(name.stem if name.suffix in COMPRESSED else name).suffix


def _read_file(path: Path, separator: Any = None, encoding: Any = None, **_: Any) -> pd.DataFrame:
    """Read one file as a frame. The names of its columns are the first line of it, as it is."""
    import pyarrow.parquet  # here: a run on synthetic data starts without it

    kind = _kind(path)
    if kind == ".parquet":
        # An index that pandas wrote is read too, because it may be a column that somebody named.
        table = pyarrow.parquet.ParquetFile(path).read()
        return table.to_pandas(ignore_metadata=True, integer_object_nulls=True)
    if kind == ".xlsx":
        rows = pd.read_excel(path, header=None, dtype=object, keep_default_na=False)
        return rows[1:].set_axis([*rows.iloc[0]], axis=1)
    text = read_text(str(path), encoding)
    if kind == ".json":
        return pd.DataFrame(json.loads(text), dtype=object)
    if "json" in kind:
        lines = filter(str.strip, text.split("\n"))
        return pd.DataFrame([json.loads(line) for line in lines], dtype=object)
    first = text.partition("\n")[0]
    separator = separator or max(",;\t|", key=first.count)
    # The names are read as a row, because pandas would rename the second of two equal ones.
    options = {"dtype": str, "keep_default_na": False, "header": None, "sep": separator}
    rows = pd.read_csv(io.StringIO(text), **options)
    table = rows[1:].set_axis([*rows.iloc[0]], axis=1)
    table.attrs["separator"] = separator
    return table


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
