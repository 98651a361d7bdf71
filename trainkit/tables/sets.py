"""Read a table, split its rows, and make sets of them to train and to evaluate on.

`where` names the table; the sentence of a UsageError begins with it.
"""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from tyro.constructors import PrimitiveConstructorSpec

from trainkit.config import (
    UNSET,
    Count,
    Fraction,
    MayChange,
    NonNegative,
    ReadOnlyIf,
    Rule,
    Seed,
    TrainingConfig,
)
from trainkit.errors import UsageError
from trainkit.numbers.loaders import InMemory
from trainkit.reading import splits
from trainkit.reading.frames import (
    MAX_SHOWN,
    choose_columns,
    choose_evaluated_table,
    find_nested,
    read_parts,
    typed,
)
from trainkit.reading.recall import describe_classes
from trainkit.tables import network
from trainkit.tables.columns import (
    INDEX,
    MISSING,
    Column,
    ask_missing,
    ask_sums,
    empty_cells,
    encode,
    find_kind,
    learn_column,
    read_cells,
)
from trainkit.text import count, nfc, shorten


def split_names(text: str) -> list[str]:
    """Split `a,b` into names; one that contains a comma is quoted: `"a, b",c`."""
    lines = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    return [nfc(name.strip()) for line in lines for name in line]


