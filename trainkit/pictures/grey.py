"""Labelled pictures of any size and mode as one uint8 tensor."""

import functools
import re
import reprlib
import sys
import zipfile
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import torch
from datasets.data_files import DataFilesList

from trainkit.errors import UsageError, as_usage_error, is_main_rank
from trainkit.loaders import InMemory
from trainkit.orders import hold_out
from trainkit.pictures import files, folders
from trainkit.pictures.decoding import decode_once
from trainkit.private import fingerprint_of
from trainkit.text import shorten

IN_COLOUR = ("RGB", "RGBA", "P", "PA", "CMYK", "YCbCr")  # of Pillow's modes
MOST_SMALL = 64  # pixels; pictures above it lose too much at the size of digits
NUM_LOOKED_AT = 2000  # pictures of a split that are checked for content


def open_dataset(
    name: str, tell: bool, list_of_labels: Path | None = None
) -> dict[str, datasets.Dataset]:
    """Return the splits of a folder or of a Hub data set. Raises UsageError.

    The fingerprint of a folder's split is computed from the content of its files.

    Args:
        tell: print which files of a folder are not read: other kinds, hidden files, files behind
            links.
        list_of_labels: a CSV file: the classes of the pictures, instead of their folders.
    """
    datasets.disable_progress_bars()
    folder = Path(name)
    with as_usage_error(f"--dataset {name} cannot be read"):
        if folder.is_file():
            raise UsageError(f"--dataset {name} is a file: name its folder, and unpack an archive")
        if not folder.is_dir():
            return load_by_datasets(name)
        found = folders.find_files(folder, list_of_labels)
        if found.unread and tell and is_main_rank():
            unread = shorten([*map(str, found.unread)])
            print(f"--dataset {folder}: {len(found.unread)} not read: {unread}", file=sys.stderr)
        if found.classes:
            return {
                split: make_rows(folder, paths, found.classes)
                for split, paths in found.splits.items()
            }
        return load_tables(folder.resolve(), found)


def load_by_datasets(name: str, **options: Any) -> dict[str, datasets.Dataset]:
    builder = datasets.load_dataset_builder(name, **options)
    builder.download_and_prepare()
    return builder.as_dataset()


def make_rows(folder: Path, paths: list[Path], classes: dict[Path, str]) -> datasets.Dataset:
    """Make a row for each picture: its path, and the class that its folder stands for."""
    names = sorted({classes[path] for path in paths})
    numbers = {name: number for number, name in enumerate(names)}
    made = datasets.Dataset.from_dict(
        {
            "image": [str(folder / path) for path in paths],
            "label": [numbers[classes[path]] for path in paths],
        },
        datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=names)),
    )
    return datasets.Dataset(made.data, made.info, fingerprint=folders.hash_files(folder, paths))


def load_tables(folder: Path, found: folders.Folder) -> dict[str, datasets.Dataset]:
    """Read table files and archives, or pictures with a list of labels, by means of `datasets`."""
    schemas = set()
    for split, paths in found.splits.items():
        for path in [path for path in paths if path.suffix == ".parquet"]:
            known = pq.read_metadata(folder / path)
            schemas.add(str(datasets.Features.from_arrow_schema(known.schema.to_arrow_schema())))
            if not known.num_rows:  # datasets would fail on it
                paths.remove(path)
        if not paths:
            raise UsageError(f"--dataset {folder}, split {split!r}: its files have no rows")
    # For all files, datasets uses the class names of the first one, in their order there.
    if len(schemas) > 1:
        raise UsageError(f"--dataset {folder}: its files differ in their columns or classes")
    files_of_splits = [path for paths in found.splits.values() for path in paths]
    for path in [path for path in files_of_splits if path.suffix.lower() == ".zip"]:
        with zipfile.ZipFile(folder / path) as archive:
            inside = [Path(name) for name in archive.namelist()]
        has_list = any(each.name in folders.LISTS for each in inside)
        if not has_list and any(map(folders.is_picture, inside)):
            # datasets would take the folder that holds the archive for the class of them all.
            raise UsageError(f"--dataset {folder}: unpack {path}, for its folders to be classes")
    options: dict[str, Any] = {}
    card = folder / "README.md"
    if card.is_file() and "data_files:" in card.read_text(errors="replace"):
        # A folder as on the Hub: its README.md says which of its files belong to which split.
        files_of_splits += [path for path in found.unread if (folder / path).is_file()]
    else:
        options["data_files"] = {
            split: DataFilesList([str(folder / path) for path in paths], [()] * len(paths))
            for split, paths in found.splits.items()
        }
    key = folders.hash_files(folder, sorted(files_of_splits))
    options["cache_dir"] = Path(datasets.config.HF_DATASETS_CACHE, "folders", key)
    rows = load_by_datasets(str(folder), **options)
    return {
        split: datasets.Dataset(each.data, each.info, each.split, fingerprint=f"{split}-{key}")
        for split, each in rows.items()
    }


