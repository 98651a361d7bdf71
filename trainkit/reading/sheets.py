"""The sheets of an Excel file as a person sees them: merged cells filled, formulas by value."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.errors import UsageError
from trainkit.reading.splits import find_splits
from trainkit.text import shorten


def read_sheets(path: Path, chosen: Sequence[str]) -> dict[str, list[list[Any]]]:
    """Return the rows of sheets by their names, "" in empty cells.

    chosen: their names; none means the only one that is shown and not empty, or those that are
    called like splits. Raises UsageError, also for a formula whose value is not in the file.
    """
    if importlib.util.find_spec("openpyxl") is None:
        raise UsageError(f"{path} needs a package for Excel files: pip install openpyxl")
    import openpyxl  # here: the tables of most runs are no Excel files

    book, formulas = (openpyxl.load_workbook(path, data_only=only) for only in (True, False))
    shown = [sheet.title for sheet in book.worksheets if sheet.sheet_state == "visible"]
    sheets = {name: _read_rows(path, book[name], formulas[name]) for name in shown}
    sheets = {name: rows for name, rows in sheets.items() if any(map(any, rows))}
    unknown = [name for name in chosen if name not in sheets]
    is_open = not chosen and len(sheets) > 1 and len(find_splits([*sheets])) == 1
    if unknown or is_open or not sheets:
        what = f"has no sheet {unknown[0]!r} but" if unknown else "has the sheets"
        known = shorten([*map(repr, sheets)], 30) or "empty ones"
        raise UsageError(f"{path} {what} {known}: choose one, or several, with --sheet A,B")
    return {name: sheets[name] for name in chosen or sheets}


def _read_rows(path: Path, sheet: Any, formulas: Any) -> list[list[Any]]:
    rows = [["" if c.value is None or c.data_type == "e" else c.value for c in r] for r in sheet]
    for cells, row in zip(formulas, rows, strict=True):
        for cell, value in zip(cells, row, strict=True):
            if cell.data_type == "f" and value == "":
                raise UsageError(
                    f"{path}, sheet {sheet.title!r}: cell {cell.coordinate} is a formula whose "
                    "value is not in the file: save it in a spreadsheet, which computes it"
                )
    for left, top, right, bottom in (area.bounds for area in sheet.merged_cells.ranges):
        for row in rows[top - 1 : bottom]:
            row[left - 1 : right] = [rows[top - 1][left - 1]] * (right - left + 1)
    return rows
