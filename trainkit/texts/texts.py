"""Texts and their classes: from a table, or from the documentation of installed packages."""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
import torch

from trainkit.config import UNSET, Count, MayChange, Optimizer, ReadOnlyIf
from trainkit.errors import UsageError, as_usage_error
from trainkit.numbers.orders import Order, by_length
from trainkit.reading import frames, splits
from trainkit.reading.flags import FileConfig
from trainkit.reading.recall import describe_classes
from trainkit.text import count, nfc, shorten
from trainkit.texts import bags

# What columns are called, in any case; the first that is there is taken.
NAMES = {
    "text": ["text", "sentence", "review", "content", "comment", "message", "document", "body"],
    "label": ["label", "class", "category", "sentiment", "topic", "target"],
}
# The defaults that depend on --base.
BAG = {"optimizer": "sgd", "weight_decay": 0.0}  # and see fit_bag
MANY = 7500  # texts to train on: the batch of twice as many is twice as large
PRETRAINED = {"epochs": 3, "batch_size": 32, "optimizer": "adamw", "learning_rate": 5e-5}
PRETRAINED |= {"weight_decay": 0.05}
FIRST_LINE = re.compile(r':\n +r?"""\s*(\S.{19,}?)\s*(?:"""|\n)')  # of a docstring


@dataclass
class TextConfig(FileConfig):
    """The flags of a script that classifies texts; without --data it has texts of its own."""

    text: Annotated[str | None, ReadOnlyIf("data")] = None
    """column of the texts (default: the one called text, sentence, review, ...)"""
    label: Annotated[str | None, ReadOnlyIf("data")] = None
    """column of the classes (default: the one called label, class, category, ...)"""
    base: MayChange[str | None] = None
    """pretrained encoder of transformers, a folder or Hub id (default: words and n-grams)"""
    max_tokens: Annotated[Count | None, ReadOnlyIf("base")] = None
    """with --base: texts are truncated to this many (default: 128, or what the encoder takes)"""
    balance: bool = False
    """draw all classes equally often"""
    num_lines: Annotated[Count | None, ReadOnlyIf("data", (None,))] = None
    """without --data: texts to train on, and to evaluate on (default: all)"""
    epochs: int = UNSET
    """passes over the texts (default: 5, up to 20 for fewer than 800 texts; 3 with --base)"""
    batch_size: int = UNSET
    """texts per optimizer step, over all processes and micro-batches (default: 60, more for 15,000
    texts or more; 32 with --base)"""
    learning_rate: float = UNSET
    """peak learning rate (default: 8, more with a larger step; 5e-5 with --base)"""
    optimizer: Optimizer = UNSET
    """fused, except under fp16 (default: sgd, or adamw with --base)"""
    weight_decay: float = UNSET
    """decoupled for adamw, else an L2 penalty (default: 0, or 0.05 with --base)"""

    def __post_init__(self) -> None:
        self.set_unset(PRETRAINED if self.base else BAG)


class TextSets(NamedTuple):
    """Texts with the number of the class of each, the names of the classes, lines of the plan."""

    train: list[tuple[str, int]]
    held_out: list[tuple[str, int]]
    classes: list[str]
    columns: dict[str, Any]
    plan: dict[str, str]


def read_docstrings(packages: list[str], num: int | None) -> TextSets:
    """Return lines of documentation and which package has them; every fifth is held out."""
    origin: dict[str, set[int]] = {}
    for label, package in enumerate(packages):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        for path in Path(spec.origin).parent.rglob("*.py"):
            for line in FIRST_LINE.findall(path.read_text(encoding="utf-8", errors="ignore")):
                origin.setdefault(line, set()).add(label)
    # A line that occurs in two packages is left out.
    lines = [(line, min(ids)) for line, ids in sorted(origin.items()) if len(ids) == 1]
    train = [line for n, line in enumerate(lines) if n % 5][:num]
    held_out = lines[::5][:num]
    return TextSets(train, held_out, packages, {}, describe_texts(train, held_out, packages))


