"""Which decimal mark the numbers of a table have, for columns that leave it open: 1,234 or 1.234.

The other columns of the table tell, and then a semicolon between the cells, which Excel writes
where the comma is the decimal mark.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pandas as pd

from trainkit.tables.amounts import NUM_LOOKED_AT, PATTERNS, find_unit, prove_mark
from trainkit.tables.columns import MISSING, Column

EXPONENT = re.compile(r"(?<=\d)[eE][-+]?\d+$")
OTHER = {".": ",", ",": "."}


class TableMark(NamedTuple):
    """The decimal mark of a table.

    is_proven: columns can only be read with this one, and none with the other. is_assumed: nothing
    tells, so that it is a point.
    """

    decimal: str = "."
    is_proven: bool = False
    is_assumed: bool = True


class ColumnMarks(NamedTuple):
    """The marks in the numbers of one column.

    proof: the decimal mark, if more of the numbers can be read with it than with the other; else
    "". mark: the one that is written, in front of three digits each time. is_fixed: every number
    has it, as those that are rounded to three decimals do; below 1,000 one between thousands is
    missing.
    """

    proof: str
    mark: str
    is_fixed: bool

    @property
    def likely(self) -> str:
        """The decimal mark that the column speaks for."""
        return self.proof or (self.mark if self.is_fixed else OTHER[self.mark])


def find_marks(values: pd.Series) -> ColumnMarks | None:
    """Return the marks in the numbers of a column; None if it holds no such texts."""
    if values.dtype.kind in "biufM":
        return None
    texts: dict[str, None] = {}
    for cell in values.to_numpy(dtype=object):
        if isinstance(cell, str) and cell not in MISSING:
            texts[cell] = None
            if len(texts) == NUM_LOOKED_AT:
                break
    # With one more digit, as what has an exponent has no thousands.
    _, cells = find_unit([EXPONENT.sub("0", text.strip()) for text in texts])
    numbers = [cell.number for cell in cells.values()]
    written = Counter(mark for number in numbers for mark in PATTERNS if mark in number)
    read = [n for n in numbers if any(kind.fullmatch(n) for kind in PATTERNS.values())]
    if not written or 2 * len(read) <= len(numbers):  # dates and versions have marks too
        return None
    is_fixed = all("." in number or "," in number for number in numbers)
    return ColumnMarks(prove_mark(cells), written.most_common(1)[0][0], is_fixed)


def find_table_mark(columns: Iterable[pd.Series], separator: str) -> TableMark:
    """Return the decimal mark of a table. separator: between its cells, "" if it is no text."""
    found = [marks for marks in map(find_marks, columns) if marks is not None]
    proofs = Counter(marks.proof for marks in found if marks.proof)
    if proofs["."] != proofs[","]:
        decimal = max(proofs, key=proofs.__getitem__)
        return TableMark(decimal, is_proven=not proofs[OTHER[decimal]], is_assumed=False)
    if separator == ";" and found:
        likely = Counter(marks.likely for marks in found)
        decimal = "." if likely["."] > likely[","] else ","
        return TableMark(decimal, is_proven=False, is_assumed=False)
    return TableMark(is_assumed=not proofs)


def has_decimal_comma(
    table: pd.DataFrame, columns: Sequence[Column], target: str, separator: str
) -> bool:
    """Return whether the numbers of a text file have a decimal comma.

    The columns that were read tell, and so does the target, and then the others. Without any
    decimals a semicolon does.

    columns: those that were read. target: the decimal mark of the targets in training, "" if they
    had none.
    """
    votes = Counter([target] if target else [])
    for column in columns:
        is_number = not column.holds_texts and not column.days
        if is_number and find_marks(table[column.name]) is not None:
            votes[column.decimal] += 1
    if votes[","] != votes["."]:
        return votes[","] > votes["."]
    mark = find_table_mark((table[name] for name in table), separator)
    return separator == ";" if mark.is_assumed else mark.decimal == ","