def comma_separated(item_type: type) -> PrimitiveConstructorSpec[list]:
    """Tell tyro how a flag that is one word, a,b, becomes a list of this type."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="A,B",
        instance_from_str=lambda words: [item_type(name) for name in split_names(words[0])],
        is_instance=lambda value: value is None or isinstance(value, list),
        str_from_instance=lambda value: [",".join(map(str, value or []))],
    )


Names = Annotated[list[str], comma_separated(str)]
# Not Names | None, of which tyro would say that no type matches, and not what is wrong.
OptionalNames = Annotated[list[str] | None, comma_separated(str)]
Widths = Annotated[
    list[int],
    comma_separated(int),
    Rule(lambda value: min(value, default=0) >= 1, "at least 1 each"),
]
READ_OPTIONS = ("separator", "encoding", "sheet", "header_row")  # of read_parts
MOVED = "tables are for another script: python examples/table.py --data FILE --target COLUMN"
TABLE_FLAGS = dict.fromkeys(  # which train_regression.py had
    ("--data", "--eval-data", "--features", "--categorical", "--missing", "--encoding"), MOVED
)


@dataclass
class TableConfig(TrainingConfig):
    """The flags of a script that reads a table; columns are written as a,b."""

    data: MayChange[str | None] = None
    """CSV, Excel, JSON or Parquet file, a folder of them, or Hub id"""
    eval_data: MayChange[str | None] = None
    """the same, to evaluate on (default: the test split of --data, or else --test-fraction)"""
    target: OptionalNames = None  # type: ignore[assignment]
    """column to predict, a number or a class, or several numbers as a,b; a name with a comma in
    double quotes: 'a,"b, c"'"""
    features: OptionalNames = None
    """columns to predict from, written like --target (default: all that can be used)"""
    categorical: Names = field(default_factory=list)
    """columns that are categories, or classes, although their values read as numbers"""
    missing_values: Names = field(default_factory=list)
    """cells that mean a missing value in every column, with = in between: =-999,unknown"""
    separator: str | None = None
    """of the values in text files (default: , ; tab or |)"""
    decimal: Literal[".", ","] | None = None
    """mark before the decimals, where both can be (default: as in English, or a comma in files
    with semicolons)"""
    encoding: str | None = None
    """of text files, such as cp1252 or utf-16 (default: UTF-8)"""
    sheet: OptionalNames = None
    """sheet of an Excel file, or several with the same columns as a,b (default: the only one, or
    those called train and test)"""
    header_row: Count | None = None
    """line of the file, or row of the sheet, with the names of the columns (default: the first)"""
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

    @property
    def where(self) -> str:
        """How a message names the table."""
        return f"--data {self.data}"


class UsedRows(NamedTuple):
    """The rows of a table that have a target, those to evaluate on last if the user chose them."""

    table: pd.DataFrame
    targets: list[Column]
    numbers: np.ndarray  # of each row in its file, from 0
    given: torch.Tensor | None  # which rows the user chose to evaluate on; None: a part is held out
    marks: list[str]
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
    table, targets, classes = rows.table, rows.targets, rows.targets[0].categories
    train, test, fold, learned, plan = split_and_learn(rows, config)
    columns = [column for column in learned.values() if not column.problem]
    if not columns:
        said = [f"{name} ({column})" for name, column in learned.items()]
        why = shorten(said, MAX_SHOWN) or rows.plan.get("nested") or "there are no others"
        raise UsageError(f"{config.where}: no column can be used: {why}")
    features, _ = encode(table, columns)
    metadata: dict[str, Any] = {"input": "table_class" if classes else "table"}
    metadata["read_options"] = {
        name: getattr(config, name) for name in (*READ_OPTIONS, "missing_values")
    }
    inputs, scale = standardise_columns("feature", features, train)
    metadata |= scale | describe_columns(learned, targets)
    if classes:
        outputs = number_classes(table, targets[0])
        plan |= describe_classes(outputs[train], outputs[test], classes, "row")
        metadata["classes"] = classes
    else:
        numbers, _ = encode(table, targets)
        outputs, scale = standardise_columns("target", numbers, train)
        metadata |= scale | {"baseline": numbers[train].mean(0).tolist()}
    train_set = InMemory(inputs[train], outputs[train], fold)
    metadata["edges"] = network.find_edges(train_set.tensors[0])
    plan = rows.plan | describe_use(learned, rows) | plan
    eval_set = InMemory(inputs[test], outputs[test], torch.from_numpy(rows.numbers[test]))
    return TableSets(train_set, eval_set, metadata, plan)


def read_used_rows(config: TableConfig) -> UsedRows:
    """Return the rows of --data, and of --eval-data or a split of it. Raises UsageError."""
    where, options = config.where, {name: getattr(config, name) for name in READ_OPTIONS}
    target = config.target or []
    named = [*target, *(config.features or []), *config.categorical]
    parts = read_parts(str(config.data), where, **options)
    whole = parts["train"]
    if not target:
        known = shorten([*map(typed, whole)], MAX_SHOWN)
        raise UsageError(f"{where}: choose the column to predict with --target: {known}")
    choose_columns(whole, [*config.categorical, *target], where)

    def is_labelled(table: pd.DataFrame) -> bool:
        cells = table.reindex(columns=target)
        return bool((cells.notna() & ~cells.isin(MISSING)).all(axis=1).any())

    evaluated, lines = choose_evaluated_table(
        parts, config.eval_data, is_labelled, "row", named, **options
    )
    nested = [] if config.features else find_nested(whole)
    names = [*(config.features or whole.columns.drop(nested)), *target]
    tables = [choose_columns(whole, names, where)]
    if evaluated is not None:
        tables.append(choose_columns(evaluated, names, evaluated.attrs["where"]))
    numbers = np.concatenate([table.index.to_numpy() for table in tables])
    name, part = Path(str(config.data)).name, whole.attrs["part"]
    plan = {"data": f"{name} ({part})" if part else name}
    plan |= {"nested": f"{shorten(nested)}: left out, as lists or objects"} if nested else {}
    table = pd.concat(tables, ignore_index=True)
    if config.missing_values:
        num_present = int(table.notna().to_numpy().sum())
        table = empty_cells(table, config.missing_values)
        emptied = count(num_present - int(table.notna().to_numpy().sum()), "cell")
        plan["missing"] = f"{', '.join(config.missing_values)}: {emptied}"
    marks = [",", "."] if whole.attrs.get("separator") == ";" else [".", ","]
    marks = [config.decimal] if config.decimal else marks
    targets = find_targets(table, config, marks)
    lacking = find_lacking(table, targets)
    if lacking.any():
        words = shorten(["no target", *map(repr, table.loc[lacking, target[0]].dropna().unique())])
        plan["data"] += f", {count(int(lacking.sum()), 'row')} dropped: {words}"
    has_target = np.flatnonzero(~lacking)
    given = None if evaluated is None else torch.from_numpy(has_target >= len(tables[0]))
    used = table.iloc[has_target].reset_index(drop=True)
    return UsedRows(used, targets, numbers[has_target], given, marks, plan | lines)


def find_targets(table: pd.DataFrame, config: TableConfig, marks: Sequence[str]) -> list[Column]:
    """Return how the targets are read: as numbers, or the only one as classes.

    It is classes if it holds texts or just two different values, or is named in --categorical.
    """
    columns = [find_kind(table[name], config.categorical, marks) for name in config.target or []]
    column = columns[0]
    cells = pd.Series(read_cells(table[column.name], column), table.index).dropna()
    for other in columns:
        if len(columns) > 1 and other.categories is not None:
            raise UsageError(
                f"{config.where}: column {other.name!r} holds texts, and several targets must be "
                "numbers: choose one column of classes"
            )
        numbers = pd.Series(read_cells(table[other.name], other))
        if other.categories is None and numbers.nunique() < 2:
            raise UsageError(f"{config.where}: the target {other.name!r} is the same in all rows")
    if column.categories is None and (len(columns) > 1 or column.days or cells.nunique() != 2):
        return columns
    classes = sorted({*read_cells(table.loc[cells.index, column.name], Column("", []))})
    if not 2 <= len(classes) <= max(2, len(cells) // 2):
        raise UsageError(
            f"{config.where}: column {column.name!r} has {count(len(classes), 'different text')} "
            f"in {count(len(cells), 'row')}, which are neither classes nor numbers: choose another "
            "--target"
        )
    order = pd.to_numeric(pd.Series(classes, dtype=object), errors="coerce")
    if order.notna().all():
        classes = [classes[n] for n in order.argsort()]
    return [Column(column.name, classes)]


def find_lacking(table: pd.DataFrame, targets: Sequence[Column]) -> np.ndarray:
    """Return which rows lack a target."""
    lacking = np.zeros(len(table), bool)
    for column in targets:
        cells = pd.Series(read_cells(table[column.name], column))
        lacking |= (~cells.isin(column.categories) if column.categories else cells.isna()).values
    return lacking


def split_and_learn(
    rows: UsedRows, config: TableConfig
) -> tuple[np.ndarray, np.ndarray, torch.Tensor, dict[str, Column], dict[str, str]]:
    """Return the rows to train and to evaluate on, the folds of the former, columns, the plan.

    Equal rows are on one side and in one fold. Raises UsageError.
    """
    table, targets, given = rows.table, rows.targets, rows.given
    num_rows = len(table)
    if given is None:
        is_class = targets[0].categories is not None
        labels = number_classes(table, targets[0]) if is_class else None
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


def learn_columns(rows: UsedRows, train: np.ndarray, config: TableConfig) -> dict[str, Column]:
    """Learn from its training rows how each feature is encoded, or why it is left out."""
    learned = {}
    for name in rows.table.columns.drop([column.name for column in rows.targets]):
        if INDEX.fullmatch(str(name)) and not config.features:
            learned[name] = Column(name, problem="left out: an index")
        else:
            learned[name] = learn_column(rows.table[name], train, config.categorical, rows.marks)
    if all(column.problem for column in learned.values()):  # as of values one after the other
        for name in filter(INDEX.fullmatch, learned):
            learned[name] = learn_column(rows.table[name], train, config.categorical, rows.marks)
    return learned


def hash_rows(rows: UsedRows, learned: dict[str, Column]) -> tuple[torch.Tensor, bool]:
    """Return a hash of what is used of each row, and whether some rows must be equal.

    They must if the columns allow fewer distinct rows than there are: equal ones are no copies.
    """
    used = [column for column in (*learned.values(), *rows.targets) if not column.problem]
    cells = pd.DataFrame({c.name: read_cells(rows.table[c.name], c) for c in used})
    num_possible = math.prod(max(1, number) for number in cells.nunique())
    hashes = pd.util.hash_pandas_object(cells, index=False).to_numpy().view(np.int64)
    return torch.from_numpy(hashes.copy()), num_possible <= len(cells)


def number_classes(table: pd.DataFrame, column: Column) -> torch.Tensor:
    """Return the number of the class of each row, int64."""
    texts = read_cells(table[column.name], column)
    return torch.from_numpy(pd.Index(column.categories).get_indexer(texts))


def describe_columns(learned: dict[str, Column], targets: list[Column]) -> dict[str, Any]:
    """Return the metadata of the columns that are used, and the names of the others."""
    columns = [column for column in learned.values() if not column.problem]
    return {
        "columns": [*map(vars, columns)],
        "left_out": [name for name, column in learned.items() if column.problem],
        "features": [name for column in columns for name in column.feature_names()],
        "targets": [column.name for column in targets],
    }


def standardise_columns(
    name: str, numbers: np.ndarray, train: np.ndarray, as_is: bool = False
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return numbers with the mean 0 and the deviation 1 in the training rows, and metadata.

    name: feature or target. as_is: the numbers are not changed.
    """
    rows = numbers[train]
    mean, std = rows.mean(0), rows.std(0)
    if as_is:
        mean, std = np.zeros_like(mean), np.ones_like(std)
    std = np.where(std > 0, std, 1.0)
    scale = {
        f"{name}_range": np.stack((rows.min(0), rows.max(0)), 1).tolist(),
        f"{name}_whole": (rows == rows.round()).all(0).tolist(),
        f"{name}_mean": mean.tolist(),
        f"{name}_std": std.tolist(),
    }
    return torch.from_numpy((numbers - mean) / std).float(), scale


