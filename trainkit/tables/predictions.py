"""Write a copy of a table, with columns of predictions, beside the table.

It is in UTF-8, with commas and decimal points.
"""

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
from trainkit.reading.predictor import Classifier, Predictor
from trainkit.store.atomic import write_durably
from trainkit.tables.columns import Column, empty_cells, encode, read_cells
from trainkit.text import count, shorten, write_number

# Texts that a spreadsheet would run: they begin with = + - or @ and are not numbers (with a decimal
# comma or point), or begin with a tab or line break.
FORMULA = r"\A(?!\s*[+-]?(\d[\d.,]*|[.,]\d+)([eE][+-]?\d+)?\s*\Z)(\s*[=+@-]|[\t\n])"

# A number is named if it is further beyond those of the training rows, in parts of their range.
MARGIN = 0.1
OUTSIDE = "outside_training_range"  # the column that names such numbers, if there are any

WRITTEN: dict[Path, Path] = {}  # by this process: each file and the table it was made from


class TableRows(Predictor):
    """Takes features, float64 (n, features), in their own units.

    They are float64 because float32 cannot tell ids or times in milliseconds apart. In a subclass,
    answer_rows returns the columns that are written for inputs of forward.
    """

    options = ("encoding",)
    answer_rows: Callable[[torch.Tensor], dict[str, Any]]

    def prepare(self, inputs: torch.Tensor) -> torch.Tensor:
        return ((inputs - self.numbers("feature_mean")) / self.numbers("feature_std")).float()

    def example_inputs(self) -> torch.Tensor:
        mean = self.numbers("feature_mean")
        std = self.numbers("feature_std")
        return torch.randn(64, len(mean)) * std + mean

    def predict_file(self, path: Path, **options: Any) -> str:
        """Write TABLE_predictions.csv: the rows of a table and the columns of answer_rows."""
        return add_predictions(path, self.metadata, self.answer_rows, options.get("encoding"))


