"""The labelled pictures of a split: rows of a folder, of tables or of the Hub, decoded once.

`where` names the split; the sentence of a UsageError begins with it.
"""

import math
import re
import reprlib
import shlex
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets.data_files import DataFilesList

from trainkit.errors import UsageError, is_main_rank
from trainkit.pictures import files, folders
from trainkit.pictures.decoding import Decoded, Read, decode_once, merge_greys
from trainkit.reading.paths import read_here_or_from_hub
from trainkit.reading.recall import describe_classes
from trainkit.reading.splits import (
    choose_evaluated,
    describe_equal,
    describe_given,
    find_splits,
    may_say_split,
    read_split_columns,
    split_rows,
)
from trainkit.repairs.private_names import fingerprint_of
from trainkit.text import count, nfc, shorten

LABELS = re.compile("u?int|bool|(large_)?string")  # the types of columns of labels
FILES_OF_ROWS = (".parquet", ".arrow")  # which may be named themselves, not by their folder


class Labelled(NamedTuple):
    """The pictures of a split as they are stored, and their classes.

    Attributes:
        rows: one column of pictures.
        labels: the class of each, int64.
        classes: the names of the classes.
        is_whole: all rows are of the split; else a part of them is held out.
        where: names the rows.
        given: what the user chose to evaluate on, "" if a part is held out.
        unread: splits that are neither trained on nor evaluated, and why.
        note: a sentence about columns that say which rows are evaluated, or might, or "".
        respelt: names of classes that are stored in another form of Unicode.
    """

    rows: datasets.Dataset
    labels: torch.Tensor
    classes: list[str]
    is_whole: bool
    where: str
    given: str
    unread: list[str]
    note: str
    respelt: set[str]


class Parts(NamedTuple):
    """The rows of each split of a data set, what each is called, and a note as in Labelled."""

    rows: dict[str, datasets.Dataset]
    names: dict[str, str]
    note: str


class Split(NamedTuple):
    """The samples of a split.

    Attributes:
        given: why these samples are evaluated, as lines of the plan; {} if nobody chose them.
        respelt: names of classes that were read in another form of Unicode than they are stored in.
        path: the file of the decoded values of all rows; missing if it would be too large.
        cells: all rows as they are stored, a column of datasets.Image(decode=False).
        rows: the row of each sample, int64.
        labels: its class, int64.
        hashes: of its values, int64, equal for equal pictures.
        classes: the names of the classes.
        forms: how many pictures of all rows are of which size and mode.
        problems: what is wrong with the rows that were left out.
        how: what `read` was given beside the file and the side: "fit", and for deep grey pictures
            "greys", the values of black and white of each kind.
    """

    given: dict[str, str]
    respelt: set[str]
    path: Path
    cells: datasets.Dataset
    rows: torch.Tensor
    labels: torch.Tensor
    hashes: torch.Tensor
    classes: list[str]
    forms: Counter[str]
    problems: list[str]
    how: dict[str, Any]


def load_split(
    name: str,
    split: str,
    read: Read,
    shape: tuple[int, ...],
    label: str | None = None,
    classes: list[str] | None = None,
    num_held_out: int = 0,
    list_of_labels: Path | None = None,
    eval_data: str | None = None,
    eval_labels: Path | None = None,
    skip_unreadable: bool | None = None,
    max_bytes: float = math.inf,
    **how: Any,
) -> Split:
    """Return a split, whose pictures are decoded once and cached.

    If part of the training pictures is held out, equal ones are on the same side. Raises
    UsageError, which names all pictures that cannot be read.

    Args:
        split: "train" or "test"; see read_split for this and the options that are not named here.
        read: decodes a picture to uint8 values of this shape: (1, side, side), or (side, side, 3)
            in colour.
        skip_unreadable: leave out the pictures that cannot be read. None: the script has no such
            flag.
        max_bytes: if the values would take more, no file is written.
        how: what `read` gets too. Without "greys" the range of deep grey pictures is chosen by the
            values of both splits.
    """
    options = num_held_out, list_of_labels, eval_data, eval_labels
    found = read_split(name, split, label, classes, *options)
    other = {"train": "test", "test": "train"}[split]
    read_other = partial(read_split, name, other, label, None, *options)
    where = f"--dataset {name}"  # has both splits, or names the one that is trained on
    cells, decoded, how = decode_as_set(found.rows, read_other, where, how, read, shape, max_bytes)
    if decoded.problems and not skip_unreadable:
        what = f"{found.where}: {len(decoded.problems)} of {len(cells)}"
        refuse_unreadable(what, decoded.problems, has_flag=skip_unreadable is not None)
    chosen = choose_rows(found, split, decoded, num_held_out)
    samples = chosen, found.labels[chosen], decoded.hashes[chosen]
    given = f"{found.given}: {count(len(chosen), 'picture')}" if found.given else ""
    report = decoded.forms, [*decoded.problems.values()], how
    plan = describe_given(given, found.unread, found.note) if split == "test" else {}
    return Split(plan, found.respelt, decoded.path, cells, *samples, found.classes, *report)


