"""Pictures of any mode as grey values: the same for training and for prediction."""

import numpy as np
from PIL import Image


def to_grey(picture: Image.Image) -> np.ndarray:
    """Grey values 0 to 255 as float64. What is transparent becomes the opposite of the ink."""
    if picture.mode.startswith("I;16"):  # Pillow's own conversion would cut off above 255
        return np.asarray(picture, dtype=np.float64) / 257
    if picture.mode in ("I", "F"):
        values = np.asarray(picture, dtype=np.float64)
        return (values - values.min()) * (255 / max(np.ptp(values), 1e-9))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        alpha = np.asarray(picture.getchannel("A"), dtype=np.float64) / 255
        grey = np.asarray(picture.convert("RGB").convert("L"), dtype=np.float64)
        ink = (grey * alpha).sum() / max(alpha.sum(), 1e-9)
        return grey * alpha + (1 - alpha) * (255 if ink < 128 else 0)
    return np.asarray(picture.convert("RGB").convert("L"), dtype=np.float64)
