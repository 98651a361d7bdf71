"""Read picture files of any kind as numbers, in the same way for all scripts.

read_square is for small grey pictures, whose transparent pixels become ground_of(...), read_centre
for photos in colour, which are put on white. Decoded pictures are cached; after any change to this
file they are all decoded again.
"""

import contextlib
import math
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError

# The formats that Pillow reads without help; for an EPS file it would start Ghostscript.
PILLOW_FORMATS = ["PNG", "JPEG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000", "ICO", "AVIF"]
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # see open_file
with contextlib.suppress(ImportError):  # of phones: `pip install pillow-heif`
    import pillow_heif

    pillow_heif.register_heif_opener()
    PILLOW_FORMATS.append("HEIF")
# Everything that the values of a picture depend on, besides its file.
READER = f"{PILLOW_FORMATS} {PIL.__version__} {torch.__version__}".encode()
READER += Path(__file__).read_bytes()
RANGES = {"F": "F of 0 to 1", "I": "I of 0 to 65535"}  # of modes that do not define one


def open_file(file: Path | BytesIO) -> Image.Image:
    """Open one picture. Raises an exception that says what is wrong with it."""
    try:
        picture = Image.open(file, formats=PILLOW_FORMATS)
    except UnidentifiedImageError:
        more = "" if "HEIF" in PILLOW_FORMATS else " (for HEIC: `pip install pillow-heif`)"
        raise ValueError(f"it is not one of {', '.join(PILLOW_FORMATS)}{more}") from None
    clear = picture.info.get("transparency")
    if isinstance(clear, tuple) and max(clear) > 255:  # of 16 bits, where Pillow keeps the upper 8
        picture.info["transparency"] = tuple(value >> 8 for value in clear)
    num_pixels = math.prod(picture.size)
    most = Image.MAX_IMAGE_PIXELS or math.inf
    if num_pixels > most:  # Pillow itself only warns, up to twice as many
        raise ValueError(f"it has {num_pixels} pixels, more than {most}")
    return picture


def open_picture(file: Path | BytesIO) -> Image.Image:
    """Open one picture and turn it upright. Raises an exception that says what is wrong with it."""
    with open_file(file) as picture:
        # MPO is a JPEG as many phones write it: one photo, and a small or brighter copy of it.
        if (number := getattr(picture, "n_frames", 1)) > 1 and picture.format != "MPO":
            raise ValueError(f"it holds {number} pictures: save one of them")
        picture.load()
        if picture.info:  # without metadata it is upright, and looking costs a sixth of decoding
            ImageOps.exif_transpose(picture, in_place=True)
    return picture


def ground_of(grey: np.ndarray, alpha: np.ndarray) -> int:
    """Return what transparent pixels of a small grey picture become: 255 (white) or 0 (black).

    It is read for its shape, so it is put on white if its visible pixels are dark, else on black.

    Args:
        grey: the picture's grey values, 0 to 255. alpha: its opacity, 0 to 1, of the same shape.
    """
    return 255 if (grey * alpha).sum() <= 128 * alpha.sum() else 0


def to_values(picture: Image.Image, mode: str, ground: int | None = None) -> np.ndarray:
    """Return values 0 to 255 as float64 (channels, height, width), for mode "L" or "RGB".

    Transparent pixels become `ground`; None: ground_of(...). Raises ValueError for values
    outside the range of the picture's own mode.
    """
    transparent = picture.has_transparency_data
    if picture.mode[0] in RANGES:  # Pillow's own conversion would cut off above 255
        white = 1 if picture.mode == "F" else 65535
        stored = np.asarray(picture, dtype=np.float64)
        grey = stored * (255 / white)
        if not (grey.min() >= 0 and grey.max() <= 255):  # or NaN
            raise ValueError(f"the values of a picture of mode {picture.mode} must be 0 to {white}")
        values = np.stack([grey] * len(mode))
        if transparent:
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
    if transparent:
        ground = ground_of(grey, alpha) if ground is None else ground
        values = values * alpha + (1 - alpha) * ground
    return values


def to_grey(picture: Image.Image) -> np.ndarray:
    """Return grey values 0 to 255 as float64 (height, width). See to_values."""
    return to_values(picture, "L")[0]


def resize(values: np.ndarray, size: int) -> np.ndarray:
    """Resize values, float64 (height, width), to uint8 (size, size)."""
    if values.shape == (size, size):
        return values.round().astype(np.uint8)
    batch = torch.from_numpy(values)[None, None]
    resized = F.interpolate(batch, (size, size), mode="bilinear", antialias=True)
    return resized.round()[0, 0].byte().numpy()


def read_centre(file: Path | BytesIO, side: int) -> tuple[np.ndarray, str]:
    """Return the centre square of a picture in colour, uint8 (side, side, 3), and its form.

    Of an animation the first picture is taken. Raises an exception that says what is wrong with the
    picture.
    """
    with open_file(file) as picture:
        width, height = picture.size
        form = f"{width} x {height} {picture.mode}"
        picture.draft("RGB", (side, side))  # a JPEG is decoded at the smallest scale that is enough
        ImageOps.exif_transpose(picture, in_place=True)
    if picture.mode[0] in RANGES:  # Pillow would cut them off
        values = to_values(picture, "L", ground=255)[0]
        picture = Image.fromarray(values.round().astype(np.uint8))
    picture = picture.convert("RGBA" if picture.has_transparency_data else "RGB")
    short = min(picture.size)
    left, top = ((length - short) / 2 for length in picture.size)
    box = left, top, left + short, top + short
    picture = picture.resize((side, side), Image.Resampling.BICUBIC, box)
    if picture.mode == "RGBA":
        white = Image.new("RGBA", picture.size, "white")  # as a page or a browser shows it
        picture = Image.alpha_composite(white, picture).convert("RGB")
    return np.array(picture), form


def read_photo_pixels(file: Path | BytesIO, side: int, size: int) -> torch.Tensor:
    """Return a photo with the evaluation crop: uint8 (3, size, size), the centre of read_centre."""
    return cut_centre(torch.from_numpy(read_centre(file, side)[0]).permute(2, 0, 1), size)


def cut_centre(pictures: torch.Tensor, size: int) -> torch.Tensor:
    """Return the centre of pictures (..., height, width): (..., size, size)."""
    top, left = ((length - size) // 2 for length in pictures.shape[-2:])
    return pictures[..., top : top + size, left : left + size]


def standardise(images: torch.Tensor, metadata: dict[str, Any]) -> torch.Tensor:
    """Cut out the centre and scale colours 0 to 255 to what the network was trained on.

    Features of photos, which have no height and width, are returned as they are.

    Args:
        images: (n, channels, height, width).
        metadata: has "size", "mean" and "std".
    """
    if images.ndim == 2:
        return images
    images = cut_centre(images, metadata["size"]).float()
    shift, scale = (images.new_tensor(metadata[name]).view(-1, 1, 1) for name in ("mean", "std"))
    images = (images - 255 * shift) / (255 * scale)
    return images.contiguous(memory_format=torch.channels_last)


def read_square(file: Path | BytesIO, size: int) -> tuple[np.ndarray, str]:
    """Return the grey values of a picture, uint8 (1, size, size), and its size and mode."""
    picture = open_picture(file)
    width, height = picture.size
    form = f"{width} x {height} {RANGES.get(picture.mode[0], picture.mode)}"
    if form == f"{size} x {size} L" and not picture.has_transparency_data:
        # As it is: digits come by ten thousands. np.asarray(picture) would take longer.
        return np.frombuffer(picture.tobytes(), np.uint8).reshape(1, size, size), form
    return resize(to_grey(picture), size)[None], form
