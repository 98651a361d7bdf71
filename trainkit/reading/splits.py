"""Say which rows are trained on and which are evaluated, for all kinds of data.

A split that the user made is kept: its files, folders or parts are called train, test, validation,
val or dev. What --eval-data names comes before these. Without a split a share of each class is held
out, the same for any --seed. Equal rows are on one side.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any

import torch

from trainkit.errors import UsageError
from trainkit.text import count, shorten

# What splits are called. The first that is there is evaluated; "train" is not.
WORDS = {
    "train": "training|train",
    "test": "testing|test|evaluation|eval|hold[-_]?out|held[-_]?out",
    "validation": "validation|valid|val|dev",
}
EVALUATED = ("test", "validation")
# A whole part of a path, perhaps with the number of a shard and endings, or a word in it.
SHARD = re.compile(r"[-_.]?\d+[-_]of[-_]\d+(\.\w+)*")
FORMS = (r"({})([-_.]?\d+[-_]of[-_]\d+)?(\.\w+)*", r"(.*[\W\d_])?({})([\W\d_].*)?")


def find_split(name: str, whole: bool = False) -> str:
    """Return the split that a path or part is called, or "".

    A part of the path that is such a word counts before one that contains it (dev-set/train.csv is
    to train on), and with whole nothing else.
    """
    for form in FORMS[:1] if whole else FORMS:
        for part in PurePath(name).parts:
            for split, words in WORDS.items():
                if re.fullmatch(form.format(words), part, re.IGNORECASE):
                    return split
    return ""


def find_splits(names: Sequence[str]) -> dict[str, list[str]]:
    """Return which of these files or parts are each split; "" are those in none: not read.

    All are "train" if their names tell no split. If nothing is called train, it is what has no name
    of a split, or else the validation beside a test. Beside a part called train, one called
    train_10pct is in none: it would repeat rows. So would train_sft and train_gen, which are
    refused.
    """
    splits: dict[str, list[str]] = {}
    for name in names:
        splits.setdefault(find_split(name), []).append(name)
    if "train" not in splits and len(splits) > 1:
        splits["train"] = splits.pop("" if "" in splits else "validation")
    for split, words in WORDS.items():
        named = splits.get(split, [])
        exact = [name for name in named if re.fullmatch(words, name, re.IGNORECASE)]
        if exact and exact != named:
            splits[split] = exact
            splits.setdefault("", []).extend(name for name in named if name not in exact)
    files = [PurePath(name).name for name in splits.get("train", []) if find_split(name) == "train"]
    parts = sorted({SHARD.sub("", x) for x in files if SHARD.search(x) or not PurePath(x).suffix})
    if len(parts) > 1:
        raise UsageError(
            f"{shorten(parts)} are parts to choose from, and all are to train on by their names: "
            f"name one (FOLDER/{parts[0]}, if save_to_disk wrote them), or give a folder with its "
            "files alone"
        )
    return splits if splits.keys() & {*EVALUATED} and "train" in splits else {"train": [*names]}


def choose_evaluated(
    names: dict[str, str], is_labelled: Callable[[str], bool], other: bool
) -> tuple[str, list[str]]:
    """Return the split to evaluate on, "" if none is or `other` data are, and what is not read.

    It is the first that is labelled: in many sets those called test are not. names: of the files or
    parts of each split.
    """
    chosen = ""
    unread = [names[""]] if "" in names else []
    for split in (split for split in EVALUATED if split in names):
        if chosen or other:
            unread.append(names[split])
        elif is_labelled(split):
            chosen = split
        else:
            unread.append(f"{names[split]} (no row has what is to be predicted)")
    return chosen, unread


def describe_given(evaluated: str, unread: Sequence[str]) -> dict[str, str]:
    """Return the line of the plan that says what is evaluated; "" is a share of the others."""
    if not evaluated and not unread:
        return {}
    line = evaluated or "a share of the others"
    return {"evaluated on": f"{line}; not read: {', '.join(unread)}" if unread else line}


def says_split(column: Any, cells: Iterable[Any]) -> bool:
    """Return whether a column is called split and says that some of its rows are evaluated."""
    words = {*map(str, cells)} if str(column).strip().lower() == "split" else ()
    return any(find_split(word.strip(), True) in EVALUATED for word in words)


def load_parts(name: str) -> dict[str, tuple[str, Any]]:
    """Return the names and rows of each split of a data set that is saved or on the Hub."""
    import datasets

    loaded = datasets.load_from_disk(name) if is_saved(Path(name)) else datasets.load_dataset(name)
    if not isinstance(loaded, dict):
        return {"train": ("", loaded)}
    return {
        split: (shorten(parts), datasets.concatenate_datasets([loaded[part] for part in parts]))
        for split, parts in find_splits([*map(str, loaded)]).items()
    }


def is_saved(path: Path) -> bool:
    """Return whether save_to_disk of `datasets` wrote this folder."""
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def hold_out(
    num_rows: int,
    share: float = 0.2,
    labels: torch.Tensor | None = None,
    number: int = 0,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows to train and to evaluate on, int64, in an order that only `seed` changes.

    About this share of each class, or of all rows without labels, is evaluated, and never all of a
    class; with a number it is that many rows.
    """
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(num_rows)
    if labels is None or number:
        held_out = positions < (number or round(share * num_rows))
    else:
        order = order[labels[order].argsort(stable=True)]
        held_out = ((positions + 1).double() * share).floor() > (positions.double() * share).floor()
        trained_on = labels[order[~held_out]]
        held_out &= torch.isin(labels[order], trained_on)  # of a class with one row, none
    return order[~held_out], order[held_out]


