"""The flags of scripts that read tables, and lists of names in one word."""

import csv
import io
from dataclasses import dataclass, field
from typing import Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec

from trainkit.config import Count, MayChange, ReadOnlyIf, TrainingConfig
from trainkit.text import nfc


def split_names(text: str) -> list[str]:
    """Split `a,b` into names; one that contains a comma is quoted: `"a, b",c`."""
    lines = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    return [nfc(name.strip()) for line in lines for name in line]


def comma_separated(item_type: type) -> PrimitiveConstructorSpec[list]:
    """Tell tyro how a flag that is one word, a,b, becomes a list of this type."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="A,B",
        instance_from_str=lambda words: [item_type(name) for name in split_names(words[0])],
        is_instance=lambda value: isinstance(value, list),
        str_from_instance=lambda value: [",".join(map(str, value))],
    )


Names = Annotated[list[str], comma_separated(str)]


@dataclass
class FileConfig(TrainingConfig):
    """The flags of a script that reads a table; names are written as a,b."""

    data: MayChange[str | None] = None
    """CSV, Excel, JSON or Parquet file, a folder of them, or Hub id"""
    eval_data: Annotated[MayChange[str | None], ReadOnlyIf("data")] = None
    """the same, to evaluate on (default: the test split of --data, or else a share of it)"""
    separator: Annotated[str | None, ReadOnlyIf("data")] = None
    """of the values in text files (default: , ; tab or |); '\\s+' for blanks"""
    encoding: Annotated[str | None, ReadOnlyIf("data")] = None
    """of text files, such as cp1252 or utf-16 (default: UTF-8)"""
    sheet: Annotated[Names, ReadOnlyIf("data")] = field(default_factory=list)
    """sheet of an Excel file, or several with the same columns as a,b (default: the only one, or
    those called train and test)"""
    header_row: Annotated[Count | None, ReadOnlyIf("data")] = None
    """line of the file, or row of the sheet, with the names of the columns (default: the first)"""

    @property
    def where(self) -> str:
        """How a message names the table."""
        return f"--data {self.data}"

    @property
    def read_options(self) -> dict[str, Any]:
        """How the table is read, for read_parts."""
        names = ("separator", "encoding", "sheet", "header_row")
        return {name: getattr(self, name) for name in names}
