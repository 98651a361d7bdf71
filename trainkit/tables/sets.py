"""Read a table, split its rows, and make sets of them to train and to evaluate on.

`where` names the table; the sentence of a UsageError begins with it.
"""

import csv
import io
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from tyro.constructors import PrimitiveConstructorSpec

from trainkit.cli.parse import flag
from trainkit.config import UNSET, Fraction, MayChange, NonNegative, Seed, TrainingConfig
from trainkit.errors import UsageError
from trainkit.loaders import InMemory
from trainkit.orders import split_equal_samples
from trainkit.reading.frames import MAX_SHOWN, choose_columns, read_table, typed
from trainkit.reading.recall import describe_classes
from trainkit.tables.columns import (
    MAX_CATEGORIES,
    MISSING,
    Column,
    encode,
    find_kind,
    is_index,
    learn_column,
    list_counts,
    parse_cells,
)
from trainkit.tables.network import NUM_FOLDS
from trainkit.text import count, shorten

# The flags that say what the data are.
OF_DATA = ["data", "target", "features", "categorical", "missing", "separator", "encoding"]
OF_DATA += ["test_fraction", "data_seed"]


def split_names(text: str) -> list[str]:
    """Split `a,b` into names; one that contains a comma is quoted: `"a, b",c`."""
    lines = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    return [name.strip() for line in lines for name in line if name.strip()]