def keep_equal_on_one_side(
    train: torch.Tensor, evaluated: torch.Tensor, hashes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both sides with equal rows, by their hashes, on the side of the first of them.

    More copies of a row than are to be evaluated are trained on, unless no row would be left: then
    the row with the fewest copies is evaluated.
    """
    _, group, sizes = hashes.unique(return_inverse=True, return_counts=True)
    held_out = torch.zeros(len(hashes), dtype=torch.bool)
    held_out[evaluated] = True
    rows = torch.arange(len(hashes))
    first = torch.full_like(sizes, len(hashes)).scatter_reduce(0, group, rows, "amin")
    is_held_out = held_out[first] & (sizes <= len(evaluated))
    if len(evaluated) and len(sizes) > 1 and not is_held_out.any():
        is_held_out[sizes.argmin()] = True
    held_out = is_held_out[group]
    candidates = torch.cat((train, evaluated)), torch.cat((evaluated, train))
    return candidates[0][~held_out[candidates[0]]], candidates[1][held_out[candidates[1]]]


def split_rows(hashes: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows to train and to evaluate on, by hold_out, with equal rows on one side."""
    return keep_equal_on_one_side(*hold_out(len(hashes), **options), hashes)


def number_equal(keys: Iterable[Hashable]) -> torch.Tensor:
    """Return for each row the number of the first one that equals it, int64: hashes of any keys."""
    first: dict[Hashable, int] = {}
    return torch.tensor([first.setdefault(key, n) for n, key in enumerate(keys)], dtype=torch.int64)


def describe_equal(train: torch.Tensor, evaluated: torch.Tensor, noun: str) -> dict[str, str]:
    """Return the line of the plan about equal rows, by the hashes of both sides."""
    num_rows = len(train) + len(evaluated)
    if num_both := int(torch.isin(evaluated, train).sum()):
        which = f"{num_both} of {count(len(evaluated), noun)} to evaluate on"
        return {"twice": f"{which} {'is' if num_both == 1 else 'are'} also trained on"}
    if num_equal := num_rows - len(torch.cat((train, evaluated)).unique()):
        return {"twice": f"{num_equal} of {count(num_rows, noun)} repeat another: on one side"}
    return {}
