"""A further picture made like those that a model was trained on, also if it is a photograph."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from trainkit.data.files import open_picture, resize, to_grey, to_values
from trainkit.errors import UsageError, as_usage_error

MAX_SIDE = 240  # pixels of a photo in which the ink is looked for


def describe_looks(pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    """How pictures, uint8 (n, size, size), look, as fractions; NaN for a picture without contrast.

    border: where the border lies between the darkest and the brightest value. side: of the square
    that holds the ink. x, y: the ink's centre of mass. amount: of ink, over the whole picture.
    """
    values, size = pixels.float(), pixels.shape[-1]
    edge = torch.cat((values[:, 0], values[:, -1], values[:, :, 0], values[:, :, -1]), 1)
    low, high = values.flatten(1).aminmax(dim=1)
    looks = {"border": (edge.median(1).values - low) / (high - low)}
    ink = (values - edge.median(1).values[:, None, None]).abs()
    on = ink > ink.amax((1, 2), keepdim=True) / 4
    looks["amount"] = ink.mean((1, 2)) / 255
    axis = (torch.arange(size) + 0.5) / size
    for name, dim in (("x", 1), ("y", 2)):
        looks[name] = (ink.sum(dim) * axis).sum(1) / ink.sum((1, 2))
        start, end = (torch.where(on.any(dim), axis, other) for other in (1, 0))
        side = end.amax(1) - start.amin(1) + 1 / size
        looks["side"] = torch.maximum(side, looks.get("side", side))
    return looks | {"side": looks["side"].where(high > low, torch.nan)}


def learn_framing(size: int, *seen: tuple[torch.Tensor, Counter[str]]) -> dict[str, Any]:
    """What all pictures of a run have in common, so that another picture can be made like them.

    Training does not use it. read_as: in words, for example `32 x 32 RGB read as 28 x 28 grey`.
    shape: width and height, if there is one. border: the range of describe_looks. frame: side, x
    and y, if they are steady. most_ink: the amount that few exceed.

    Args:
        seen: what load_images returned last, of each split.
    """
    pixels, counts = zip(*seen, strict=True)
    looks = describe_looks(torch.cat(pixels))
    border = looks["border"][~looks["border"].isnan()]
    if not len(border):
        raise UsageError(
            "each of the pictures is of one grey value: there is nothing in them (16 bit files "
            "must use 0 to 65535, float ones 0 to 1)"
        )
    kinds = [kind for kind, _ in sum(counts, Counter()).most_common()]
    shapes = {tuple(map(int, kind.split()[:3:2])) for kind in kinds}
    shape = shapes.pop() if len(shapes) == 1 else None
    frame = torch.stack([looks[name] for name in ("side", "x", "y")])
    low, middle, high = frame.nanquantile(torch.tensor([0.05, 0.5, 0.95]), 1)
    framed = shape and shape[0] == shape[1] and (high - low).max().item() < 0.1
    others = f" and {len(kinds) - 1} other kinds" if len(kinds) > 1 else ""
    grey, kind = f"{size} x {size} grey", f"{kinds[0]}{others}"
    return {
        "read_as": grey if kind == f"{size} x {size} L" else f"{kind} read as {grey}",
        "shape": shape and list(shape),
        "border": [border.min().item(), border.max().item()],
        "frame": middle.tolist() if framed else None,
        "most_ink": looks["amount"].nanquantile(0.995).item(),
    }


def read_picture(path: Path, size: int, seen: dict[str, Any], as_is: bool = False) -> torch.Tensor:
    """A picture file as the training pictures are: uint8 (1, 1, size, size). UsageError."""
    return read_photo(path, size, seen, as_is)[0]


def read_photo(
    path: Path, size: int, seen: dict[str, Any], as_is: bool = False
) -> tuple[torch.Tensor, str]:
    """A picture file as the training pictures are, and what makes it unlike them, if anything.

    A picture whose border is unlike theirs, more than its negative's is, is turned to its negative.
    One of another shape than theirs is a photo: its ink is framed as theirs is, if they are framed
    alike. as_is: none of it is done. Raises UsageError.

    Args:
        seen: what learn_framing returned.

    Returns:
        uint8 (1, 1, size, size), and for example `2 separate groups of ink`, or nothing.
    """
    with as_usage_error(f"{path} cannot be read as a picture"):
        picture = open_picture(path)
        grey = to_grey(picture)
    doubt, (low, high) = "", seen["border"]
    if not as_is and seen["frame"] and [*picture.size] != seen["shape"]:
        ink, bright = find_ink(picture, grey)
        if ink is None:
            raise UsageError(f"{path} is blank: nothing in it differs from its border")
        ink, groups = choose_groups(ink)
        pixels = frame(ink, size, *seen["frame"])
        if groups > 1:
            doubt = f"{groups} separate groups of ink"
        elif pixels.mean() / 255 > seen.get("most_ink", 1.0):
            doubt = "a blot"
        border = 0.0
        if not bright:
            pixels, border = 255 - pixels, 1.0
    else:
        pixels = resize(grey, size)
        border = describe_looks(torch.from_numpy(pixels[None]))["border"].item()
    strange, strange_negative = (max(low - x, x - high, 0) for x in (border, 1 - border))
    if not as_is and strange_negative < strange:
        pixels = 255 - pixels
    return torch.from_numpy(pixels)[None, None], doubt


def find_ink(picture: Image.Image, grey: np.ndarray) -> tuple[np.ndarray | None, bool]:
    """Where the ink of a photo is, 0 to 1, and if it is brighter than the paper; None if blank.

    Ink is what differs from the light on the paper. Of grey, red, green and blue that channel is
    taken in which it does so most, so that red on green of the same brightness is seen.
    """
    planes = [grey]
    if picture.mode[0] not in "1LIF":
        planes += [*to_values(picture, "RGB")]
    values = torch.from_numpy(np.stack(planes))[None]
    if (scale := MAX_SIDE / max(grey.shape)) < 1:
        values = F.interpolate(values, scale_factor=scale, mode="bilinear", antialias=True)
    paper = find_paper(values[0, 0].numpy())
    found = most_ink(values[0].numpy(), paper)
    # What looked like a sheet of paper but is blank was itself the ink.
    return most_ink(values[0].numpy(), np.ones_like(paper)) if found[0] is None else found


def most_ink(planes: np.ndarray, paper: np.ndarray) -> tuple[np.ndarray | None, bool]:
    """The ink of that plane in which it stands out most, and if it is brighter; None if blank."""
    most, ink, bright = 6.0, None, False  # times the noise, at least
    for plane in planes:
        off = (plane - fit_light(plane, paper)) * paper
        for axis in (1, 0):  # ruled lines run across the whole paper, strokes do not
            known = np.where(paper | ~paper.any(axis, keepdims=True), off, np.nan)
            low, high = np.nanquantile(known, [0.2, 0.8], axis, keepdims=True)
            off = (off - low.clip(min=0) - high.clip(max=0)) * paper
        smooth = F.avg_pool2d(as_batch(off), 3, 1, 1)[0, 0].numpy()
        noise = max(np.median(np.abs(off - smooth)[paper]), 2)
        level = 0.4 * np.abs(smooth).max()
        is_bright = bool(smooth[smooth > level].sum() > -smooth[smooth < -level].sum())
        smooth = smooth if is_bright else -smooth
        peak = smooth.max()
        if peak / noise > most:
            most, bright = 1.1 * peak / noise, is_bright
            floor = max(0.2 * peak, 2 * noise)
            ink = ((smooth - floor) / (0.6 * peak)).clip(0, 1)
    return ink, bright


def as_batch(values: np.ndarray) -> torch.Tensor:
    """A picture as float64 (1, 1, height, width)."""
    return torch.from_numpy(values)[None, None].double()


def grow(mask: np.ndarray, radius: int) -> np.ndarray:
    """A mask and what lies no further from it than `radius` pixels."""
    return F.max_pool2d(as_batch(mask), 2 * radius + 1, 1, radius)[0, 0].numpy() > 0


def find_paper(grey: np.ndarray) -> np.ndarray:
    """Where the paper is: all of the picture, unless its border is another plane, like a table.

    Then the pixels unlike the border, by Otsu's threshold, fill what they surround for the most
    part, which the strokes of a letter do not.
    """
    share, values = np.cumsum(np.histogram(grey, 256, (0, 256))[0]) / grey.size, np.arange(256)
    mean = np.cumsum(np.diff(share, prepend=0) * values)
    between = (mean[-1] * share - mean) ** 2 / np.maximum(share * (1 - share), 1e-9)
    bright = grey > between.argmax()
    edge = np.concatenate((bright[0], bright[-1], bright[:, 0], bright[:, -1])).mean()
    other = bright != (edge > 0.5)
    paper = np.ones_like(other)
    for axis in (0, 1):  # what has paper on both sides
        ahead = np.maximum.accumulate(other, axis)
        paper &= ahead & np.flip(np.maximum.accumulate(np.flip(other, axis), axis), axis)
    inner = ~grow(np.pad(~paper, 1, constant_values=True), 4)[1:-1, 1:-1]
    if 0.2 < edge < 0.8 or inner.mean() < 0.15 or other.sum() < 0.8 * paper.sum():
        return np.ones_like(paper)
    return inner


def fit_light(plane: np.ndarray, paper: np.ndarray) -> np.ndarray:
    """The light on the paper: the surface of second order that is nearest in absolute values."""
    y, x = np.mgrid[-1 : 1 : plane.shape[0] * 1j, -1 : 1 : plane.shape[1] * 1j]
    terms = np.stack([np.ones_like(x), x, y, x * x, x * y, y * y], -1)
    inputs, targets = terms[paper][::4], plane[paper][::4]
    weights = np.ones_like(targets)
    for _ in range(12):  # least squares, reweighted: strokes are far off and count for little
        fitted = np.linalg.lstsq(inputs * weights[:, None], targets * weights, rcond=None)[0]
        weights = np.maximum(np.abs(inputs @ fitted - targets), 2) ** -0.5
    return terms @ fitted


def choose_groups(ink: np.ndarray) -> tuple[np.ndarray, int]:
    """The ink without specks and what runs off the picture, and the number of separate groups."""
    on = ink > 0.35
    near = torch.from_numpy(grow(on, max(1, round(0.012 * max(ink.shape)))))[None, None]
    numbers, before = torch.arange(1.0, near.numel() + 1).view(near.shape) * near, None
    while before is None or not torch.equal(numbers, before):  # each group takes its largest number
        before = numbers
        for _ in range(8):
            numbers = F.max_pool2d(numbers, 3, 1, 1) * near
    groups = numbers[0, 0].long().numpy()
    mass = np.bincount(groups.ravel(), (ink * on).ravel())
    inner = mass.copy()
    inner[np.concatenate((groups[0], groups[-1], groups[:, 0], groups[:, -1]))] = 0
    if inner.max() > 0.1 * mass.max():
        mass = inner
    kept = on & (mass > 0.04 * mass.max())[groups]
    return ink * grow(kept, 2), int((mass > 0.15 * mass.max()).sum())


def frame(ink: np.ndarray, size: int, side: float, x: float, y: float) -> np.ndarray:
    """Ink, 0 to 1, bright on black in a square, uint8 (size, size); see describe_looks."""
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
