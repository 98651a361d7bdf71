"""One picture file of any kind as grey values."""

import warnings
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError

# Kinds of files that are read by Pillow alone: it would start Ghostscript for an EPS file.
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000", "ICO")
RANGES = {"F": "F of 0 to 1", "I": "I of 0 to 65535"}  # modes that have none of their own


def open_picture(file: Path | BytesIO) -> Image.Image:
    """One picture, upright. Whatever is wrong with the file is an exception that says it."""
    try:
        with warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning):
            picture = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"it is none of {', '.join(FORMATS)}") from None
    with picture:
        # MPO: a JPEG of many phones, one photo and a small or brighter copy of it.
        if (number := getattr(picture, "n_frames", 1)) > 1 and picture.format != "MPO":
            raise ValueError(f"it holds {number} pictures: save one of them")
        return ImageOps.exif_transpose(picture)


def to_grey(picture: Image.Image) -> np.ndarray:
    """Grey values 0 to 255 as float64; transparent pixels become background. Raises ValueError."""
    if picture.mode[0] in RANGES:  # Pillow's own conversion would cut off above 255
        white = 1 if picture.mode == "F" else 65535
        values = np.asarray(picture, dtype=np.float64) * (255 / white)
        if not (values.min() >= 0 and values.max() <= 255):  # or NaN
            raise ValueError(f"the values of a picture of mode {picture.mode} must be 0 to {white}")
        return values
    grey = np.array(picture.convert("RGB").convert("L"), dtype=np.float64)
    if picture.has_transparency_data:
        alpha = np.asarray(picture.convert("RGBA"))[..., 3] / 255
        grey *= alpha
        grey += (1 - alpha) * 255 * (grey.sum() <= 128 * alpha.sum())
    return grey


def resize(grey: np.ndarray, size: int) -> np.ndarray:
    """Grey values, float64, brought to size x size, uint8."""
    if grey.shape == (size, size):
        return grey.round().astype(np.uint8)
    values = torch.from_numpy(grey)[None, None]
    resized = F.interpolate(values, (size, size), mode="bilinear", antialias=True)
    return resized.round()[0, 0].byte().numpy()
