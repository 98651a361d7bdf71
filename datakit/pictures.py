"""Labelled pictures of any size and mode as one uint8 tensor."""

import glob
import itertools
import json
import math
import os
import re
import reprlib
import sys
from collections import Counter
from io import BytesIO
from pathlib import Path

import datasets
import evaluate
import numpy as np
import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet
import torch
from PIL import Image

from datakit.files import RANGES, open_picture, resize, to_grey
from trainkit.errors import UsageError, as_usage_error, is_main_rank
from trainkit.order import InMemory
from trainkit.text import shorten

# Names of files that nobody takes for pictures.
NO_DATA = re.compile(r"\.|README|LICENSE|(state|dataset_infos?|dataset_dict)\.json$")
LISTING = re.compile(r".*\.zip$|metadata\.(csv|jsonl|parquet)$")  # names or holds the pictures
NUM_LOOKED_AT = 2000  # pictures of a split that tell how all of them are framed


class Accuracy(evaluate.Metric):
    """Fraction of right predictions; `evaluate.load("accuracy")` needs the internet."""

    def _info(self) -> evaluate.MetricInfo:
        value = datasets.Value("int64")
        features = datasets.Features({"predictions": value, "references": value})
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=features)

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        return {"eval_accuracy": float(np.mean(np.equal(predictions, references)))}


def decode_plain(content: bytes, size: int) -> np.ndarray | None:
    """The pixels of a PNG file of size x size grey bytes and nothing else; None for other files.

    Pillow's inflating alone: reading the other parts of such a file takes it four times as long.
    """
    header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + size.to_bytes(4) * 2 + b"\x08\0\0\0\0"
    one_chunk = abs(len(content) - 57).to_bytes(4) + b"IDAT"
    if not content.startswith(header) or content[33:41] != one_chunk:
        return None
    return np.asarray(Image.frombytes("L", (size, size), content[41:-16], "zip", "L", 0))


def decode_pictures(cells: list, indices: list[int], size: int, where: str) -> dict[str, list]:
    """The grey values of each file, size * size, and what it holds. Raises UsageError."""
    pixels, kinds = [], []
    for cell, index in zip(cells, indices, strict=True):
        row = f"{where}, row {index + 1}"
        if cell is None:
            raise UsageError(f"{row}: the picture is missing")
        content, path = cell["bytes"], cell["path"]
        with as_usage_error(f"{row}{f' ({path})' * bool(path)}: the picture cannot be read"):
            content = content or Path(path).read_bytes()
            grey, kind = decode_plain(content, size), f"{size} x {size} L"
            if grey is None:
                picture = open_picture(BytesIO(content))
                grey = resize(to_grey(picture), size)
                width, height = picture.size
                kind = f"{width} x {height} {RANGES.get(picture.mode[0], picture.mode)}"
        pixels.append(grey.reshape(-1))
        kinds.append(kind)
    return {"pixels": pixels, "kind": kinds}


def pixel_tensor(decoded: datasets.Dataset, size: int) -> torch.Tensor:
    """One uint8 tensor (n, 1, size, size), mapped from a file beside the cache of `datasets`.

    All processes share its pages, and the kernel takes them back when it needs the memory.
    """
    path = Path(decoded.cache_files[0]["filename"]).with_suffix(".pixels")
    if not path.exists():
        unfinished = path.with_suffix(f".pixels-{os.getpid()}")
        with open(unfinished, "wb") as file:
            for chunk in decoded.data.column("pixels").chunks:
                file.write(chunk.flatten().to_numpy())
        os.replace(unfinished, path)
    # Not torch.from_file: a loader worker that is spawned could not be given such a tensor.
    mapped = torch.from_numpy(np.memmap(path, np.uint8, mode="c"))
    return mapped.view(-1, 1, size, size)


def open_dataset(name: str) -> tuple[dict[str, datasets.Dataset], dict[str, list[str]]]:
    """The splits of a folder or of a data set on the Hub, and the files of a folder's splits."""
    datasets.disable_progress_bars()
    with as_usage_error(f"--dataset {name} cannot be read"):
        folder = Path(name).resolve()
        if folder.exists() and glob.has_magic(str(folder)):
            raise UsageError(f"{folder}: `datasets` takes *, ? and [ for patterns: rename it")
        if folder.is_file():
            raise UsageError(f"--dataset {name} is a file: give the folder of the pictures")
        saved = files_of_save_to_disk(folder)
        source = {"path": "arrow", "data_files": saved} if saved else {"path": name}
        builder = datasets.load_dataset_builder(**source)
        if is_main_rank() and not Path(builder.cache_dir).exists():
            print("preparing the pictures (once)", file=sys.stderr)
        builder.download_and_prepare()
        files = builder.config.data_files or {}
        for one, other in itertools.combinations(files, 2):
            if both := set(files[one]) & set(files[other]):
                raise UsageError(
                    f"--dataset {name}: {min(both)} belongs to the splits '{one}' and '{other}', "
                    "because folders on its way have those names: rename the folder of the class"
                )
        return builder.as_dataset(), files


def files_of_save_to_disk(folder: Path) -> dict[str, list[str]]:
    """The files of each split that save_to_disk wrote last; older ones may lie beside them."""
    inside, found = {"train": folder}, dict[str, list[str]]()
    if (folder / "dataset_dict.json").is_file():
        if (folder / "state.json").is_file():
            raise UsageError(
                f"--dataset {folder}: save_to_disk wrote a Dataset there and a DatasetDict, and "
                "nothing says which is meant: save it into an empty folder"
            )
        names = json.loads((folder / "dataset_dict.json").read_text()).get("splits", [])
        inside = {name: folder / name for name in names}
    for name, place in inside.items():
        if (place / "state.json").is_file():
            named = json.loads((place / "state.json").read_text()).get("_data_files", [])
            if named:
                found[name] = [str(place / file["filename"]) for file in named]
    return found


