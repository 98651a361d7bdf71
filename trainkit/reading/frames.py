"""Read tables by pandas as they are written, and choose columns of them.

`where` names the table; the sentence of a UsageError begins with it.
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from trainkit.errors import UsageError, as_usage_error
from trainkit.reading import splits
from trainkit.reading.encodings import Encoding, find_encoding
from trainkit.reading.paths import read_here_or_from_hub, refuse_pipe, select_read
from trainkit.text import count, first_sentence, nfc, shorten

KINDS = (".csv", ".tsv", ".tab", ".txt", ".json", ".jsonl", ".ndjson", ".parquet", ".xlsx")
# Text files may also be followed by one of these.
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
MAX_DIGITS = 300  # of a whole number that a float can hold
MAX_SHOWN = 30  # columns in a message


class TextForm(NamedTuple):
    """How a text file writes a table.

    encoding: of the text after the byte order mark. first_line: such as sep=;, which Excel reads,
    above the names of the columns. line_end: of a row.
    """

    encoding: str = "utf-8"
    mark: bytes = b""
    separator: str = ","
    first_line: str = ""
    line_end: str = os.linesep


def read_table(name: str, where: str, **options: Any) -> pd.DataFrame:
    """Read all rows of a table file, of a folder of such files or of a Hub data set.

    Values stay as they are written: those of text files are texts, "" if missing. Raises
    UsageError.

    separator: None means the one that splits the first line most often. encoding: None means UTF-8;
    encodings.find_encoding says when it is not the one that is read. Other options come from older
    runs. attrs["form"] is the TextForm of text files but JSON, the usual one if they differ, and
    attrs["encodings"] has a note for each file that is in another encoding than the given one.
    """
    parts = [*_read_all(name, where, **options).values()]
    return _join_tables(parts) if len(parts) > 1 else parts[0]


def read_parts(
    name: str, where: str, meant_otherwise: Sequence[str | None] = (), **options: Any
) -> dict[str, pd.DataFrame]:
    """Return read_table of each split that the user made, as splits.find_splits names them.

    There is only "train", with all rows, if none was made. Beside the attrs of read_table,
    attrs["files"] of a table names its files, and attrs["part"] what it is called. attrs["unread"]
    of "train" names what is in no split, and attrs["split"] is a sentence about columns that say
    which rows are evaluated. Such columns are left out, and rows keep the index that they have in
    the whole table.

    meant_otherwise: columns that are not asked.
    """
    parts = _read_all(name, where, **options)
    table = parts["train"]
    names = [name for name in table if name not in meant_otherwise and splits.may_say_split(name)]
    found = splits.read_split_columns({name: table[name] for name in names})
    if len(parts) == 1 and found.rows:
        files = table.attrs.get("unread", "")
        parts = {split: table.iloc[rows] for split, rows in found.rows.items() if split}
        for split, part in parts.items():
            part.attrs["part"] = found.names[split]
        unread = [files, found.names.get("", "")]
        parts["train"].attrs["unread"] = ", ".join(filter(None, unread))
        parts["train"].attrs["split"] = found.note
    elif len(parts) == 1:
        table.attrs["split"] = found.note
    elif found.columns:
        table.attrs["split"] = f"column {shorten(found.columns)} is not read, as the files say it"
    return {
        split: part.drop(columns=found.columns, errors="ignore") for split, part in parts.items()
    }


def _read_all(name: str, where: str, **options: Any) -> dict[str, pd.DataFrame]:
    """Return the tables of read_parts by their files and parts alone, with all columns."""
    path = Path(name)
    try:
        is_here = path.exists()
    except (OSError, ValueError) as problem:  # a name may be too long for a path
        raise UsageError(f"{where:.80} cannot be read: {first_sentence(problem):.80}") from None
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
    meant_otherwise: Sequence[str | None] = (),
    **options: Any,
) -> tuple[pd.DataFrame | None, dict[str, str]]:
    """Return the table to evaluate on, None if a share of the training rows is, and plan lines.

    It is that of --eval-data, or else a split of read_parts. attrs["where"] of the table names it.
    Raises UsageError.

    noun: what a row is called. The other options are those of read_parts.
    """
    names = {split: table.attrs["part"] for split, table in parts.items() if len(parts) > 1}
    if parts["train"].attrs.get("unread"):
        names[""] = parts["train"].attrs["unread"]
    split, unread = splits.choose_evaluated(
        names, lambda split: is_labelled(parts[split]), bool(eval_data)
    )
    if eval_data:
        name = f"--eval-data {eval_data}"
        own = read_parts(eval_data, name, meant_otherwise, **options)
        chosen = next((own[split] for split in splits.EVALUATED if split in own), own["train"])
        if len(own) > 1:
            name += f", {chosen.attrs['part']}"
    elif split:
        name = names[split]
        chosen = parts[split]
    else:
        chosen = None
    note = parts["train"].attrs.get("split", "")
    if chosen is None:
        return None, splits.describe_given("", unread, note) | describe_encodings(parts.values())
    chosen.attrs["where"] = name
    if len(parts) == 1:  # nobody needs a column that might have told what is evaluated
        note = ""
    line = f"{name}: {count(len(chosen), noun)}"
    encodings = describe_encodings([*parts.values(), chosen])
    return chosen, splits.describe_given(line, unread, note) | encodings


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
            try:
                table = _read_file(file, **options)
            except UnicodeError:
                raise UsageError(
                    f"{where}: {file.name} is not in UTF-8, or not in the given "
                    "--encoding: try --encoding cp1252 or utf-16"
                ) from None
            # If rows of JSON are lists, the names of the columns are the numbers 0, 1 and so on.
            table.columns = [*_unique([(nfc(str(name).strip()), 0) for name in table])]
        tables.append(table)
        if [*table] != [*tables[0]]:
            raise UsageError(
                f"{where}: {file.name} has other columns than {files[0].name}: all "
                "files of a folder must have the same"
            )
    return _join_tables(tables)


def _join_tables(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of all tables as one. Its attrs are those of read_table and the question."""
    joined = pd.concat(tables, ignore_index=True)
    joined.attrs = {"encodings": list_encodings(tables)}
    forms = {table.attrs.get("form") for table in tables}
    if None not in forms:
        joined.attrs["form"] = forms.pop() if len(forms) == 1 else TextForm()
    questions = {table.attrs.get("question") for table in tables}
    if len(questions) == 1 and None not in questions:
        joined.attrs["question"] = questions.pop()
    return joined


