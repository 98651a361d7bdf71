"""Texts and their classes: from a table, or from the documentation of installed packages.

`where` names the table; the sentence of a UsageError begins with it.
"""

import importlib.util
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from trainkit.config import UNSET, Count, MayChange, Optimizer, TrainingConfig, flag
from trainkit.errors import UsageError, as_usage_error
from trainkit.numbers.orders import Order, by_length
from trainkit.reading import frames, splits
from trainkit.reading.encodings import find_encoding
from trainkit.reading.recall import describe_classes
from trainkit.text import count, nfc, shorten
from trainkit.texts import bags

MAX_FOUND = 100  # classes of a column that is found by itself
NUM_LOOKED_AT = 500  # cells of a column, and signs of each, to tell what it holds
# What columns are called, in any case; the first that is there is taken.
TEXT_NAMES = ("text", "sentence", "review", "content", "comment", "message", "document", "body")
LABEL_NAMES = ("label", "class", "category", "sentiment", "topic", "target")
# The defaults that depend on --base.
BAG = {"optimizer": "sgd", "weight_decay": 0.0}  # and see fit_bag
MANY = 7500  # texts to train on: the batch of twice as many is twice as large
PRETRAINED = {"epochs": 3, "batch_size": 32, "optimizer": "adamw", "learning_rate": 5e-5}
PRETRAINED |= {"weight_decay": 0.05}
FIRST_LINE = re.compile(r':\n +r?"""\s*(\S.{19,}?)\s*(?:"""|\n)')  # of a docstring


