"""Find the labelled pictures to train and to evaluate on: rows of a folder, of tables, of the Hub.

Pictures are not opened here. The sentence of a UsageError begins with the flag that was meant.
"""

import re
import reprlib
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import torch
from datasets.data_files import DataFilesList

from trainkit.errors import UsageError, is_main_rank
from trainkit.pictures import folders
from trainkit.reading.paths import read_here_or_from_hub
from trainkit.reading.splits import choose_evaluated, find_splits, may_say_split
from trainkit.text import count, nfc, shorten

LABELS = re.compile("u?int|bool|(large_)?string")  # the types of columns of labels
FILES_OF_ROWS = (".parquet", ".arrow")  # which may be named themselves, not by their folder


class Labelled(NamedTuple):
    """Pictures as they are stored, in rows of one column, the class of each, and their name."""

    rows: datasets.Dataset
    labels: torch.Tensor
    where: str


class Sides(NamedTuple):
    """The pictures to train and to evaluate on.

    Attributes:
        train: to train on.
        evaluated: to evaluate on; None if a part of `train` is to be held out.
        classes: the names of the classes.
        given: what the user chose to evaluate on, "" if a part is held out.
        unread: splits that are neither trained on nor evaluated, and why.
        plan: lines about a column that is called split, and classes in another form of Unicode.
    """

    train: Labelled
    evaluated: Labelled | None
    classes: list[str]
    given: str
    unread: list[str]
    plan: dict[str, str]


def find_sets(
    name: str,
    label: str | None = None,
    eval_data: str | None = None,
    held_out: bool = False,
    same_classes: bool = True,
) -> Sides:
    """Return the pictures to train and to evaluate on, and their classes. Raises UsageError.

    Evaluated are those of `eval_data`, or else the first of the test and the validation split that
    has labels.

    Args:
        name: a folder, a file of rows or a Hub id.
        label: column of the classes; None: the only column that can be one.
        eval_data: another folder, file or Hub id: its own test or validation split, or all of it.
        held_out: a part of the training pictures is held out, whatever other splits there are.
        same_classes: refuse a class that is not trained on. False: classes do not matter.
    """
    where = f"--dataset {folders.name_of(name)}"
    parts = open_dataset(name, where)
    if "train" not in parts:
        raise UsageError(
            f"{where}, split 'train': the folder and file names give only {sorted(parts)}: "
            "put the training pictures into train/"
        )
    chosen, unread = "", list[str]()
    if not held_out:
        chosen, unread = choose_part(parts, where, label, bool(eval_data))
    rows, given, where_evaluated = parts.get(chosen), chosen, f"{where}, split {chosen!r}"
    if eval_data:
        rows, given, where_evaluated = open_given(eval_data, label)
    train, classes, respelt = label_rows(parts["train"], f"{where}, split 'train'", label)
    evaluated = None
    if rows is not None:
        known = classes if same_classes else None
        evaluated, _, more = label_rows(rows, where_evaluated, label, known)
        respelt |= more
    columns = [c for c in parts["train"].column_names if may_say_split(c) and c != label]
    return Sides(train, evaluated, classes, given, unread, describe_names(columns, respelt))


def describe_names(columns: list[str], respelt: set[str]) -> dict[str, str]:
    """Return lines of the plan about columns called split, and classes whose names were respelt."""
    plan = {}
    if columns:
        plan["split"] = (
            f"column {shorten(columns)} is not read: put the pictures of each split into a folder "
            "of their own, called train and test"
        )
    if respelt:
        names = count(len(respelt), "class name")
        plan["spelling"] = f"{names} in another form of Unicode, read in NFC: {shorten([*respelt])}"
    return plan


def open_given(name: str, label: str | None) -> tuple[datasets.Dataset, str, str]:
    """Return the rows of --eval-data, what the plan calls them, and how a sentence begins."""
    given = where = f"--eval-data {folders.name_of(name)}"
    parts = open_dataset(name, where)
    chosen = choose_part(parts, where, label, False)[0] or "train"
    if len(parts) > 1:
        where += f", split {chosen!r}"
    return parts[chosen], given, where


def choose_part(
    parts: dict[str, datasets.Dataset], where: str, label: str | None, other: bool
) -> tuple[str, list[str]]:
    """Return the split to evaluate on, "" if there is none, and those that are not read.

    other: none of these is, because something else is evaluated.
    """

    def is_labelled(split: str) -> bool:
        rows = parts[split]
        column = choose_column(parts.get("train", rows), f"{where}, split 'train'", label)
        return column in rows.column_names and bool(values_of(rows, column).notna().any())

    return choose_evaluated({split: split for split in parts}, is_labelled, other)


def choose_column(rows: datasets.Dataset, where: str, label: str | None) -> str:
    """Return the column of the classes: `label`, or the only one that fits. Raises UsageError."""
    columns = [x for x in rows.features.items() if x[0] == label or not may_say_split(x[0])]
    class_labels = [name for name, kind in columns if isinstance(kind, datasets.ClassLabel)]
    fitting = [name for name, kind in columns if LABELS.match(str(getattr(kind, "dtype", "")))]
    choices = [label] if label else class_labels or fitting
    if len(choices) != 1 or choices[0] not in fitting:
        raise UsageError(
            f"{where}: --label must name the column of the classes, whole numbers or texts, one of "
            f"{fitting}; or put each picture into the folder of its class"
        )
    return choices[0]


