"""Labelled pictures of any size and mode as one uint8 tensor."""

import math
import re
import reprlib
import sys
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import torch
from pyarrow.parquet import read_schema

from trainkit.cli.text import shorten
from trainkit.data.files import RANGES, open_picture, resize, to_grey
from trainkit.errors import UsageError, as_usage_error, is_main_rank
from trainkit.loaders import InMemory

# Files that nobody takes for pictures, or that list them.
NO_DATA = re.compile(r"\.|README|LICENSE|dataset_infos?\.json|metadata\.")
NUM_LOOKED_AT = 2000  # pictures of a split that tell how all of them are framed


def decode_pictures(cells: list, indices: list[int], size: int, where: str) -> dict[str, list]:
    """The grey values of each file, size * size, and what it holds. Raises UsageError."""
    pixels, kinds = [], []
    for cell, index in zip(cells, indices, strict=True):
        content, path = cell["bytes"], cell["path"]
        row = f"row {index + 1}{f' ({path})' * bool(path)}"
        with as_usage_error(f"{where}, {row}: the picture cannot be read"):
            picture = open_picture(BytesIO(content or Path(path).read_bytes()))
            grey = resize(to_grey(picture), size)
            width, height = picture.size
            kind = f"{width} x {height} {RANGES.get(picture.mode[0], picture.mode)}"
        pixels.append(grey.reshape(-1))
        kinds.append(kind)
    return {"pixels": pixels, "kind": kinds}


def open_dataset(name: str, tell: bool) -> dict[str, datasets.Dataset]:
    """The splits of a folder or of a Hub data set. Raises UsageError.

    tell: print which files of a folder are in no split: of other kinds, hidden, behind a link.
    """
    datasets.disable_progress_bars()
    with as_usage_error(f"--dataset {name} cannot be read"):
        builder = datasets.load_dataset_builder(name)
        builder.download_and_prepare()
    files = builder.config.data_files or {}
    known = [file for split in files.values() for file in split]
    if len({*known}) < len(known):
        raise UsageError(
            f"--dataset {name}: a folder in it is called {' or '.join(map(str, files))}, and would "
            "be read as that split and as a class: rename it"
        )
    # datasets reads all files with the names of the classes, and their order, in the first one.
    tables = [file for file in known if file.endswith(".parquet") and Path(file).is_file()]
    if len({str(datasets.Features.from_arrow_schema(read_schema(file))) for file in tables}) > 1:
        raise UsageError(f"--dataset {name}: its files name other columns, or classes, than others")
    if known and tell and is_main_rank():
        folder, read = Path(name).resolve(), {*map(Path, known)}
        unread = [
            str(path.relative_to(folder))
            for path in sorted(folder.rglob("*"))
            if (path.is_file() or path.is_symlink()) and not NO_DATA.match(path.name)
            if path not in read
        ]
        if unread:
            print(f"--dataset {folder}: not read: {shorten(unread)}", file=sys.stderr)
    return builder.as_dataset()


def read_split(
    name: str,
    split: str,
    label: str | None = None,
    classes: list[str] | None = None,
    num_held_out: int = 0,
) -> tuple[datasets.Dataset, torch.Tensor, list[str], torch.Tensor, str]:
    """Return the pictures, labels, names of the classes, which rows are of the split, and `where`.

    The pictures are the only column. Raises UsageError, whose sentence begins with the last.

    Args:
        split: "train" or "test". Without a test split that is the validation split; without that it
            is held out from the training pictures.
        label: column of the classes; None: the only one that there can be.
        classes: those of another split, by which the labels of this one are numbered.
        num_held_out: of the training pictures for "test", whatever else there is; 0: see split.
    """
    splits = open_dataset(name, split == "train")
    others = ["test", "validation"] if not num_held_out else []
    own = next((other for other in others if other in splits), "train")
    read = own if split == "test" else split
    where = f"--dataset {name}, split {read!r}"
    if read not in splits:
        raise UsageError(
            f"{where}: there are only {sorted(splits)}; names of folders and files say so: put the "
            "training pictures into train/"
        )
    rows = splits[read]
    images = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    if len(images) != 1:
        raise UsageError(
            f"{where}: there must be rows with one Image column, not {rows.column_names} "
            "(make one with cast_column(NAME, datasets.Image()))"
        )
    labels, classes = read_labels(rows, where, label, classes)
    chosen = hold_out(labels, split, num_held_out) if own == "train" else torch.arange(len(rows))
    return rows.select_columns(images), labels, classes, chosen, where