@dataclass
class TextConfig(TrainingConfig):
    """The flags of a script that classifies texts."""

    data: MayChange[str | None] = None
    """CSV, JSON or Parquet file, a folder of them, or Hub id (default: the script's own texts)"""
    eval_data: MayChange[str | None] = None
    """the same, to evaluate on (default: the test split of --data, or a fifth of each class)"""
    text: str | None = None
    """column of the texts (default: the only one that fits)"""
    label: str | None = None
    """column of the classes (default: the only one that fits)"""
    encoding: str | None = None
    """of text files, such as cp1252 or utf-16 (default: UTF-8)"""
    base: MayChange[str | None] = None
    """pretrained encoder of transformers, a folder or Hub id (default: words and n-grams)"""
    max_tokens: Count | None = None
    """with --base: texts are truncated to this many (default: 128, or what the encoder takes)"""
    balance: bool = False
    """draw all classes equally often"""
    num_lines: Count | None = None
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

    def find_problems(self, num_processes: int) -> list[str]:
        """Add flags of the data that go with --data, or without it."""
        problems = super().find_problems(num_processes)
        names = ("eval_data", "text", "label", "encoding")
        if flags := [flag(name) for name in names if getattr(self, name) and not self.data]:
            problems.append(f"{' and '.join(flags)}: name the file of the texts with --data")
        if self.num_lines and self.data:
            problems.append("--num-lines cannot be used with --data")
        if self.max_tokens and not self.base:
            problems.append("--max-tokens needs --base: without it whole texts are read")
        return problems


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

    These are all of --eval-data, or of a test split, or else a fifth of each class. Rows without a
    text or a label are left out, and counted in the plan. Raises UsageError for a table that cannot
    be used.
    """
    where = f"--data {config.data}"
    encoding = config.encoding
    named = (config.text, config.label)
    parts = frames.read_parts(str(config.data), where, named, encoding=encoding)
    text, label = choose_text_and_label(parts["train"], config.text, config.label, where)
    rows, dropped = labelled_texts(parts["train"], text, label, where)
    names = [name for _, name in rows]
    plan = {"data": f"{config.data}, {len(rows)} texts{dropped}"}
    plan["columns"] = f"text {text!r}, label {label!r}"
    plan |= frames.describe_spelling(frames.choose_columns(parts["train"], [text, label], where))

    def is_labelled(table: pd.DataFrame) -> bool:
        if not {text, label} <= {*table}:
            return False
        return any(name in names for _, name in labelled_texts(table, text, label, where)[0])

    options = config.eval_data, is_labelled, "text", named
    table, lines = frames.choose_evaluated_table(parts, *options, encoding=encoding)
    given: list[tuple[str, str]] = []
    if table is not None:
        where = table.attrs["where"]
        given, dropped = labelled_texts(table, text, label, where)
        unknown = sorted({name for _, name in given} - {*names})
        if config.eval_data and unknown:
            raise UsageError(f"{where}: --data has no class {shorten([*map(repr, unknown)])}")
        names += unknown
        lines["evaluated on"] += dropped
    classes = find_text_classes(names, label, where)
    number = {name: n for n, name in enumerate(classes)}
    train, held_out = ([(words, number[name]) for words, name in part] for part in (rows, given))
    if table is None:
        hashes = splits.number_equal(words for words, _ in train)
        sides = splits.split_rows(hashes, labels=torch.tensor([n for _, n in train]))
        train, held_out = ([train[n] for n in side.sort().values.tolist()] for side in sides)
    _check_sizes(len(train), len(held_out), where)
    plan |= lines | describe_texts(train, held_out, classes)
    return TextSets(train, held_out, classes, {"text": text, "encoding": encoding}, plan)


def _check_sizes(num_train: int, num_held_out: int, where: str) -> None:
    if not num_train or not num_held_out:
        raise UsageError(
            f"{where}: {num_train} texts are left to train on and {num_held_out} to evaluate "
            "on, and equal texts are not parted: more different texts are needed, or --eval-data"
        )


def find_text_classes(labels: list[str], label: str, where: str) -> list[str]:
    """Return the names of the classes, sorted. Raises UsageError if they are none."""
    classes = sorted({*labels})
    if len(classes) < 2:
        raise UsageError(
            f"{where}: column {label!r} has {count(len(classes), 'class')} in "
            f"{count(len(labels), 'row')} with a text and a label, and two are needed"
        )
    if len(classes) > 2 and len(classes) == len(labels):
        raise UsageError(
            f"{where}: column {label!r} has {len(classes)} different values in {len(labels)} rows, "
            "which are not classes: name another column with --label"
        )
    return classes


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
    """Return the weight of each text, by which --balance draws all classes equally often, or None.

    Also returns the order for an encoder, whose batches have texts of similar lengths, or None.
    """
    if config.balance:
        labels = torch.tensor([label for _, label in samples])
        return 1 / labels.bincount().double()[labels], None
    if config.base:
        lengths = [len(tokens) for tokens, _ in samples]
        return None, by_length(lengths, config.batch_size, config.seed)
    return None, None


def fit_bag(config: TextConfig, num_train: int) -> dict[str, str]:
    """Set epochs, batch size and rate of a bag where they are UNSET; return a line of the plan.

    A step goes over the whole table, whatever the texts in it, so that many small steps take most
    of the time: for many texts, batch size and rate are larger by the same factor, at most 8,
    unless the user chose one of them. A few texts are read more often.
    """
    epochs = min(20, max(5, 5 * bags.FEW // num_train))
    is_chosen = any((config.batch_size, config.learning_rate, config.scale_lr))
    factor = 1 if is_chosen else min(8, max(1, num_train // MANY))
    is_usual = factor == 1 and (epochs == 5 or config.epochs is not None)
    sizes = {"epochs": epochs, "batch_size": 60 * factor, "learning_rate": 8.0 * factor}
    flags = config.set_unset(sizes)
    if is_usual:
        return {}
    return {"size": f"{count(num_train, 'text')} to train on: {flags}"}


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


def choose_text_and_label(
    table: pd.DataFrame, text: str | None, label: str | None, where: str
) -> tuple[str, str]:
    """Return the columns of the texts and of the classes: as given, by name, or all that fits.

    A column may be the classes if its values repeat, and the texts if it holds letters and does not
    repeat; sentences are taken before names.
    """
    text, label = (name and nfc(name) for name in (text, label))
    frames.choose_columns(table, [name for name in (text, label) if name], where)
    text = text or _called(TEXT_NAMES, table, label)
    label = label or _called(LABEL_NAMES, table, text)
    labels = [name for name in table if name != text and _repeats(table[name])]
    label = label or _only(labels, [*table], where, "--label", "classes")
    return text or find_text(table.drop(columns={label, *labels}), where), label


def find_text(table: pd.DataFrame, where: str) -> str:
    """Return the column of the texts. Raises UsageError."""
    if text := _called(TEXT_NAMES, table):
        return text
    scores = {name: _prose(table[name]) for name in table}
    columns = [name for name, score in scores.items() if score == max(scores.values()) > 0]
    return _only(columns, [*table], where, "--text", "texts")


def _called(names: Sequence[str], table: pd.DataFrame, other: str | None = None) -> str | None:
    """Return the column that has the first of these names, in any case; None if there is none."""
    columns = {name.lower(): name for name in reversed([*table]) if name != other}
    return next((columns[name] for name in names if name in columns), None)


def _only(columns: list[str], names: list[str], where: str, flag: str, what: str) -> str:
    if len(columns) != 1:
        fits = (
            f"{shorten(columns, frames.MAX_SHOWN)} could be" if columns else "no column seems to be"
        )
        raise UsageError(
            f"{where}: {fits} the {what}: choose the column by {flag}: "
            f"{shorten([*map(frames.typed, names)], frames.MAX_SHOWN)}"
        )
    return columns[0]


def _repeats(values: pd.Series) -> bool:
    try:
        present = values[values.notna() & (values != "")]
        return 2 <= present.nunique() <= min(MAX_FOUND, len(present) // 2)
    except (TypeError, ValueError):  # lists have no hash
        return False


def _prose(values: pd.Series) -> int:
    """Return 2 for a column of sentences, 1 for one of other texts made of letters, else 0."""
    present = [text for text in values if isinstance(text, str) and text.strip()][:NUM_LOOKED_AT]
    kinds = [unicodedata.category(sign) for text in present for sign in text[:NUM_LOOKED_AT]]
    num_letters = sum(kind[0] in "LM" for kind in kinds)
    if not present or _repeats(values) or 2 * num_letters < len(kinds) - kinds.count("Zs"):
        return 0
    # A script without case may be written without blanks: three of its letters count as a word.
    num_words = sum(len(text.split()) for text in present) + kinds.count("Lo") / 3
    return 1 + (num_words >= 3 * len(present))


def labelled_texts(
    table: pd.DataFrame, text: str, label: str, where: str
) -> tuple[list[tuple[str, str]], str]:
    """Return text and label of the rows that have both, and how many were left out."""
    rows = frames.choose_columns(table, [text, label], where)
    texts = [_clean(cell) for cell in rows[text]]
    labels = ["" if pd.isna(cell) else frames.as_text(cell) for cell in rows[label]]
    dropped = "".join(
        f", {count(cells.count(''), 'row')} dropped: no {what}"
        for cells, what in ((texts, "text"), (labels, "label"))
        if "" in cells
    )
    return [pair for pair in zip(texts, labels, strict=True) if all(pair)], dropped


def _clean(value: Any) -> str:
    """Return a cell as text, "" if it is empty; half of a surrogate pair, in JSON, becomes "?"."""
    if not isinstance(value, str):
        value = "" if pd.isna(value) else frames.as_text(value)
    return nfc(value.strip()).encode("utf-8", "replace").decode()


def read_texts(path: Path, text: str | None, encoding: str | None) -> tuple[list[str], list[str]]:
    """Return the lines of a .txt file, or a column of a table; "" where there is no text.

    The second list has a note if the file is in another encoding than the given one. text: the
    column; None: the only one that fits. encoding: as read_table has it. Raises UsageError.
    """
    where = str(path)
    if path.suffix.lower() == ".txt":
        with as_usage_error(f"{where} cannot be read"):
            try:
                found = find_encoding(str(path), encoding)
                lines = path.read_text(found.reader).split("\n")
            except UnicodeError:
                raise UsageError(
                    f"{where} is not in UTF-8, or not in the given --encoding: try --encoding "
                    "cp1252 or utf-16"
                ) from None
        notes = [f"{path.name} {found.note}"] if found.note else []
        return [_clean(line) for line in lines[: len(lines) - (not lines[-1])]], notes
    table = frames.read_table(where, where, encoding=encoding)
    if text is None:
        text = find_text(table, where)
    cells = frames.choose_columns(table, [text], where)[text]
    return [*map(_clean, cells)], [*frames.describe_encodings([table]).values()]
