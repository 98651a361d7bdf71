"""Write a copy of a table, with columns of predictions, beside it: UTF-8, comma and point."""

import re
from collections.abc import Callable, Sequence
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
from trainkit.text import count, shorten

# Texts that a spreadsheet would run: they begin with = + - or @ and are not numbers (with a decimal
# comma or point), or begin with a tab or line break.
FORMULA = r"\A(?!\s*[+-]?(\d[\d.,]*|[.,]\d+)([eE][+-]?\d+)?\s*\Z)(\s*[=+@-]|[\t\n])"
# A number is named if it is further beyond those of the training rows, in parts of their range.
MARGIN = 0.1


class TableRows(Predictor):
    """Takes features, float64 (n, features), in their own units.

    In a subclass, answer_rows returns the columns that are written for inputs of forward.
    """

    options = ("encoding", "sheet", "header_row")
    answer_rows: Callable[[torch.Tensor], dict[str, Any]]

    def __init__(self, *run: Any):
        super().__init__(*run)
        self.written: dict[Path, Path] = {}  # the table of each file of predictions

    def prepare(self, inputs: torch.Tensor) -> torch.Tensor:
        return ((inputs - self.numbers("feature_mean")) / self.numbers("feature_std")).float()

    def example_inputs(self) -> torch.Tensor:
        mean = self.numbers("feature_mean")
        return torch.randn(64, len(mean)) * self.numbers("feature_std") + mean

    def predict_file(self, path: Path, **options: Any) -> str:
        """Write TABLE_predictions.csv: the rows of a table and the columns of answer_rows.

        Returns its path, what to know about these rows, and the first of them. Raises UsageError.
        """
        where, metadata = str(path), self.metadata
        if "missing_values" in metadata.get("read_options", {}):  # which are flags of frames now
            raise UsageError("an earlier version made this run: train the model again")
        rows = frames.read_table(where, where, **(metadata.get("read_options", {}) | options))
        columns = [Column(**column) for column in metadata["columns"]]
        table = frames.choose_columns(rows, [column.name for column in columns], where)
        table = empty_cells(table, metadata.get("missing_values", ()))
        inputs, problems = encode(table, columns)
        why = {row: f"column {name!r}: {cell}" for row, name, cell in reversed(problems)}
        if len(why) == len(table):
            raise UsageError(f"{where}: no row can be predicted: {name_rows(why) or 'it has none'}")
        predictions = pd.DataFrame(self.answer_rows(torch.from_numpy(inputs)))
        predictions.loc[[*why]] = np.nan
        with as_usage_error(f"{where} has predictions already"):
            rows = rows.join(predictions)
        stem = Path(path.stem).stem if path.suffix.lower() in frames.COMPRESSED else path.stem
        output = path.with_name(f"{stem}_predictions.csv")
        if (other := self.written.setdefault(output.absolute(), path)) != path:
            raise UsageError(f"{where}: {output} holds what is predicted for {other}: rename one")
        write_rows(rows, output)
        notes = [f"{output}{describe_unknown(table, columns)}"]
        if outside := find_outside(inputs, metadata):
            notes.append(f"outside the range of the training rows: {name_rows(outside)}")
        if why:
            notes.append(f"no prediction for {name_rows(why)}")
        sizes = {"max_cols": 6, "max_colwidth": 20, "line_width": 79}
        return "\n".join([*notes, rows.head().to_string(index=False, na_rep="", **sizes)])


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


def name_rows(texts: dict[int, str]) -> str:
    """Return the first rows, numbered from 1, with the text about each."""
    return shorten([f"row {row + 1} ({texts[row]})" for row in sorted(texts)])


def describe_unknown(table: pd.DataFrame, columns: Sequence[Column]) -> str:
    """Name the texts of categories that training did not have."""
    notes = ""
    for column in columns:
        if column.categories is not None:
            texts = {*read_cells(table[column.name].dropna(), column)}
            if new := sorted(map(repr, texts - {*column.categories})):
                notes += f"  (column {column.name!r}: {shorten(new)} not in the training rows)"
    return notes


def find_outside(inputs: np.ndarray, metadata: dict[str, Any]) -> dict[int, str]:
    """Return the rows with a number beyond those of the training rows, and a text for each."""
    low, high = np.array(metadata["feature_range"]).T
    beyond = np.maximum(low - inputs, inputs - high) > MARGIN * (high - low)
    return {
        row: f"{metadata['features'][n]} {inputs[row, n]:.6g}, not {low[n]:.6g} to {high[n]:.6g}"
        for row, n in reversed(np.argwhere(beyond).tolist())
    }


def write_answers(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write the predictions for pictures as CSV, a row for each, and return a line that says so."""
    columns = ["file", "prediction", "probability", "doubt", "error"]
    with as_usage_error(f"--csv {path} cannot be written"):
        write_rows(pd.DataFrame(rows, columns=columns), path)
    return f"{count(len(rows), 'answer')} in {path}"


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
