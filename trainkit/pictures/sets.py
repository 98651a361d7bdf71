"""The pictures to train and to evaluate on: found, decoded once, and what the plan says of them."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch

from trainkit.errors import UsageError
from trainkit.pictures import files
from trainkit.pictures.decoding import Decoded, Read, decode_once
from trainkit.pictures.flags import Fit, PictureConfig
from trainkit.pictures.splits import Labelled, find_sets
from trainkit.reading.recall import describe_classes
from trainkit.reading.splits import describe_equal, describe_given, split_rows
from trainkit.repairs.private_names import fingerprint_of
from trainkit.text import count

NEARLY_BLACK = 64  # of 255: if no deep grey value is brighter, another one must be white


class Split(NamedTuple):
    """The samples of a side.

    Attributes:
        path: the file of the decoded values of all rows.
        rows: the row of each sample, int64.
        labels: its class, int64.
        hashes: of its values, int64, equal for equal pictures.
        classes: the names of the classes.
        forms: how many pictures of all rows are of which size and mode.
        problems: what is wrong with the rows that were left out.
        reading: what predict.py needs to read pictures as these were read, as JSON: "fit", and
            "greys", the values of black and white of grey pictures of more than 8 bits.
    """

    path: Path
    rows: torch.Tensor
    labels: torch.Tensor
    hashes: torch.Tensor
    classes: list[str]
    forms: Counter[str]
    problems: list[str]
    reading: dict[str, Any]


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
        raise UsageError(
            f"{where}: all {len(train.rows)} pictures look the same, or are too few to hold some "
            "out"
        )
    forms = train.forms if train.path == held_out.path else train.forms + held_out.forms
    plan |= describe_classes(train.labels, held_out.labels, train.classes, "picture")
    plan |= describe_equal(train.hashes, held_out.hashes, "picture")
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
    if "greys" not in how and 0 <= max(each.brightest for each in decoded) < NEARLY_BLACK:
        raise UsageError(
            f"--dataset {name}: its grey pictures of more than 8 bits are nearly black if 65535, "
            "or 1 of fractions, is white: say which values are black and white, as in --grey-range "
            "0 4095"
        )
    if found.evaluated:
        chosen = [torch.arange(len(side.rows)) for side in sides]
    else:
        options = {"labels": found.train.labels, "number": num_held_out}
        chosen = [*split_rows(decoded[0].hashes, **options)]
    reading = {"fit": how["fit"], "greys": how.get("greys", {})}
    make = partial(make_split, classes=found.classes, reading=reading)
    train = make(sides[0], decoded[0], chosen[0])
    held_out = make(sides[-1], decoded[-1], chosen[1])
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
    return decoded


def cells_of(rows: datasets.Dataset) -> datasets.Dataset:
    """Return rows of one column of pictures as they are stored."""
    (image,) = rows.column_names
    return rows.cast_column(image, datasets.Image(decode=False))


def make_split(
    side: Labelled,
    decoded: Decoded,
    chosen: torch.Tensor,
    classes: list[str],
    reading: dict[str, Any],
) -> Split:
    """Return the chosen rows of a side that could be read."""
    unread = torch.tensor([*decoded.problems], dtype=torch.int64)
    rows = chosen[~torch.isin(chosen, unread)]
    samples = rows, side.labels[rows], decoded.hashes[rows]
    problems = [*decoded.problems.values()]
    return Split(decoded.path, *samples, classes, decoded.forms, problems, reading)


def describe_reading(forms: Counter[str], reading: dict[str, Any]) -> dict[str, str]:
    """Return lines of the plan about how pictures of these forms are read. See Split."""
    plan = describe_fit(forms, reading["fit"])
    several = sum(number for form, number in forms.items() if form.endswith(files.SEVERAL))
    if several:
        plan["several"] = f"{several} of {forms.total()} files hold several: the first is read"
    if any(files.is_deep(form.split()[3]) for form in forms):
        black, white = reading["greys"].get("any", (0, "65535, or 1 of fractions,"))
        plan["greys"] = f"of more than 8 bits: {black} is black, {white} is white (--grey-range)"
    return plan


def describe_fit(forms: Counter[str], fit: Fit | None) -> dict[str, str]:
    """Return a line of the plan if not all pictures are square. See files.fit_square for `fit`."""
    num_other = 0
    area_cut = 0.0
    for form, number in forms.items():
        short, longer = sorted(int(side) for side in form.split()[:3:2])
        num_other += number * (longer != short)
        if fit == "crop" or (fit is None and longer <= files.LONG * short):
            area_cut += number * (1 - short / longer)
    if not num_other:
        return {}
    how = {"pad": "padded", "squash": "squashed", "crop": "cropped"}
    text = how.get(fit or "", f"cropped, or padded beyond {files.LONG} : 1")
    cut = f": {area_cut / forms.total():.1%} is cut off" if area_cut else ""
    return {"fit": f"{num_other} of {forms.total()} are not square and {text}{cut} (--fit)"}