def comma_separated(kind: type) -> PrimitiveConstructorSpec[list]:
    """Tell tyro how a flag that is one word, a,b, becomes a list of this type."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="A,B",
        instance_from_str=lambda words: [kind(name) for name in split_names(words[0])],
        is_instance=lambda value: isinstance(value, list),
        str_from_instance=lambda value: [",".join(map(str, value))],
    )


Names = Annotated[list[str], comma_separated(str)]


@dataclass
class TableConfig(TrainingConfig):
    """The flags of a script that reads a table; columns are written as a,b."""

    data: MayChange[str | None] = None
    """CSV, Excel, JSON or Parquet file, a folder of them, or Hub id"""
    target: Names | None = None
    """columns to predict, as a,b; a name with a comma in double quotes: 'a,"b, c"'"""
    features: Names | None = None
    """columns to predict from, written like --target (default: all that can be used)"""
    categorical: Names = field(default_factory=list)
    """columns that are categories although their values read as numbers"""
    missing: Literal["refuse", "impute", "drop"] | None = None
    """what to do with a missing feature: refuse it, fill in the training mean, drop the row
    (default: impute)"""
    separator: str | None = None
    """of the values in text files (default: , ; tab or |)"""
    encoding: str | None = None
    """of text files, such as cp1252 or utf-16 (default: UTF-8)"""
    test_fraction: Fraction = 0.2
    """of the rows, to evaluate on; 0: on all"""
    data_seed: Seed = 0
    """of the split, and of synthetic data"""

    # Their defaults depend on the model, and for a network on the number of rows too.
    epochs: int = UNSET
    """passes over the training data (default: as suits the model, see the plan)"""
    batch_size: int = UNSET
    """samples per optimizer step, over all processes (default: as suits the model)"""
    learning_rate: float = UNSET
    """peak learning rate (default: as suits the model)"""
    weight_decay: NonNegative[float] = UNSET
    """decoupled for adamw, else an L2 penalty (default: as suits the model)"""
    warmup: Fraction = UNSET
    """fraction of all steps in which the learning rate rises (default: as suits the model)"""
    clip_norm: float = UNSET
    """largest norm of the gradient; inf: do not clip (default: as suits the model)"""

    def set_defaults(self, values: dict[str, Any]) -> None:
        """Set each of these fields that the user has not."""
        vars(self).update({n: v for n, v in values.items() if getattr(self, n) is None})


class TableSplit(NamedTuple):
    """Positions of the rows to train and to evaluate on, int64, folds, and lines of the plan.

    fold: of each row to train on, for network.py; None: it is not used.
    """

    train: np.ndarray
    test: np.ndarray
    fold: torch.Tensor | None
    plan: dict[str, str]


class TableSets(NamedTuple):
    """A set to train on (with folds, if any), one to evaluate on (with row numbers), and metadata.

    The metadata are what a prediction for a new row needs, and the lines of the plan.
    """

    train: InMemory
    evaluated: InMemory
    metadata: dict[str, Any]


def load_table(
    config: TableConfig, predicts_classes: bool = False
) -> tuple[pd.DataFrame, list[str], dict[str, Any]]:
    """Return the table of --data without dropped rows, the targets, and how the table was read.

    The index of the table holds row numbers from 0. Raises UsageError.
    """
    assert config.data is not None
    where = f"--data {config.data}"
    options = {"separator": config.separator, "encoding": config.encoding}
    table = read_table(config.data, where, **options)
    files, question = table.attrs.get("files", ""), table.attrs.get("question", "")
    if table.shape[1] == 1:
        raise UsageError(
            f"{where}: there is one column, {table.columns[0]!r}, and two are needed: if it is "
            "several, name what lies between them with --separator, such as ' '"
        )
    if not config.target:
        raise UsageError(
            f"{where}: choose the column to predict with --target: "
            f"{shorten([*map(typed, table)], MAX_SHOWN)}"
        )
    choose_columns(table, config.categorical, where)
    table = choose_columns(table, [*(config.features or table), *config.target], where)
    if not predicts_classes:
        _check_targets(table, config)
    needed, what = (
        (table, "value") if config.missing == "drop" else (table[config.target], "target")
    )
    kinds = [find_kind(needed[name], name in config.categorical) for name in needed]
    numbers = [isinstance(kind, Column) and kind.categories is None for kind in kinds]
    missing = needed.isna() | (needed.isin(MISSING) & numbers)
    used = table[~missing.any(axis=1)]
    words = needed.astype(object).fillna("").where(missing).stack().value_counts().to_dict()
    dropped = f", {count(len(table) - len(used), 'row')} dropped: no {what}{list_counts(words)}"
    metadata = {
        "data": Path(config.data).name + files,
        "read_options": options,
        "dropped": dropped * (len(used) < len(table)),
        "question": question,
        "truth": None,
    }
    return used, config.target, metadata


def _check_targets(table: pd.DataFrame, config: TableConfig) -> None:
    """Raise a UsageError that names the script for classes if the target holds texts."""
    for name in config.target or []:
        kind = find_kind(table[name], name in config.categorical)
        is_category = isinstance(kind, Column) and kind.categories is not None
        if is_category and table[name].notna().any():
            texts = sorted(parse_cells(table[name], Column(name, [])).dropna().unique())
            raise UsageError(
                f"--data {config.data}: column {name!r} holds texts, such as "
                f"{shorten([*map(repr, texts)])}, and this script predicts numbers. For the class "
                f"of a row: {command('examples/table_classes.py', config, [name])}"
            )


def command(script: str, config: TableConfig, target: list[str]) -> str:
    """Return the command that starts another script for tables with these flags of the data."""
    words = ["python", script]
    default = TableConfig()
    for name in OF_DATA:
        value = target if name == "target" else getattr(config, name)
        if value != getattr(default, name):
            is_list = isinstance(value, list)
            words += [flag(name), typed(*value) if is_list else shlex.quote(str(value))]
    return " ".join(words)


def make_table_sets(
    table: pd.DataFrame,
    names: list[str],
    metadata: dict[str, Any],
    config: TableConfig,
    in_folds: bool = False,
) -> TableSets:
    """Return sets whose rows are features and targets, both as standardised numbers.

    names: the targets. metadata: what load_table returns. in_folds: see TableSplit. What is
    learned from rows (categories, means) is learned from the training rows alone. Raises a
    UsageError that says of each column whether it can be used.
    """
    targets = [Column(name) for name in names]
    split, learned = split_and_learn(table, targets, config, in_folds)
    features, facts = encode_features(table, targets, learned, split, config)
    features, numbers = np.split(features, [-len(names)], axis=1)
    inputs, more = standardise_columns("feature", facts["features"], features, split, config)
    outputs, facts["target"] = standardise_columns("target", names, numbers, split, config)
    facts |= more | facts.pop("target")
    facts["baseline"] = numbers[split.train].mean(0).tolist()
    metadata = metadata | facts
    metadata["plan"] = make_plan(metadata, learned, table, split)
    return take_parts((inputs, outputs), table, split, metadata)


def make_class_sets(
    table: pd.DataFrame, names: list[str], metadata: dict[str, Any], config: TableConfig
) -> TableSets:
    """Return sets whose rows are features, as standardised numbers, and the number of a class.

    names: the one target. metadata: what load_table returns; the names of the classes are added to
    it. Raises UsageError for a table that cannot be used.
    """
    where = f"--data {config.data}"
    if len(names) > 1:
        raise UsageError(f"{where}: --target {typed(*names)}: choose one column of classes")
    classes, labels = find_table_classes(table[names[0]], where, config)
    target = Column(names[0], classes)
    split, learned = split_and_learn(table, [target], config, in_folds=True)
    features, facts = encode_features(table, [target], learned, split, config)
    inputs, more = standardise_columns(
        "feature", facts["features"], features[:, : -len(classes)], split, config
    )
    facts |= more | {"classes": classes, "targets": names}
    metadata = metadata | facts
    plan = make_plan(metadata, learned, table, split)
    metadata["plan"] = plan | describe_classes(
        labels[split.train], labels[split.test], classes, "row"
    )
    return take_parts((inputs, labels), table, split, metadata)


def find_table_classes(
    values: pd.Series, where: str, config: TableConfig
) -> tuple[list[str], torch.Tensor]:
    """Return the names of the classes in a column, and the number of the class of each row.

    Raises UsageError if its values are amounts, or all alike, or all different.
    """
    texts = parse_cells(values, Column(str(values.name), []))
    classes = sorted(texts.unique())
    numbers = pd.to_numeric(pd.Series(classes), errors="coerce")
    if numbers.notna().all():
        classes = [classes[place] for place in numbers.argsort()]
    is_amount = numbers.notna().all() and (numbers % 1 != 0).any()
    if is_amount and values.name not in config.categorical:
        raise UsageError(
            f"{where}: column {values.name!r} holds numbers that are not whole, such as "
            f"{shorten(classes)}. To predict a number: "
            f"{command('train_regression.py', config, [str(values.name)])}"
        )
    if len(classes) < 2 or len(classes) > max(2, len(texts) // 2):
        raise UsageError(
            f"{where}: column {values.name!r} has {count(len(classes), 'different value')} in "
            f"{count(len(texts), 'row')}, which are not classes: choose another --target, or to "
            f"predict a number: {command('train_regression.py', config, [str(values.name)])}"
        )
    number = {name: place for place, name in enumerate(classes)}
    return classes, torch.tensor([number[text] for text in texts])


def split_and_learn(
    table: pd.DataFrame, targets: list[Column], config: TableConfig, in_folds: bool
) -> tuple[TableSplit, dict[str, Column | str]]:
    """Split the rows, with equal ones on one side; learn each column, or why it is left out."""
    train, test = split_rows(len(table), config)
    learned = learn_columns(table, targets, train, config)
    hashes, must_repeat = hash_rows(table, targets, learned)
    together = torch.arange(len(table)) if must_repeat else hashes
    plan: dict[str, str] = {}
    if config.test_fraction:
        held_out = torch.zeros(len(table), dtype=torch.bool)
        held_out[test] = True
        parts = [part.numpy() for part in split_equal_samples(held_out, together)]
        if all(map(len, parts)) and not np.array_equal(parts[0], train):
            train, test = parts
            learned = learn_columns(table, targets, train, config)
        num_both = int(torch.isin(hashes[test], hashes[train]).sum())
        num_equal = len(hashes) - len(hashes.unique())
        if num_both:
            plan["equal rows"] = f"{num_both} of {len(test)} to evaluate on are also trained on"
        elif num_equal:
            plan["equal rows"] = f"{num_equal} repeat another one: equal rows are in one part"
    check_parts(len(train), len(test), config)
    fold = None
    if in_folds:  # equal rows are in one
        kinds, kind = together[train].unique(return_inverse=True)
        generator = torch.Generator().manual_seed(config.data_seed)
        fold = torch.randperm(len(kinds), generator=generator)[kind] % NUM_FOLDS
    return TableSplit(train, test, fold, plan), learned


def hash_rows(
    table: pd.DataFrame, targets: list[Column], learned: dict[str, Column | str]
) -> tuple[torch.Tensor, bool]:
    """Return a hash of what is used of each row, int64, and whether rows must be equal.

    They must be if the columns can only make fewer different rows than there are: a row is then a
    kind of thing, and not one that was copied.
    """
    used = [column for column in learned.values() if isinstance(column, Column)]
    parsed = pd.DataFrame({column.name: parse_cells(table[column.name], column) for column in used})
    for column in targets:
        parsed[column.name] = parse_cells(table[column.name], column)
    kinds = math.prod(max(1, parsed[name].nunique()) for name in parsed)
    hashes = pd.util.hash_pandas_object(parsed, index=False).to_numpy().view(np.int64)
    return torch.from_numpy(hashes.copy()), kinds <= len(table)


def learn_columns(
    table: pd.DataFrame, targets: list[Column], train: np.ndarray, config: TableConfig
) -> dict[str, Column | str]:
    """Learn from its training rows how each feature is encoded, or why it is left out."""
    predicted = [column.name for column in targets]
    learned = {}
    for name in table:
        if name not in predicted:
            is_named = bool(config.features)
            learned[name] = (
                "left out: an index"
                if is_index(table[name]) and not is_named
                else learn_column(table[name], train, config.categorical, config.missing)
            )
    return learned


def encode_features(
    table: pd.DataFrame,
    targets: list[Column],
    learned: dict[str, Column | str],
    split: TableSplit,
    config: TableConfig,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return features and targets as float64, and the metadata of the columns.

    Raises UsageError if a row has a problem, or no column is left.
    """
    columns = [column for column in learned.values() if isinstance(column, Column)]
    values, problems = encode(table, [*columns, *targets])
    if problems or not columns:
        refused = {name: f"row {row + 1}: {why}" for row, name, why in reversed(problems)}
        raise UsageError(_judge({**learned, **refused}, table, config))
    facts = {
        "columns": [*map(vars, columns)],
        "left_out": [name for name, column in learned.items() if isinstance(column, str)],
        "features": [name for column in columns for name in column.feature_names()],
    }
    return values, facts