def load_images(
    name: str, split: str, size: int, *options: Any
) -> tuple[InMemory, list[str], tuple[torch.Tensor, Counter[str]]]:
    """Return the pictures and labels of a split, the names of its classes, and some pictures.

    The last, for learn_framing, are uint8 (n, size, size), and what each file that was read holds.
    Decoded once; later runs read the cache that `datasets` keeps. For the options see read_split.
    Raises UsageError.
    """
    rows, labels, classes, chosen, where = read_split(name, split, *options)
    (image,) = rows.column_names
    with as_usage_error(f"{where}: the pictures cannot be read"):
        decoded = rows.cast_column(image, datasets.Image(decode=False)).map(
            lambda cells, indices: decode_pictures(cells, indices, size, where),
            input_columns=image,
            with_indices=True,
            batched=True,
            remove_columns=image,
            features=datasets.Features(
                pixels=datasets.List(datasets.Value("uint8")), kind=datasets.Value("string")
            ),
        )
    numbers = decoded.data.column("pixels").combine_chunks().flatten().to_numpy()
    pixels = torch.from_numpy(numbers.reshape(-1, 1, size, size)[chosen.numpy()])
    kinds = Counter(decoded.data.column("kind").to_pylist())
    some = pixels[:: math.ceil(len(pixels) / NUM_LOOKED_AT), 0]
    return InMemory(pixels, labels[chosen]), classes, (some, kinds)


def hold_out(labels: torch.Tensor, split: str, number: int) -> torch.Tensor:
    """Indices of the pictures to evaluate on, or to train on: the same whatever the --seed.

    number: of those to evaluate on; 0: a fifth of each class.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    places = torch.arange(len(labels))
    held_out = places < number
    if not number:
        order, held_out = order[labels[order].argsort(stable=True)], places % 5 == 4
    return order[held_out == (split == "test")]


def choose_column(rows: datasets.Dataset, where: str, label: str | None) -> str:
    """The column of the classes: `label`, or the only one that fits. Raises UsageError."""
    kinds = rows.features.items()
    found = [name for name, kind in kinds if isinstance(kind, datasets.ClassLabel)]
    fitting = [
        name
        for name, kind in kinds
        if re.match("u?int|bool|(large_)?string", str(getattr(kind, "dtype", "")))
    ]
    choices = [label] if label else found or fitting
    if len(choices) != 1 or choices[0] not in fitting:
        raise UsageError(
            f"{where}: --label must name the column of the classes, whole numbers or texts, one of "
            f"{fitting}; pictures have one if each lies in the folder of its class"
        )
    return choices[0]


def read_labels(
    rows: datasets.Dataset, where: str, label: str | None, classes: list[str] | None = None
) -> tuple[torch.Tensor, list[str]]:
    """The classes of all rows as int64, and their names: of a ClassLabel, or the values, sorted.

    Raises UsageError.
    """
    column = choose_column(rows, where, label)
    values = rows.data.column(column).to_pandas(integer_object_nulls=True)
    own, texts = [*map(str, sorted(values.dropna().unique()))], values.map(str)
    if isinstance(rows.features[column], datasets.ClassLabel):
        own = rows.features[column].names
        texts = values.map(dict(enumerate(own)))
    names = classes or own
    # By name: another split may have them in another order.
    numbers = pd.Index(names).get_indexer(texts)
    if (numbers < 0).any():
        row = numbers.argmin()  # -1: none of them
        raise UsageError(
            f"{where}, column {column!r}, row {row + 1}: the label {values[row]!r} is not one of "
            f"the {len(names)} classes {reprlib.repr(names)}"
        )
    return torch.from_numpy(numbers.astype(np.int64)), names
