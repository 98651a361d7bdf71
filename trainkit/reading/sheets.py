"""The cells of an Excel sheet as a person sees them: merged ones filled, formulas by their value.

`path` begins the sentence of a UsageError.
"""

import importlib.util
from contextlib import closing
from pathlib import Path
from typing import Any

from trainkit.errors import UsageError
from trainkit.text import shorten


def _open(path: Path, **options: Any) -> Any:
    if importlib.util.find_spec("openpyxl") is None:
        raise UsageError(f"{path} needs a package for Excel files: pip install openpyxl")
    import openpyxl  # here: the tables of most runs are no Excel files

    return openpyxl.load_workbook(path, **options)


def name_sheets(path: Path) -> list[str]:
    """Return the names of the sheets that are not hidden and hold something. Raises UsageError."""
    with closing(_open(path, read_only=True)) as book:
        shown = [sheet for sheet in book.worksheets if sheet.sheet_state == "visible"]
        return [sheet.title for sheet in shown if any(cell for row in sheet.values for cell in row)]


def read_sheet(path: Path, name: str | None) -> list[list[Any]]:
    """Return the rows of a sheet, "" in empty cells, and its value in all cells of a merged area.

    name: None means the only sheet. Raises UsageError for a formula whose value is not in the file.
    """
    names = name_sheets(path)
    if name not in names if name else len(names) != 1:
        lacking = f"has no sheet {name!r} but" if name else "has several sheets,"
        known = shorten([*map(repr, names)], 30) or "empty ones"
        raise UsageError(f"{path} {lacking} {known}: choose one, or several, with --sheet A,B")
    sheet = _open(path, data_only=True)[name or names[0]]
    rows = [["" if c.value is None or c.data_type == "e" else c.value for c in r] for r in sheet]
    with closing(_open(path, read_only=True)) as book:
        for cells, row in zip(book[sheet.title].rows, rows, strict=False):
            for cell in cells:
                if cell.data_type == "f" and row[cell.column - 1] == "":
                    raise UsageError(
                        f"{path}, sheet {sheet.title!r}: cell {cell.coordinate} is a formula whose "
                        "value is not in the file: save it in a spreadsheet, which computes it"
                    )
    for left, top, right, bottom in (area.bounds for area in sheet.merged_cells.ranges):
        for row in rows[top - 1 : bottom]:
            row[left - 1 : right] = [rows[top - 1][left - 1]] * (right - left + 1)
    return rows[: 1 + max(n for n, row in enumerate(rows) if {*row} != {""})]