def standardise_columns(
    kind: str, names: list[str], part: np.ndarray, split: TableSplit, config: TableConfig
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return numbers with the mean 0 and the deviation 1 in the training rows, and metadata."""
    rows = part[split.train]
    mean, std = rows.mean(0), rows.std(0)
    if not np.ptp(rows, axis=0).all():
        raise UsageError(f"--data {config.data}: a {kind} is the same in all training rows")
    if config.data is None:  # synthetic data are not standardised
        mean, std = np.zeros_like(mean), np.ones_like(std)
    facts = {
        f"{kind}s": names,
        f"{kind}_range": np.stack((rows.min(0), rows.max(0)), 1).tolist(),
        f"{kind}_whole": (rows == rows.round()).all(0).tolist(),
        f"{kind}_mean": mean.tolist(),
        f"{kind}_std": std.tolist(),
    }
    return torch.from_numpy((part - mean) / std).float(), facts


def take_parts(
    tensors: Sequence[torch.Tensor],
    table: pd.DataFrame,
    split: TableSplit,
    metadata: dict[str, Any],
) -> TableSets:
    """Return the sets of the rows that a split has; those to evaluate on have row numbers."""
    numbers = torch.from_numpy(table.index.to_numpy(copy=True))
    evaluated = InMemory(*(tensor[split.test] for tensor in (*tensors, numbers)))
    train = [tensor[split.train] for tensor in tensors]
    train += [] if split.fold is None else [split.fold]
    return TableSets(InMemory(*train), evaluated, metadata)


def make_plan(
    metadata: dict[str, Any],
    learned: dict[str, Column | str],
    table: pd.DataFrame,
    split: TableSplit,
) -> dict[str, str]:
    """Return the lines of the plan that say how the table is used.

    What only the plan needs, such as the file's name, is taken out of the metadata: a resume
    compares them, and the file may have another name by then.
    """
    texts = {name: f"{learned.get(name, 'number')}{_doubt(table[name])}" for name in table}
    special = [f"{name} ({text})" for name, text in texts.items() if text != "number"]
    num_features, num_rows = len(metadata["features"]), len(split.train)
    plan = {
        "data": f"{metadata.pop('data')}{metadata.pop('dropped', '')}",
        "features": f"{num_features}, from {count(len(metadata['columns']), 'column')}",
        "columns": shorten(special, MAX_SHOWN) or "numbers",
        "targets": ", ".join(metadata["targets"]),
    }
    if question := metadata.pop("question", ""):
        plan["names"] = question
    if num_rows < 2 * num_features:
        plan["few rows"] = (
            f"{num_rows} to train on for {num_features} features: another split may give a very "
            "different score"
        )
    return plan | split.plan


def _doubt(values: pd.Series) -> str:
    """Ask whether . separates thousands if values have no or three decimals: 850 and 1.180."""
    if values.dtype.kind != "O":
        return ""
    texts = values[pd.to_numeric(values, errors="coerce").abs() >= 1].astype(str)
    decimals = texts.str.extract(r"\.(\d*)\s*$", expand=False).fillna("").str.len()
    asked = ", whole or with three decimals: is . a thousands separator?"
    return asked * ({*decimals} == {0, 3})


def _judge(learned: dict[str, Any], table: pd.DataFrame, config: TableConfig) -> str:
    """Return a list of all columns, the refused ones first, and a command that works."""
    good = [name for name, column in learned.items() if isinstance(column, Column)]
    lines = [f"  {name}: {learned[name]}" for name in sorted(learned, key=good.__contains__)]
    text = "\n".join([f"--data {config.data} cannot be used as it is:", *lines[:MAX_SHOWN]])
    if not good or {*(config.target or [])} & learned.keys():
        return (
            f"{text}\nWrite numbers like 1234.5, with a decimal point, without currency, unit, % "
            "or thousands separator"
        )
    refused = [name for name in learned if "is not a number" in str(learned[name])]
    if kinds := [name for name in refused if table[name].nunique() <= MAX_CATEGORIES]:
        text += f"\nIf their values are kinds, not amounts, add --categorical {typed(*kinds)}"
    return f"{text}\nThis works: {shlex.join(['python', *sys.argv])} --features {typed(*good)}"


def split_rows(num_rows: int, config: TableConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the training and test rows."""
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(config.data_seed))
    parts = order.tensor_split([round(config.test_fraction * num_rows)])
    test, train = (part.sort().values.numpy() for part in parts)
    return train, test if config.test_fraction else train


def check_parts(num_train: int, num_test: int, config: TableConfig) -> None:
    """Raise UsageError if a part of the rows is empty."""
    if not num_train * num_test:
        raise UsageError(
            f"--data {config.data or 'synthetic'}: of {num_train + num_test} rows {num_train} are "
            f"left to train on and {num_test} to evaluate on (--test-fraction "
            f"{config.test_fraction})"
        )
