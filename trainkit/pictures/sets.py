"""The pictures to train and to evaluate on: found, decoded once, and what the plan says of them."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trainkit.errors import UsageError
from trainkit.pictures import files
from trainkit.pictures.decoding import Read, decode_once
from trainkit.pictures.flags import PictureConfig
from trainkit.pictures.splits import Labelled, find_sides
from trainkit.reading.recall import describe_classes
from trainkit.reading.splits import describe_equal, describe_given, split_rows
from trainkit.repairs.private_names import fingerprint_of
from trainkit.text import count

NEARLY_BLACK = 64  # of 255: if no deep grey value is brighter, another one must be white


class Split(NamedTuple):
    """The samples of a side.

    Attributes:
        path: the file (.npy) of the values of these and perhaps of other pictures, uint8.
        forms: how many of these pictures are of which size and mode.
        rows: the row of each sample in the file, int64.
        labels: its class, int64.
        hashes: of its values, int64, equal for equal pictures.
        classes: the names of the classes.
        reading: what predict.py needs to read pictures as these were read, as JSON: "fit", and
            "greys", the values of black and white of grey pictures of more than 8 bits.
    """

    path: Path
    forms: Counter[str]
    rows: torch.Tensor
    labels: torch.Tensor
    hashes: torch.Tensor
    classes: list[str]
    reading: dict[str, Any]

    def select(self, indices: torch.Tensor) -> "Split":
        """Return some of the samples."""
        kept = {name: getattr(self, name)[indices] for name in ("rows", "labels", "hashes")}
        return self._replace(**kept)

    def read(self, indices: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values of samples, or of all. Mapped anew, because pages count as memory."""
        rows = self.rows if indices is None else self.rows[indices]
        return torch.from_numpy(np.load(self.path, mmap_mode="r")[rows.numpy()])


def load_labelled(
    config: PictureConfig, read: Read, shape: tuple[int, ...], **options: Any
) -> tuple[Split, Split, dict[str, str]]:
    """Return the pictures with their classes, and lines of the plan. For the options see load_sets.

    Raises UsageError also if there is nothing to tell apart.
    """
    options |= {"label": config.label, "eval_data": config.eval_data, "fit": config.fit}
    if config.grey_range:
        options["greys"] = {"any": [*config.grey_range]}
    train, held_out, plan = load_sets(config.dataset, read, shape, **options)
    where = f"--dataset {config.dataset}"
    if len(train.classes) < 2:
        raise UsageError(
            f"{where}: all pictures are of one class, {train.classes[0]}: give each class a "
            "folder and name the folder that holds them, or a column of metadata.csv with --label"
        )
    if not len(held_out.rows):
        raise UsageError(f"{where}: all {len(train.rows)} pictures look the same, or are too few")
    plan |= describe_classes(train.labels, held_out.labels, train.classes, "picture")
    plan |= describe_equal(train.hashes, held_out.hashes, "picture")
    return train, held_out, describe_reading(train, held_out) | plan


def load_sets(
    name: str,
    read: Read,
    shape: tuple[int, ...],
    label: str | None = None,
    eval_data: str | None = None,
    same_classes: bool = True,
    num_held_out: int = 0,
    **how: Any,
) -> tuple[Split, Split, dict[str, str]]:
    """Return the pictures to train and to evaluate on, decoded once and cached, and plan lines.

    If a part of the training pictures is held out, equal ones are on the same side. For the first
    options see find_sides. num_held_out: evaluate on so many training pictures, whatever other
    splits there are. how: what `read`, which decodes to uint8 values of this shape, gets too.
    """
    sides, given, unread = find_sides(name, label, eval_data, same_classes, bool(num_held_out))
    train, *others = decode_sides(sides, read, shape, how)
    if others:
        held_out = others[0]._replace(classes=train.classes)
    else:
        chosen = split_rows(train.hashes, labels=train.labels, number=num_held_out)
        train, held_out = map(train.select, chosen)
    given = f"{given}: {count(len(held_out.rows), 'picture')}" if given else ""
    return train, held_out, {"data": name} | describe_given(given, unread)


def decode_sides(
    sides: list[Labelled], read: Read, shape: tuple[int, ...], how: dict[str, Any]
) -> list[Split]:
    """Decode the pictures of each side, and ask for white if deep ones are nearly black."""
    reading = {"fit": how["fit"], "greys": how.get("greys", {})}
    splits = []
    for rows, labels, classes, where in sides:
        key = f"{fingerprint_of(rows)} {shape} {how} ".encode() + files.READER
        path, forms, hashes = decode_once(rows, shape, partial(read, **how), key, where)
        numbers = torch.arange(len(rows))
        splits.append(Split(path, forms, numbers, labels, hashes, classes, reading))
    if "greys" in how or not all(files.is_deep(form) for each in splits for form in each.forms):
        return splits
    if max(np.load(each.path, mmap_mode="r").max() for each in splits) < NEARLY_BLACK:
        raise UsageError(
            f"{sides[0].where}: its grey pictures of more than 8 bits are nearly black if 65535, "
            "or 1 of fractions, is white: say which values are black and white, as in --grey-range "
            "0 4095"
        )
    return splits


def describe_reading(train: Split, held_out: Split) -> dict[str, str]:
    """Return lines of the plan about how pictures of these forms are read."""
    plan, reading = {}, train.reading
    forms = sum({side.path: side.forms for side in (train, held_out)}.values(), Counter[str]())
    other = sum(n for form, n in forms.items() if form.split()[0] != form.split()[2])
    if other:
        how = {"pad": "padded", "squash": "squashed", "crop": "cropped"}
        text = how.get(reading["fit"], f"cropped, or padded beyond {files.LONG} : 1")
        plan["fit"] = f"{other} of {forms.total()} are not square and {text} (--fit)"
    if any(map(files.is_deep, forms)):
        black, white = reading["greys"].get("any", (0, "65535, or 1 of fractions,"))
        plan["greys"] = f"of more than 8 bits: {black} is black, {white} is white (--grey-range)"
    return plan