def choose_rows(found: Labelled, split: str, decoded: Decoded, num_held_out: int) -> torch.Tensor:
    """Return which rows are of a split and could be read, int64."""
    chosen = torch.arange(len(found.rows))
    if not found.is_whole:
        to_train_on, to_evaluate_on = split_rows(
            decoded.hashes, labels=found.labels, number=num_held_out
        )
        chosen = to_evaluate_on if split == "test" else to_train_on
    return chosen[~torch.isin(chosen, torch.tensor([*decoded.problems], dtype=torch.int64))]


def refuse_unreadable(what: str, problems: dict[int, str], has_flag: bool) -> None:
    """Raise UsageError with all problems, and the command that works if there is a flag for it."""
    text = f"{what} pictures cannot be read: " + "; ".join(problems.values())
    if has_flag:
        command = shlex.join(["python", *sys.argv, "--skip-unreadable"])
        text += f"\nThis works, without them: {command}"
    raise UsageError(text)


def decode_as_set(
    rows: datasets.Dataset,
    read_other: Callable[[], Labelled],
    where: str,
    how: dict[str, Any],
    *how_read: Any,
) -> tuple[datasets.Dataset, Decoded, dict[str, Any]]:
    """Return what decode_rows returns, and `how` with the range of deep grey pictures, if any.

    read_other: returns what read_split does for the other split, whose values count too.
    """
    cells, decoded = decode_rows(rows, how, *how_read)
    if decoded.greys:
        _, others_decoded = decode_rows(read_other().rows, how, *how_read)
        merge_greys(decoded.greys, others_decoded.greys)
        how = how | {"greys": choose_greys(decoded.greys, where)}
        cells, decoded = decode_rows(rows, how, *how_read)
    return cells, decoded, how


def decode_rows(
    rows: datasets.Dataset,
    how: dict[str, Any],
    read: Read,
    shape: tuple[int, ...],
    max_bytes: float,
) -> tuple[datasets.Dataset, Decoded]:
    """Return rows of one column of pictures as they are stored, and decoded. See load_split."""
    (image,) = rows.column_names
    cells = rows.cast_column(image, datasets.Image(decode=False))
    key = f"{fingerprint_of(rows)} {shape} {how} ".encode() + files.READER
    is_stored = len(rows) * math.prod(shape) <= max_bytes
    return cells, decode_once(cells, shape, partial(read, **how), key, is_stored, "greys" in how)


def choose_greys(greys: dict[str, list[float]], where: str) -> dict[str, list[float]]:
    """Return the values of black and of white for each kind of deep grey pictures of a set.

    greys: the smallest and the largest value of each kind. Raises UsageError if no range fits.
    """
    chosen = {}
    for kind, (low, high) in greys.items():
        found = files.choose_range(kind, low, high)
        if found is None:
            raise UsageError(
                f"{where}: which values are black and white? Those of its pictures of "
                f"mode {kind} are {low:g} to {high:g}, and none of {files.RANGES} fits them: say "
                f"it, for example with --grey-range {low:g} {high:g}"
            )
        chosen[kind] = [*found]
    return chosen


def describe_evaluation(train: Split, held_out: Split) -> dict[str, str]:
    """Return the lines of the plan about what is evaluated, the classes, and what says little."""
    plan = held_out.given | describe_classes(
        train.labels, held_out.labels, train.classes, "picture"
    )
    if respelt := train.respelt | held_out.respelt:
        names = count(len(respelt), "class name")
        plan["spelling"] = f"{names} in another form of Unicode, read in NFC: {shorten([*respelt])}"
    plan |= describe_equal(train.hashes, held_out.hashes, "picture")
    labels = pd.Series(torch.cat((train.labels, held_out.labels)).numpy())
    alike = labels.groupby(torch.cat((train.hashes, held_out.hashes)).numpy())
    if unlike := int((alike.transform("nunique") > 1).sum()):
        plan["unlike"] = f"{unlike} of {len(labels)} pictures look as one of another class"
    return plan


