"""A further picture made like those that a model was trained on."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image

from datakit.pictures import open_picture, resize, to_grey
from trainkit.errors import UsageError, as_usage_error


def describe_looks(pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    """How pictures, uint8 (n, size, size), look, as fractions; NaN for a picture without contrast.

    border: where the border lies between the darkest and the brightest value. side: of the square
    that holds the ink. x, y: the ink's centre of mass.
    """
    values, size = pixels.float(), pixels.shape[-1]
    edge = torch.cat((values[:, 0], values[:, -1], values[:, :, 0], values[:, :, -1]), 1)
    low, high = values.flatten(1).aminmax(dim=1)
    looks = {"border": (edge.median(1).values - low) / (high - low)}
    ink = (values - edge.median(1).values[:, None, None]).abs()
    on = ink > ink.amax((1, 2), keepdim=True) / 4
    axis = (torch.arange(size) + 0.5) / size
    for name, dim in (("x", 1), ("y", 2)):
        looks[name] = (ink.sum(dim) * axis).sum(1) / ink.sum((1, 2))
        start, end = (torch.where(on.any(dim), axis, other) for other in (1, 0))
        side = end.amax(1) - start.amin(1) + 1 / size
        looks["side"] = torch.maximum(side, looks.get("side", side))
    return looks | {"side": looks["side"].where(high > low, torch.nan)}


def learn_framing(size: int, *seen: tuple[torch.Tensor, pd.Series]) -> dict[str, Any]:
    """What all pictures of a run have in common, so that another picture can be made like them.

    Training does not use it. read_as: in words, for example `32 x 32 RGB read as 28 x 28 grey`.
    shape: width and height, if there is one. border: the range of describe_looks. frame: side, x
    and y, if they are steady.

    Args:
        seen: what load_images returned last, of each split.
    """
    pixels, texts = zip(*seen, strict=True)
    looks = pd.DataFrame(describe_looks(torch.cat(pixels)))
    kinds = pd.concat(texts).value_counts().index
    shapes = {tuple(map(int, kind.split()[:3:2])) for kind in kinds}
    steady = looks[["side", "x", "y"]].quantile([0.05, 0.5, 0.95])
    framed = len(shapes) == 1 and len({*next(iter(shapes))}) == 1
    framed = framed and (steady.loc[0.95] - steady.loc[0.05]).max() < 0.1
    others = f" and {len(kinds) - 1} other kinds" if len(kinds) > 1 else ""
    grey, kind = f"{size} x {size} grey", f"{kinds[0]}{others}"
    return {
        "read_as": grey if kind == f"{size} x {size} L" else f"{kind} read as {grey}",
        "shape": list(shapes.pop()) if len(shapes) == 1 else None,
        "border": [float(looks["border"].min()), float(looks["border"].max())],
        "frame": steady.loc[0.5].tolist() if framed else None,
    }


def read_picture(path: Path, size: int, seen: dict[str, Any], as_is: bool = False) -> torch.Tensor:
    """A picture file as the training pictures are: uint8 (1, 1, size, size). UsageError.

    A picture whose border is unlike theirs, more than its negative's is, is turned to its negative.
    One of another shape than theirs is framed as they are, if they are framed alike. as_is: neither
    is done.

    Args:
        seen: what learn_framing returned.
    """
    with as_usage_error(f"{path} cannot be read as a picture"):
        grey = to_grey(open_picture(path))
    pixels = resize(grey, size)
    low, high = seen["border"]
    border = describe_looks(torch.from_numpy(pixels[None]))["border"].item()
    strange, strange_negative = (max(low - x, x - high, 0) for x in (border, 1 - border))
    if not as_is and strange_negative < strange:
        grey = 255 - grey
        pixels = resize(grey, size)
    if not as_is and seen["frame"] and [*grey.shape[::-1]] != seen["shape"]:
        pixels = frame(path, grey, size, *seen["frame"])
    return torch.from_numpy(pixels)[None, None]


def frame(path: Path, grey: np.ndarray, size: int, side: float, x: float, y: float) -> np.ndarray:
    """The ink of a picture in a square of its ground, uint8 (size, size); see describe_looks."""
    ground = np.median(np.concatenate((grey[0], grey[-1], grey[:, 0], grey[:, -1])))
    bright = ground < (grey.min() + grey.max()) / 2
    ink = (grey - ground if bright else ground - grey).clip(0)
    if ink.max() < 16:
        raise UsageError(f"{path} is blank: nothing in it differs from its border")
    ink *= 255 / ink.max()
    rows, columns = np.nonzero(ink > 64)
    ink = ink[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    length = max(ink.shape) / side
    top, left = (
        np.average(np.arange(ink.shape[axis]) + 0.5, weights=ink.sum(1 - axis)) - length * centre
        for axis, centre in enumerate((y, x))
    )
    window = (left, top, left + length, top + length)  # reaches beyond the ink, into black
    digit = Image.fromarray(ink.astype(np.uint8)).crop(tuple(map(round, window)))
    pixels = resize(np.asarray(digit, dtype=np.float64), size)
    return pixels if bright else 255 - pixels