def read_split(
    name: str,
    split: str,
    label: str | None = None,
    classes: list[str] | None = None,
    num_held_out: int = 0,
    list_of_labels: Path | None = None,
) -> tuple[datasets.Dataset, torch.Tensor, list[str], torch.Tensor, str]:
    """Return the pictures, labels, class names, indices of the split's rows, and `where`.

    The pictures are the only column. Raises UsageError, whose sentence begins with `where`.

    Args:
        split: "train" or "test". If there is no test split, "test" means the validation split; if
            there is no such split either, part of the training pictures is held out as "test".
        label: column of the classes; None: the only column that can be one.
        classes: the class names of another split, by which the labels of this one are numbered.
        num_held_out: how many training pictures are held out as "test", whatever other splits
            there are; 0: see split.
        list_of_labels: see open_dataset.
    """
    splits = open_dataset(name, split == "train", list_of_labels)
    others = ["test", "validation"] if not num_held_out else []
    own = next((other for other in others if other in splits), "train")
    read = own if split == "test" else split
    where = f"--dataset {name}, split {read!r}"
    if read not in splits:
        raise UsageError(
            f"{where}: the folder and file names give only {sorted(splits)}: put the "
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

    The last are meant for describe_pictures: uint8 (n, size, size), and a count of the sizes and
    modes of all files that were read. Pictures are decoded once and cached; they are decoded again
    if a file's content or the way of decoding changes. For the options see read_split. Raises
    UsageError.
    """
    rows, labels, classes, chosen, where = read_split(name, split, *options)
    (image,) = rows.column_names
    key = f"{fingerprint_of(rows)} {size} ".encode() + files.READER
    cells = rows.cast_column(image, datasets.Image(decode=False))
    read, shape = functools.partial(files.read_square, size=size), (1, size, size)
    decoded = decode_once(cells, shape, read, key)
    if decoded.problems:
        raise UsageError(f"{where}: {describe_problems(decoded.problems, len(rows))}")
    pixels = torch.from_numpy(np.load(decoded.path, mmap_mode="r")[chosen.numpy()])
    kinds = decoded.kinds
    some = pixels[:: len(pixels) // NUM_LOOKED_AT + 1].squeeze(1)
    return InMemory(pixels, labels[chosen]), classes, (some, kinds)


def describe_problems(problems: dict[int, str], number: int) -> str:
    """Return all problems with the pictures of a split, in one line."""
    said = "; ".join(problems.values())
    return f"{len(problems)} of {number} pictures cannot be read: {said}"


def describe_pictures(size: int, *seen: tuple[torch.Tensor, Counter[str]]) -> dict[str, Any]:
    """Describe the files of a run, as JSON. Raises UsageError if every picture is of one value.

    read_as: in words, for example `32 x 32 RGB read as 28 x 28 grey`. shape: width and height if
    they are the same for all files, else None.

    Args:
        seen: the last of the values that load_images returned, for each split.
    """
    pixels, counts = zip(*seen, strict=True)
    if all((some == some[:, :1]).all() for some in (each.flatten(1) for each in pixels)):
        raise UsageError(
            "every picture has a single grey value, so there is nothing in it (16 bit "
            "files must use 0 to 65535, float ones 0 to 1)"
        )
    kinds = [kind for kind, _ in sum(counts, Counter()).most_common()]
    shapes = {tuple(map(int, kind.split()[:3:2])) for kind in kinds}
    others = f" and {len(kinds) - 1} other kinds" if len(kinds) > 1 else ""
    grey, kind = f"{size} x {size} grey", f"{kinds[0]}{others}"
    return {
        "read_as": grey if kind == f"{size} x {size} L" else f"{kind} read as {grey}",
        "shape": [*shapes.pop()] if len(shapes) == 1 else None,
    }


def are_photos(*seen: tuple[torch.Tensor, Counter[str]]) -> bool:
    """Return whether more than half of the files are in colour and have sides above 64 pixels.

    seen: the last of the values that load_images returned, for each split.
    """
    kinds = sum((counts for _, counts in seen), Counter[str]())
    photos = 0
    for kind, number in kinds.items():
        width, _, height, mode = kind.split()[:4]
        large = min(int(width), int(height)) > MOST_SMALL
        photos += number * (large and mode in IN_COLOUR)
    return photos * 2 > kinds.total()


def describe_values(*seen: tuple[torch.Tensor, Counter[str]]) -> dict[str, str]:
    """Return a line of the plan if many pictures, as a network gets them, are nearly of one shade.

    seen: the last of the values that load_images returned, for each split.
    """
    pictures = torch.cat([some.flatten(1) for some, _ in seen])
    low, high = pictures.aminmax(dim=1)
    narrow = pictures[high - low < 32]  # an eighth of the range
    if len(narrow) * 10 < len(pictures):
        return {}
    said = " ".join(kind for _, kinds in seen for kind in kinds)
    deep = [values for values in files.RANGES.values() if values in said]
    remedy = "spread their values over the whole range"
    if deep:
        remedy = f"files of {' and '.join(deep)} must use that range: save 8 bit values as 8 bits"
    return {
        "values": f"{len(narrow)} of {len(pictures)} pictures looked at use less than an eighth of "
        f"the range 0 to 255 ({narrow.min()} to {narrow.max()}), nearly one shade: {remedy}"
    }


def choose_column(rows: datasets.Dataset, where: str, label: str | None) -> str:
    """Return the column of the classes: `label`, or the only one that fits. Raises UsageError."""
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
            f"{fitting}; or put each picture into the folder of its class"
        )
    return choices[0]


def read_labels(
    rows: datasets.Dataset, where: str, label: str | None, classes: list[str] | None = None
) -> tuple[torch.Tensor, list[str]]:
    """Return the class of each row, int64, and the names of the classes. Raises UsageError.

    The names are those of a ClassLabel, or the values of the column in sorted order.
    """
    column = choose_column(rows, where, label)
    values = rows.data.column(column).to_pandas(integer_object_nulls=True)
    own, texts = [*map(str, sorted(values.dropna().unique()))], values.map(str)
    if isinstance(rows.features[column], datasets.ClassLabel):
        own = rows.features[column].names
        values = texts = values.map(dict(enumerate(own)))
    names = classes or own
    # Classes are matched by name, because another split may have them in another order.
    numbers = pd.Index(names).get_indexer(texts)
    if (numbers < 0).any():
        row = numbers.argmin()  # the first -1: a label that is none of them
        raise UsageError(
            f"{where}, column {column!r}, row {row + 1}: the label {values[row]!r} is not one of "
            f"the {len(names)} classes {reprlib.repr(names)}"
        )
    return torch.from_numpy(numbers.astype(np.int64)), names


def read_photo_pixels(file: Path | BytesIO, resize: int, size: int) -> torch.Tensor:
    """Return a photo as it is evaluated: uint8 (3, size, size), the centre of files.read_centre.

    resize: the short side of the whole picture, in pixels. Raises what files.read_centre raises.
    """
    return cut_centre(torch.from_numpy(files.read_centre(file, resize)[0]).permute(2, 0, 1), size)


def cut_centre(pictures: torch.Tensor, size: int) -> torch.Tensor:
    """Return the centre of pictures (..., height, width): (..., size, size)."""
    top, left = ((length - size) // 2 for length in pictures.shape[-2:])
    return pictures[..., top : top + size, left : left + size]
