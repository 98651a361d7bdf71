"""Small grey pictures, of files of any size and mode, as one uint8 tensor."""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch

from trainkit.errors import UsageError
from trainkit.numbers.loaders import InMemory
from trainkit.pictures import files
from trainkit.pictures.splits import Split, load_split
from trainkit.reading.splits import describe_equal

IN_COLOUR = ("RGB", "RGBA", "P", "PA", "CMYK", "YCbCr")  # of Pillow's modes
MOST_SMALL = 64  # pixels; pictures above it lose too much at the size of digits
NUM_CHECKED = 2000  # pictures of a split whose content is looked at


class Sampled(NamedTuple):
    """What is looked at to describe the pictures of a run.

    Attributes:
        pixels: of some of them, uint8 (n, size * size).
        forms: how many of all files have which size and mode.
    """

    pixels: torch.Tensor
    forms: Counter[str]


def load_images(
    name: str, split: str, size: int, *options: Any, **how: Any
) -> tuple[InMemory, Split]:
    """Return the pictures and labels of a split, and the split itself.

    Pictures are decoded once and cached; they are decoded again if a file's content or the way of
    decoding changes. For the options see splits.read_split, and files.read_square for `how`.
    Raises UsageError.
    """
    part = load_split(name, split, files.read_square, (1, size, size), *options, **how)
    pixels = torch.from_numpy(np.load(part.path, mmap_mode="r")[part.rows.numpy()])
    return InMemory(pixels, part.labels), part


def load_unlabelled(
    name: str, size: int, eval_data: str | None
) -> tuple[InMemory, InMemory, dict[str, str]]:
    """Return pictures to train and to evaluate on, without labels, and lines of the plan.

    Raises UsageError.
    """
    train_set, train = load_images(name, "train", size, eval_data=eval_data)
    eval_set, held_out = load_images(name, "test", size, eval_data=eval_data)
    plan = {"data": name} | held_out.given
    plan |= describe_equal(train.hashes, held_out.hashes, "picture")
    return InMemory(train_set.tensors[0]), InMemory(eval_set.tensors[0]), plan


def sample(*sets: tuple[InMemory, Split]) -> Sampled:
    """Look at some pictures of each set that load_images returned."""
    pixels = [images.tensors[0][:: len(images) // NUM_CHECKED + 1] for images, _ in sets]
    forms = sum((part.forms for _, part in sets), Counter[str]())
    return Sampled(torch.cat(pixels).flatten(1), forms)


def describe_pictures(size: int, sampled: Sampled) -> dict[str, Any]:
    """Describe the files of a run, as JSON. Raises UsageError if each is of a single value.

    read_as: in words, for example `32 x 32 RGB read as 28 x 28 grey`. shape: width and height if
    they are the same for all files, else None.
    """
    if (sampled.pixels == sampled.pixels[:, :1]).all():
        raise UsageError("every picture has a single grey value, so there is nothing in it")
    forms = [form for form, _ in sampled.forms.most_common()]
    shapes = {tuple(map(int, form.split()[:3:2])) for form in forms}
    others = f" and {len(forms) - 1} other kinds" if len(forms) > 1 else ""
    grey = f"{size} x {size} grey"
    is_grey = forms == [f"{size} x {size} L"]
    return {
        "read_as": grey if is_grey else f"{forms[0]}{others} read as {grey}",
        "shape": [*shapes.pop()] if len(shapes) == 1 else None,
    }


def are_photos(forms: Counter[str]) -> bool:
    """Return whether more than half of the files are in colour and have sides above 64 pixels."""
    num_photos = 0
    for form, number in forms.items():
        width, _, height, mode = form.split()[:4]
        large = min(int(width), int(height)) > MOST_SMALL
        num_photos += number * (large and mode in IN_COLOUR)
    return num_photos * 2 > forms.total()


def describe_values(sampled: Sampled) -> dict[str, str]:
    """Return a line of the plan if many pictures, as a network gets them, have nearly one shade."""
    low, high = sampled.pixels.aminmax(dim=1)
    narrow = sampled.pixels[high - low < 32]  # an eighth of the range
    if len(narrow) * 10 < len(sampled.pixels):
        return {}
    return {
        "values": f"{len(narrow)} of {len(sampled.pixels)} pictures looked at use less than an "
        f"eighth of the range 0 to 255 ({narrow.min()} to {narrow.max()}), nearly one shade: "
        "spread their values over the whole range"
    }
