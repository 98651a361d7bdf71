"""Read a table, split its rows, and make sets of them to train and to evaluate on.

`where` names the table; the sentence of a UsageError begins with it.
"""

import csv
import io
import math
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from tyro.constructors import PrimitiveConstructorSpec

from trainkit.config import UNSET, Fraction, MayChange, NonNegative, Seed, TrainingConfig
from trainkit.config.command_line import flag
from trainkit.errors import UsageError
from trainkit.numbers.loaders import InMemory
from trainkit.numbers.orders import split_equal_samples
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
    read_numbers,
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


def comma_separated(item_type: type) -> PrimitiveConstructorSpec[list]:
    """Tell tyro how a flag that is one word, a,b, becomes a list of this type."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="A,B",
        instance_from_str=lambda words: [item_type(name) for name in split_names(words[0])],
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

    folds: one tensor, the fold of each row to train on, for network.py; or none.
    """

    train: np.ndarray
    test: np.ndarray
    folds: list[torch.Tensor]
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
    """Return the table of --data without dropped rows, the targets, and metadata.

    The index of the table holds row numbers from 0. The metadata have the options to read such a
    table with, and lines of the plan. Raises UsageError.
    """
    assert config.data is not None
    where = f"--data {config.data}"
    options = {"separator": config.separator, "encoding": config.encoding}
    table = read_table(config.data, where, **options)
    attributes = table.attrs
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
    for name in table.columns.difference([*config.target, *config.categorical]):
        table[name] = read_numbers(table[name])
    if not predicts_classes:
        _check_targets(table, config)
    needed, what = (
        (table, "value") if config.missing == "drop" else (table[config.target], "target")
    )
    columns = [find_kind(needed[name], config.categorical) for name in needed]
    numbers = [column.categories is None for column in columns]
    missing = needed.isna() | (needed.isin(MISSING) & numbers)
    used = table[~missing.any(axis=1)]
    plan = {"data": f"{Path(config.data).name}{attributes.get('files', '')}"}
    if num_dropped := len(table) - len(used):
        words = needed.astype(object).fillna("").where(missing).stack().value_counts().to_dict()
        plan["data"] += f", {count(num_dropped, 'row')} dropped: no {what}{list_counts(words)}"
    if "question" in attributes:
        plan["names"] = attributes["question"]
    return used, config.target, {"read_options": options, "truth": None, "plan": plan}


def _check_targets(table: pd.DataFrame, config: TableConfig) -> None:
    """Raise a UsageError that names the script for classes if the target holds texts."""
    for name in config.target or []:
        column = find_kind(table[name], config.categorical)
        if column.categories is not None and table[name].notna().any():
            texts = sorted(parse_cells(table[name], column).dropna().unique())
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


def make_class_sets(
    table: pd.DataFrame, names: list[str], metadata: dict[str, Any], config: TableConfig
) -> TableSets:
    """Return make_table_sets of a table with one target, whose values are classes, in folds."""
    where = f"--data {config.data}"
    if len(names) > 1:
        raise UsageError(f"{where}: --target {typed(*names)}: choose one column of classes")
    classes = find_table_classes(table[names[0]], where, config)
    return make_table_sets(table, names, metadata, config, in_folds=True, classes=classes)


