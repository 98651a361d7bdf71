"""Texts and their classes: from a table, or from the documentation of installed packages.

`where` names the table; the sentence of a UsageError begins with it.
"""

import importlib.util
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from trainkit.cli.parse import flag
from trainkit.config import UNSET, Count, MayChange, TrainingConfig
from trainkit.errors import UsageError, as_usage_error
from trainkit.orders import hold_out
from trainkit.reading import frames
from trainkit.text import count, shorten

MAX_FOUND = 100  # classes of a column that is found by itself
RARE = 5  # texts: with fewer of a class, a fifth may be none of them
NUM_HASHED = 4096  # numbers of a hashed word
FIRST_LINE = re.compile(r':\n +r?"""\s*(\S.{19,}?)\s*(?:"""|\n)')  # of a docstring


@dataclass
class TextConfig(TrainingConfig):
    """The flags of a script that classifies texts."""

    data: MayChange[str | None] = None
    """CSV, JSON or Parquet file, a folder of them, or Hub id (default: the script's own texts)"""
    eval_data: MayChange[str | None] = None
    """the same, to evaluate on (default: a fifth of --data)"""
    text: str | None = None
    """column of the texts (default: the only one that fits)"""
    label: str | None = None
    """column of the classes (default: the only one that fits)"""
    encoding: str | None = None
    """of text files, such as cp1252 or utf-16 (default: UTF-8)"""
    base: MayChange[str | None] = None
    """pretrained encoder of transformers, a folder or Hub id (default: train from scratch)"""
    max_tokens: Count = UNSET
    """of a text: what is over is cut (default: 32, or 128 with --base)"""
    num_lines: Count | None = None
    """without --data: texts to train on, and to evaluate on (default: all)"""
    epochs: int = UNSET
    """passes over the texts (default: 5, or 3 with --base)"""
    batch_size: int = UNSET
    """texts per optimizer step, over all processes and micro-batches (default: 60, or 32)"""
    learning_rate: float = UNSET
    """peak learning rate (default: 2e-3, or 5e-5 with --base)"""

    def find_problems(self, num_processes: int) -> list[str]:
        """Add flags of the data that go with --data, or without it."""
        problems = super().find_problems(num_processes)
        names = ("eval_data", "text", "label", "encoding")
        if given := [flag(name) for name in names if getattr(self, name) and not self.data]:
            problems.append(f"{' and '.join(given)}: name the file of the texts with --data")
        if self.num_lines and self.data:
            problems.append("--num-lines cannot be used with --data")
        return problems


class Sets(NamedTuple):
    """Texts with the number of the class of each, the names of the classes, lines of the plan."""

    train: list[tuple[str, int]]
    held_out: list[tuple[str, int]]
    classes: list[str]
    columns: dict[str, Any]
    plan: dict[str, str]


def read_docstrings(packages: list[str], num: int | None) -> Sets:
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
    train, held_out = [line for n, line in enumerate(lines) if n % 5], lines[::5]
    train, held_out = train[:num], held_out[:num]
    return Sets(train, held_out, packages, {}, describe(train, held_out, packages))


