"""Labelled pictures of any size and mode as one uint8 tensor, and further ones read like them."""

import math
import os
import re
import reprlib
import sys
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow.parquet
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from trainkit.errors import UsageError, as_usage_error, is_main_rank
from trainkit.order import InMemory

RESIDENT_BYTES = 2**30  # decoded pictures beyond this stay in a file that is mapped
# Kinds of files that are read by Pillow alone: it would start Ghostscript for an EPS file.
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000", "ICO")


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


def resize(grey: np.ndarray, height: int, width: int) -> np.ndarray:
    """Grey values brought to another size, uint8."""
    import torchvision.transforms.v2.functional as TF  # here: it takes a second to import

    resized = TF.resize(torch.from_numpy(grey).unsqueeze(0), [height, width], antialias=True)
    return np.asarray(resized.round()[0], dtype=np.uint8)


def decode(cells: list, indices: list[int], size: int, where: str) -> dict[str, list]:
    """Files of pictures to size * size grey values each, and how each picture looks. UsageError."""
    pixels, kinds = [], []
    for cell, index in zip(cells, indices, strict=True):
        row = f"{where}, row {index + 1}"
        if cell is None:
            raise UsageError(f"{row}: the picture is missing")
        content, path = cell["bytes"], cell["path"]
        with as_usage_error(f"{row}{f' ({path})' * bool(path)}: the picture cannot be read"):
            picture = open_picture(Path(path) if content is None else BytesIO(content))
            plain = picture.mode == "L" and picture.size == (size, size)
            grey = np.asarray(picture) if plain else resize(to_grey(picture), size, size)
        pixels.append(grey)
        kinds.append("{} x {} {}".format(*picture.size, picture.mode))
    looks = describe_looks(torch.from_numpy(np.stack(pixels)))
    flat = [grey.reshape(-1) for grey in pixels]
    return {"pixels": flat, "kind": kinds, **{name: x.tolist() for name, x in looks.items()}}


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