def _kind(path: Path) -> str:
    name = Path(path.name.lower())
    return Path(name.stem if name.suffix in COMPRESSED else name).suffix


def _read_file(path: Path, separator: Any = None, encoding: Any = None, **_: Any) -> pd.DataFrame:
    import fsspec  # these two are imported here: a run on synthetic data starts without them
    import pyarrow.parquet

    kind = _kind(path)
    if kind == ".parquet":
        # An index that pandas wrote is read too, because it may be a column that somebody named.
        table = pyarrow.parquet.ParquetFile(path).read()
        return table.to_pandas(ignore_metadata=True, integer_object_nulls=True)
    if kind == ".xlsx":
        return _name_columns(pd.read_excel(path, header=None, dtype=object, keep_default_na=False))
    found = find_encoding(str(path), encoding)  # reads all of a file that may be in another one
    notes = [f"{path.name} {found.note}"] if found.note else []
    source = fsspec.open(path, "rt", encoding=found.reader, compression="infer")
    if "json" in kind:
        with source as file:
            decode = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_read_whole).decode
            lines = filter(str.strip, file)
            rows = decode(file.read()) if kind == ".json" else [*map(decode, lines)]
            table = _without_halves(pd.DataFrame(rows, dtype=object))
        table.attrs["encodings"] = notes
        return table
    form = _read_form(path, separator, found)
    with source as file:
        if form.first_line:
            file.readline()
        separator = separator or form.separator
        # The names are read as a row, because pandas would rename the second of two equal ones.
        try:
            rows = pd.read_csv(file, sep=separator, dtype=str, keep_default_na=False, header=None)
        except pd.errors.ParserError as problem:
            rule = "the first line must name all columns, and quotation marks come in pairs"
            raise ValueError(f"{str(problem).strip()}: {rule}") from None
    table = _name_columns(rows)
    table.attrs |= {"form": form, "encodings": notes}
    return table


def list_encodings(tables: Iterable[pd.DataFrame]) -> list[str]:
    """Return the notes of read_table about encodings, each once."""
    notes = [note for table in tables for note in table.attrs.get("encodings", ())]
    return [*dict.fromkeys(notes)]


def describe_encodings(tables: Iterable[pd.DataFrame]) -> dict[str, str]:
    """Return the line of the plan about files that are in another encoding than the given one."""
    notes = list_encodings(tables)
    return {"encoding": shorten(notes)} if notes else {}


def _read_form(path: Path, separator: str | None, found: Encoding) -> TextForm:
    """Return how a text file is written. separator: the given one, which may be a pattern."""
    import fsspec

    options = {"encoding": found.reader, "compression": "infer", "newline": ""}
    with fsspec.open(path, "rt", **options) as file:
        first = file.readline()
        is_extra = first.startswith(("sep=", '"sep='))
        line_end = _find_line_end(file if is_extra else chain([first], file))
    usual = max(",;\t|", key=first.count)
    if separator and len(separator) > 1:
        match = re.search(separator, first)
        separator = match[0][:1] if match else ""
    extra = first.rstrip("\r\n") if is_extra else ""  # which may end with a tab
    return TextForm(found.writer, found.mark, separator or usual, extra, line_end)


