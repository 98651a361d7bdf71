"""Write a copy of a table, with columns of predictions, beside the table."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from trainkit.errors import UsageError, as_usage_error
from trainkit.reading import frames
from trainkit.store.atomic import write_durably
from trainkit.tables.columns import Column, ask_words, empty_cells, encode, parse_cells
from trainkit.tables.marks import has_decimal_comma
from trainkit.text import count, shorten, write_number

# Texts that a spreadsheet would run: they begin with = + - or @ and are not numbers (with a decimal
# comma or point), or begin with a tab or line break.
FORMULA = r"\A(?!\s*[+-]?(\d[\d.,]*|[.,]\d+)([eE][+-]?\d+)?\s*\Z)(\s*[=+@-]|[\t\n])"

# A number is named if it is further beyond those of the training rows, in parts of their range.
MARGIN = 0.1
OUTSIDE = "outside_training_range"  # the column that names such numbers, if there are any

WRITTEN: dict[Path, Path] = {}  # by this process: each file and the table it was made from


def add_predictions(
    path: Path,
    metadata: dict[str, Any],
    predict: Callable[[torch.Tensor], dict[str, Any]],
    encoding: str | None = None,
) -> str:
    """Write TABLE_predictions.csv, the rows of a table and the columns that predict returns.

    What was a text file is written in the same form: separator, decimal mark, encoding, byte order
    mark and ends of the lines. Returns a text: the path, categories that training did not have,
    which rows have numbers beyond those of the training rows (one more column names them all),
    which have no prediction and why, and the first rows. A text that a spreadsheet would run as a
    formula gets an apostrophe in front. Raises UsageError, also if no row can be predicted.

    encoding: None means that of the training table.
    """
    where = str(path)
    path = path if path.stem.strip(".") else path.resolve()  # . has no name of its own
    if not path.exists():
        raise UsageError(f"{where} cannot be read: there is no such file")
    options = metadata.get("read_options", {}) | ({"encoding": encoding} if encoding else {})
    written = frames.read_table(where, where, **options)
    columns = [Column(**column) for column in metadata["columns"]]
    table = frames.choose_columns(written, [column.name for column in columns], where)
    form = written.attrs.get("form")
    if not len(table):
        raise UsageError(f"{where}: there is no row below the names of the columns")
    if options.get("missing_values"):
        table, _ = empty_cells(table, options["missing_values"])
    inputs, problems = encode(table, columns)
    why = {
        row: f"row {row + 1} (column {name!r}: {cell})" for row, name, cell in reversed(problems)
    }
    unknown = shorten([why[row] for row in sorted(why)])
    unknown += describe_words(table, problems, columns, options.get("missing_values", []))
    if len(why) == len(table):
        raise UsageError(f"{where}: no row can be predicted: {unknown}")
    predictions = pd.DataFrame(predict(torch.from_numpy(inputs)))
    predictions.loc[[*why]] = np.nan
    outside = find_outside(table, inputs, columns, metadata)
    added = [*predictions, *([OUTSIDE] if outside else [])]
    if taken := [name for name in added if name in written]:
        raise UsageError(f"{where} has a column {taken[0]!r} already: rename or remove it")
    notes = ""
    for column in columns:
        if column.categories:
            texts = parse_cells(table[column.name], column).dropna()
            if new := [*map(repr, texts[~texts.isin(column.categories)].unique())]:
                notes += f"  (column {column.name!r}: {shorten(new)} not in the training rows)"
    for line in frames.describe_encodings([written]).values():
        notes += f"\n{line}"
    if outside:
        named = [f"row {row + 1} ({shorten(outside[row], 2)})" for row in sorted(outside)]
        notes += f"\noutside the range of the training rows: {shorten(named)}"
    if why:
        notes += f"\nno prediction for {unknown}"
    kinds, packed = ("|".join(map(re.escape, x)) for x in (frames.KINDS, frames.COMPRESSED))
    stem = re.sub(rf"({kinds})({packed})?$", "", path.name, flags=re.IGNORECASE)
    output = path.with_name(f"{stem}_predictions.csv")
    if WRITTEN.setdefault(output.resolve(), path.resolve()) != path.resolve():
        raise UsageError(f"{where}: {output} has just been written for another table: rename one")
    rows = written.join(predictions)
    plain = partial(write_number, digits=6, separator="")
    shown = rows.head().to_string(
        index=False, max_cols=6, max_colwidth=20, line_width=79, float_format=plain
    )
    if outside:  # each of them, where the message names the first rows
        rows[OUTSIDE] = pd.Series({row: "; ".join(outside[row]) for row in outside}, rows.index)
    rows = rows.astype(object).where(rows.notna(), "")  # or map would turn ids into floats
    target = metadata.get("target_decimal", "")  # older runs have none
    if form is not None and has_decimal_comma(written, columns, target, form.separator):
        rows[[*predictions]] = rows[[*predictions]].map(_with_comma)
    rows = rows.map(_not_a_formula).rename(columns=_not_a_formula)
    form = form or frames.TextForm()
    text = rows.to_csv(index=False, sep=form.separator, lineterminator=form.line_end)
    if form.first_line:
        text = form.first_line + form.line_end + text
    try:
        content = form.mark + text.encode(form.encoding)
    except UnicodeEncodeError as problem:
        content = text.encode("utf-8-sig")
        letter = text[problem.start]
        notes += f"\nwritten in UTF-8, as {form.encoding} has no {letter!r}"
    write_durably(output, content)
    return f"{output}{notes}\n{shown}"


def _with_comma(value: Any) -> Any:
    return str(value).replace(".", ",") if isinstance(value, float | np.floating) else value


def describe_words(
    table: pd.DataFrame,
    problems: Sequence[tuple[int, str, str]],
    columns: Sequence[Column],
    known: Sequence[str],
) -> str:
    """Return what to do about words among numbers, or "". The arguments are those of ask_words."""
    words, flag = ask_words(table, problems, known)
    if not words:
        return ""
    refused = {name for _, name, _ in problems}
    if all(column.fill is not None for column in columns if column.name in refused):
        return f"; if {words} means a missing value, empty the cell, or train with {flag}"
    return f"; if {words} means a missing value, train with {flag} --missing impute"


def find_outside(
    table: pd.DataFrame, inputs: np.ndarray, columns: Sequence[Column], metadata: dict[str, Any]
) -> dict[int, list[str]]:
    """Return the rows with numbers beyond those of the training rows, and a text for each number.

    inputs: what encode() returns for the table and these columns.
    """
    found: dict[int, list[str]] = {}
    place = 0
    for column in columns:
        if not column.holds_texts:
            low, high = metadata["feature_range"][place]
            beyond = np.maximum(low - inputs[:, place], inputs[:, place] - high)
            for row in table.index[beyond > MARGIN * (high - low)]:
                limits = [write_number(limit, 6, separator="") for limit in (low, high)]
                if column.days:
                    limits = [str(np.datetime64(int(limit), "D")) for limit in (low, high)]
                cell = f"column {column.name!r}: {table[column.name][row]!s:.40}"
                found.setdefault(row, []).append(f"{cell}, not {' to '.join(limits)}")
        place += len(column.feature_names())
    return found


def write_answers(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write the predictions for pictures as CSV, a row for each, and return a line that says so.

    The columns are file, prediction, probability, doubt (what makes it unsure, or nothing) and
    error. A text that a spreadsheet would run as a formula gets an apostrophe in front.
    """
    columns = ["file", "prediction", "probability", "doubt", "error"]
    table = pd.DataFrame(rows, columns=columns).astype(object)
    table = table.where(table.notna(), "").map(_not_a_formula)
    with as_usage_error(f"--csv {path} cannot be written"):
        text = table.to_csv(index=False)
        write_durably(path, text.encode(errors="backslashreplace"))
    return f"{count(len(table), 'answer')} in {path}"


def _not_a_formula(value: Any) -> Any:
    if isinstance(value, str):  # the CSV writer does not quote \r
        return re.sub(FORMULA, r"'\g<0>", value.replace("\r", "\n"))
    return value