def tell_unread(
    folder: Path, splits: dict[str, datasets.Dataset], files: dict[str, list[str]]
) -> None:
    """Say which files of a folder are in no split: of other kinds, hidden, behind a link.

    And pictures beside a metadata.csv that does not list them.
    """
    known = {file for split in files.values() for file in split}
    cells = (rows.data.column(name) for rows in splits.values() for name in image_columns(rows))
    rows = {path for cell in cells for path in pc.struct_field(cell, "path").to_pylist()}
    # Rows of Parquet files have other paths, or none.
    unlisted = (
        {p for p in known - rows if not LISTING.match(Path(p).name)} if known & rows else set()
    )
    unread = [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*"))
        if (str(path) not in known or str(path) in unlisted)
        and not NO_DATA.match(path.name)
        and (path.is_file() or path.is_symlink())
    ]
    if known and unread:
        print(f"--dataset {folder}: not read: {shorten(unread)}", file=sys.stderr)


def load_images(
    name: str, split: str, size: int, label: str | None = None, classes: list[str] | None = None
) -> tuple[InMemory, list[str], tuple[torch.Tensor, Counter[str]]]:
    """Return the pictures and labels of a split, the names of its classes, and some pictures.

    The last, for learn_framing, are uint8 (n, size, size), and what each file of the split holds.
    Decoded once; later runs read the cache that `datasets` keeps. Raises UsageError.

    Args:
        label: column of the classes; None: the only one that there can be.
        classes: those of another split, by which the labels of this one are numbered.
    """
    where = f"--dataset {name}, split {split!r}"
    splits, files = open_dataset(name)
    if is_main_rank() and classes is None:  # once, for all splits
        tell_unread(Path(name).resolve(), splits, files)
    if split not in splits:
        remedy = "to evaluate on held out training pictures use --validation-split N"
        if split == "train":
            remedy = "names of folders and files say so: put the training pictures into train/"
        raise UsageError(f"{where}: there are only {sorted(splits)}; {remedy}")
    rows = splits[split]
    images = image_columns(rows)
    if len(images) != 1 or len(rows) == 0:
        raise UsageError(
            f"{where}: there must be rows with one Image column, not {len(rows)} rows of "
            f"{rows.column_names} (make one with cast_column(NAME, datasets.Image()))"
        )
    labels, classes = read_labels(rows, where, label, classes, files.get(split, []))
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
    pixels = pixel_tensor(decoded, size)
    kinds = Counter(decoded.data.column("kind").to_pandas().value_counts().to_dict())
    some = pixels[:: math.ceil(len(pixels) / NUM_LOOKED_AT), 0]
    return InMemory(pixels, labels), classes, (some, kinds)


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
        problem = f"--label must name the column of the classes, one of {fitting}"
        if not fitting:
            problem = (
                "there is no column of classes (pictures have one if each lies in the folder of "
                "its class, and these in one folder; whole numbers of which one is missing are "
                "fractions)"
            )
        raise UsageError(
            f"{where}: {problem}, whole numbers or texts; or make one: "
            "rows = datasets.load_dataset(...).class_encode_column(NAME); rows.save_to_disk(FOLDER)"
        )
    return choices[0]


def read_labels(
    rows: datasets.Dataset,
    where: str,
    label: str | None,
    classes: list[str] | None,
    files: list[str],
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
    if isinstance(rows.features[column], datasets.ClassLabel):
        # datasets reads every file with the names in the first one of all splits.
        found = [names_in_file(Path(file), column) for file in files]
        lists = [names for names in found if names] or [rows.features[column].names]
        own = lists[0]
        if any(names != own for names in lists):
            raise UsageError(
                f"{where}: its files number the classes differently, {reprlib.repr(lists)}"
            )
        texts = values.map(dict(enumerate(own)))
    else:
        own, texts = [*map(str, sorted(values.unique()))], values.map(str)
    names = classes or own
    if len(names) < 2:
        raise UsageError(f"{where}: there is only one class")
    # By name: another split may have them in another order.
    numbers = pd.Index(names).get_indexer(texts)
    if (numbers < 0).any():
        more = f"; this split has {reprlib.repr(own)}" * (own != names)
        raise UsageError(
            f"{where}, row {(numbers < 0).argmax() + 1}: the label is not one of the {len(names)} "
            f"classes {reprlib.repr(names)}{more}"
        )
    return torch.from_numpy(numbers.astype(np.int64)), names


def names_in_file(path: Path, column: str) -> list[str]:
    """The names of a ClassLabel that a file here itself gives; none of another kind of file."""
    features = {}
    if path.is_file() and path.suffix == ".parquet":
        features = datasets.Features.from_arrow_schema(pyarrow.parquet.read_schema(path))
    elif path.is_file() and path.suffix == ".arrow":
        features = datasets.Dataset.from_file(str(path)).features
    return getattr(features.get(column), "names", [])


def check_classes(name: str, train_set: InMemory, eval_set: InMemory, classes: list[str]) -> None:
    """Raise UsageError if the evaluation set has a class of which there is no training picture."""
    unknown = set(eval_set.tensors[1].tolist()) - set(train_set.tensors[1].tolist())
    if unknown and len(train_set):
        raise UsageError(
            f"--dataset {name}: no training picture is of the class {classes[min(unknown)]!r}, "
            "which the evaluation pictures have"
        )
