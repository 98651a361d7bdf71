"""Find the labelled pictures of a folder, of tables or of the Hub, as rows that are not opened.

The sentence of a UsageError begins with the flag that was meant.
"""

import re
import reprlib
import sys
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import torch
from datasets.data_files import DataFilesList

from trainkit.errors import UsageError, is_main_rank
from trainkit.pictures import folders
from trainkit.reading.paths import read_here_or_from_hub
from trainkit.reading.splits import choose_evaluated, load_parts
from trainkit.text import nfc

LABELS = re.compile("u?int|bool|(large_)?string")  # the types of columns of labels
FILES_OF_ROWS = (".parquet", ".arrow")  # which may be named themselves, not by their folder


class Labelled(NamedTuple):
    """Pictures as they are stored, in rows of one column, and the class of each."""

    rows: datasets.Dataset
    labels: torch.Tensor
    classes: list[str]
    where: str  # begins the sentence of a UsageError about them


def find_sides(
    name: str, label: str | None, eval_data: str | None, same_classes: bool, held_out: bool
) -> tuple[list[Labelled], str, list[str]]:
    """Return the pictures to train and to evaluate on, what these are, and which are neither.

    Evaluated are those of `eval_data` (its own test or validation split, or all of it), or else the
    first of the test and the validation split that has labels, unless some are to be held out; with
    "" there are none. label: column of the classes, None: the only one that can be. same_classes:
    refuse a class that is not trained on.
    """
    where = f"--dataset {name}"
    parts = open_dataset(name, where)
    if "train" not in parts:
        raise UsageError(
            f"{where}, split 'train': the folder and file names give only {sorted(parts)}: "
            "put the training pictures into train/"
        )
    train = label_rows(parts["train"], f"{where}, split 'train'", label)
    split, unread = "", list[str]()
    if not held_out:
        split, unread = choose_part(parts, where, label, bool(eval_data))
    given, where = split, f"{where}, split {split!r}"
    if eval_data:
        given = where = f"--eval-data {eval_data}"
        parts = open_dataset(eval_data, where)
        split = choose_part(parts, where, label, False)[0] or "train"
    if not split:
        return [train], "", unread
    classes = train.classes if same_classes else None
    return [train, label_rows(parts[split], where, label, classes)], given, unread


def open_dataset(name: str, where: str) -> dict[str, datasets.Dataset]:
    """Return the splits of a folder, a file of rows or a Hub data set; "" are parts in none.

    The fingerprint of a folder's split is computed from the content of its files.
    """
    datasets.disable_progress_bars()
    folder = Path(name)
    with read_here_or_from_hub(name, where):
        if folder.is_file() and folder.suffix in FILES_OF_ROWS:
            return load_tables(folder.parent.resolve(), {"train": [Path(folder.name)]}, where)
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{where} is a file: name its folder, and unpack an archive")
        if not folder.is_dir():
            return {split: rows for split, (_, rows) in load_parts(name).items()}
        splits, classes, unread = folders.find_files(folder, where)
        if unread and is_main_rank():
            print(f"{where}: {unread}", file=sys.stderr)
        if not classes:
            return load_tables(folder.resolve(), splits, where)
        return {split: make_rows(folder, classes, paths) for split, paths in splits.items()}


def make_rows(folder: Path, classes: dict[Path, str], paths: list[Path]) -> datasets.Dataset:
    """Make a row for each picture: its path, and the class that its folder stands for."""
    names = sorted({classes[path] for path in paths}, key=lambda name: (nfc(name), name))
    numbers = {name: number for number, name in enumerate(names)}
    made = datasets.Dataset.from_dict(
        {
            "image": [str(folder / path) for path in paths],
            "label": [numbers[classes[path]] for path in paths],
        },
        datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=names)),
    )
    return datasets.Dataset(made.data, made.info, fingerprint=folders.hash_files(folder, paths))


