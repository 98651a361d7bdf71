"""Read picture files of any kind as numbers, by the same rules for all scripts.

Every picture is turned upright. Of a file that holds several the first is read. Transparent pixels
become white, or black if what is visible could not be seen on white (on_ground). Grey values of
more than 8 bits are scaled by the range of their set (choose_range). read_square is for small grey
pictures, read_centre for photos in colour. Decoded pictures are cached; after any change to this
file they are all decoded again.
"""

import contextlib
import functools
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError

from trainkit.pictures.flags import Fit
from trainkit.reading.paths import find_spelt

# The formats that Pillow reads without help; for an EPS file it would start Ghostscript.
PILLOW_FORMATS = ["PNG", "JPEG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000", "ICO", "AVIF"]
with contextlib.suppress(ImportError):  # of phones: `pip install pillow-heif`
    import pillow_heif

    pillow_heif.register_heif_opener()
    PILLOW_FORMATS.append("HEIF")
# Everything that the values of a picture depend on, besides its file.
READER = f"{PILLOW_FORMATS} {PIL.__version__} {torch.__version__}".encode()
READER += Path(__file__).read_bytes()

SEVERAL = " (first of several)"  # at the end of the form of an animation, or of a file of pages
BRIGHT = 192  # of 255: a mean grey value that hardly differs from white
WHITES = (255, 1023, 4095, 16383, 65535)  # of 8, 10, 12, 14 and 16 bits
RANGES = "0 to 1 (fractions), 255, 1023, 4095, 16383 or 65535 (8 to 16 bits)"
LONG = 2  # sides beyond 2 : 1: by default such a picture is padded, since a crop would lose half

# The values of black and of white for each kind of deep grey picture ("I;16", "I", "F"). "any" is
# for all kinds, and values outside of it are cut off.
Greys = Mapping[str, tuple[float, float]]


def source_of(cell: dict[str, Any] | None) -> BytesIO | Path:
    """Return what is opened for a cell of datasets.Image. Raises ValueError if it is empty."""
    content, path = (cell or {}).get("bytes"), (cell or {}).get("path")
    if not (content or path):
        raise ValueError("there is no picture in it")
    return BytesIO(content) if content else find_spelt(Path(path or ""))


def open_upright(file: Path | BytesIO, side: int = 0) -> tuple[Image.Image, str]:
    """Open one picture and turn it upright; return its form too: its size and mode in words.

    With a side, a JPEG is decoded at the smallest scale with sides of at least that. Raises an
    exception that says what is wrong with the picture.
    """
    try:
        picture: Image.Image = Image.open(file, formats=PILLOW_FORMATS)
    except UnidentifiedImageError:
        more = "" if "HEIF" in PILLOW_FORMATS else " (for HEIC: `pip install pillow-heif`)"
        raise ValueError(f"it is not one of {', '.join(PILLOW_FORMATS)}{more}") from None
    with picture:
        clear = picture.info.get("transparency")
        if isinstance(clear, tuple) and max(clear) > 255:  # of 16 bits; Pillow keeps the upper 8
            picture.info["transparency"] = tuple(value >> 8 for value in clear)
        width, height = picture.size
        mode = picture.mode
        # MPO is a JPEG as many phones write it: one photo, and a small or brighter copy of it.
        is_one = picture.format == "MPO" or not getattr(picture, "is_animated", False)
        if side:
            picture.draft("RGB", (side, side))
        picture.load()
        before = picture.size
        if picture.info:  # without metadata it is upright, and looking costs a sixth of decoding
            ImageOps.exif_transpose(picture, in_place=True)
    if picture.size != before:
        width, height = height, width
    return picture, f"{width} x {height} {mode}{'' if is_one else SEVERAL}"


def deep_kind(mode: str) -> str:
    """Return "I;16", "I" or "F" for a mode whose range Pillow does not define, "" for others."""
    return "I;16" if mode.startswith("I;16") else mode * (mode in ("I", "F"))


def choose_range(kind: str, low: float, high: float) -> tuple[float, float] | None:
    """Return the values of black and white of pictures whose values lie from low to high.

    It is the smallest of RANGES that holds them, if they use more than a quarter of it, else None.
    """
    whites = (1, *WHITES) if kind == "F" else WHITES
    for white in whites:
        if low >= 0 and white / 4 < high <= white:
            return 0, white
    return None


