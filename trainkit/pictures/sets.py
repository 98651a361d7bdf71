"""The pictures to train and to evaluate on: found, decoded once, and what the plan says of them."""

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pandas as pd
import torch

from trainkit.errors import UsageError
from trainkit.pictures import files
from trainkit.pictures.decoding import Decoded, Read, decode_once, widen
from trainkit.pictures.flags import PictureConfig
from trainkit.pictures.shown import describe_reading
from trainkit.pictures.splits import Labelled, find_sets
from trainkit.reading.recall import describe_classes
from trainkit.reading.splits import describe_equal, describe_given, split_rows
from trainkit.repairs.private_names import fingerprint_of
from trainkit.text import count


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
            "greys", the values of black and white of each kind of deep grey pictures.
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
    labels = pd.Series(torch.cat((train.labels, held_out.labels)).numpy())
    alike = labels.groupby(torch.cat((train.hashes, held_out.hashes)).numpy())
    if unlike := int((alike.transform("nunique") > 1).sum()):
        plan["unlike"] = f"{unlike} of {len(labels)} pictures look as one of another class"
    return train, held_out, describe_reading(forms, train.reading) | plan


def load_sets(
    name: str,
    read: Read,
    shape: tuple[int, ...],
    label: str | None = None,
    eval_data: str | None = None,
    same_classes: bool = True,
    num_held_out: int = 0,
    skip_unreadable: bool | None = None,
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
        skip_unreadable: leave out what cannot be read. None: the script has no such flag.
        how: what `read` gets too. Without "greys" the range of deep grey pictures is chosen by the
            values of both sides.
    """
    found = find_sets(name, label, eval_data, bool(num_held_out), same_classes)
    sides = [side for side in (found.train, found.evaluated) if side]
    decode = partial(decode_rows, read=read, shape=shape)
    decoded = [decode(side.rows, how) for side in sides]
    if any(each.greys for each in decoded):
        how["greys"] = choose_greys(f"--dataset {name}", *(each.greys for each in decoded))
        decoded = [decode(side.rows, how) for side in sides]
    refuse_unreadable(sides, decoded, skip_unreadable)
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
    return train, held_out, {"data": name} | describe_given(given, found.unread) | found.plan


def decode_rows(
    rows: datasets.Dataset, how: dict[str, Any], read: Read, shape: tuple[int, ...]
) -> Decoded:
    """Decode rows of one column of pictures. See load_sets."""
    key = f"{fingerprint_of(rows)} {shape} {how} ".encode() + files.READER
    return decode_once(cells_of(rows), shape, partial(read, **how), key, "greys" in how)


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


def refuse_unreadable(
    sides: Sequence[Labelled], decoded: Sequence[Decoded], skip_unreadable: bool | None
) -> None:
    """Raise UsageError with all that cannot be read, unless they are skipped. See load_sets."""
    for side, (_, problems, *_) in zip(sides, decoded, strict=True):
        if not problems or skip_unreadable:
            continue
        text = f"{side.where}: {len(problems)} of {len(side.rows)} pictures cannot be read: "
        text += "; ".join(problems.values())
        if skip_unreadable is not None:
            command = shlex.join(["python", *sys.argv, "--skip-unreadable"])
            text += f"\nThis works, without them: {command}"
        raise UsageError(text)


def choose_greys(where: str, *greys: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the values of black and of white for each kind of deep grey pictures of a set.

    greys: the smallest and the largest value of each kind, of each side. Raises UsageError if no
    range fits.
    """
    measured: dict[str, list[float]] = {}
    for each in greys:
        widen(measured, each)
    chosen = {}
    for kind, (low, high) in measured.items():
        found = files.choose_range(kind, low, high)
        if found is None:
            raise UsageError(
                f"{where}: which values are black and white? Those of its pictures of "
                f"mode {kind} are {low:g} to {high:g}, and none of {files.RANGES} fits them: say "
                f"it, for example with --grey-range {low:g} {high:g}"
            )
        chosen[kind] = [*found]
    return chosen