def make_table_sets(
    table: pd.DataFrame,
    names: list[str],
    metadata: dict[str, Any],
    config: TableConfig,
    in_folds: bool = False,
    classes: list[str] | None = None,
) -> TableSets:
    """Return sets whose rows are features, as standardised numbers, and targets.

    The targets, `names`, are standardised numbers too, or with `classes` the number of a class.
    What is learned from rows (categories, means) is learned from the training rows alone. Raises a
    UsageError that says of each column whether it can be used. metadata: what load_table returns.
    in_folds: see TableSplit.
    """
    targets = [Column(name, classes) for name in names]
    split, learned = split_and_learn(table, targets, config, in_folds)
    columns = [column for column in learned.values() if not column.problem]
    values, problems = encode(table, [*columns, *targets])
    if problems or not columns:
        raise UsageError(_judge(learned, problems, table, config))
    features, numbers = np.split(values, [-len(classes or names)], axis=1)
    inputs, facts = standardise_columns("feature", features, split, config)
    facts |= {
        "columns": [*map(vars, columns)],
        "left_out": [name for name, column in learned.items() if column.problem],
        "features": [name for column in columns for name in column.feature_names()],
        "targets": names,
    }
    if classes:
        outputs = torch.from_numpy(numbers.argmax(1))
        parts = outputs[split.train], outputs[split.test]
        split.plan.update(describe_classes(*parts, classes, "row"))
        facts["classes"] = classes
    else:
        outputs, more = standardise_columns("target", numbers, split, config)
        facts |= more | {"baseline": numbers[split.train].mean(0).tolist()}
    plan = metadata["plan"] | make_plan(facts, learned, table, split)
    rows = torch.from_numpy(table.index.to_numpy(copy=True))
    return TableSets(
        InMemory(inputs[split.train], outputs[split.train], *split.folds),
        InMemory(inputs[split.test], outputs[split.test], rows[split.test]),
        metadata | facts | {"plan": plan},
    )


