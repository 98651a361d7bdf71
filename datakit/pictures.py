"""Labelled pictures of any size and mode as one uint8 tensor."""

import argparse
import functools
import math
import re
import reprlib
import sys
from collections import Counter
from io import BytesIO
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import torch
from pyarrow.parquet import read_schema

from datakit.files import RANGES, open_picture, resize, to_grey
from trainkit.errors import UsageError, as_usage_error, is_main_rank
from trainkit.order import InMemory
from trainkit.words.text import shorten

# Files that nobody takes for pictures, or that list them.
NO_DATA = re.compile(r"\.|README|LICENSE|dataset_infos?\.json|metadata\.")
NUM_LOOKED_AT = 2000  # pictures of a split that tell how all of them are framed
SMALL = 10_000  # with fewer pictures, the defaults for MNIST make too few steps


def decode_pictures(cells: list, indices: list[int], size: int, where: str) -> dict[str, list]:
    """The grey values of each file, size * size, and what it holds. Raises UsageError."""
    pixels, kinds = [], []
    for cell, index in zip(cells, indices, strict=True):
        row = f"{where}, row {index + 1}"
        if cell is None:
            raise UsageError(f"{row}: the picture is missing")
        content, path = cell["bytes"], cell["path"]
        with as_usage_error(f"{row}{f' ({path})' * bool(path)}: the picture cannot be read"):
            picture = open_picture(BytesIO(content or Path(path).read_bytes()))
            grey = resize(to_grey(picture), size)
            width, height = picture.size
            kind = f"{width} x {height} {RANGES.get(picture.mode[0], picture.mode)}"
        pixels.append(grey.reshape(-1))
        kinds.append(kind)
    return {"pixels": pixels, "kind": kinds}


def open_dataset(name: str) -> dict[str, datasets.Dataset]:
    """The splits of a folder, of what save_to_disk wrote, or of a Hub data set. UsageError."""
    datasets.disable_progress_bars()
    folder = Path(name).resolve()
    with as_usage_error(f"--dataset {name} cannot be read"):
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            saved = datasets.load_from_disk(name)
            return saved if isinstance(saved, dict) else {"train": saved}
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
    if known and is_main_rank():
        tell_unread(Path(name).resolve(), frozenset(map(Path, known)))
    return builder.as_dataset()


@functools.cache  # once
def tell_unread(folder: Path, known: frozenset[Path]) -> None:
    """Say which files of a folder are in no split: of other kinds, hidden, behind a link."""
    paths = {path for path in folder.rglob("*") if path.is_file() or path.is_symlink()}
    unread = sorted(path for path in paths - known if not NO_DATA.match(path.name))
    if unread:
        said = shorten([str(path.relative_to(folder)) for path in unread])
        print(f"--dataset {folder}: not read: {said}", file=sys.stderr)


def _read_split(name: str, split: str, num_held_out: int) -> tuple[datasets.Dataset, str, str]:
    """The rows of a split or to hold it out from; the split to evaluate on; its name in words."""
    splits = open_dataset(name)
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
    if len(image_columns(rows)) != 1 or len(rows) == 0:
        raise UsageError(
            f"{where}: there must be rows with one Image column, not {len(rows)} rows of "
            f"{rows.column_names} (make one with cast_column(NAME, datasets.Image()))"
        )
    return rows, own, where