def pixel_tensor(decoded: datasets.Dataset, size: int) -> torch.Tensor:
    """One uint8 tensor (n, 1, size, size): in memory, or mapped from a file if it is large."""
    shape = (len(decoded), 1, size, size)
    chunks = (chunk.flatten().to_numpy() for chunk in decoded.data.column("pixels").chunks)
    if math.prod(shape) <= RESIDENT_BYTES:
        return torch.from_numpy(np.concatenate(list(chunks))).view(shape)
    path = Path(decoded.cache_files[0]["filename"]).with_suffix(".pixels")
    if not path.exists():  # beside the cache that datasets keeps, whose parts are not contiguous
        unfinished = path.with_suffix(f".pixels-{os.getpid()}")
        with open(unfinished, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
        os.replace(unfinished, path)
    return torch.from_file(str(path), size=math.prod(shape), dtype=torch.uint8).view(shape)


def load_images(
    name: str, split: str, size: int, label: str | None = None, classes: list[str] | None = None
) -> tuple[InMemory, list[str], pd.DataFrame]:
    """Return the pictures and labels of a split, the names of its classes, and how each looks.

    Decoded once; later runs read the cache that `datasets` keeps. Raises UsageError.

    Args:
        label: column of the classes; None: the only one that there can be.
        classes: those of another split, by which the labels of this one are numbered.
    """
    if not (sys.stderr.isatty() and is_main_rank()):
        datasets.disable_progress_bars()
    where = f"--dataset {name}, split {split!r}"
    with as_usage_error(f"--dataset {name} cannot be read"):
        source = {"path": name}
        if (Path(name) / "state.json").is_file():  # one data set that save_to_disk wrote
            source = {"path": "arrow", "data_files": str(Path(name) / "*.arrow")}
        builder = datasets.load_dataset_builder(**source)
        builder.download_and_prepare()
        splits, files = builder.as_dataset(), Path(name).exists() and builder.config.data_files
    if split not in splits:
        raise UsageError(f"{where}: there are only {sorted(splits)}; to evaluate on held "
                         "out training pictures use --validation-split N")  # fmt: skip
    rows = splits[split]
    images = [key for key, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    if not images or len(rows) == 0:
        raise UsageError(
            f"{where}: there must be rows with an Image column, not {len(rows)} rows of "
            f"{rows.column_names} (make one with cast_column(NAME, datasets.Image()))"
        )
    labels, classes = read_labels(rows, where, label, classes, files[split] if files else [])
    looks = dict.fromkeys(("border", "x", "y", "side"), datasets.Value("float32"))
    flat = datasets.Sequence(datasets.Value("uint8"), length=size * size)
    with as_usage_error(f"{where}: the pictures cannot be read"):
        decoded = rows.cast_column(images[0], datasets.Image(decode=False)).map(
            lambda cells, indices: decode(cells, indices, size, where),
            input_columns=images[0], with_indices=True, batched=True,
            remove_columns=rows.column_names,
            features=datasets.Features(pixels=flat, kind=datasets.Value("string"), **looks),
        )  # fmt: skip
    seen = decoded.select_columns(["kind", *looks]).to_pandas()
    return InMemory(pixel_tensor(decoded, size), labels), classes, seen


def read_labels(
    rows: datasets.Dataset,
    where: str,
    label: str | None,
    classes: list[str] | None,
    files: list[str],
) -> tuple[torch.Tensor, list[str]]:
    """The classes of all rows as int64, and their names: of a ClassLabel, or the values, sorted.

    Raises UsageError.
    """
    kinds = {name: (type(kind), str(getattr(kind, "dtype", "")))
             for name, kind in rows.features.items()}  # fmt: skip
    found = [name for name, (kind, _) in kinds.items() if kind is datasets.ClassLabel]
    plain = [name for name, (kind, dtype) in kinds.items()
             if kind is datasets.Value and re.match("u?int|bool|(large_)?string", dtype)
             ]  # fmt: skip
    choices = [label] if label else found or plain
    if len(choices) != 1 or choices[0] not in found + plain:
        raise UsageError(
            f"{where}: --label must name the column of the classes, whole numbers or texts, one of "
            f"{found + plain}; or make one: rows = datasets.load_dataset(...)"
            ".class_encode_column(NAME); rows.save_to_disk(FOLDER)"
        )
    values = rows.data.column(choices[0]).to_pandas()
    where = f"{where}, column {choices[0]!r}"
    if values.isna().any():
        raise UsageError(f"{where}, row {values.isna().idxmax() + 1}: the label is missing")
    if choices[0] in found:
        # datasets reads every file with the names in the first one of all splits.
        lists = [names for file in files if (names := names_in_file(Path(file), choices[0]))]
        own = lists[0] if lists else rows.features[choices[0]].names
        for other in lists:
            if other != own:
                raise UsageError(f"{where}: its files number the classes differently, "
                                 f"{reprlib.repr(own)} and {reprlib.repr(other)}")  # fmt: skip
        texts = values.map(dict(enumerate(own)))
    else:
        own, texts = [str(value) for value in sorted(values.unique())], values.map(str)
        if classes is None and len(own) == len(rows) > 2:
            raise UsageError(f"{where}: each row has a label of its own: name another --label")
    names = classes or own
    if len(names) < 2:
        raise UsageError(f"{where}: there is only one class")
    # By name: another split may have them in another order.
    numbers = pd.Index(names).get_indexer(texts)
    if (numbers < 0).any():
        more = f"; this split has {reprlib.repr(own)}" * (own != names)
        raise UsageError(f"{where}, row {(numbers < 0).argmax() + 1}: the label is not one of the "
                         f"{len(names)} classes {reprlib.repr(names)}{more}")  # fmt: skip
    return torch.from_numpy(numbers.astype(np.int64)), names


def names_in_file(path: Path, column: str) -> list[str]:
    """The names of a ClassLabel that a file itself gives; none of another kind of file."""
    features = {}
    if path.suffix == ".parquet":
        features = datasets.Features.from_arrow_schema(pyarrow.parquet.read_schema(path))
    elif path.suffix == ".arrow":
        features = datasets.Dataset.from_file(str(path)).features
    return getattr(features.get(column), "names", None) or []


def learn_framing(size: int, *looks: pd.DataFrame) -> dict[str, Any]:
    """What all pictures of a run have in common, so that another picture can be made like them.

    read_as: in words, for example `32 x 32 RGB read as 28 x 28 grey`. shape: width and height, if
    there is one. border: the range of describe_looks. frame: side, x and y, if they are steady.
    """
    seen = pd.concat(looks)
    kinds = seen["kind"].value_counts().index
    shapes = {tuple(map(int, kind.split()[:3:2])) for kind in kinds}
    steady = seen[["side", "x", "y"]].quantile([0.05, 0.5, 0.95])
    framed = len(shapes) == 1 and len({*next(iter(shapes))}) == 1
    framed = framed and (steady.loc[0.95] - steady.loc[0.05]).max() < 0.1
    others = f" and {len(kinds) - 1} other kinds" if len(kinds) > 1 else ""
    grey, kind = f"{size} x {size} grey", f"{kinds[0]}{others}"
    return {
        "read_as": grey if kind == f"{size} x {size} L" else f"{kind} read as {grey}",
        "shape": list(shapes.pop()) if len(shapes) == 1 else None,
        "border": [float(seen["border"].min()), float(seen["border"].max())],
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
    pixels = resize(grey, size, size)
    low, high = seen["border"]
    border = describe_looks(torch.from_numpy(pixels[None]))["border"].item()
    strange, strange_negative = (max(low - x, x - high, 0) for x in (border, 1 - border))
    if not as_is and strange_negative < strange:
        grey = 255 - grey
        pixels = resize(grey, size, size)
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
    pixels = resize(np.asarray(digit, dtype=np.float64), size, size)
    return pixels if bright else 255 - pixels