class TablePredictor(TableRows):
    """Maps features to targets, (n, targets), in their own units."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.model(self.prepare(inputs))
        return outputs * self.numbers("target_std") + self.numbers("target_mean")

    def answer_rows(self, inputs: torch.Tensor) -> dict[str, Any]:
        outputs = zip(self.metadata["targets"], self(inputs).numpy().T, strict=True)
        return {f"predicted_{name}": values for name, values in outputs}


class TableClassifier(TableRows, Classifier):
    """Maps features to class probabilities."""

    def answer_rows(self, inputs: torch.Tensor) -> dict[str, Any]:
        probability, number = self(inputs).max(1)
        (name,), classes = self.metadata["targets"], self.metadata["classes"]
        answers = [classes[n] for n in number.tolist()]
        return {f"predicted_{name}": answers, f"probability_{name}": probability.numpy()}


def add_predictions(
    path: Path,
    metadata: dict[str, Any],
    predict: Callable[[torch.Tensor], dict[str, Any]],
    encoding: str | None = None,
) -> str:
    """Write TABLE_predictions.csv, the rows of a table and the columns that predict returns.

    Returns a text: the path, categories that training did not have, which rows have numbers beyond
    those of the training rows (one more column names them all), which have no prediction and why,
    and the first rows. Raises UsageError, also if no row can be predicted.

    encoding: None means that of the training table.
    """
    where = str(path)
    path = path if path.stem.strip(".") else path.resolve()  # . has no name of its own
    if not path.exists():
        raise UsageError(f"{where} cannot be read: there is no such file")
    written, table, columns = read_new_table(path, where, metadata, encoding)
    inputs, problems = encode(table, columns)
    why = {row: [f"column {name!r}: {cell}"] for row, name, cell in reversed(problems)}
    unknown = name_rows(why)
    if len(why) == len(table):
        raise UsageError(f"{where}: no row can be predicted: {unknown}")
    predictions = pd.DataFrame(predict(torch.from_numpy(inputs)))
    predictions.loc[[*why]] = np.nan
    outside = find_outside(table, inputs, columns, metadata)
    notes = describe_unknown(table, columns)
    notes += "".join(f"\n{line}" for line in written.attrs["encodings"])
    if outside:  # all are in a column of the file
        notes += f"\noutside the range of the training rows: {name_rows(outside)}"
        cells = {row: "; ".join(texts) for row, texts in outside.items()}
        predictions[OUTSIDE] = pd.Series(cells, predictions.index, dtype=object)
    if why:
        notes += f"\nno prediction for {unknown}"
    if taken := [name for name in predictions if name in written]:
        raise UsageError(f"{where} has a column {taken[0]!r} already: rename or remove it")
    output = find_output(path, where)
    rows = written.join(predictions)
    write_rows(rows, output)
    shown = rows.drop(columns=OUTSIDE, errors="ignore").head()
    return f"{output}{notes}\n{write_lines(shown)}"


def name_rows(texts: dict[int, list[str]]) -> str:
    """Return the first rows, numbered from 1, with the first texts about each."""
    return shorten([f"row {row + 1} ({shorten(texts[row], 2)})" for row in sorted(texts)])


def write_lines(rows: pd.DataFrame) -> str:
    """Return a few rows as text, in 79 columns."""
    plain = partial(write_number, digits=6, separator="")
    return rows.to_string(
        index=False, max_cols=6, max_colwidth=20, line_width=79, float_format=plain
    )


def read_new_table(
    path: Path, where: str, metadata: dict[str, Any], encoding: str | None
) -> tuple[pd.DataFrame, pd.DataFrame, list[Column]]:
    """Return a table as it is written, the columns that the model reads, and how it reads them."""
    options = metadata.get("read_options", {}) | ({"encoding": encoding} if encoding else {})
    written = frames.read_table(where, where, **options)
    columns = [Column(**column) for column in metadata["columns"]]
    table = frames.choose_columns(written, [column.name for column in columns], where)
    if not len(table):
        raise UsageError(f"{where}: there is no row below the names of the columns")
    if options.get("missing_values"):
        table, _ = empty_cells(table, options["missing_values"])
    return written, table, columns


def find_output(path: Path, where: str) -> Path:
    """Return the path of the predictions for a table. Raises UsageError if another table has it."""
    kinds, packed = ("|".join(map(re.escape, x)) for x in (frames.KINDS, frames.COMPRESSED))
    stem = re.sub(rf"({kinds})({packed})?$", "", path.name, flags=re.IGNORECASE)
    output = path.with_name(f"{stem}_predictions.csv")
    if WRITTEN.setdefault(output.resolve(), path.resolve()) != path.resolve():
        raise UsageError(f"{where}: {output} has just been written for another table: rename one")
    return output


def describe_unknown(table: pd.DataFrame, columns: Sequence[Column]) -> str:
    """Name the texts of categories that training did not have."""
    notes = ""
    for column in columns:
        texts = pd.Series(read_cells(table[column.name], column)).dropna()
        if column.categories is not None:
            new = [*map(repr, texts[~texts.isin(column.categories)].unique())]
            if new:
                notes += f"  (column {column.name!r}: {shorten(new)} not in the training rows)"
    return notes


def find_outside(
    table: pd.DataFrame, inputs: np.ndarray, columns: Sequence[Column], metadata: dict[str, Any]
) -> dict[int, list[str]]:
    """Return the rows with numbers beyond those of the training rows, and a text for each number.

    inputs: what encode() returns for the table and these columns.
    """
    found: dict[int, list[str]] = {}
    place = 0
    for column in columns:
        if column.categories is None:
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
    error.
    """
    columns = ["file", "prediction", "probability", "doubt", "error"]
    table = pd.DataFrame(rows, columns=columns)
    with as_usage_error(f"--csv {path} cannot be written"):
        write_rows(table, path)
    return f"{count(len(table), 'answer')} in {path}"


def write_rows(table: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV; a text that a spreadsheet would run as a formula gets an apostrophe."""
    table = table.astype(object)
    table = table.where(table.notna(), "")  # or map would turn ids into floats
    text = table.map(_not_a_formula).rename(columns=_not_a_formula).to_csv(index=False)
    write_durably(path, text.encode(errors="backslashreplace"))


def _not_a_formula(value: Any) -> Any:
    if isinstance(value, str):  # the CSV writer does not quote \r
        return re.sub(FORMULA, r"'\g<0>", value.replace("\r", "\n"))
    return value