def read_sets(config: TextConfig) -> TextSets:
    """Read texts and classes of a table, and which of them are evaluated.

    These are all of --eval-data, or of a test split, or else a fifth of each class. Raises
    UsageError for a table that cannot be used.
    """
    where = config.where
    parts = frames.read_parts(str(config.data), where, **config.read_options)
    whole = parts.tables["train"]
    columns = [find_column(whole, getattr(config, kind), kind, where) for kind in NAMES]
    rows, dropped = labelled_texts(whole, columns, where)
    known = {name for _, name in rows}

    def is_labelled(table: pd.DataFrame) -> bool:
        there = {*columns} <= {*table}
        return there and any(x in known for _, x in labelled_texts(table, columns, where)[0])

    table, name, lines = frames.choose_evaluated_table(config, parts, is_labelled, "text", columns)
    given, unused = labelled_texts(whole[:0] if table is None else table, columns, name)
    if unused:
        lines["evaluated on"] += unused
    unknown = sorted({label for _, label in given} - known)
    if config.eval_data and unknown:
        raise UsageError(f"{name}: --data has no class {shorten([*map(repr, unknown)])}")
    classes = sorted({*known, *unknown})
    if len(classes) < 2 or len(rows) == len(known) > 2:
        raise UsageError(
            f"{where}: column {columns[1]!r} has {count(len(classes), 'different label')} in "
            f"{count(len(rows), 'row')} with a text and a label, which are not classes: name "
            "another column with --label"
        )
    number = {label: n for n, label in enumerate(classes)}
    train, held_out = ([(text, number[label]) for text, label in part] for part in (rows, given))
    if table is None:
        hashes = splits.number_equal(text for text, _ in train)
        sides = splits.split_rows(hashes, labels=torch.tensor([label for _, label in train]))
        train, held_out = ([train[n] for n in side.sort().values.tolist()] for side in sides)
    if not train or not held_out:
        left = f"{len(train)} and {len(held_out)} texts are left to train and to evaluate on"
        raise UsageError(f"{where}: {left}, as equal texts are not parted: give --eval-data")
    plan = {"data": f"{config.data}, {len(rows)} texts{dropped}"}
    plan |= {"columns": "text {!r}, label {!r}".format(*columns)} | lines
    plan |= describe_texts(train, held_out, classes)
    metadata = {"text": columns[0], "read_options": config.read_options}
    return TextSets(train, held_out, classes, metadata, plan)


def find_column(table: pd.DataFrame, given: str | None, kind: str, where: str) -> str:
    """Return the given column, or the first with a name of this kind. Raises UsageError."""
    columns = {name.lower(): name for name in reversed([*table])}
    found = [columns[name] for name in NAMES[kind] if name in columns]
    if not given and not found:
        raise UsageError(
            f"{where}: no column is called {', '.join(NAMES[kind])}: choose one by --{kind}: "
            f"{shorten([*table], frames.MAX_SHOWN)}"
        )
    name = nfc(given) if given else found[0]
    frames.choose_columns(table, [name], where)
    return name


def labelled_texts(
    table: pd.DataFrame, columns: Sequence[str], where: str
) -> tuple[list[tuple[str, str]], str]:
    """Return text and label of the rows that have both, and how many were left out."""
    rows = frames.choose_columns(table, columns, where)
    texts, labels = (map(clean, rows[name]) for name in columns)
    pairs = zip(texts, map(frames.as_text, labels), strict=True)
    used = [(text, label) for text, label in pairs if text and label]
    num = len(rows) - len(used)
    return used, f", {count(num, 'row')} dropped: no text or no label" if num else ""


def clean(value: Any) -> str:
    """Return a cell as text, "" if it is empty; half of a surrogate pair, in JSON, becomes "?"."""
    if not isinstance(value, str):
        value = "" if pd.isna(value) else frames.as_text(value)
    return nfc(value.strip()).encode("utf-8", "replace").decode()


