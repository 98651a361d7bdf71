"""Read a table, split its rows, and make sets of them to train and to evaluate on."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch

from trainkit.config import UNSET, Fraction, NonNegative, ReadOnlyIf, Rule, Seed
from trainkit.errors import UsageError
from trainkit.numbers.loaders import InMemory
from trainkit.reading import frames, splits
from trainkit.reading.flags import FileConfig, Names, comma_separated
from trainkit.reading.recall import describe_classes
from trainkit.tables import network
from trainkit.tables.columns import (
    INDEX,
    MISSING,
    Column,
    ask_missing,
    ask_totals,
    empty_cells,
    encode,
    find_kind,
    learn_column,
    read_cells,
)
from trainkit.text import count, shorten

Widths = Annotated[
    list[int],
    comma_separated(int),
    Rule(lambda value: min(value, default=0) >= 1, "at least 1 each"),
]
MOVED = "tables are for another script: python examples/table.py --data FILE --target COLUMN"
TABLE_FLAGS = dict.fromkeys(  # which train_regression.py had
    ("--data", "--eval-data", "--features", "--categorical", "--missing", "--encoding"), MOVED
)


@dataclass
class TableConfig(FileConfig):
    """The flags of a script that predicts columns of a table."""

    target: Names = field(default_factory=list)  # type: ignore[assignment]
    """column to predict, a number or a class, or several numbers as a,b; a name with a comma in
    double quotes: 'a,"b, c"'"""
    features: Names = field(default_factory=list)
    """columns to predict from, written like --target (default: all that can be used)"""
    categorical: Names = field(default_factory=list)
    """columns that are categories, or classes, although their values read as numbers"""
    missing_values: Names = field(default_factory=list)
    """cells that mean a missing value in every column, with = in between: =-999,unknown"""
    decimal: Literal[".", ","] | None = None
    """mark before the decimals, where both can be (default: as in English, or a comma in files
    with semicolons)"""
    test_fraction: Annotated[Fraction, ReadOnlyIf("eval_data", (None,))] = 0.2
    """of the rows, or of each class, to evaluate on, if no split is given; 0: on all"""
    data_seed: Seed = 0
    """of the split"""

    # These defaults depend on the number of rows.
    epochs: int = UNSET
    """passes over the training data (default: about 1,000 steps)"""
    batch_size: int = UNSET
    """samples per optimizer step, over all processes (default: as suits the number of rows)"""

    # These differ from those of trainkit.config.
    learning_rate: float = 2e-3
    weight_decay: NonNegative[float] = 0.03
    warmup: Fraction = 0.05
    clip_norm: float = 1.0

    def find_problems(self, num_processes: int) -> list[str]:
        """Add a table that is not named."""
        problems = super().find_problems(num_processes)
        return problems if self.data else [*problems, "name the table with --data FILE"]


class UsedRows(NamedTuple):
    """The rows of a table that have a target, those to evaluate on last if the user chose them."""

    table: pd.DataFrame
    targets: list[Column]
    numbers: np.ndarray  # of each row in its file, from 0
    given: torch.Tensor | None  # which rows the user chose to evaluate on; None: a part is held out
    how: tuple[list[str], str]  # categorical columns, and decimal marks: see find_kind
    plan: dict[str, str]


class TableSets(NamedTuple):
    """A set to train on (with folds), and one to evaluate on (with row numbers)."""

    train: InMemory
    evaluated: InMemory
    metadata: dict[str, Any]  # what a prediction for a new row needs
    plan: dict[str, str]


def make_table_sets(config: TableConfig) -> TableSets:
    """Return sets of features and targets, as standardised numbers, or the number of a class.

    What is learned from rows is learned from the training rows alone. Raises UsageError.
    """
    rows = read_used_rows(config)
    train, test, fold, learned, plan = split_and_learn(rows, config)
    columns = [column for column in learned if not column.problem]
    if not columns:
        said = [f"{column.name} ({column})" for column in learned] or ["there are no others"]
        raise UsageError(
            f"{config.where}: no column can be used: {shorten(said, frames.MAX_SHOWN)}"
        )
    classes = rows.targets[0].categories
    metadata: dict[str, Any] = {"input": "table_class" if classes else "table"}
    metadata["read_options"] = config.read_options
    metadata["missing_values"] = config.missing_values
    inputs, scale = standardise_columns("feature", encode(rows.table, columns)[0], train)
    metadata |= scale | describe_columns(learned, rows.targets)
    targets = np.stack([read_target(rows.table, column) for column in rows.targets], 1)
    if classes:
        outputs = torch.from_numpy(targets[:, 0]).long()
        plan |= describe_classes(outputs[train], outputs[test], classes, "row")
        metadata["classes"] = classes
    else:
        outputs, scale = standardise_columns("target", targets, train)
        metadata |= scale
    train_set = InMemory(inputs[train], outputs[train], fold)
    metadata["edges"] = network.find_edges(train_set.tensors[0])
    eval_set = InMemory(inputs[test], outputs[test], torch.from_numpy(rows.numbers[test]))
    plan = rows.plan | describe_use(learned, rows) | plan
    return TableSets(train_set, eval_set, metadata, plan)


def read_used_rows(config: TableConfig) -> UsedRows:
    """Return the rows of --data, and of --eval-data or a split of it. Raises UsageError."""
    where, target = config.where, config.target
    parts = frames.read_parts(str(config.data), where, **config.read_options)
    whole, part = parts.tables["train"], parts.names["train"]
    if not target:
        known = shorten([*map(repr, whole)], frames.MAX_SHOWN)
        raise UsageError(f"{where}: choose the column to predict with --target: {known}")
    frames.choose_columns(whole, [*config.categorical, *target], where)

    def is_labelled(table: pd.DataFrame) -> bool:
        cells = table.reindex(columns=target)
        return bool((cells.notna() & ~cells.isin(MISSING)).all(axis=1).any())

    named = [*target, *config.features, *config.categorical]
    evaluated, name, plan = frames.choose_evaluated_table(config, parts, is_labelled, "row", named)
    nested = [] if config.features else frames.find_nested(whole)
    names = [*(config.features or whole.columns.drop(nested)), *target]
    tables = [frames.choose_columns(whole, names, where)]
    if evaluated is not None:
        tables.append(frames.choose_columns(evaluated, names, name))
    numbers = np.concatenate([np.arange(len(table)) for table in tables])
    table = empty_cells(pd.concat(tables, ignore_index=True), config.missing_values)
    default_marks = ",." if whole.attrs.get("separator") == ";" else ".,"
    how = config.categorical, config.decimal or default_marks
    targets = find_targets(table, config, how)
    lacking = np.any([np.isnan(read_target(table, column)) for column in targets], axis=0)
    told = f"{Path(str(config.data)).name} ({part})" if part else Path(str(config.data)).name
    if lacking.any():
        words = shorten(["no target", *map(repr, table.loc[lacking, target[0]].dropna().unique())])
        told += f", {count(int(lacking.sum()), 'row')} dropped: {words}"
    plan |= {"nested": f"{shorten(nested)}: left out, as lists or objects"} if nested else {}
    given = None if evaluated is None else torch.from_numpy(~lacking).nonzero()[:, 0] >= len(whole)
    used = table[~lacking].reset_index(drop=True)
    return UsedRows(used, targets, numbers[~lacking], given, how, {"data": told} | plan)


def find_targets(
    table: pd.DataFrame, config: TableConfig, how: tuple[list[str], str]
) -> list[Column]:
    """Return how the targets are read: as numbers, or one of texts or two values as classes."""
    columns = [find_kind(table[name], *how) for name in config.target]
    for column in columns:
        what = f"{config.where}: column {column.name!r}"
        cells = pd.Series(read_cells(table[column.name], column))
        if column.categories is None:
            if cells.nunique() < 2:
                raise UsageError(f"{what}, a target, is the same in all rows")
            if len(columns) > 1 or column.days or cells.nunique() > 2:
                continue
        elif len(columns) > 1:
            raise UsageError(
                f"{what} holds texts, and several targets must be numbers: choose one column of "
                "classes"
            )
        texts = table.loc[cells.notna(), column.name].map(frames.as_text)
        column.categories = sorted(texts.unique())
        if not 2 <= len(column.categories) <= max(2, len(texts) // 2):
            raise UsageError(
                f"{what} has {count(len(column.categories), 'different text')} in "
                f"{count(len(texts), 'row')}, which are neither classes nor numbers (see "
                "--decimal): choose another --target"
            )
        order = pd.to_numeric(pd.Series(column.categories, dtype=object), errors="coerce")
        if order.notna().all():
            column.categories = [column.categories[n] for n in order.argsort()]
    return columns


def read_target(table: pd.DataFrame, column: Column) -> np.ndarray:
    """Return the number, or the number of the class, of each row, float64; NaN: it has none."""
    cells = read_cells(table[column.name], column)
    if column.categories is None:
        return cells
    numbers = pd.Index(column.categories).get_indexer(cells)
    return np.where(numbers < 0, np.nan, numbers)


def split_and_learn(
    rows: UsedRows, config: TableConfig
) -> tuple[np.ndarray, np.ndarray, torch.Tensor, list[Column], dict[str, str]]:
    """Return the rows of both sides, folds, columns, the plan; equal rows are in one fold."""
    num_rows, given = len(rows.table), rows.given
    if given is None:
        target = torch.from_numpy(read_target(rows.table, rows.targets[0]))
        labels = target.long() if rows.targets[0].categories else None
        sides = splits.hold_out(num_rows, config.test_fraction, labels, seed=config.data_seed)
        train, test = (side.sort().values for side in sides)
    else:
        train, test = (torch.nonzero(given == side).flatten() for side in (False, True))
    learned = learn_columns(rows, train.numpy(), config)
    hashes, must_repeat = hash_rows(rows, learned)
    equal = torch.arange(num_rows) if must_repeat else hashes
    if given is None and len(test):
        parts = [side.sort().values for side in splits.keep_equal_on_one_side(train, test, equal)]
        if all(map(len, parts)) and not torch.equal(parts[0], train):
            train, test = parts
            learned = learn_columns(rows, train.numpy(), config)
    plan = splits.describe_equal(hashes[train], hashes[test], "row")
    if given is None and config.test_fraction == 0:
        test = train
    if not (len(train) and len(test)):
        raise UsageError(
            f"{config.where}: of {num_rows} rows {len(train)} are left to train on and "
            f"{len(test)} to evaluate on (--test-fraction {config.test_fraction})"
        )
    groups, group = equal[train].unique(return_inverse=True)
    generator = torch.Generator().manual_seed(config.data_seed)
    fold = torch.randperm(len(groups), generator=generator)[group] % network.NUM_FOLDS
    return train.numpy(), test.numpy(), fold, learned, plan


def learn_columns(rows: UsedRows, train: np.ndarray, config: TableConfig) -> list[Column]:
    """Learn from its training rows how each feature is encoded, or why it is left out.

    An index is used if it is named, or nothing else can be, as of values one after the other.
    """
    names = rows.table.columns.drop([column.name for column in rows.targets])
    learned = [learn_column(rows.table[name], train, *rows.how) for name in names]
    is_used = [not (column.problem or INDEX.fullmatch(column.name)) for column in learned]
    if config.features or not any(is_used):
        return learned
    return [
        Column(column.name, problem="left out: an index")
        if INDEX.fullmatch(column.name)
        else column
        for column in learned
    ]


def hash_rows(rows: UsedRows, learned: list[Column]) -> tuple[torch.Tensor, bool]:
    """Return a hash of what is used of each row, and whether some must be equal, being no copies.

    They must if the columns allow fewer distinct rows than there are.
    """
    used = [column for column in (*learned, *rows.targets) if not column.problem]
    cells = pd.DataFrame({c.name: read_cells(rows.table[c.name], c) for c in used})
    num_possible = math.prod(max(1, number) for number in cells.nunique())
    hashes = pd.util.hash_pandas_object(cells, index=False).to_numpy().view(np.int64)
    return torch.from_numpy(hashes.copy()), num_possible <= len(cells)


def describe_columns(learned: list[Column], targets: list[Column]) -> dict[str, Any]:
    """Return the metadata of the columns that are used, and the names of the others."""
    columns = [column for column in learned if not column.problem]
    return {
        "columns": [*map(vars, columns)],
        "left_out": [column.name for column in learned if column.problem],
        "features": [name for column in columns for name in column.feature_names()],
        "targets": [column.name for column in targets],
    }


def standardise_columns(
    name: str, numbers: np.ndarray, train: np.ndarray, as_is: bool = False
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return numbers with the mean 0 and the deviation 1 in the training rows, and metadata."""
    rows = numbers[train]
    means, std = rows.mean(0), rows.std(0)
    mean = np.zeros_like(means) if as_is else means
    std = np.where((std > 0) & (not as_is), std, 1.0)
    scale = {
        f"{name}_range": np.stack((rows.min(0), rows.max(0)), 1).tolist(),
        f"{name}_whole": (rows == rows.round()).all(0).tolist(),
        f"{name}_mean": mean.tolist(),
        f"{name}_std": std.tolist(),
    }
    scale |= {"baseline": means.tolist()} if name == "target" else {}
    return torch.from_numpy((numbers - mean) / std).float(), scale