def open_dataset(name: str, where: str) -> dict[str, datasets.Dataset]:
    """Return the splits of a folder, a file of rows or a Hub data set. Raises UsageError.

    The fingerprint of a folder's split is computed from the content of its files. What is not read
    is printed.
    """
    datasets.disable_progress_bars()
    folder = Path(name)
    with read_here_or_from_hub(name, where):
        if folder.suffix in FILES_OF_ROWS and folder.is_file():
            one_file = folders.Folder({"train": [Path(folder.name)]}, {}, [])
            return load_tables(folder.parent.resolve(), one_file, where, has_card=False)
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{where} is a file: name its folder, and unpack an archive")
        if not folder.is_dir():
            return load_from_hub(name, where)
        contents = folders.find_files(folder, where)
        if contents.unread and is_main_rank():
            print(f"{where}: {folders.describe_unread(contents.unread)}", file=sys.stderr)
        if not contents.classes:
            return load_tables(folder.resolve(), contents, where)
        make = partial(make_rows, folder, contents.classes)
        return {split: make(paths) for split, paths in contents.splits.items()}


def values_of(rows: datasets.Dataset, column: str) -> pd.Series:
    """Return the values of a column, where the name of a class stands for its number.

    On the Hub -1 stands for no class; it becomes a missing value.
    """
    table = rows.select_columns([column]).with_format("arrow")[:]
    values = table.column(column).to_pandas(integer_object_nulls=True).astype(object)
    names = getattr(rows.features[column], "names", None)  # of a ClassLabel
    return values.map(dict(enumerate(names))) if names else values


def load_from_hub(name: str, where: str) -> dict[str, datasets.Dataset]:
    """Return the splits of a data set, as find_splits names them: valid and dev are validation."""
    rows = load_by_datasets(name)
    splits = find_splits([*map(str, rows)])
    others = splits.pop("", [])
    if others and is_main_rank():
        print(f"{where}: not read: {shorten(others)}", file=sys.stderr)
    return {
        split: datasets.concatenate_datasets([rows[part] for part in parts])
        if len(parts) > 1
        else rows[parts[0]]
        for split, parts in splits.items()
    }


def load_by_datasets(name: str, **options: Any) -> dict[str, datasets.Dataset]:
    builder = datasets.load_dataset_builder(name, **options)
    builder.download_and_prepare()
    return builder.as_dataset()


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
    folder: Path, contents: folders.Folder, where: str, has_card: bool = True
) -> dict[str, datasets.Dataset]:
    """Read table files and archives, or pictures with a list of labels, by means of `datasets`.

    has_card: a README.md there may say which file belongs to which split.
    """
    schemas = set()
    for split, paths in contents.splits.items():
        for path in [path for path in paths if path.suffix == ".parquet"]:
            footer = pq.read_metadata(folder / path)
            schemas.add(str(datasets.Features.from_arrow_schema(footer.schema.to_arrow_schema())))
            if not footer.num_rows:  # datasets would fail on it
                paths.remove(path)
        if not paths:
            raise UsageError(f"{where}, split {split!r}: its files have no rows")
    # For all files, datasets uses the class names of the first one, in their order there.
    if len(schemas) > 1:
        raise UsageError(f"{where}: its files differ in their columns or classes")
    files_of_splits = [path for paths in contents.splits.values() for path in paths]
    for path in [path for path in files_of_splits if path.suffix.lower() == ".zip"]:
        with zipfile.ZipFile(folder / path) as archive:
            inside = [Path(name) for name in archive.namelist()]
        # datasets would take the folder that holds the archive for the class of them all.
        if any(map(folders.is_picture, inside)) and not {x.name for x in inside} & {*folders.LISTS}:
            raise UsageError(f"{where}: unpack {path}, for its folders to be classes")
    options: dict[str, Any] = {}
    card = folder / "README.md"
    if has_card and card.is_file() and "data_files:" in card.read_text(errors="replace"):
        # A folder as on the Hub: its README.md says which of its files belong to which split.
        files_of_splits += [path for path in contents.unread if (folder / path).is_file()]
    else:
        options["data_files"] = {
            split: DataFilesList([str(folder / path) for path in paths], [()] * len(paths))
            for split, paths in contents.splits.items()
        }
    key = folders.hash_files(folder, sorted(files_of_splits))
    options["cache_dir"] = Path(datasets.config.HF_DATASETS_CACHE, "folders", key)
    rows = load_by_datasets(str(folder), **options)
    return {
        split: datasets.Dataset(part.data, part.info, part.split, fingerprint=f"{split}-{key}")
        for split, part in rows.items()
    }


def label_rows(
    rows: datasets.Dataset, where: str, label: str | None, classes: list[str] | None = None
) -> tuple[Labelled, list[str], set[str]]:
    """Return pictures with their classes, the names of the classes, and which were respelt.

    The names are those of a ClassLabel, or the values of the column in sorted order, in NFC. Raises
    UsageError.

    classes: the names of another split, by which the labels of this one are numbered.
    """
    images = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    if len(images) != 1:
        raise UsageError(
            f"{where}: there must be rows with one Image column, not {rows.column_names} "
            "(make one with cast_column(NAME, datasets.Image()))"
        )
    column = choose_column(rows, where, label)
    values = values_of(rows, column)
    kind = rows.features[column]
    if isinstance(kind, datasets.ClassLabel):
        stored = kind.names
    else:
        in_nfc = lambda value: nfc(value) if isinstance(value, str) else value  # noqa: E731
        stored = [*map(str, sorted(values.dropna().unique(), key=in_nfc))]
    respelt = {nfc(name) for name in stored if nfc(name) != name}
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
    return Labelled(rows.select_columns(images), labels, where), names, respelt