def open_dataset(
    name: str, tell: bool, list_of_labels: Path | None = None, flag: str = "--dataset"
) -> dict[str, datasets.Dataset]:
    """Return the splits of a folder, a file of rows or a Hub data set. Raises UsageError.

    The fingerprint of a folder's split is computed from the content of its files.

    Args:
        tell: print which files of a folder are not read, and why.
        list_of_labels: a CSV file: the classes of the pictures, instead of their folders.
        flag: by which the user named it.
    """
    datasets.disable_progress_bars()
    folder = Path(name)
    where = f"{flag} {folders.name_of(folder)}"
    with read_here_or_from_hub(name, where):
        if folder.suffix in FILES_OF_ROWS and folder.is_file():
            one_file = folders.Folder({"train": [Path(folder.name)]}, {}, {})
            return load_tables(folder.parent.resolve(), one_file, where, has_card=False)
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{where} is a file: name its folder, and unpack an archive")
        if not folder.is_dir():
            return load_from_hub(name, where if tell and is_main_rank() else None)
        contents = folders.find_files(folder, list_of_labels, flag)
        if contents.unread and tell and is_main_rank():
            print(f"{where}: {folders.describe_unread(contents.unread)}", file=sys.stderr)
        if not contents.classes:
            return load_tables(folder.resolve(), contents, where)
        return {
            split: make_rows(folder, paths, contents.classes)
            for split, paths in contents.splits.items()
        }


def open_parts(rows: dict[str, datasets.Dataset], label: str | None) -> Parts:
    """Return the splits that open_dataset returned, or those that columns of the only one tell.

    label: the column of the classes, which is not one of them.
    """
    names = {split: split for split in rows}
    if {*rows} != {"train"}:
        return Parts(rows, names, "")
    (whole,) = rows.values()
    columns = {
        name: column_of(whole, name).to_pandas().astype(object)
        for name, kind in whole.features.items()
        if name != label and may_say_split(name) and LABELS.match(str(getattr(kind, "dtype", "")))
    }
    for name in columns:
        kind = whole.features[name]
        if isinstance(kind, datasets.ClassLabel):
            columns[name] = columns[name].map(dict(enumerate(kind.names)))
    found = read_split_columns(columns)
    if not found.rows:
        return Parts(rows, names, found.note)
    left = whole.remove_columns(found.columns)
    parts = {
        split: left.select(numbers, keep_in_memory=True)
        for split, numbers in found.rows.items()
        if split
    }
    return Parts(parts, found.names, found.note)


def column_of(rows: datasets.Dataset, name: str) -> pa.ChunkedArray:
    """Return the stored values of a column, of all rows."""
    return rows.select_columns([name]).with_format("arrow")[:].column(name)


def load_from_hub(name: str, where: str | None = None) -> dict[str, datasets.Dataset]:
    """Return the splits of a data set, as find_splits names them: valid and dev are validation.

    where: for a line about what is not read; None prints none.
    """
    rows = load_by_datasets(name)
    splits = find_splits([*map(str, rows)])
    others = splits.pop("", [])
    if others and where:
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


def make_rows(folder: Path, paths: list[Path], classes: dict[Path, str]) -> datasets.Dataset:
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
        if any(map(folders.is_picture, inside)) and not any(
            x.name in folders.LISTS for x in inside
        ):
            # datasets would take the folder that holds the archive for the class of them all.
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


def read_split(
    name: str,
    split: str,
    label: str | None = None,
    classes: list[str] | None = None,
    num_held_out: int = 0,
    list_of_labels: Path | None = None,
    eval_data: str | None = None,
    eval_labels: Path | None = None,
) -> Labelled:
    """Return the pictures of a split and their classes. Raises UsageError.

    Args:
        split: "train" or "test". If there is no test split with labels, "test" means the
            validation split; if there is no such split either, part of the training pictures is
            held out as "test".
        label: column of the classes; None: the only column that can be one.
        classes: the class names of another split, by which the labels of this one are numbered.
        num_held_out: how many training pictures are held out as "test", whatever other splits
            there are; 0: see split.
        list_of_labels: see open_dataset.
        eval_data: what "test" means, whatever other splits there are: all pictures of another
            folder, file or Hub data set, or its own test or validation split, if it has one.
        eval_labels: list_of_labels of eval_data.
    """
    options = label, num_held_out, list_of_labels, eval_data, eval_labels
    rows, where, given, unread, note = choose_part(name, split, *options)
    images = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    if len(images) != 1:
        raise UsageError(
            f"{where}: there must be rows with one Image column, not {rows.column_names} "
            "(make one with cast_column(NAME, datasets.Image()))"
        )
    labels, names, respelt = read_labels(rows, where, label, classes)
    pictures = rows.select_columns(images)
    return Labelled(pictures, labels, names, bool(given), where, given, unread, note, respelt)