def make_number_sets(features: torch.Tensor, targets: torch.Tensor, config: Any) -> TableSets:
    """Return sets of numbers as they are, (rows, features) and (rows, targets), float64.

    They are called x0, x1, ... and y0, y1, ... A fifth, by --data-seed, is evaluated.
    """
    sides = splits.hold_out(len(features), seed=config.data_seed)
    train, test = (side.sort().values for side in sides)
    if not (len(train) and len(test)):
        raise UsageError(f"{count(len(features), 'row')}: one to train on and one to evaluate on")
    columns = [Column(f"x{n}") for n in range(features.shape[1])]
    metadata = describe_columns(columns, [Column(f"y{n}") for n in range(targets.shape[1])])
    inputs, scale = standardise_columns("feature", features.numpy(), train.numpy(), as_is=True)
    outputs, more = standardise_columns("target", targets.numpy(), train.numpy(), as_is=True)
    train_set = InMemory(inputs[train], outputs[train])
    eval_set = InMemory(inputs[test], outputs[test], test)
    return TableSets(train_set, eval_set, metadata | scale | more | {"input": "table"}, {})


def describe_use(learned: list[Column], rows: UsedRows) -> dict[str, str]:
    """Return the lines of the plan that say how the columns are used."""
    columns = [column for column in learned if not column.problem]
    targets = [column for column in rows.targets if column.categories is None]
    special = [f"{c.name} ({c})" for c in (*learned, *targets) if str(c) != "number"]
    if columns and all(INDEX.fullmatch(column.name) for column in columns):
        special.append("nothing but an index is used, as nothing else can be")
    num_features = sum(len(column.feature_names()) for column in columns)
    plan = {"features": f"{num_features}, from {count(len(columns), 'column')}"}
    plan["columns"] = shorten(special, frames.MAX_SHOWN) or "numbers"
    asked: dict[str, int] = {}
    for column in (*columns, *targets):
        if column.categories is None and not column.days:
            for code, number in ask_missing(read_cells(rows.table[column.name], column)).items():
                asked[f"{code} in {count(number, 'row')} of {column.name}"] = code
    questions = []
    if asked:
        codes = ",".join(map(str, dict.fromkeys(asked.values())))
        cells = shorten([*asked], frames.MAX_SHOWN)
        questions.append(f"is {cells} a missing value? Then add --missing-values={codes}")
    if targets and (totals := ask_totals(rows.table, targets)):
        said = [f"row {rows.numbers[n] + 1} ({why})" for n, why in totals.items()]
        questions.append(f"is {shorten(said)} a sum of others? Then remove it from the file")
    return plan | ({"asked": "; ".join(questions)} if questions else {})