def find_table_classes(values: pd.Series, where: str, config: TableConfig) -> list[str]:
    """Return the names of the classes in a column, in their order.

    Raises UsageError if its values are amounts, or all alike, or all different.
    """
    name = str(values.name)
    texts = parse_cells(values, Column(name, []))
    classes = sorted(texts.unique())
    numbers = pd.to_numeric(pd.Series(classes), errors="coerce")
    if numbers.notna().all():
        classes = [classes[n] for n in numbers.argsort()]
    is_amount = numbers.notna().all() and (numbers % 1 != 0).any()
    for_numbers = command("train_regression.py", config, [name])
    if is_amount and name not in config.categorical:
        raise UsageError(
            f"{where}: column {name!r} holds numbers that are not whole, such as "
            f"{shorten(classes)}. To predict a number: {for_numbers}"
        )
    if len(classes) < 2 or len(classes) > max(2, len(texts) // 2):
        raise UsageError(
            f"{where}: column {name!r} has {count(len(classes), 'different value')} in "
            f"{count(len(texts), 'row')}, which are not classes: choose another --target, or to "
            f"predict a number: {for_numbers}"
        )
    return classes


def split_and_learn(
    table: pd.DataFrame, targets: list[Column], config: TableConfig, in_folds: bool
) -> tuple[TableSplit, dict[str, Column]]:
    """Split the rows, with equal ones on one side, and learn each column. Raises UsageError."""
    num_rows = len(table)
    generator = torch.Generator().manual_seed(config.data_seed)
    order = torch.randperm(num_rows, generator=generator)
    held_out = torch.zeros(num_rows, dtype=torch.bool)
    held_out[order[: round(config.test_fraction * num_rows)]] = True
    train, test = ((held_out == side).nonzero().flatten().numpy() for side in (False, True))
    learned = learn_columns(table, targets, train, config)
    hashes, must_repeat = hash_rows(table, targets, learned)
    together = torch.arange(num_rows) if must_repeat else hashes
    plan: dict[str, str] = {}
    if config.test_fraction:
        parts = [part.numpy() for part in split_equal_samples(held_out, together)]
        if all(map(len, parts)) and not np.array_equal(parts[0], train):
            train, test = parts
            learned = learn_columns(table, targets, train, config)
        num_both = int(torch.isin(hashes[test], hashes[train]).sum())
        num_equal = num_rows - len(hashes.unique())
        if num_both:
            plan["equal rows"] = f"{num_both} of {len(test)} to evaluate on are also trained on"
        elif num_equal:
            plan["equal rows"] = f"{num_equal} repeat another one: equal rows are in one part"
    else:
        test = train
    if not (len(train) and len(test)):
        raise UsageError(
            f"--data {config.data or 'synthetic'}: of {num_rows} rows {len(train)} are left to "
            f"train on and {len(test)} to evaluate on (--test-fraction {config.test_fraction})"
        )
    folds = []
    if in_folds:  # equal rows are in one
        groups, group = together[train].unique(return_inverse=True)
        generator.manual_seed(config.data_seed)
        folds = [torch.randperm(len(groups), generator=generator)[group] % NUM_FOLDS]
    return TableSplit(train, test, folds, plan), learned


def hash_rows(
    table: pd.DataFrame, targets: list[Column], learned: dict[str, Column]
) -> tuple[torch.Tensor, bool]:
    """Return a hash of what is used of each row, int64, and whether rows must be equal.

    They must be if the columns can only make fewer different rows than there are: a row is then a
    kind of thing, and not one that was copied.
    """
    used = [column for column in (*learned.values(), *targets) if not column.problem]
    parsed = pd.DataFrame({column.name: parse_cells(table[column.name], column) for column in used})
    num_possible = math.prod(max(1, number) for number in parsed.nunique())
    hashes = pd.util.hash_pandas_object(parsed, index=False).to_numpy().view(np.int64)
    return torch.from_numpy(hashes.copy()), num_possible <= len(table)


def learn_columns(
    table: pd.DataFrame, targets: list[Column], train: np.ndarray, config: TableConfig
) -> dict[str, Column]:
    """Learn from its training rows how each feature is encoded, or why it is left out."""
    learned = {}
    for name in table.columns.drop([column.name for column in targets]):
        if is_index(table[name]) and not config.features:
            learned[name] = Column(name, problem="left out: an index")
        else:
            learned[name] = learn_column(table[name], train, config.categorical, config.missing)
    return learned


def standardise_columns(
    name: str, numbers: np.ndarray, split: TableSplit, config: TableConfig
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return numbers with the mean 0 and the deviation 1 in the training rows, and metadata.

    name: feature or target.
    """
    rows = numbers[split.train]
    mean, std = rows.mean(0), rows.std(0)
    if not np.ptp(rows, axis=0).all():
        raise UsageError(f"--data {config.data}: a {name} is the same in all training rows")
    if config.data is None:  # synthetic data are not standardised
        mean, std = np.zeros_like(mean), np.ones_like(std)
    facts = {
        f"{name}_range": np.stack((rows.min(0), rows.max(0)), 1).tolist(),
        f"{name}_whole": (rows == rows.round()).all(0).tolist(),
        f"{name}_mean": mean.tolist(),
        f"{name}_std": std.tolist(),
    }
    return torch.from_numpy((numbers - mean) / std).float(), facts


def make_plan(
    facts: dict[str, Any], learned: dict[str, Column], table: pd.DataFrame, split: TableSplit
) -> dict[str, str]:
    """Return the lines of the plan that say how the table is used."""
    texts = {name: f"{learned.get(name, 'number')}{_doubt(table[name])}" for name in table}
    special = [f"{name} ({text})" for name, text in texts.items() if text != "number"]
    num_features, num_rows = len(facts["features"]), len(split.train)
    plan = {
        "features": f"{num_features}, from {count(len(facts['columns']), 'column')}",
        "columns": shorten(special, MAX_SHOWN) or "numbers",
        "targets": ", ".join(facts["targets"]),
    }
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


def _judge(
    learned: dict[str, Column],
    problems: list[tuple[int, str, str]],
    table: pd.DataFrame,
    config: TableConfig,
) -> str:
    """Return a list of all columns, the refused ones first, and a command that works."""
    texts = {name: str(column) for name, column in learned.items()}
    texts |= {name: f"row {row + 1}: {why}" for row, name, why in reversed(problems)}
    refused = {name for _, name, _ in problems}
    good = [name for name in learned if not learned[name].problem and name not in refused]
    lines = [f"  {name}: {texts[name]}" for name in sorted(texts, key=good.__contains__)]
    text = "\n".join([f"--data {config.data} cannot be used as it is:", *lines[:MAX_SHOWN]])
    if not good or refused - learned.keys():
        return (
            f"{text}\nWrite numbers like 1234.5, with a decimal point, without currency, unit, % "
            "or thousands separator"
        )
    no_numbers = [name for name in texts if "is not a number" in texts[name]]
    if kinds := [name for name in no_numbers if table[name].nunique() <= MAX_CATEGORIES]:
        text += f"\nIf their values are kinds, not amounts, add --categorical {typed(*kinds)}"
    return f"{text}\nThis works: {shlex.join(['python', *sys.argv])} --features {typed(*good)}"