def describe_texts(
    train: Sequence[tuple[str, int]], held_out: Sequence[tuple[str, int]], classes: list[str]
) -> dict[str, str]:
    """Return the lines of the plan that say what the accuracy will be worth."""
    trained, tested = (torch.tensor([label for _, label in part]) for part in (train, held_out))
    plan = describe_classes(trained, tested, classes, "text")
    hashes = splits.number_equal(text for part in (train, held_out) for text, _ in part)
    return plan | splits.describe_equal(hashes[: len(train)], hashes[len(train) :], "text")


def choose_order(
    samples: Sequence[tuple[torch.Tensor, int]], config: TextConfig
) -> tuple[torch.Tensor | None, Order | None]:
    """Return the weight of each text for --balance, or the order of similar lengths for --base."""
    if config.balance:
        labels = torch.tensor([label for _, label in samples])
        return 1 / labels.bincount().double()[labels], None
    lengths = [len(tokens) for tokens, _ in samples]
    return None, by_length(lengths, config.batch_size, config.seed) if config.base else None


def fit_bag(config: TextConfig, num_train: int) -> dict[str, str]:
    """Set epochs, batch size and rate of a bag where they are UNSET; return a line of the plan.

    A step goes over the whole table, so many small steps would take most of the time: for many
    texts, batch size and rate are larger by the same factor. A few texts are read more often.
    """
    epochs = min(20, max(5, 5 * bags.FEW // num_train))
    is_chosen = any((config.batch_size, config.learning_rate, config.scale_lr))
    factor = 1 if is_chosen else min(8, max(1, num_train // MANY))
    sizes = {"epochs": epochs, "batch_size": 60 * factor, "learning_rate": 8.0 * factor}
    flags = config.set_unset(sizes)
    return {"size": f"{count(num_train, 'text')} to train on: {flags}"} if flags else {}


def tokenize(texts: Sequence[str], max_tokens: int | None, tokenizer: Any) -> list[torch.Tensor]:
    """Return at most max_tokens tokens of each text, int64; one token 0 if it has none."""
    rows = tokenizer([*texts], truncation=True, max_length=max_tokens).input_ids
    return [torch.tensor(row or [0]) for row in rows]


def make_samples(
    sets: TextSets, max_tokens: int | None, tokenizer: Any
) -> tuple[list, list, int | None, dict[str, str]]:
    """Return samples (tokens, label) to train and to evaluate on, num_bits, and the plan.

    Without a tokenizer the tokens are the pieces of a bag, numbers of num_bits.
    """
    num_train = len(sets.train)
    texts, labels = zip(*sets.train, *sets.held_out, strict=True)
    plan = sets.plan
    num_bits = None
    if tokenizer is None:
        pieces = [bags.number_pieces(text) for text in texts]
        num_bits = bags.find_num_bits(pieces[:num_train], len(sets.classes))
        tokens = [bags.make_bag(bag, num_bits) for bag in pieces]
    else:
        tokens = tokenize(texts, max_tokens, tokenizer)
        if full := sum(len(row) == max_tokens for row in tokens[:num_train]):
            plan = plan | {
                "truncated": f"{full} of {num_train} texts have at least --max-tokens "
                f"{max_tokens} tokens; longer ones are truncated"
            }
    samples = [*zip(tokens, labels, strict=True)]
    return samples[:num_train], samples[num_train:], num_bits, plan


def read_texts(path: Path, text: str | None, **options: Any) -> list[str]:
    """Return the lines of a .txt file, or a column of a table; "" where there is no text.

    text: the column; None: the one with a usual name. options: those of read_parts. Raises
    UsageError.
    """
    where = str(path)
    if path.suffix.lower() == ".txt":
        with as_usage_error(f"{where} cannot be read"):
            return [*map(clean, frames.read_text(where, options.get("encoding")).splitlines())]
    table = frames.read_table(where, where, **options)
    name = find_column(table, text, "text", where)
    return [*map(clean, frames.choose_columns(table, [name], where)[name])]