def choose_part(
    name: str,
    split: str,
    label: str | None,
    num_held_out: int,
    list_of_labels: Path | None,
    eval_data: str | None,
    eval_labels: Path | None,
) -> tuple[datasets.Dataset, str, str, list[str], str]:
    """Return the rows of read_split before any is held out, its `where`, given, unread and note."""
    parts, names, note = open_parts(open_dataset(name, split == "train", list_of_labels), label)
    where = f"--dataset {name}"
    if "train" not in parts:
        raise UsageError(
            f"{where}, split 'train': the folder and file names give only {sorted(parts)}: put the "
            "training pictures into train/"
        )
    chosen, unread = "", list[str]()
    if not num_held_out:
        is_labelled = partial(_is_labelled, parts, f"{where}, split 'train'", label)
        chosen, unread = choose_evaluated(names, is_labelled, bool(eval_data))
    read_from = chosen if chosen and split == "test" else "train"
    given = names.get(chosen, "")
    if eval_data:
        given = f"--eval-data {eval_data}"
        note = note if len(parts) > 1 else ""
    if eval_data and split == "test":
        where = given
        own = open_dataset(eval_data, True, eval_labels, "--eval-data")
        parts, names, _ = open_parts(own, label)
        is_labelled = partial(_is_labelled, parts, f"{where}, split 'train'", label)
        labelled, _ = choose_evaluated(names, is_labelled, False)
        read_from = labelled or "train"
        if names[read_from] != read_from:  # a column says it
            given += f", {names[read_from]}"
    if len(parts) > 1 or where != given:
        where += f", split {read_from!r}"
    return parts[read_from], where, given, unread, note


def _is_labelled(
    parts: dict[str, datasets.Dataset], where: str, label: str | None, split: str
) -> bool:
    """Return whether the class of any row of a split is known; -1 stands for none on the Hub."""
    column = choose_column(parts.get("train", parts[split]), where, label)
    if column not in parts[split].column_names:
        return False
    values = column_of(parts[split], column).to_pandas()
    if isinstance(parts[split].features[column], datasets.ClassLabel):
        return bool((values >= 0).any())
    return bool(values.notna().any())


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


def read_labels(
    rows: datasets.Dataset, where: str, label: str | None, classes: list[str] | None = None
) -> tuple[torch.Tensor, list[str], set[str]]:
    """Return the class of each row, int64, the names of the classes, and which were respelt.

    The names are those of a ClassLabel, or the values of the column in sorted order, in NFC. Raises
    UsageError.
    """
    column = choose_column(rows, where, label)
    values = column_of(rows, column).to_pandas(integer_object_nulls=True)
    if isinstance(rows.features[column], datasets.ClassLabel):
        stored = [*rows.features[column].names]
        spelt = [*map(nfc, stored)]
        values = texts = values.map(dict(enumerate(spelt)))
    else:
        stored = [str(value) for value in sorted(values.dropna().unique())]
        spelt = [*map(nfc, stored)]
        if any(isinstance(value, str) for value in values):
            spelt = sorted(spelt)
        texts = values.map(str).map(nfc)
    respelt = {nfc(name) for name in stored if nfc(name) != name}
    names = classes or [*dict.fromkeys(spelt)]
    # Classes are matched by name, because another split may have them in another order.
    numbers = pd.Index(names).get_indexer(texts)
    if (numbers < 0).any():
        row = numbers.argmin()  # the first -1: a label that is none of them
        raise UsageError(
            f"{where}, column {column!r}, row {row + 1}: the label {values[row]!r} is not one of "
            f"the {len(names)} classes {reprlib.repr(names)}"
        )
    return torch.from_numpy(numbers.astype(np.int64)), names, respelt
