"""Small grey pictures, of files of any size and mode, as one uint8 tensor for each side."""

from collections import Counter
from typing import Any

from trainkit.numbers.loaders import InMemory
from trainkit.pictures.files import read_square
from trainkit.pictures.flags import GreyConfig
from trainkit.pictures.sets import load_labelled, load_sets
from trainkit.reading.splits import describe_equal

# Defaults for a set like MNIST, and those that differ for a much smaller one.
LARGE = {"batch_size": 128, "epochs": 3, "drop_last": True}
SMALL = {"batch_size": 32, "drop_last": False}
SMALL_SET = 10_000  # pictures; with fewer it is small
NUM_SEEN = 16_384  # pictures, about, that a run on a small data set sees, each several times


def load_grey(
    config: GreyConfig,
    size: int,
    usual: dict[str, Any] | None = None,
    for_small_set: dict[str, Any] | None = None,
) -> tuple[InMemory, InMemory, dict[str, Any], dict[str, str]]:
    """Return pictures to train and to evaluate on, of the side `size`, with their classes.

    A batch is the pictures, uint8 (n, 1, size, size), their classes, and the indices of both.
    Flags that are UNSET are set by the number of pictures. Raises UsageError.

    Args:
        usual: defaults of more flags, of the script. for_small_set: those of a small data set.

    Returns:
        Both sets; what predict.py needs beside "input", "size", "mean" and "std", as metadata:
        "classes", "pictures" and "reading"; and lines of the plan.
    """
    options = {"num_held_out": config.validation_split}
    train, held_out, plan = load_labelled(config, read_square, (1, size, size), **options)
    train_set, eval_set = (InMemory(each.read(), each.labels) for each in (train, held_out))
    pictures = describe_pictures(size, train.forms + held_out.forms)
    metadata = {"classes": train.classes, "pictures": pictures, "reading": train.reading}
    lines = {"data": plan.pop("data"), "pictures": pictures["read_as"]}
    sizes = set_by_number(config, len(train_set), usual or {}, for_small_set or {})
    return train_set, eval_set, metadata, lines | plan | sizes


def set_by_number(
    config: GreyConfig, num_train: int, usual: dict[str, Any], for_small_set: dict[str, Any]
) -> dict[str, str]:
    """Set the flags that are UNSET by the number of training pictures; return a line of the plan.

    If the user chose --batch-size or --drop-last, no data set counts as small.
    """
    if num_train >= SMALL_SET or config.batch_size is not None or config.drop_last is not None:
        config.set_unset(LARGE | usual)
        return {}
    epochs = max(3, NUM_SEEN // max(1, num_train))
    flags = config.set_unset(LARGE | usual | SMALL | for_small_set | {"epochs": epochs})
    return {"small set": f"of {num_train} pictures: {flags}"}


def load_unlabelled(
    name: str, size: int, eval_data: str | None
) -> tuple[InMemory, InMemory, dict[str, str]]:
    """Return pictures to train and to evaluate on, without labels, and lines of the plan.

    A batch is the pictures, uint8 (n, 1, size, size), and their indices. Raises UsageError.
    """
    options: dict[str, Any] = {"eval_data": eval_data, "same_classes": False, "fit": "squash"}
    train, held_out, plan = load_sets(name, read_square, (1, size, size), **options)
    plan |= describe_equal(train.hashes, held_out.hashes, "picture")
    return InMemory(train.read()), InMemory(held_out.read()), plan


def describe_pictures(size: int, forms: Counter[str]) -> dict[str, Any]:
    """Describe files of these forms, as JSON: "read_as" in words, and "shape", if all have one."""
    kinds = [form for form, _ in forms.most_common()]
    shapes = {tuple(map(int, form.split()[:3:2])) for form in kinds}
    others = f" and {len(kinds) - 1} other kinds" if len(kinds) > 1 else ""
    grey = f"{size} x {size} grey"
    is_grey = kinds == [f"{size} x {size} L"]
    return {
        "read_as": grey if is_grey else f"{kinds[0]}{others} read as {grey}",
        "shape": [*shapes.pop()] if len(shapes) == 1 else None,
    }
