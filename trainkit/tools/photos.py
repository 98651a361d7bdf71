"""Prepare a picture file, or a photo, so that it looks like the training pictures."""

import math
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageFilter

from trainkit.errors import UsageError, as_usage_error
from trainkit.pictures.files import open_picture, resize, to_grey, to_values

MAX_SIDE = 240  # pixels, of the small copy of a photo in which ink is found
NUM_LOOKED_AT = 2000  # pictures from which the framing of all is learned


def border_of(values: torch.Tensor) -> torch.Tensor:
    """Return the outermost values of pictures (..., height, width), as (..., n)."""
    return torch.cat((values[..., [0, -1], :].flatten(-2), values[..., [0, -1]].flatten(-2)), -1)


def centre_of(ink: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the centre of mass of pictures (..., height, width), x and y in pixels."""
    lines = ink.sum(-2), ink.sum(-1)
    x, y = ((line * (torch.arange(line.shape[-1]) + 0.5)).sum(-1) / line.sum(-1) for line in lines)
    return x, y


def box_of(mask: torch.Tensor) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of what is True."""
    return Image.fromarray(mask.numpy()).getbbox() or (0, 0, 0, 0)


def describe_looks(pixels: torch.Tensor) -> torch.Tensor:
    """Measure pictures, uint8 (n, size, size), as five fractions, (5, n); NaN without contrast.

    Where the border's value lies between the darkest (0) and the brightest (1); the side of the
    square that holds the ink; the ink's centre of mass, x and y; the mean of the ink.
    """
    values, size = pixels.float(), pixels.shape[-1]
    paper, (low, high) = border_of(values).median(1).values, values.flatten(1).aminmax(dim=1)
    ink = (values - paper[:, None, None]).abs()
    is_ink = ink > ink.amax((1, 2), keepdim=True) / 4
    x, y = (centre / size for centre in centre_of(ink))
    side = torch.maximum(*(is_ink.any(dim).sum(1) for dim in (1, 2))) / size
    return torch.stack(((paper - low) / (high - low), side + 0 * x, x, y, ink.mean((1, 2)) / 255))


def learn_framing(pictures: torch.Tensor) -> dict[str, Any]:
    """Learn what pictures, uint8 (n, 1, size, size), have in common.

    border: the lowest and the highest border of describe_looks. frame: side, x and y, or None if
    they differ from picture to picture. most_ink: an amount that few pictures exceed.
    """
    looks = describe_looks(pictures[:: math.ceil(len(pictures) / NUM_LOOKED_AT), 0])
    shares = torch.tensor([0, 0.05, 0.5, 0.95, 0.995, 1])
    least, low, middle, high, most, greatest = looks.nanquantile(shares, 1)
    is_steady = (high - low)[1:4].max() < 0.1
    return {
        "border": [least[0].item(), greatest[0].item()],
        "frame": middle[1:4].tolist() if is_steady else None,
        "most_ink": most[4].item(),
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
    (low, high), frame, shape = (framing[name] for name in ("border", "frame", "shape"))
    doubt, border = "", 0.0
    if as_is or not frame or shape in (None, [*picture.size]) or shape[0] != shape[1]:
        pixels = torch.from_numpy(resize(grey, size))
        border = describe_looks(pixels[None])[0].item()
    else:
        ink, num_groups = choose_groups(find_ink(picture))
        if not num_groups:
            raise UsageError(f"{path} is blank: nothing in it differs from its border")
        pixels = frame_ink(ink, size, *frame)
        if num_groups > 1:
            doubt = f"{num_groups} separate groups of ink"
        elif pixels.float().mean() / 255 > framing["most_ink"]:
            doubt = "a blot"
    distance, inverted = (max(low - x, x - high, 0) for x in (border, 1 - border))
    if inverted < distance and not as_is:
        pixels = 255 - pixels
    return pixels[None, None], doubt


def find_ink(picture: Image.Image) -> torch.Tensor:
    """Return where a photo differs from the lit paper, 0 to 1, at most MAX_SIDE pixels a side.

    Of red, green and blue the one is used in which it differs most: red ink on green paper.
    """
    found = torch.zeros(1, 1)
    for channel in to_values(picture, "RGB"):
        plane = Image.fromarray(channel.astype(np.uint8))
        plane.thumbnail((MAX_SIDE, MAX_SIDE))
        values = torch.from_numpy(np.array(plane)).float()
        is_sheet = (values - border_of(values).median()).abs() > 50
        if is_sheet.float().mean() > 0.3:  # a sheet on a table; writing covers less
            left, top, right, bottom = box_of(is_sheet)
            plane = plane.crop((left + 6, top + 6, right - 6, bottom - 6))
        # The median of a wide neighbourhood is the paper's, because strokes cover less than half.
        light = plane.resize((48, 48)).filter(ImageFilter.MedianFilter(31)).resize(plane.size)
        blurred = plane.filter(ImageFilter.BoxBlur(1))
        off = torch.from_numpy(np.asarray(blurred, np.float32) - np.asarray(light, np.float32))
        found = max(found, off, -off, key=torch.max)
    peak = found.max()
    return ((found / peak.clamp(1) - 0.25) / 0.5).clamp(0, 1) * (peak > 20)  # less is noise


def choose_groups(ink: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the ink without specks and without what runs off the picture, and the group count."""
    is_ink = ink > 0.35
    near = F.max_pool2d(is_ink[None].double(), 5, 1, 2)
    groups, before = torch.arange(1.0, near.numel() + 1).view(near.shape) * near, near
    while not torch.equal(groups, before):  # each group takes its largest number
        before, groups = groups, F.max_pool2d(groups, 3, 1, 1) * near
    groups = groups[0].long()
    mass = groups.flatten().bincount((ink * is_ink).flatten())
    inner = mass.clone()
    inner[border_of(groups)] = 0
    if inner.max() > 0.1 * mass.max():
        mass = inner
    return ink * (mass > 0.04 * mass.max())[groups], int((mass > 0.15 * mass.max()).sum())


def frame_ink(ink: torch.Tensor, size: int, side: float, x: float, y: float) -> torch.Tensor:
    """Draw ink, 0 to 1, bright on black, uint8 (size, size). side, x and y: see describe_looks."""
    left, top, right, bottom = box_of(ink > 0.35)
    length = max(right - left, bottom - top) / side
    # Cut out a square that reaches beyond the ink, into black.
    x, y = (round(c.item() - length * part) for c, part in zip(centre_of(ink), (x, y), strict=True))
    digit = Image.fromarray(ink.numpy()).crop((x, y, x + round(length), y + round(length)))
    pixels = torch.from_numpy(resize(np.asarray(digit, float) * 255, size)).float()
    return (pixels * (255 / pixels.max())).round().byte()