def read_sets(config: TextConfig) -> Sets:
    """Read texts and classes of a table; a fifth of each class is held out, or all of --eval-data.

    Rows without a text or a label are left out, and counted in the plan. Raises UsageError for a
    table that cannot be used.
    """
    where, encoding = f"--data {config.data}", config.encoding
    table = frames.read_table(str(config.data), where, encoding=encoding)
    text, label = choose(table, config.text, config.label, where)
    texts, labels, dropped = read_rows(table, text, label, where)
    classes = find_classes(labels, label, where)
    number = {name: n for n, name in enumerate(classes)}
    pairs = [(each, number[name]) for each, name in zip(texts, labels, strict=True)]
    plan = {"data": f"{config.data}, {len(pairs)} texts{dropped}"}
    plan["columns"] = f"text {text!r}, label {label!r}"
    if config.eval_data is None:
        numbers = torch.tensor([each for _, each in pairs])
        # In the order of the table, because hold_out sorts by class.
        rows = [hold_out(numbers, split, 0).sort().values.tolist() for split in ("train", "test")]
        train, held_out = ([pairs[n] for n in each] for each in rows)
    else:
        where = f"--eval-data {config.eval_data}"
        table = frames.read_table(config.eval_data, where, encoding=encoding)
        texts, labels, dropped = read_rows(table, text, label, where)
        if unknown := sorted({*labels} - {*classes}):
            raise UsageError(f"{where}: --data has no class {shorten([*map(repr, unknown)])}")
        train, held_out = pairs, [(a, number[b]) for a, b in zip(texts, labels, strict=True)]
        plan["evaluated on"] = f"{config.eval_data}, {len(held_out)} texts{dropped}"
    if not train or not held_out:
        raise UsageError(
            f"{where}: {len(train)} texts are left to train on and {len(held_out)} to evaluate on"
        )
    plan |= describe(train, held_out, classes)
    return Sets(train, held_out, classes, {"text": text, "encoding": encoding}, plan)


def find_classes(labels: list[str], label: str, where: str) -> list[str]:
    """Return the names of the classes, sorted. Raises UsageError if they are none."""
    classes = sorted({*labels})
    if len(classes) < 2:
        raise UsageError(
            f"{where}: column {label!r} has {count(len(classes), 'class')} in "
            f"{count(len(labels), 'row')} with a text and a label, and two are needed"
        )
    if len(classes) > 2 and 2 * len(classes) > len(labels):
        raise UsageError(
            f"{where}: column {label!r} has {len(classes)} different values in {len(labels)} rows, "
            "which are not classes: name another column with --label"
        )
    return classes


def describe(
    train: Sequence[tuple[str, int]], held_out: Sequence[tuple[str, int]], classes: list[str]
) -> dict[str, str]:
    """Return the lines of the plan that say what the accuracy will be worth."""
    counts = torch.tensor([label for _, label in held_out]).bincount(minlength=len(classes))
    share = f"{100 * counts.max().item() / len(held_out):.1f} %"
    largest = f"{classes[int(counts.argmax())]}, {share} of the texts to evaluate on"
    plan = {"classes": f"{len(classes)}: {shorten(classes, 10)}", "largest class": largest}
    labels = [label for _, label in (*train, *held_out)]
    if rare := [name for n, name in enumerate(classes) if labels.count(n) < RARE]:
        plan["rare"] = f"fewer than {RARE} texts of a class: {shorten(rare, 10)}"
    known = {each for each, _ in train}
    if twice := sum(each in known for each, _ in held_out):
        plan["twice"] = f"{twice} of {len(held_out)} texts to evaluate on are also trained on"
    return plan


def tokenize(texts: Sequence[str], max_tokens: int, tokenizer: Any = None) -> list[torch.Tensor]:
    """Return at most max_tokens tokens of each text, int64; without a tokenizer hashed words.

    Hashed words are never 0, which is for padding. A text without a token becomes one token 0.
    """
    if tokenizer is not None:
        found = tokenizer([*texts], truncation=True, max_length=max_tokens).input_ids
    else:
        words = [re.findall(r"\w+|[^\w\s]", text)[:max_tokens] for text in texts]
        found = [[zlib.crc32(w.encode()) % (NUM_HASHED - 1) + 1 for w in row] for row in words]
    return [torch.tensor(row or [0]) for row in found]


def make_samples(sets: Sets, max_tokens: int, tokenizer: Any) -> tuple[list, list, dict[str, str]]:
    """Return samples (tokens, label, index) to train and to evaluate on, and the plan."""
    parts = []
    for part in (sets.train, sets.held_out):
        texts, labels = zip(*part, strict=True)
        tokens = tokenize(texts, max_tokens, tokenizer)
        parts.append([*zip(tokens, labels, range(len(labels)), strict=True)])
    train, held_out = parts
    full = sum(len(tokens) == max_tokens for tokens, *_ in train)
    said = f"{full} of {len(train)} texts have --max-tokens {max_tokens} or more, and are cut"
    return train, held_out, sets.plan | ({"cut": said} if full else {})