def make_number_sets(features: torch.Tensor, targets: torch.Tensor, config: Any) -> TableSets:
    """Return sets of numbers as they are, (rows, features) and (rows, targets), float64.

    They are called x0, x1, ... and y0, y1, ... A fifth, by --data-seed, is evaluated.
    """
    sides = splits.hold_out(len(features), seed=config.data_seed)
    train, test = (side.sort().values for side in sides)
    if not (len(train) and len(test)):
        raise UsageError(f"{count(len(features), 'row')}: one to train on and one to evaluate on")
    inputs, metadata = standardise_columns("feature", features.numpy(), train.numpy(), as_is=True)
    learned = {name: Column(name) for name in (f"x{n}" for n in range(features.shape[1]))}
    metadata |= describe_columns(learned, [Column(f"y{n}") for n in range(targets.shape[1])])
    outputs, scale = standardise_columns("target", targets.numpy(), train.numpy(), as_is=True)
    metadata |= scale | {"baseline": targets.numpy()[train].mean(0).tolist(), "input": "table"}
    train_set = InMemory(inputs[train], outputs[train])
    eval_set = InMemory(inputs[test], outputs[test], test)
    return TableSets(train_set, eval_set, metadata, {})


def describe_use(learned: dict[str, Column], rows: UsedRows) -> dict[str, str]:
    """Return the lines of the plan that say how the columns are used."""
    numbers = [column for column in rows.targets if column.categories is None]
    told = [(column.name, str(column)) for column in (*learned.values(), *numbers)]
    special = [f"{name} ({kind})" for name, kind in told if kind != "number"]
    columns = [column for column in learned.values() if not column.problem]
    if columns and all(INDEX.fullmatch(column.name) for column in columns):
        special.append("nothing but an index is used, as nothing else can be")
    num_features = sum(len(column.feature_names()) for column in columns)
    plan = {"features": f"{num_features}, from {count(len(columns), 'column')}"}
    plan["columns"] = shorten(special, MAX_SHOWN) or "numbers"
    asked: dict[str, int] = {}
    for column in (*columns, *numbers):
        if column.categories is None and not column.days:
            for code, number in ask_missing(read_cells(rows.table[column.name], column)).items():
                asked[f"{code} in {count(number, 'row')} of {column.name}"] = code
    questions = []
    if asked:
        codes = typed(*dict.fromkeys(map(str, asked.values())))
        cells = shorten([*asked], MAX_SHOWN)
        questions.append(f"is {cells} a missing value? Then add --missing-values={codes}")
    if sums := ask_sums(rows.table, numbers):
        said = [f"row {rows.numbers[n] + 1} ({why})" for n, why in sums.items()]
        questions.append(f"is {shorten(said)} a sum of others? Then remove it from the file")
    return plan | ({"asked": "; ".join(questions)} if questions else {})