def measure_greys(cell: dict[str, Any] | None) -> dict[str, tuple[float, float]]:
    """Return the kind of a deep grey picture with its smallest and largest value; {} for others."""
    with (
        contextlib.suppress(Exception),
        Image.open(source_of(cell), formats=PILLOW_FORMATS) as picture,
    ):
        if kind := deep_kind(picture.mode):
            values = np.asarray(picture, dtype=np.float64)
            values = values[np.isfinite(values)]
            return {kind: (float(values.min()), float(values.max()))}
    return {}


def scale_greys(picture: Image.Image, greys: Greys | None) -> np.ndarray:
    """Return the values of a deep grey picture as 0 to 255, float64 (height, width).

    greys: None, or without this kind: the range is chosen by this picture alone. Raises ValueError
    for values outside of the range.
    """
    values = np.asarray(picture, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("some of its values are not finite numbers")
    greys, kind = greys or {}, deep_kind(picture.mode)
    low, high = values.min(), values.max()
    if given := greys.get("any"):
        values = values.clip(*given)
    chosen = given or greys.get(kind) or choose_range(kind, low, high)
    what = f"its values (mode {picture.mode}) are {low:g} to {high:g}"
    if chosen is None:
        raise ValueError(f"{what}, and none of {RANGES} fits them")
    black, white = chosen
    if not given and (low < black or high > white):
        raise ValueError(f"{what}, and must be {black:g} to {white:g}")
    return (values - black) * (255 / (white - black))


def on_ground(values: np.ndarray, grey: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Return values (..., height, width), 0 to 255, on white ground, as on a page.

    It is black if the visible pixels are so bright that they could not be seen on white.

    Args:
        grey: the picture's grey values, 0 to 255. alpha: its opacity, 0 to 1, of the same shape.
    """
    ground = 255 if (grey * alpha).sum() <= BRIGHT * alpha.sum() else 0
    return values * alpha + (1 - alpha) * ground


def to_values(picture: Image.Image, mode: str, greys: Greys | None = None) -> np.ndarray:
    """Return values 0 to 255 as float64 (channels, height, width), for mode "L" or "RGB".

    greys: see scale_greys, of which this raises the ValueError.
    """
    transparent = picture.has_transparency_data
    if deep_kind(picture.mode):  # Pillow's own conversion would cut off above 255
        grey = scale_greys(picture, greys)
        values = np.stack([grey] * len(mode))
        if transparent:
            stored = np.asarray(picture)
            alpha = (stored != picture.info["transparency"]).astype(np.float64)
    else:
        if transparent:
            picture = picture.convert("RGBA")
            alpha = np.asarray(picture)[..., 3] / 255
        shown = picture if picture.mode == "L" else picture.convert("RGB")
        grey = np.array(shown.convert("L"), dtype=np.float64)
        values = grey[None]
        if mode != "L":
            values = np.array(shown.convert(mode), dtype=np.float64).transpose(2, 0, 1)
    return on_ground(values, grey, alpha) if transparent else values


def to_grey(picture: Image.Image, greys: Greys | None = None) -> np.ndarray:
    """Return grey values 0 to 255 as float64 (height, width). See to_values."""
    return to_values(picture, "L", greys)[0]


def resize(values: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize values, float64 (height, width), to uint8 of another height and width."""
    if values.shape == (height, width):
        return values.round().astype(np.uint8)
    batch = torch.from_numpy(values)[None, None]
    resized = F.interpolate(batch, (height, width), mode="bilinear", antialias=True)
    return resized.round()[0, 0].byte().numpy()


def pad(values: np.ndarray, side: int) -> np.ndarray:
    """Put values, uint8 (height, width, ...), into the middle of a square of this side.

    Around them is the median colour of their border: paper goes on as paper.
    """
    height, width = values.shape[:2]
    border = np.concatenate((values[0], values[-1], values[:, 0], values[:, -1]))
    square = np.empty((side, side, *values.shape[2:]), np.uint8)
    square[:] = np.median(border, axis=0).round()
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = values
    return square


def inside(width: int, height: int, side: int) -> tuple[int, int]:
    """Return the width and height of a picture whose longer side is made this long."""
    longer = max(width, height)
    return max(1, round(width * side / longer)), max(1, round(height * side / longer))


def fit_square(values: np.ndarray, size: int, fit: Fit) -> np.ndarray:
    """Bring grey values, float64 (height, width), to uint8 (size, size)."""
    height, width = values.shape
    if fit == "pad":
        new_width, new_height = inside(width, height, size)
        return pad(resize(values, new_height, new_width), size)
    if fit == "crop":
        short = min(height, width)
        top, left = (height - short) // 2, (width - short) // 2
        values = values[top : top + short, left : left + short]
    return resize(values, size, size)


def read_square(
    file: Path | BytesIO, size: int, fit: Fit = "squash", greys: Greys | None = None
) -> tuple[np.ndarray, str]:
    """Return the grey values of a picture, uint8 (1, size, size), and its form.

    Raises an exception that says what is wrong with the picture.
    """
    picture, form = open_upright(file)
    if form == f"{size} x {size} L" and not picture.has_transparency_data:
        # As it is: digits come by ten thousands. np.asarray(picture) would take longer.
        return np.frombuffer(picture.tobytes(), np.uint8).reshape(1, size, size), form
    return fit_square(to_grey(picture, greys), size, fit)[None], form


def read_centre(
    file: Path | BytesIO,
    side: int,
    fit: Fit | None = "crop",
    seen: int | None = None,
    greys: Greys | None = None,
) -> tuple[np.ndarray, str]:
    """Return a picture in colour as a square, uint8 (side, side, 3), and its form.

    Raises an exception that says what is wrong with the picture.

    Args:
        fit: "crop" returns the centre square. "pad" shows all of the picture in the middle `seen`
            pixels, which cut_centre leaves. "squash" changes its shape. None: the centre square,
            but all of a picture beyond 2 : 1.
        seen: None: all of the side.
        greys: see scale_greys.
    """
    picture, form = open_upright(file, side)
    if deep_kind(picture.mode):  # Pillow would cut them off
        picture = Image.fromarray(to_grey(picture, greys).round().astype(np.uint8))
    picture = picture.convert("RGBA" if picture.has_transparency_data else "RGB")
    width, height = picture.size
    short = min(picture.size)
    if fit is None:
        fit = "pad" if max(picture.size) > LONG * short else "crop"
    size = side, side
    box = 0.0, 0.0, float(width), float(height)
    if fit == "crop":
        left, top = (width - short) / 2, (height - short) / 2
        box = left, top, left + short, top + short
    elif fit == "pad":
        size = inside(width, height, seen or side)
    picture = picture.resize(size, Image.Resampling.BICUBIC, box)
    values = np.array(picture)
    if picture.mode == "RGBA":
        grey = np.asarray(picture.convert("RGB").convert("L"), dtype=np.float64)
        colours = values[..., :3].transpose(2, 0, 1).astype(np.float64)
        shown = on_ground(colours, grey, values[..., 3] / 255)
        values = np.ascontiguousarray(shown.round().astype(np.uint8).transpose(1, 2, 0))
    return (pad(values, side) if fit == "pad" else values), form


def read_photo_pixels(
    file: Path | BytesIO, side: int, size: int, fit: Fit | None = "crop", greys: Greys | None = None
) -> torch.Tensor:
    """Return a photo with the evaluation crop: uint8 (3, size, size), the centre of read_centre."""
    values, _ = read_centre(file, side, fit, size, greys)
    return cut_centre(torch.from_numpy(values).permute(2, 0, 1), size)


def cut_centre(pictures: torch.Tensor, size: int) -> torch.Tensor:
    """Return the centre of pictures (..., height, width): (..., size, size)."""
    top, left = ((length - size) // 2 for length in pictures.shape[-2:])
    return pictures[..., top : top + size, left : left + size]


def standardise(
    images: torch.Tensor,
    metadata: dict[str, Any],
    layout: torch.memory_format = torch.channels_last,
) -> torch.Tensor:
    """Cut out the centre and scale colours 0 to 255 to what the network was trained on.

    Features of photos, which have no height and width, are returned as they are.

    Args:
        images: (n, channels, height, width).
        metadata: has "size", "mean" and "std".
        layout: of the result in memory.
    """
    if images.ndim == 2:
        return images
    images = cut_centre(images, metadata["size"]).float()
    mean, std = (_in_channels(metadata[name], images.device) for name in ("mean", "std"))
    images = (images - mean) / std
    return images.contiguous(memory_format=layout)


def _in_channels(numbers: float | list[float], device: torch.device) -> torch.Tensor:
    """Return 255 times a number for each channel, (channels, 1, 1)."""
    make = _to_device.__wrapped__ if torch.compiler.is_compiling() else _to_device
    return make(tuple(numbers) if isinstance(numbers, list) else numbers, device)


@functools.cache  # to copy them to a GPU in each step would wait for all that it still has to do
def _to_device(numbers: float | tuple[float, ...], device: torch.device) -> torch.Tensor:
    return 255 * torch.tensor(numbers, dtype=torch.float32, device=device).view(-1, 1, 1)