def choose(table: pd.DataFrame, text: str | None, label: str | None, where: str) -> tuple[str, str]:
    """Return the columns of the texts and of the classes: as given, or the only one that fits.

    A column may be the classes if its values repeat, and the texts if most of its values differ and
    have three words or more on average.
    """
    frames.choose_columns(table, [name for name in (text, label) if name], where)
    labels = [name for name in table if name != text and _repeats(table[name])]
    label = label or _only(labels, [*table], where, "--label", "classes")
    texts = [name for name in table if name not in (label, *labels) and _is_prose(table[name])]
    text = text or _only(texts, [*table], where, "--text", "texts")
    return text, label


def _only(found: list[str], names: list[str], where: str, flag: str, what: str) -> str:
    if len(found) != 1:
        fits = f"{shorten(found, frames.MAX_SHOWN)} could be" if found else "no column seems to be"
        raise UsageError(
            f"{where}: {fits} the {what}: choose the column by {flag}: "
            f"{shorten([*map(frames.typed, names)], frames.MAX_SHOWN)}"
        )
    return found[0]


def _repeats(values: pd.Series) -> bool:
    try:
        known = values[values.notna() & (values != "")]
        return 2 <= known.nunique() <= min(MAX_FOUND, len(known) // 2)
    except (TypeError, ValueError):  # lists have no hash
        return False


def _is_prose(values: pd.Series) -> bool:
    known = [each for each in values if isinstance(each, str) and each.strip()]
    words = sum(len(each.split()) for each in known)
    return bool(known) and words >= 3 * len(known) and 2 * len({*known}) > len(known)


def read_rows(
    table: pd.DataFrame, text: str, label: str, where: str
) -> tuple[list[str], list[str], str]:
    """Return texts and labels of the rows that have both, and how many were left out."""
    rows = frames.choose_columns(table, [text, label], where)
    texts = [_clean(each) for each in rows[text]]
    labels = [frames.as_text(each).strip() if pd.notna(each) else "" for each in rows[label]]
    kept = [n for n, pair in enumerate(zip(texts, labels, strict=True)) if all(pair)]
    empty, unnamed = texts.count(""), labels.count("")
    dropped = f", {count(empty, 'row')} dropped: no text" * bool(empty)
    dropped += f", {count(unnamed, 'row')} dropped: no label" * bool(unnamed)
    return [texts[n] for n in kept], [labels[n] for n in kept], dropped


def _clean(value: Any) -> str:
    """Return a cell as text, "" if it is empty; half of a surrogate pair, in JSON, becomes "?"."""
    if not isinstance(value, str):
        value = "" if pd.isna(value) else frames.as_text(value)
    return value.strip().encode("utf-8", "replace").decode()


def read_texts(path: Path, text: str | None, encoding: str | None) -> list[str]:
    """Return the lines of a .txt file, or a column of a table; "" where there is no text.

    text: the column; None: the only one that fits. Raises UsageError.
    """
    where = str(path)
    if path.suffix.lower() == ".txt":
        with as_usage_error(f"{where} cannot be read"):
            try:
                lines = path.read_text(encoding or "utf-8-sig").split("\n")
            except UnicodeError:
                raise UsageError(
                    f"{where} is not in UTF-8, or not in the given --encoding: try --encoding "
                    "cp1252 or utf-16"
                ) from None
        return [_clean(line) for line in lines[: len(lines) - (not lines[-1])]]
    table = frames.read_table(where, where, encoding=encoding)
    if text is None:
        text = _only([n for n in table if _is_prose(table[n])], [*table], where, "--text", "texts")
    return [_clean(each) for each in frames.choose_columns(table, [text], where)[text]]
