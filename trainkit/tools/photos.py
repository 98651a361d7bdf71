"""Prepare a picture file, or a photo, so that it looks like the training pictures."""

import math
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageFilter

from trainkit.data.files import open_picture, resize, to_grey, to_values
from trainkit.errors import UsageError, as_usage_error

MAX_SIDE = 240  # pixels, of the small copy of a photo in which ink is found
NUM_LOOKED_AT = 2000  # pictures from which the framing of all is learned


def describe_looks(pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Measure pictures, uint8 (n, size, size), as fractions; NaN for a picture without contrast.

    border: where the border's value lies between the darkest (0) and the brightest (1). side: that
    of the square that holds the ink. x, y: the ink's centre of mass. amount: the mean of the ink
    over the whole picture.
    """
    values, size = pixels.float(), pixels.shape[-1]
    edge = torch.cat((values[:, 0], values[:, -1], values[:, :, 0], values[:, :, -1]), 1)
    paper, (low, high) = edge.median(1).values, values.flatten(1).aminmax(dim=1)
    ink = (values - paper[:, None, None]).abs()
    is_ink = ink > ink.amax((1, 2), keepdim=True) / 4
    axis, sides = (torch.arange(size) + 0.5) / size, []
    looks = {"border": (paper - low) / (high - low), "amount": ink.mean((1, 2)) / 255}
    for name, dim in (("x", 1), ("y", 2)):
        looks[name] = (ink.sum(dim) * axis).sum(1) / ink.sum((1, 2))
        start, stop = (torch.where(is_ink.any(dim), axis, other) for other in (1, 0))
        sides.append(stop.amax(1) - start.amin(1) + 1 / size)
    return looks | {"side": torch.maximum(*sides).where(high > low, torch.nan)}


def learn_framing(pictures: torch.Tensor) -> dict[str, Any]:
    """Learn what pictures, uint8 (n, 1, size, size), have in common.

    border: the lowest and the highest border of describe_looks. frame: side, x and y, or None if
    they differ from picture to picture. most_ink: an amount that few pictures exceed.
    """
    looks = describe_looks(pictures[:: math.ceil(len(pictures) / NUM_LOOKED_AT), 0])
    border = looks["border"][~looks["border"].isnan()]
    frame = torch.stack([looks[name] for name in ("side", "x", "y")])
    low, middle, high = frame.nanquantile(torch.tensor([0.05, 0.5, 0.95]), 1)
    is_steady = (high - low).max().item() < 0.1
    return {
        "border": [border.min().item(), border.max().item()] if len(border) else [0.0, 1.0],
        "frame": middle.tolist() if is_steady else None,
        "most_ink": looks["amount"].nanquantile(0.995).item(),
    }


def read_photo(
    path: Path | BytesIO, size: int, framing: dict[str, Any], as_is: bool = False
) -> tuple[torch.Tensor, str]:
    """Make a picture file look like the training pictures, and return what still differs.

    If inverting the picture makes its border more like theirs, it is inverted. If the ink of all
    training pictures is framed alike, a picture of another width and height than theirs is taken
    for a photo: its ink is found, and framed like theirs. Raises UsageError.

    Args:
        framing: what learn_framing returned, and "shape", the width and height of all training
            pictures, or None.
        as_is: resize the picture and do nothing else.

    Returns:
        uint8 (1, 1, size, size), and for example "2 separate groups of ink", or "".
    """
    with as_usage_error(f"{path} cannot be read as a picture"):
        picture = open_picture(path)
        grey = to_grey(picture)
    doubt, (low, high) = "", framing["border"]
    frame, shape = framing["frame"], framing["shape"]
    if as_is or not frame or not shape or shape[0] != shape[1] or shape == [*picture.size]:
        pixels = resize(grey, size)
        border = describe_looks(torch.from_numpy(pixels[None]))["border"].item()
    else:
        ink, num_groups = choose_groups(find_ink(picture, grey))
        if not num_groups:
            raise UsageError(f"{path} is blank: nothing in it differs from its border")
        pixels, border = frame_ink(ink, size, *frame), 0.0
        if num_groups > 1:
            doubt = f"{num_groups} separate groups of ink"
        elif pixels.mean() / 255 > framing["most_ink"]:
            doubt = "a blot"
    distance, inverted = (max(low - x, x - high, 0) for x in (border, 1 - border))
    if inverted < distance and not as_is:
        pixels = 255 - pixels
    return torch.from_numpy(pixels)[None, None], doubt


def find_ink(picture: Image.Image, grey: np.ndarray) -> np.ndarray:
    """Return where a photo differs from the lit paper, 0 to 1, at most MAX_SIDE pixels a side.

    Of grey, red, green and blue the channel is used in which it differs most, so that red ink is
    found on green paper.
    """
    colours = [] if picture.mode[0] in "1LIF" else [*to_values(picture, "RGB")]
    planes = [Image.fromarray(values.round().astype(np.uint8)) for values in (grey, *colours)]
    box = find_paper(planes[0])
    found = np.zeros((1, 1))
    for plane in (plane.crop(box) for plane in planes):
        plane.thumbnail((MAX_SIDE, MAX_SIDE))
        # The median of a wide neighbourhood is the paper's, because strokes cover less than half.
        light = plane.resize((48, 48)).filter(ImageFilter.MedianFilter(31)).resize(plane.size)
        off = np.asarray(plane.filter(ImageFilter.BoxBlur(1)), float) - np.asarray(light, float)
        off = off if off.max() > -off.min() else -off
        found = max(found, off, key=np.max)
    peak = found.max()
    return ((found / max(peak, 1) - 0.25) / 0.5).clip(0, 1) * (peak > 20)  # less is noise


def find_paper(grey: Image.Image) -> tuple[float, float, float, float]:
    """Return the box that holds the paper: the whole photo, or what differs from its border."""
    small = np.asarray(grey.resize((48, 48)), float)
    edge = np.concatenate((small[0], small[-1], small[:, 0], small[:, -1]))
    is_paper = np.abs(small - np.median(edge)) > 50
    if is_paper.mean() < 0.3:  # this is the writing: a sheet of paper would cover more
        return (0, 0, *grey.size)
    rows, columns = np.nonzero(is_paper)
    x, y = (side / 48 for side in grey.size)
    return (columns.min() + 1) * x, (rows.min() + 1) * y, columns.max() * x, rows.max() * y


def choose_groups(ink: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the ink without specks and without what runs off the picture, and the group count."""
    is_ink = torch.from_numpy(ink > 0.35)[None, None].double()
    near = F.max_pool2d(is_ink, 5, 1, 2)
    numbers, before = torch.arange(1.0, near.numel() + 1).view(near.shape) * near, None
    while before is None or not torch.equal(numbers, before):  # each group takes its largest number
        before = numbers
        for _ in range(8):
            numbers = F.max_pool2d(numbers, 3, 1, 1) * near
    groups = numbers[0, 0].long().numpy()
    mass = np.bincount(groups.ravel(), (ink * (ink > 0.35)).ravel())
    inner = mass.copy()
    inner[np.concatenate((groups[0], groups[-1], groups[:, 0], groups[:, -1]))] = 0
    if inner.max() > 0.1 * mass.max():
        mass = inner
    return ink * (mass > 0.04 * mass.max())[groups], int((mass > 0.15 * mass.max()).sum())


def frame_ink(ink: np.ndarray, size: int, side: float, x: float, y: float) -> np.ndarray:
    """Draw ink, 0 to 1, bright on black, uint8 (size, size). side, x and y: see describe_looks."""
    rows, columns = np.nonzero(ink > 0.35)
    ink = ink[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    length = max(ink.shape) / side
    top, left = (
        np.average(np.arange(ink.shape[axis]) + 0.5, weights=ink.sum(1 - axis)) - length * centre
        for axis, centre in enumerate((y, x))
    )
    window = (left, top, left + length, top + length)  # reaches beyond the ink, into black
    digit = Image.fromarray((255 * ink).astype(np.uint8)).crop(tuple(map(round, window)))
    pixels = resize(np.asarray(digit, dtype=np.float64), size)
    return (pixels * (255 / pixels.max())).round().astype(np.uint8)
