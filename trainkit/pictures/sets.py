"""The pictures to train and to evaluate on: found, decoded once, and what the plan says of them."""

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import datasets
import torch

from trainkit.errors import UsageError
from trainkit.pictures import files
from trainkit.pictures.decoding import Decoded, Read, decode_once
from trainkit.pictures.flags import PictureConfig
from trainkit.pictures.splits import Labelled, find_sets
from trainkit.reading.recall import describe_classes
from trainkit.reading.splits import describe_equal, describe_given, split_rows
from trainkit.repairs.private_names import fingerprint_of
from trainkit.text import count, shorten

NEARLY_BLACK = 64  # of 255: if no deep grey value is brighter, another one must be white


class Split(NamedTuple):
    """The samples of a side.

    Attributes:
        decoded: all rows of its file, also those that are no samples.
        rows: the row of each sample, int64.
        labels: its class, int64.
        classes: the names of the classes.
        reading: what predict.py needs to read pictures as these were read, as JSON: "fit", and
            "greys", the values of black and white of grey pictures of more than 8 bits.
    """

    decoded: Decoded
    rows: torch.Tensor
    labels: torch.Tensor
    classes: list[str]
    reading: dict[str, Any]

    @property
    def hashes(self) -> torch.Tensor:
        """Of the values of each sample, int64, equal for equal pictures."""
        return self.decoded.hashes[self.rows]


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
    sides = {side.decoded.path: side.decoded for side in (train, held_out)}.values()
    forms = sum((side.forms for side in sides), Counter[str]())
    if problems := [problem for side in sides for problem in side.problems.values()]:
        plan["unreadable"] = f"{len(problems)} left out: {shorten(problems)}"
    return train, held_out, describe_reading(forms, train.reading) | plan


def load_sets(
    name: str,
    read: Read,
    shape: tuple[int, ...],
    label: str | None = None,
    eval_data: str | None = None,
    same_classes: bool = True,
    num_held_out: int = 0,
    skip_unreadable: bool = False,
    **how: Any,
) -> tuple[Split, Split, dict[str, str]]:
    """Return the pictures to train and to evaluate on, decoded once and cached, and plan lines.

    If a part of the training pictures is held out, equal ones are on the same side. Raises
    UsageError, which names all pictures that cannot be read.

    Args:
        name, label, eval_data, same_classes: see find_sets.
        read: decodes a picture to uint8 values of this shape: (1, side, side), or (side, side, 3)
            in colour.
        num_held_out: evaluate on so many training pictures, whatever other splits there are.
        skip_unreadable: leave out what cannot be read.
        how: what `read` gets too.
    """
    found = find_sets(name, label, eval_data, bool(num_held_out), same_classes)
    sides = [side for side in (found.train, found.evaluated) if side]
    decoded = decode_sides(sides, read, shape, skip_unreadable, how)
    if found.evaluated:
        chosen = [torch.arange(len(side.rows)) for side in sides]
    else:
        options = {"labels": found.train.labels, "number": num_held_out}
        chosen = [*split_rows(decoded[0].hashes, **options)]
    reading = {"fit": how["fit"], "greys": how.get("greys", {})}
    splits = []
    for number, rows in zip((0, -1), chosen, strict=True):
        unread = torch.tensor([*decoded[number].problems], dtype=torch.int64)
        read_rows = rows[~torch.isin(rows, unread)]
        labels = sides[number].labels[read_rows]
        splits.append(Split(decoded[number], read_rows, labels, found.classes, reading))
    train, held_out = splits
    given = f"{found.given}: {count(len(held_out.rows), 'picture')}" if found.given else ""
    return train, held_out, {"data": name} | describe_given(given, found.unread)


def decode_sides(
    sides: list[Labelled],
    read: Read,
    shape: tuple[int, ...],
    skip_unreadable: bool,
    how: dict[str, Any],
) -> list[Decoded]:
    """Decode the pictures of each side. See load_sets."""
    decoded = []
    for side in sides:
        key = f"{fingerprint_of(side.rows)} {shape} {how} ".encode() + files.READER
        decoded.append(decode_once(cells_of(side.rows), shape, partial(read, **how), key))
        problems = [*decoded[-1].problems.values()]
        if problems and not skip_unreadable:
            raise UsageError(
                f"{side.where}: {len(problems)} of {len(side.rows)} pictures cannot be read "
                "(--skip-unreadable of examples/pictures.py leaves such ones out): "
                + "; ".join(problems)
            )
    if "greys" not in how and 0 <= max(each.brightest for each in decoded) < NEARLY_BLACK:
        raise UsageError(
            f"{sides[0].where}: its grey pictures of more than 8 bits are nearly black if 65535, "
            "or 1 of fractions, is white: say which values are black and white, as in --grey-range "
            "0 4095"
        )
    return decoded


def cells_of(rows: datasets.Dataset) -> datasets.Dataset:
    """Return rows of one column of pictures as they are stored."""
    (image,) = rows.column_names
    return rows.cast_column(image, datasets.Image(decode=False))


def describe_reading(forms: Counter[str], reading: dict[str, Any]) -> dict[str, str]:
    """Return lines of the plan about how pictures of these forms are read. See Split."""
    plan = {}
    other = sum(n for form, n in forms.items() if form.split()[0] != form.split()[2])
    if other:
        how = {"pad": "padded", "squash": "squashed", "crop": "cropped"}
        text = how.get(reading["fit"], f"cropped, or padded beyond {files.LONG} : 1")
        plan["fit"] = f"{other} of {forms.total()} are not square and {text} (--fit)"
    if any(files.is_deep(form.split()[3]) for form in forms):
        black, white = reading["greys"].get("any", (0, "65535, or 1 of fractions,"))
        plan["greys"] = f"of more than 8 bits: {black} is black, {white} is white (--grey-range)"
    return plan
