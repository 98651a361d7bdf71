"""A table with a column for each prediction, written beside the table it is about."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from datakit import tables
from trainkit.errors import UsageError
from trainkit.rundir import write_durably
from trainkit.text import shorten

# What a spreadsheet would run: = + - @ first, but no number; or a tab or line break first.
FORMULA = r"\A(?!\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*\Z)(\s*[=+@-]|[\t\n])"

WRITTEN: dict[Path, Path] = {}  # by this process: from which table


def add_predictions(
    path: Path, about: dict[str, Any], predict: Callable[[torch.Tensor], np.ndarray]
) -> str:
    """Write TABLE_predictions.csv, the rows of a table and a column for each target.

    Returns its path, in brackets what is strange, and the first rows. A text that a spreadsheet
    would run as a formula gets an apostrophe in front. Raises UsageError.
    """
    where, options = str(path), about.get("read_options", {})
    path = path if path.stem.strip(".") else path.resolve()  # . has no name to write beside
    if not path.exists():
        raise UsageError(f"{where} cannot be read: there is no such file")
    table = tables.read_table(where, where, **options)
    columns = [tables.Column(**column) for column in about["columns"]]
    values = predict(torch.from_numpy(tables.encode(table, columns, where)))
    predictions = pd.DataFrame(values, columns=[f"predicted_{name}" for name in about["targets"]])
    if taken := [name for name in predictions if name in table]:
        raise UsageError(f"{where} has a column {taken[0]!r} already: rename or remove it")
    notes = ""
    for column in columns:
        if column.categories:
            texts = tables.parse_column(table[column.name], where, True).dropna()
            if new := [*map(repr, texts[~texts.isin(column.categories)].unique())]:
                notes += f"  (column {column.name!r}: {shorten(new)} not in the training rows)"
    # The rows as they are written: 01234 stays 01234.
    rows = tables.read_table(where, where, **options | {"dtype": "object"}).join(predictions)
    kinds = "|".join(kind[1:] for kind in tables.KINDS)
    stem = re.sub(rf"\.({kinds})(\.gz)?$", "", path.name, flags=re.IGNORECASE)
    output = path.with_name(f"{stem}_predictions.csv")
    if WRITTEN.setdefault(output.resolve(), path.resolve()) != path.resolve():
        raise UsageError(f"{where}: {output} has just been written for another table: rename one")
    rows = rows.astype(object).where(rows.notna(), "")  # else map makes floats of ids and NaN
    rows = rows.map(_not_a_formula).rename(columns=_not_a_formula)
    write_durably(output, rows.to_csv(index=False).encode())
    first_rows = (
        table.join(predictions)
        .head()
        .to_string(
            index=False, max_cols=6, max_colwidth=20, line_width=79, float_format="{:.6g}".format
        )
    )
    return f"{output}{notes}\n{first_rows}"


def _not_a_formula(value: Any) -> Any:
    if isinstance(value, str):  # the writer would not put \r into quotes
        return re.sub(FORMULA, r"'\g<0>", value.replace("\r", "\n"))
    return value