def load_images(
    name: str,
    split: str,
    size: int,
    label: str | None = None,
    classes: list[str] | None = None,
    num_held_out: int = 0,
) -> tuple[InMemory, list[str], tuple[torch.Tensor, Counter[str]]]:
    """Return the pictures and labels of a split, the names of its classes, and some pictures.

    The last, for learn_framing, are uint8 (n, size, size), and what each file that was read holds.
    Decoded once; later runs read the cache that `datasets` keeps. Raises UsageError.

    Args:
        split: "train" or "test". Without a test split that is the validation split; without that it
            is held out from the training pictures.
        label: column of the classes; None: the only one that there can be.
        classes: those of another split, by which the labels of this one are numbered.
        num_held_out: of the training pictures for "test", whatever else there is; 0: see split.
    """
    rows, own, where = _read_split(name, split, num_held_out)
    images = image_columns(rows)
    labels, classes = read_labels(rows, where, label, classes)
    values = datasets.List(datasets.Value("uint8"))
    with as_usage_error(f"{where}: the pictures cannot be read"):
        decoded = rows.cast_column(images[0], datasets.Image(decode=False)).map(
            lambda cells, indices: decode_pictures(cells, indices, size, where),
            input_columns=images[0],
            with_indices=True,
            batched=True,
            remove_columns=rows.column_names,
            features=datasets.Features(pixels=values, kind=datasets.Value("string")),
        )
    numbers = decoded.data.column("pixels").combine_chunks().flatten().to_numpy()
    pixels = torch.from_numpy(numbers.copy()).view(-1, 1, size, size)
    if own == "train":
        chosen = hold_out(labels, num_held_out)[split == "train"]
        pixels, labels = pixels[chosen], labels[chosen]
    kinds = Counter(decoded.data.column("kind").to_pandas().value_counts().to_dict())
    some = pixels[:: math.ceil(len(pixels) / NUM_LOOKED_AT), 0]
    return InMemory(pixels, labels), classes, (some, kinds)


def hold_out(labels: torch.Tensor, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the pictures to evaluate on, and to train on: the same whatever the --seed.

    number: of those to evaluate on; 0: a fifth of each class.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    if number:
        return order[:number], order[number:]
    order = order[labels[order].argsort(stable=True)]
    chosen = torch.arange(len(order)) % 5 == 4
    return order[chosen], order[~chosen]


def image_columns(rows: datasets.Dataset) -> list[str]:
    """The names of the columns that hold pictures."""
    return [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)]


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
    values = rows.data.column(column).to_pandas()
    where = f"{where}, column {column!r}"
    if values.isna().any():
        raise UsageError(
            f"{where}, row {values.isna().idxmax() + 1}: the label is missing: fill it in; a "
            "picture file has one in the folder of its class, or from a metadata.csv"
        )
    own, texts = [*map(str, sorted(values.unique()))], values.map(str)
    if isinstance(rows.features[column], datasets.ClassLabel):
        own = rows.features[column].names
        texts = values.map(dict(enumerate(own)))
    names = classes or own
    if len(names) < 2:
        raise UsageError(f"{where}: there is only one class")
    # By name: another split may have them in another order.
    numbers = pd.Index(names).get_indexer(texts)
    if (numbers < 0).any():
        raise UsageError(
            f"{where}, row {(numbers < 0).argmax() + 1}: the label is not one of the {len(names)} "
            f"classes {reprlib.repr(names)}"
        )
    return torch.from_numpy(numbers.astype(np.int64)), names


def check_classes(name: str, train_set: InMemory, eval_set: InMemory, classes: list[str]) -> None:
    """Raise UsageError if the evaluation set has a class of which there is no training picture."""
    unknown = set(eval_set.tensors[1].tolist()) - set(train_set.tensors[1].tolist())
    if unknown and len(train_set):
        raise UsageError(
            f"--dataset {name}: no training picture is of the class {classes[min(unknown)]!r}, "
            "which the evaluation pictures have"
        )


def fit_to_small_set(args: argparse.Namespace, num_train: int) -> str:
    """Change flags of a small set, if none of them was given, and return them in words.

    The defaults for MNIST would make a few steps of it, and leave out up to a batch in each epoch.
    """
    if num_train >= SMALL or args.given:
        return ""
    args.batch_size, args.epochs, args.drop_last = 16, max(3, 8192 // max(1, num_train)), False
    return f"of {num_train} pictures: --batch-size 16 --epochs {args.epochs} --no-drop-last"