def _find_line_end(lines: Iterable[str]) -> str:
    """Return what ends the first row. A line break between quotation marks ends none."""
    is_inside = False
    for line in lines:
        is_inside ^= line.count('"') % 2 == 1
        if not is_inside:
            return next((end for end in ("\r\n", "\n", "\r") if line.endswith(end)), os.linesep)
    return os.linesep


def _read_whole(text: str) -> int | str:
    """Return a whole number of JSON, as a text if no float is as large."""
    return text if len(text) > MAX_DIGITS else int(text)


def _without_halves(table: pd.DataFrame) -> pd.DataFrame:
    """Replace halves of surrogate pairs, which JSON may hold and no file can be written with."""
    for name in table:
        cells = [_heal(cell) if isinstance(cell, str) else cell for cell in table[name]]
        table[name] = pd.Series(cells, table.index, dtype=object)
    return table.rename(columns=lambda name: _heal(name) if isinstance(name, str) else name)


def _heal(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _name_columns(rows: pd.DataFrame) -> pd.DataFrame:
    """Take the names of the columns from the first row. Raises ValueError if that holds data."""
    names = [str(name).strip() for name in rows.iloc[0]]
    numbers = pd.to_numeric(pd.Series(names), errors="coerce")
    table = rows[1:]
    if numbers.notna().any() and all(
        pd.notna(number) or name in {*table[column].astype(str).str.strip()}
        for name, number, column in zip(names, numbers, rows, strict=True)
    ):
        if (numbers % 1 > 0).any() or numbers.isna().any():
            raise ValueError(
                f"the first line must name the columns, but it holds data, {shorten(names)}: add a "
                "line of names above it"
            )
        question = f"the first line is {shorten(names)}: if it is data, add a line of names above"
        table.attrs["question"] = question
    for i, name in enumerate(names):  # a missing name becomes the one pandas gives
        if not name:
            names[i] = f"Unnamed: {i}.0" if f"Unnamed: {i}" in names else f"Unnamed: {i}"
    return table.set_axis(names, axis=1)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of these pairs of name and value. Raises ValueError if a name comes twice."""
    names = [name for name, _ in pairs]
    if len({*names}) < len(names):
        twice = max(names, key=names.count)
        raise ValueError(
            f"two columns are called {twice!r}: rename one, or add a first line of names"
        )
    return dict(pairs)


def choose_columns(table: pd.DataFrame, names: Sequence[str], where: str) -> pd.DataFrame:
    """Return these columns, without spaces round texts, in NFC, and NaN in empty cells.

    attrs["respelt"] is how many cells were in another form of Unicode. Raises UsageError if a
    column is missing or holds nested values.
    """
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
    num_respelt = 0
    for name in chosen:  # "Oslo " is Oslo, and " NA" is missing
        if pd.api.types.is_string_dtype(chosen[name].dtype) and chosen[name].dtype != object:
            stripped = chosen[name].str.strip()
            chosen[name] = stripped.str.normalize("NFC")
            num_respelt += int((chosen[name] != stripped).sum())
        elif chosen[name].dtype == object:
            cells = [cell.strip() if isinstance(cell, str) else cell for cell in chosen[name]]
            spelt = [nfc(cell) if isinstance(cell, str) else cell for cell in cells]
            num_respelt += sum(a is not b and a != b for a, b in zip(cells, spelt, strict=True))
            # As objects: Arrow's texts cannot hold half of a surrogate pair, which JSON may.
            chosen[name] = pd.Series(spelt, chosen.index, dtype=object)
    chosen = chosen.mask(chosen.isin([""]))
    chosen.attrs["respelt"] = num_respelt
    return chosen


def describe_spelling(*tables: pd.DataFrame) -> dict[str, str]:
    """Return the line of the plan about cells that choose_columns has put into NFC."""
    number = sum(table.attrs["respelt"] for table in tables)
    if not number:
        return {}
    return {"spelling": f"{count(number, 'cell')} in another form of Unicode, read in NFC"}


def typed(*names: str) -> str:
    """Return column names as typed after a flag; one with a comma is in two pairs of quotes."""
    return shlex.quote(",".join(f'"{name}"' if "," in name else name for name in names))


def as_text(value: Any) -> str:
    """Return one text for all forms in which files give a value: 1 for 1.0, True for TRUE."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = re.sub(r"^(-?\d+)\.0+$", r"\1", str(value).strip())
    return text.capitalize() if text.lower() in ("true", "false") else text
