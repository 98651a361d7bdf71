"""Read picture files of any kind as numbers, by the same rules for all scripts.

Every picture is turned upright. Of a file that holds several the first is read. read_square is for
small grey pictures, read_centre for photos in colour. Decoded pictures are cached; after any change
here they are all decoded again.
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
from PIL import Image, ImageOps, UnidentifiedImageError

from trainkit.pictures.flags import Fit

# The formats that Pillow reads without help; for an EPS file it would start Ghostscript.
PILLOW_FORMATS = ["PNG", "JPEG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000", "ICO", "AVIF"]
with contextlib.suppress(ImportError):  # of phones: `pip install pillow-heif`
    import pillow_heif

    pillow_heif.register_heif_opener()
    PILLOW_FORMATS.append("HEIF")
# Everything that the values of a picture depend on, besides its file.
READER = f"{PILLOW_FORMATS} {PIL.__version__}".encode() + Path(__file__).read_bytes()

BRIGHT = 192  # of 255: a mean grey value that hardly differs from white
LONG = 2  # sides beyond 2 : 1: by default such a picture is padded, since a crop would lose half
# Other values of black and white in grey pictures of more than 8 bits, called "any".
Greys = Mapping[str, tuple[float, float]]


def source_of(cell: dict[str, Any] | None) -> BytesIO | Path:
    """Return what is opened for a cell of datasets.Image. Raises ValueError if it is empty."""
    content, path = (cell or {}).get("bytes"), (cell or {}).get("path")
    if not (content or path):
        raise ValueError("there is no picture in it")
    return BytesIO(content) if content else Path(path or "")


def open_upright(
    file: Path | BytesIO, side: int = 0, greys: Greys | None = None
) -> tuple[Image.Image, str]:
    """Return a picture, upright, of mode "L" or "RGB", and its form: its size and mode in words.

    With a side, a JPEG is decoded at the smallest scale with sides of at least that.
    """
    try:
        picture: Image.Image = Image.open(file, formats=PILLOW_FORMATS)
    except UnidentifiedImageError:
        formats = f"{', '.join(PILLOW_FORMATS)} (for HEIC: `pip install pillow-heif`)"
        raise ValueError(f"it is not one of {formats}") from None
    with picture:
        (width, height), mode = picture.size, picture.mode
        if side:
            picture.draft("RGB", (side, side))
        picture.load()
        before = picture.size
        if picture.info:  # without metadata it is upright, and looking costs a sixth of decoding
            ImageOps.exif_transpose(picture, in_place=True)
    if picture.size != before:
        width, height = height, width
    if picture.has_transparency_data:
        clear = picture.info.get("transparency")
        if is_deep(mode) or (isinstance(clear, tuple) and max(clear) > 255):
            raise ValueError("a transparent colour of 16 bits is not read: save it with 8 bits")
        picture = on_ground(picture.convert("RGBA"))
    elif is_deep(mode):  # Pillow's own conversion would cut off above 255
        picture = Image.fromarray(scale_greys(picture, greys or {}))
    picture = picture if picture.mode == "L" else picture.convert("RGB")
    return picture, f"{width} x {height} {mode}"


def is_deep(form: str) -> bool:
    """Return whether a form, or a mode, has grey values of more than 8 bits."""
    return form.split()[-1].partition(";16")[0] in ("I", "F")


def scale_greys(picture: Image.Image, greys: Greys) -> np.ndarray:
    """Return the values of a deep grey picture as uint8. Raises ValueError outside of its range."""
    values = np.asarray(picture, dtype=np.float64)
    black, white = greys.get("any", (0.0, 1.0 if picture.mode == "F" else 65535.0))
    if greys:
        values = values.clip(black, white)
    if not ((values >= black) & (values <= white)).all():  # also if one is not a number
        raise ValueError(
            f"its values (mode {picture.mode}) are {values.min():g} to {values.max():g}, not "
            f"{black:g} to {white:g}: say which are black and white with --grey-range"
        )
    return ((values - black) * (255 / (white - black))).round().astype(np.uint8)


def on_ground(picture: Image.Image) -> Image.Image:
    """Put a picture, RGBA, on white ground, or on black if it could not be seen on white."""
    alpha = np.asarray(picture)[..., 3] / 255
    grey = np.asarray(picture.convert("RGB").convert("L"))
    shade = 255 if (grey * alpha).sum() <= BRIGHT * alpha.sum() else 0
    ground = Image.new("RGBA", picture.size, (shade, shade, shade, 255))
    return Image.alpha_composite(ground, picture)


def pad(values: np.ndarray, side: int) -> np.ndarray:
    """Put values, uint8 (height, width, ...), on a square of the median colour of their border."""
    height, width = values.shape[:2]
    border = np.concatenate((values[0], values[-1], values[:, 0], values[:, -1]))
    square = np.empty((side, side, *values.shape[2:]), np.uint8)
    square[:] = np.median(border, axis=0).round()
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = values
    return square


def fit_square(
    picture: Image.Image, side: int, fit: Fit | None, seen: int | None = None
) -> np.ndarray:
    """Return a picture as a square, uint8 (side, side) or (side, side, 3). fit: see PictureConfig.

    "pad" shows all of the picture in the middle `seen` pixels, which cut_centre leaves, or in all.
    """
    width, height = picture.size
    short, longer = sorted(picture.size)
    if fit is None:
        fit = "pad" if longer > LONG * short else "crop"
    size = side, side
    if picture.size == size and fit != "pad":
        return np.array(picture)  # to resize it would copy it twice more
    box = 0.0, 0.0, float(width), float(height)
    if fit == "crop":
        left, top = (width - short) / 2, (height - short) / 2
        box = left, top, left + short, top + short
    elif fit == "pad":
        inner = seen or side
        size = max(1, round(width * inner / longer)), max(1, round(height * inner / longer))
    values = np.array(picture.resize(size, Image.Resampling.BICUBIC, box))
    return pad(values, side) if fit == "pad" else values


def read_square(
    file: Path | BytesIO, size: int, fit: Fit = "squash", greys: Greys | None = None
) -> tuple[np.ndarray, str]:
    """Return the grey values of a picture, uint8 (1, size, size), and its form."""
    picture, form = open_upright(file, greys=greys)
    grey = picture if picture.mode == "L" else picture.convert("L")
    return fit_square(grey, size, fit)[None], form


def read_centre(
    file: Path | BytesIO,
    side: int,
    fit: Fit | None = "crop",
    seen: int | None = None,
    greys: Greys | None = None,
) -> tuple[np.ndarray, str]:
    """Return a picture in colour as a square, uint8 (side, side, 3), and its form."""
    picture, form = open_upright(file, side, greys)
    return fit_square(picture.convert("RGB"), side, fit, seen), form


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
