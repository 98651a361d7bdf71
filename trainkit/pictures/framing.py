"""Prepare a picture file for a network of small grey pictures as those of MNIST were prepared."""

import math
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps

from trainkit.errors import UsageError, as_usage_error
from trainkit.pictures.files import Greys, fit_square, open_upright
from trainkit.pictures.flags import Fit

SIDE, WIDE = 64, 27  # pixels: of the copy in which ink is found, and wider than strokes in it
INK = 20 / 28  # the longer side of MNIST's ink, as a share of the picture


def border_of(values: torch.Tensor) -> torch.Tensor:
    """Return the outermost values of pictures (..., height, width), as (..., n)."""
    return torch.cat((values[..., [0, -1], :].flatten(-2), values[..., [0, -1]].flatten(-2)), -1)


def learn_framing(pictures: torch.Tensor) -> dict[str, Any]:
    """Learn what pictures, uint8 (n, 1, size, size), have in common.

    border: the darkest and the brightest median of a border, 0 to 1. framed: whether the ink of
    nearly all is as large as that of MNIST's.
    """
    values = pictures[:: math.ceil(len(pictures) / 2000), 0] / 255  # of at most 2000
    border = border_of(values).median(1).values
    ink = (values - border[:, None, None]).abs()
    is_ink = ink > ink.amax((1, 2), keepdim=True) / 4
    sides = torch.maximum(*(is_ink.any(dim).sum(1) for dim in (1, 2))) / values.shape[-1]
    framed = ((sides[sides > 0] - INK).abs() < 0.06).float().mean() > 0.9
    return {"border": [border.min().item(), border.max().item()], "framed": bool(framed)}


def read_photo(
    path: Path | BytesIO,
    size: int,
    framing: dict[str, Any],
    as_is: bool = False,
    fit: Fit = "squash",
    greys: Greys | None = None,
) -> tuple[torch.Tensor, str]:
    """Make a picture file look like the training pictures; return what is doubtful about it too.

    If these are framed as MNIST's are, a picture of another width and height is taken for a photo
    and prepared as MNIST's were. If inverting makes the border more like theirs, it is inverted.
    Returns uint8 (1, 1, size, size), and for example "2 separate groups of ink", or "". Raises
    UsageError.

    Args:
        framing: what learn_framing returned, and "shape", the width and height of all training
            pictures, or None.
        as_is: resize the picture and do nothing else.
        fit, greys: see files.read_square; the same as in training.
    """
    with as_usage_error(f"{path} cannot be read as a picture"):
        picture, _ = open_upright(path, greys=greys)
    low, high = framing["border"]
    num_groups = 1
    if as_is or not framing["framed"] or framing["shape"] in (None, [*picture.size]):
        pixels = torch.from_numpy(fit_square(picture.convert("L"), size, fit))
    else:
        ink, num_groups = choose_groups(find_ink(picture))
        if not num_groups:
            raise UsageError(f"{path} is blank: nothing in it differs from its border")
        pixels = frame_ink(ink, size)
    border = border_of(pixels).median().item() / 255
    distance, inverted = (max(low - x, x - high, 0) for x in (border, 1 - border))
    if inverted < distance and not as_is:
        pixels = 255 - pixels
    doubt = f"{num_groups} separate groups of ink" if num_groups > 1 else ""
    return pixels[None, None], doubt


def find_ink(picture: Image.Image) -> torch.Tensor:
    """Return how much each place differs from the paper, 0 to 1; all 0 if nothing does.

    Paper is what a filter wider than strokes leaves. Of red, green and blue and their negatives the
    one is used in which some places are most below the median: dark or bright ink of any colour.
    """
    values = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1).float()[None]
    values = torch.cat((values, -values), 1)
    size = [math.ceil(side * SIDE / max(picture.size)) for side in values.shape[2:]]
    values = F.interpolate(values, size, mode="bilinear", antialias=True)
    paper = F.pad(values, [WIDE] * 4, mode="replicate")
    for sign in (1, -1):
        paper = sign * F.max_pool2d(sign * paper, WIDE, 1, WIDE // 2)
    below = values.flatten(2).median(2).values[..., None, None] - values
    used = below.pow(3).mean((0, 2, 3)).argmax()
    ink = (paper[..., WIDE:-WIDE, WIDE:-WIDE] - values)[0, used]
    return (2 * ink / ink.max().clamp(1) - 0.5).clamp(0, 1) * (ink.max() > 20)  # less is noise


def choose_groups(ink: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the ink without specks and without what runs off the picture, and the group count."""
    near = F.max_pool2d((ink > 0.35)[None].float(), 3, 1, 1)
    groups = torch.arange(1.0, near.numel() + 1).view(near.shape) * near
    before = near
    while not torch.equal(groups, before):  # each group takes its largest number
        before = groups
        groups = F.max_pool2d(groups, 3, 1, 1) * near
    groups = groups[0].long()
    mass = groups.flatten().bincount((ink * (ink > 0.35)).flatten())
    inner = mass.clone()
    inner[border_of(groups)] = 0
    if inner.max() > 0.1 * mass.max():
        mass = inner
    return ink * (mass > 0.04 * mass.max())[groups], int((mass > 0.15 * mass.max()).sum())


def frame_ink(ink: torch.Tensor, size: int) -> torch.Tensor:
    """Draw ink, 0 to 1, bright on black, uint8 (size, size), where MNIST has it."""
    digit = Image.fromarray((255 * ink).byte().numpy())
    digit = digit.crop(Image.fromarray((ink > 0.35).numpy()).getbbox())
    sides = [max(1, round(side * size * INK / max(digit.size))) for side in digit.size]
    digit = ImageOps.autocontrast(digit.resize(sides, Image.Resampling.BILINEAR))
    lines = (np.asarray(digit).sum(axis) for axis in (0, 1))
    # The centre of mass lies in the pixel size / 2.
    x, y = (size / 2 - np.average(range(len(line)), weights=line) for line in lines)
    framed = Image.new("L", (size, size))
    framed.paste(digit, (round(x), round(y)))
    return torch.from_numpy(np.array(framed))