def load_tables(
    folder: Path, files: dict[str, list[Path]], where: str
) -> dict[str, datasets.Dataset]:
    """Read the table files of each split, or pictures with a list of labels, by `datasets`."""
    all_files = sorted(path for paths in files.values() for path in paths)
    tables = (folder / path for path in all_files if path.suffix == ".parquet")
    schemas = {str(datasets.Features.from_arrow_schema(pq.read_schema(path))) for path in tables}
    # For all files, datasets uses the class names of the first one, in their order there.
    if len(schemas) > 1:
        raise UsageError(f"{where}: its files differ in their columns or classes")
    key = folders.hash_files(folder, all_files)
    loaded = datasets.load_dataset(
        str(folder),
        data_files={
            split: DataFilesList([str(folder / path) for path in paths], [()] * len(paths))
            for split, paths in files.items()
        },
        cache_dir=str(Path(datasets.config.HF_DATASETS_CACHE, "folders", key)),
    )
    return {
        split: datasets.Dataset(part.data, part.info, part.split, fingerprint=f"{split}-{key}")
        for split, part in loaded.items()
    }


def choose_part(
    parts: dict[str, datasets.Dataset], where: str, label: str | None, other: bool
) -> tuple[str, list[str]]:
    """Return the split to evaluate on, "" if there is none or something else is, and the unread."""

    def is_labelled(split: str) -> bool:
        rows = parts[split]
        column = choose_column(parts.get("train", rows), where, label)
        return column in rows.column_names and bool(values_of(rows, column).notna().any())

    return choose_evaluated({x: x or "the other parts" for x in parts}, is_labelled, other)


def choose_column(rows: datasets.Dataset, where: str, label: str | None) -> str:
    """Return the column of the classes: `label`, or the only one that fits. Raises UsageError."""
    columns = rows.features.items()
    class_labels = [name for name, kind in columns if isinstance(kind, datasets.ClassLabel)]
    fitting = [name for name, kind in columns if LABELS.match(str(getattr(kind, "dtype", "")))]
    choices = [label] if label else class_labels or fitting
    if len(choices) != 1 or choices[0] not in fitting:
        raise UsageError(
            f"{where}: --label must name the column of the classes, whole numbers or texts, one of "
            f"{fitting}; or put each picture into the folder of its class"
        )
    return choices[0]


def values_of(rows: datasets.Dataset, column: str) -> pd.Series:
    """Return the values of a column, names for numbers of classes; -1 is missing, as on the Hub."""
    table = rows.select_columns([column]).with_format("arrow")[:]
    values = table.column(column).to_pandas(integer_object_nulls=True).astype(object)
    names = getattr(rows.features[column], "names", None)  # of a ClassLabel
    return values.map(dict(enumerate(names))) if names else values


def label_rows(
    rows: datasets.Dataset, where: str, label: str | None, classes: list[str] | None = None
) -> Labelled:
    """Return pictures with their classes, numbered by those of another split if they are given.

    Else their names are those of a ClassLabel, or the values of the column in sorted order, in NFC.
    """
    images = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    if len(images) != 1:
        raise UsageError(
            f"{where}: there must be rows with one Image column, not {rows.column_names}"
        )
    column = choose_column(rows, where, label)
    values = values_of(rows, column)
    if isinstance(kind := rows.features[column], datasets.ClassLabel):
        stored = kind.names
    else:
        in_nfc = lambda value: nfc(value) if isinstance(value, str) else value  # noqa: E731
        stored = [*map(str, sorted(values.dropna().unique(), key=in_nfc))]
    names = classes or [*dict.fromkeys(map(nfc, stored))]
    # Classes are matched by name, because another split may have them in another order.
    numbers = pd.Index(names).get_indexer(values.map(str).map(nfc))
    if (numbers < 0).any():
        row = numbers.argmin()  # the first -1: a label that is none of them
        raise UsageError(
            f"{where}, column {column!r}, row {row + 1}: the label {values[row]!r} is not one of "
            f"the {len(names)} classes {reprlib.repr(names)}"
        )
    labels = torch.from_numpy(numbers.astype(np.int64))
    cells = rows.select_columns(images).cast_column(images[0], datasets.Image(decode=False))
    return Labelled(cells, labels, names, where)
