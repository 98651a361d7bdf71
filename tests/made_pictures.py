"""Folders and Parquet files of pictures as people have them."""

import io
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path

import datasets
import pyarrow.parquet as pq
from conftest import ROOT
from datasets import ClassLabel, Dataset, Features, Value
from PIL import Image, ImageOps

NUMBERS = {"train": 60, "test": 17}
NAMES = ["three", "one", "two"]


def digits(number: int, negative: bool = False) -> list[Image.Image]:
    """Shipped digits of the three classes in turn, or dark ones on white."""
    shipped = pq.read_table(ROOT / "data/mnist/test-00000-of-00001.parquet").to_pandas()
    of_classes = [shipped.image[shipped.label == digit] for digit in (3, 1, 2)]
    cells = chain.from_iterable(zip(*of_classes, strict=False))
    pictures = [Image.open(io.BytesIO(cell["bytes"])) for cell in islice(cells, number)]
    return [*map(ImageOps.invert, pictures)] if negative else pictures


# Labels as one of the things that people have: of each digit.
LABELS = {
    "ClassLabel": ([0, 1, 2], ClassLabel(names=NAMES)),
    "int": ([5, 6, 7], Value("int16")),
    "string": (NAMES, Value("string")),
}


def dataset(
    kind: str = "ClassLabel", change: Callable = lambda picture: picture, negative: bool = False
) -> dict[str, Dataset]:
    """{split: Dataset}, `change` applied to each picture."""
    of_classes, feature = LABELS[kind]
    features = Features(picture=datasets.Image(), kind=feature)
    made = {}
    for split, number in NUMBERS.items():
        values = [of_classes[n % 3] for n in range(number)]
        rows = {"picture": [*map(change, digits(number, negative))], "kind": values}
        made[split] = Dataset.from_dict(rows, features=features)
    return made


def parquet(folder: Path, made: dict):
    folder.mkdir(exist_ok=True)
    for split, rows in made.items():
        rows.to_parquet(folder / f"{split}-00000-of-00001.parquet")


TURNED = Image.Exif()
TURNED[0x0112] = 6  # orientation: shown a quarter turned


def save_truncated(path: Path):
    Image.effect_noise((64, 64), 99).save(path)
    path.write_bytes(path.read_bytes()[:1500])


POSTSCRIPT = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 28 28\n%%EndComments\nshowpage\n"
# How a bad file is written, and the sentence.
BAD_FILES = {
    "truncated.png": (save_truncated, "truncated"),
    "text.png": (lambda path: path.write_text("not a picture"), "not one of PNG, JPEG"),
    "postscript.png": (lambda path: path.write_text(POSTSCRIPT), "not one of PNG, JPEG"),
}


def colour_folder(folder: Path, number: int):
    """So many red threes, gold ones and purple twos on white, in folders of their own."""
    inks = "red", "gold", "purple"
    coloured = [
        ImageOps.colorize(picture.resize((64, 64)), "white", inks[n % 3])
        for n, picture in enumerate(digits(3 * number))
    ]
    save_in(folder, ".jpg", coloured)


RED, GREEN = (220, 30, 40), (30, 200, 60)


def photo(size: tuple[int, int] = (60, 40)) -> Image.Image:
    """Its upper half is red and its lower half green."""
    picture = Image.new("RGB", size, RED)
    picture.paste(GREEN, (0, size[1] // 2, *size))
    return picture


def fill(folder: Path, *names: str):
    for n, name in enumerate(names):  # each is darker than the one before
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        darker = photo((70 + len(name), 80)).point(lambda value, n=n: value * 200 // (200 + n))
        darker.save(folder / name, "PNG")


def save_in(folder: Path, ending: str, pictures: list[Image.Image], **options: object):
    """Save digits in the folders of their classes."""
    for n, picture in enumerate(pictures):
        path = folder / NAMES[n % 3] / f"{n}{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path, **options)
