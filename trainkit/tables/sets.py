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
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from tyro.constructors import PrimitiveConstructorSpec

from trainkit.config import (
    UNSET,
    Fraction,
    MayChange,
    NonNegative,
    ReadOnlyIf,
    Seed,
    TrainingConfig,
    flag,
)
from trainkit.errors import UsageError
from trainkit.numbers.loaders import InMemory
from trainkit.reading import splits
from trainkit.reading.frames import (
    MAX_SHOWN,
    choose_columns,
    choose_evaluated_table,
    describe_spelling,
    read_parts,
    typed,
)
from trainkit.reading.pieces import pack
from trainkit.reading.recall import describe_classes
from trainkit.tables import doubts, words
from trainkit.tables.columns import (
    MAX_CATEGORIES,
    MISSING,
    Column,
    ask_words,
    empty_cells,
    encode,
    find_kind,
    is_index,
    learn_column,
    list_counts,
    parse_cells,
    read_column,
    read_numbers,
    target_column,
)
from trainkit.tables.marks import TableMark, find_marks, find_table_mark
from trainkit.tables.network import NUM_FOLDS
from trainkit.text import count, nfc, shorten

# The flags that say what the data are.
OF_DATA = [
    "data",
    "eval_data",
    "target",
    "features",
    "categorical",
    "missing",
    "separator",
    "encoding",
]
OF_DATA += ["missing_values", "test_fraction", "data_seed"]


def split_names(text: str) -> list[str]:
    """Split `a,b` into names; one that contains a comma is quoted: `"a, b",c`.

    Raises ValueError if there is no name, or a quotation mark without another one.
    """
    lines = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    try:
        names = [nfc(name.strip()) for line in lines for name in line if name.strip()]
    except csv.Error as problem:
        raise ValueError(f"quotation marks come in pairs ({problem})") from None
    if text and not names:
        raise ValueError(f"there is no name in {text!r}")
    return names


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
# Why a column of free text is left out, after how many texts it has.
NO_USE = ", whose words say nothing of the target that the other columns do not"
# With --test-fraction 0.
EVALUATED_AS_NEW = (
    "the rows that are trained on are evaluated as if their texts were new, so that predict.py, "
    "which knows them, comes closer to the targets of these rows"
)
MAX_COLUMNS = 20_000  # of a table, each of which takes some 2 to 10 ms
MAX_SCORES = 2**29  # of all classes for all rows, which the linear model computes at once


@dataclass
class TableConfig(TrainingConfig):
    """The flags of a script that reads a table; columns are written as a,b."""

    data: MayChange[str | None] = None
    """CSV, Excel, JSON or Parquet file, a folder of them, or Hub id"""
    eval_data: MayChange[str | None] = None
    """the same, to evaluate on (default: the test split of --data, or else --test-fraction)"""
    target: OptionalNames = None
    """columns to predict, as a,b; a name with a comma in double quotes: 'a,"b, c"'"""
    features: OptionalNames = None
    """columns to predict from, written like --target (default: all that can be used)"""
    categorical: Annotated[Names, ReadOnlyIf("data")] = field(default_factory=list)
    """columns that are categories although their values read as numbers"""
    missing: Annotated[Literal["refuse", "impute", "drop"] | None, ReadOnlyIf("data")] = None
    """what to do with a missing feature: refuse it, fill in the training mean, drop the row
    (default: impute)"""
    missing_values: Annotated[Names, ReadOnlyIf("data")] = field(default_factory=list)
    """cells that mean a missing value in every column, with = in between: =-999,unknown"""
    separator: Annotated[str | None, ReadOnlyIf("data")] = None
    """of the values in text files (default: , ; tab or |)"""
    encoding: Annotated[str | None, ReadOnlyIf("data")] = None
    """of text files, such as cp1252 or utf-16 (default: UTF-8)"""
    test_fraction: Annotated[Fraction, ReadOnlyIf("eval_data", (None,))] = 0.2
    """of the rows, or of each class, to evaluate on, if no split is given; 0: on all"""
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

    def find_problems(self, num_processes: int) -> list[str]:
        """Add --eval-data without --data."""
        problems = super().find_problems(num_processes)
        if self.eval_data and not self.data:
            problems.append("--eval-data goes with --data: name the table to train on as well")
        return problems


class Written(NamedTuple):
    """How a table is written, which its numbers no longer tell.

    words: those for missing values that stood among the numbers of a column, by row. separator:
    between the cells, "" if it is no text. mark: for columns that leave it open.
    """

    words: dict[str, pd.Series]
    separator: str = ""
    mark: TableMark = TableMark()


class TableSplit(NamedTuple):
    """Positions of the rows to train and to evaluate on, int64, folds, and lines of the plan.

    fold: of each row to train on, int64; equal rows are in one.
    """

    train: np.ndarray
    test: np.ndarray
    fold: torch.Tensor
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
    table with, lines of the plan, the number that each row has in its file, what is Written and, if
    the user chose the rows to evaluate on, which follow those to train on, the index of the first
    of them and where they are from. Raises UsageError.
    """
    assert config.data is not None
    options: dict[str, Any] = {"separator": config.separator, "encoding": config.encoding}
    table, target, places, plan, whole = _read_rows(config.data, config, options)
    metadata: dict[str, Any] = {"read_options": options, "truth": None} | places
    if config.missing_values:
        table, emptied = empty_cells(table, config.missing_values)
        options["missing_values"] = config.missing_values
        cells = [f"{count(number, 'cell')} of {name}" for name, number in emptied.items()]
        shown = shorten(cells, MAX_SHOWN) or "none found"
        plan |= {"missing": f"{', '.join(config.missing_values)}: {shown}"}
    words_of = {}
    for name in table.columns.difference([*target, *config.categorical]):
        read, words_of[name] = read_numbers(table[name], with_words=config.missing != "drop")
        table[name] = read
    found = {name: cells for name, cells in words_of.items() if len(cells)}
    metadata["written"] = Written(found, *_find_mark(table, whole))
    if not predicts_classes:
        _check_targets(table, config)
    used, dropped = _drop_missing(table, config)
    plan["data"] += dropped
    return used, target, metadata | {"plan": plan}


def _find_mark(table: pd.DataFrame, whole: pd.DataFrame) -> tuple[str, TableMark]:
    """Return what lies between the cells of a text file, and its decimal mark.

    table: what is used, whose columns are numbers where they read as such. whole: all columns as
    they are written, which are looked at if one that is used leaves the mark open.
    """
    separator = whole.attrs["form"].separator if "form" in whole.attrs else ""
    used = (find_marks(table[name]) for name in table)
    if not any(marks is not None and not marks.proof for marks in used):
        return separator, TableMark()
    return separator, find_table_mark((whole[name] for name in whole), separator)


def _read_rows(
    data: str, config: TableConfig, options: dict[str, Any]
) -> tuple[pd.DataFrame, list[str], dict[str, Any], dict[str, str], pd.DataFrame]:
    """Return the table of load_table as it is written, its targets, places of rows, and the plan.

    The rows to train on follow with all columns of the file. options: of read_table. Raises
    UsageError.
    """
    where = f"--data {data}"
    # A column that the user names is not one that says which rows are evaluated.
    named = [*(config.features or []), *(config.target or []), *config.categorical]
    parts = read_parts(data, where, named, **options)
    target = _find_target(parts["train"], config, where)
    names = [*(config.features or parts["train"]), *target]
    tables = [choose_columns(parts["train"], names, where)]
    is_labelled = partial(_is_labelled, names=target)
    evaluated, lines = choose_evaluated_table(
        parts, config.eval_data, is_labelled, "row", named, **options
    )
    lines |= describe_spelling(*tables)
    places: dict[str, Any] = {}
    if evaluated is not None:
        places["given"] = (len(tables[0]), evaluated.attrs["where"])
        tables.append(choose_columns(evaluated, names, evaluated.attrs["where"]))
    places["numbers"] = np.concatenate([table.index.to_numpy() for table in tables])
    attributes = parts["train"].attrs
    plan = {"data": Path(data).name}
    if "files" in attributes:
        plan["data"] += f" ({attributes['files']})"
    if "question" in attributes:
        plan["names"] = attributes["question"]
    table = pd.concat(tables, ignore_index=True)
    return table, target, places, plan | lines, parts["train"]


def _check_width(num_columns: int, where: str) -> None:
    """Raise a UsageError for more columns than can be looked at one by one."""
    if num_columns > MAX_COLUMNS:
        raise UsageError(
            f"{where}: it has {num_columns} columns, and at most {MAX_COLUMNS:,} are used at once, "
            "because a thousand take seconds: choose some with --features"
        )


def _find_target(table: pd.DataFrame, config: TableConfig, where: str) -> list[str]:
    """Return --target. Raises UsageError if there is none to choose, or --categorical is wrong."""
    if table.shape[1] == 1:
        raise UsageError(
            f"{where}: there is one column, {table.columns[0]!r}, and two are needed: if it is "
            "several, name what lies between them with --separator, such as ' '"
        )
    if not len(table):
        raise UsageError(f"{where}: there is no row below the names of the columns")
    if not config.target:
        raise UsageError(
            f"{where}: choose the column to predict with --target: "
            f"{shorten([*map(typed, table)], MAX_SHOWN)}"
        )
    choose_columns(table, config.categorical, where)
    _check_width(len({*(config.features or table), *config.target}), where)
    return config.target


def _drop_missing(table: pd.DataFrame, config: TableConfig) -> tuple[pd.DataFrame, str]:
    """Return the rows that have a target, or with --missing drop all values, and who lacks one."""
    needed, what = table[config.target], "target"
    if config.missing == "drop":
        needed, what = table, "value"
    columns = [find_kind(needed[name], config.categorical) for name in needed]
    numbers = [column.categories is None for column in columns]
    missing = needed.isna() | (needed.isin(MISSING) & numbers)
    used = table[~missing.any(axis=1)]
    if len(used) == len(table):
        return used, ""
    words = needed.astype(object).fillna("").where(missing).stack().value_counts().to_dict()
    num_dropped = count(len(table) - len(used), "row")
    return used, f", {num_dropped} dropped: no {what}{list_counts(words)}"


def _is_labelled(table: pd.DataFrame, names: list[str]) -> bool:
    """Return whether a row has all of these targets."""
    if not {*names} <= {*table}:
        return False
    cells = table[names]
    return bool((cells.notna() & ~cells.isin(MISSING)).all(axis=1).any())


def _check_targets(table: pd.DataFrame, config: TableConfig) -> None:
    """Raise a UsageError that names the script for classes if the target holds texts."""
    for name in config.target or []:
        column = find_kind(table[name], config.categorical)
        if column.categories is not None and table[name].notna().any():
            texts = sorted(parse_cells(table[name], column).dropna().unique())
            cells = table[name].dropna()
            others = [(row, name, "") for row in cells.index if column.num_numbers]
            words, flag_for_words = ask_words(table, others, config.missing_values)
            means = f". If {words} means a missing value, add {flag_for_words}" if words else ""
            raise UsageError(
                f"--data {config.data}: column {name!r} holds texts, such as "
                f"{shorten([*map(repr, texts)])}, and this script predicts numbers{means}. For the "
                f"class of a row: {command('examples/table_classes.py', config, [name])}"
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
    in_folds: whether the training rows have their fold, for network.py.
    """
    metadata = {**metadata}
    written = metadata.pop("written", Written({}))
    targets = [target_column(table[name], classes, written.mark.decimal) for name in names]
    first, where = metadata.pop("given", (math.inf, ""))
    in_file = metadata.pop("numbers", np.arange(len(table)))
    given = torch.from_numpy(table.index.to_numpy() >= first) if where else None
    numbers, wrong = encode_targets(table, targets)
    options = None if wrong else numbers, config, given, written
    split, learned, features, problems = read_features(table, targets, *options)
    if problems or wrong or not features.shape[1]:
        places = _name_rows([row for row, _, _ in problems + wrong], in_file, first, where)
        raise UsageError(_judge(learned, problems + wrong, places, table, config))
    inputs, facts = standardise_columns("feature", features, split, config)
    facts |= _describe_columns(learned, targets, table, written)
    if classes:
        outputs = torch.from_numpy(numbers)
        parts = outputs[split.train], outputs[split.test]
        split.plan.update(describe_classes(*parts, classes, "row"))
        facts["classes"] = classes
    else:
        outputs, more = standardise_columns("target", numbers, split, config)
        facts |= more | {"baseline": numbers[split.train].mean(0).tolist()}
    plan = metadata["plan"] | make_plan(facts, learned, targets, table, split, written.mark)
    folds = [split.fold] if in_folds else []
    rows = torch.from_numpy(in_file[table.index])
    return TableSets(
        InMemory(inputs[split.train], outputs[split.train], *folds),
        InMemory(inputs[split.test], outputs[split.test], rows[split.test]),
        metadata | facts | {"plan": plan},
    )


def _describe_columns(
    learned: dict[str, Column], targets: list[Column], table: pd.DataFrame, written: Written
) -> dict[str, Any]:
    """Return the metadata of the columns that are used, and the names of the others.

    The decimal mark of the targets is among them unless it is the usual one, a point in a file
    without semicolons.
    """
    columns = [column for column in learned.values() if not column.problem]
    facts = {
        "columns": [column.facts() for column in columns],
        "left_out": [name for name, column in learned.items() if column.problem],
        "features": [name for column in columns for name in column.feature_names()],
        "targets": [column.name for column in targets],
    }
    for column in targets:
        has_marks = column.categories is None and find_marks(table[column.name]) is not None
        if has_marks and (column.decimal == "," or written.separator == ";"):
            facts["target_decimal"] = column.decimal
    return facts


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
    if len(classes) * len(texts) > MAX_SCORES:
        gigabytes = 8 * len(classes) * len(texts) / 1e9
        raise UsageError(
            f"{where}: column {name!r} has {count(len(classes), 'class')} in "
            f"{count(len(texts), 'row')}, and a score of each class for each row takes "
            f"{gigabytes:.0f} GB: choose another --target, or put rare classes into one"
        )
    return classes


def read_features(
    table: pd.DataFrame,
    targets: list[Column],
    numbers: np.ndarray | None,
    config: TableConfig,
    given: torch.Tensor | None,
    written: Written,
) -> tuple[TableSplit, dict[str, Column], np.ndarray, list[tuple[int, str, str]]]:
    """Split the rows, learn the columns; return the features of all rows, and encode()'s problems.

    Columns of free text come last. Without use one is left out, and rows are split as without it.
    numbers: the targets of all rows; None if they cannot be read. written: see load_table.
    """
    unread: dict[str, str] = {}
    pieces: dict[str, list[np.ndarray]] = {}
    while True:
        split, learned = split_and_learn(table, targets, config, given, unread, written)
        learned = dict(sorted(learned.items(), key=lambda item: item[1].scores is not None))
        columns = [column for column in learned.values() if not column.problem]
        features, problems = encode(table, [c for c in columns if c.scores is None])
        texts = [column for column in columns if column.scores is not None]
        cells = {}
        for column in texts:
            cells[column.name], wrong = read_column(table[column.name], column)
            problems += wrong
        if problems or numbers is None or not texts:
            return split, learned, features, problems
        wanted, names = choose_scores(numbers[split.train], targets)
        for column in texts:
            if column.name not in pieces:
                pieces[column.name] = words.number_texts(cells[column.name])
            numbered = pieces[column.name]
            others = torch.from_numpy(features[split.train])
            rows = [numbered[n] for n in split.train]
            found = words.learn_words(rows, wanted, others, split.fold)
            if found.share == 0:
                unread[column.name] = NO_USE
                continue
            column.scores, column.weights = names, pack(found.weights.numpy())
            column.explained = max(1, round(100 * found.share))
            scores = words.score_texts(numbered, column.weights, len(names))
            scores[split.train] = found.scores.numpy()  # as those of rows that are new
            features = np.column_stack((features, scores))
        if all(column.scores for column in texts):
            return split, learned, features, problems


def choose_scores(numbers: np.ndarray, targets: list[Column]) -> tuple[torch.Tensor, list[str]]:
    """Return what words are asked for, (rows, scores), float64, and its names.

    It is each target that is a number, with the deviation 1, or whether a row is of a class: of the
    second one of two, or else of each of those that most rows have. numbers: as encode_targets
    returns them.
    """
    classes = targets[0].categories
    if classes is None:
        spread = numbers.std(0)
        wanted = (numbers - numbers.mean(0)) / np.where(spread > 0, spread, 1)
        return torch.from_numpy(wanted), [column.name for column in targets]
    chosen = np.array([1])
    if len(classes) > 2:
        found, counts = np.unique(numbers, return_counts=True)
        chosen = np.sort(found[(-counts).argsort(kind="stable")[: words.MAX_SCORES]])
    wanted = (numbers[:, None] == chosen).astype(np.float64)
    return torch.from_numpy(wanted), [classes[number] for number in chosen]


def split_and_learn(
    table: pd.DataFrame,
    targets: list[Column],
    config: TableConfig,
    given: torch.Tensor | None,
    unread: dict[str, str],
    written: Written,
) -> tuple[TableSplit, dict[str, Column]]:
    """Split the rows and learn each column from those to train on. Raises UsageError.

    given: which rows the user chose to evaluate on, bool; None: a part is held out. unread: see
    learn_column. written: see load_table.
    """
    num_rows = len(table)
    if given is None:
        labels = None
        if targets[0].categories is not None:
            labels, _ = number_classes(table[targets[0].name], targets[0])
        sides = splits.hold_out(num_rows, config.test_fraction, labels, seed=config.data_seed)
        train, test = (side.sort().values for side in sides)
    else:
        train, test = (torch.nonzero(given == side).flatten() for side in (False, True))
    learned = learn_columns(table, targets, train.numpy(), config, unread, written)
    hashes, must_repeat = hash_rows(table, targets, learned)
    together = torch.arange(num_rows) if must_repeat else hashes
    if given is None and len(test):
        parts = [side.sort().values for side in splits.keep_together(train, test, together)]
        if all(map(len, parts)) and not torch.equal(parts[0], train):
            train, test = parts
            learned = learn_columns(table, targets, train.numpy(), config, unread, written)
    plan = splits.describe_equal(hashes[train], hashes[test], "row")
    if given is None and config.test_fraction == 0:
        test = train
    if not (len(train) and len(test)):
        raise UsageError(
            f"--data {config.data or 'synthetic'}: of {num_rows} rows {len(train)} are left to "
            f"train on and {len(test)} to evaluate on (--test-fraction {config.test_fraction})"
        )
    groups, group = together[train].unique(return_inverse=True)
    generator = torch.Generator().manual_seed(config.data_seed)
    fold = torch.randperm(len(groups), generator=generator)[group] % NUM_FOLDS
    return TableSplit(train.numpy(), test.numpy(), fold, plan), learned


def number_classes(
    values: pd.Series, column: Column
) -> tuple[torch.Tensor, list[tuple[int, str, str]]]:
    """Return the number of the class of each row, int64, and the problems, as encode() has them."""
    texts, problems = read_column(values, column)
    return torch.from_numpy(pd.Index(column.categories).get_indexer(texts)), problems


def encode_targets(
    table: pd.DataFrame, targets: list[Column]
) -> tuple[np.ndarray, list[tuple[int, str, str]]]:
    """Return encode() of targets that are numbers, or the number of the class of each row, int64.

    A 0/1 number for each class would make a table of rows x classes, which need not fit.
    """
    if targets[0].categories is None:
        return encode(table, targets)
    labels, problems = number_classes(table[targets[0].name], targets[0])
    return labels.numpy(), problems


def hash_rows(
    table: pd.DataFrame, targets: list[Column], learned: dict[str, Column]
) -> tuple[torch.Tensor, bool]:
    """Return a hash of what is used of each row, int64, and whether rows must be equal.

    They must be if the columns allow fewer distinct rows than the table has: a row is then a
    kind of thing, and not one that was copied.
    """
    used = [column for column in (*learned.values(), *targets) if not column.problem]
    parsed = pd.DataFrame({column.name: parse_cells(table[column.name], column) for column in used})
    num_possible = math.prod(max(1, number) for number in parsed.nunique())
    hashes = pd.util.hash_pandas_object(parsed, index=False).to_numpy().view(np.int64)
    return torch.from_numpy(hashes.copy()), num_possible <= len(table)


def learn_columns(
    table: pd.DataFrame,
    targets: list[Column],
    train: np.ndarray,
    config: TableConfig,
    unread: dict[str, str],
    written: Written,
) -> dict[str, Column]:
    """Learn from its training rows how each feature is encoded, or why it is left out."""
    options = config.categorical, config.missing, unread
    decimal = written.mark.decimal
    learned = {}
    for name in table.columns.drop([column.name for column in targets]):
        if is_index(table[name]) and not config.features:
            learned[name] = Column(name, problem="left out: an index")
        else:
            cells = written.words.get(name)
            learned[name] = learn_column(table[name], train, *options, cells, decimal)
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
    facts: dict[str, Any],
    learned: dict[str, Column],
    targets: list[Column],
    table: pd.DataFrame,
    split: TableSplit,
    mark: TableMark,
) -> dict[str, str]:
    """Return the lines of the plan that say how the table is used."""
    used = learned | {column.name: column for column in targets if column.categories is None}
    texts: dict[str, str] = {}
    missing: dict[str, dict[str, int]] = {}
    codes: dict[str, str] = {}
    for name, values in table.items():
        column = used.get(name, Column(name))
        texts[name] = str(column)
        if doubt := doubts.ask_mark(values, column, mark):
            texts[name] += f", {doubt}"
        if not column.holds_texts and not column.problem:
            missing[name] = doubts.ask_missing(values, column)
            if name not in facts["targets"]:
                codes[name] = doubts.ask_codes(values, column)
    special = [f"{name} ({text})" for name, text in texts.items() if text != "number"]
    num_features, num_rows = len(facts["features"]), len(split.train)
    plan = {
        "features": f"{num_features}, from {count(len(facts['columns']), 'column')}",
        "columns": shorten(special, MAX_SHOWN) or "numbers",
        "targets": ", ".join(facts["targets"]),
    }
    if any(column.scores for column in used.values()) and np.array_equal(split.train, split.test):
        plan["words"] = EVALUATED_AS_NEW
    asked = ask(missing, codes, table)
    if asked:
        plan["asked"] = asked
    if num_rows < 2 * num_features:
        plan["few rows"] = (
            f"{num_rows} to train on for {num_features} features: another split may give a very "
            "different score"
        )
    return plan | split.plan


def ask(missing: dict[str, dict[str, int]], codes: dict[str, str], table: pd.DataFrame) -> str:
    """Return questions about cells that may mean a missing value, and columns that may be codes.

    missing: of each column, such cells and their counts. codes: what its codes look like, or "".
    table: whose other columns may have the same cells, which the flag would empty too.
    """
    questions = []
    found = {name: cells for name, cells in missing.items() if cells}
    if found:
        cells = [
            f"{cell} in {count(number, 'row')} of {name}"
            for name, counts in found.items()
            for cell, number in counts.items()
        ]
        values = dict.fromkeys(cell for counts in found.values() for cell in counts)
        _, emptied = empty_cells(table, [*values])
        others = [f"{emptied[name]} of {name}" for name in emptied if name not in found]
        too = f" (it empties these cells too: {shorten(others)})" if others else ""
        questions.append(
            f"is {shorten(cells, MAX_SHOWN)} a missing value? Then add "
            f"--missing-values={typed(*values)}{too}"
        )
    coded = {name: what for name, what in codes.items() if what}
    if coded:
        named = [f"{name} ({what})" for name, what in coded.items()]
        questions.append(
            f"are these codes: {shorten(named, MAX_SHOWN)}? Then add --categorical {typed(*coded)}"
        )
    return "; ".join(questions)


def _name_rows(
    rows: Sequence[int], in_file: np.ndarray, first: float, where: str
) -> dict[int, str]:
    """Return rows as people count them in a file; those from `first` on are of `where`."""
    names = {row: f"row {in_file[row] + 1}" for row in rows}
    return {row: name if row < first else f"{where}, {name}" for row, name in names.items()}


def _judge(
    learned: dict[str, Column],
    problems: list[tuple[int, str, str]],
    places: dict[int, str],
    table: pd.DataFrame,
    config: TableConfig,
) -> str:
    """Return a list of all columns, the refused ones first, and a command that works."""
    texts = {name: str(column) for name, column in learned.items()}
    texts |= {name: f"{places[row]}: {why}" for row, name, why in reversed(problems)}
    refused = {name for _, name, _ in problems}
    good = [name for name in learned if not learned[name].problem and name not in refused]
    lines = [f"  {name}: {texts[name]}" for name in sorted(texts, key=good.__contains__)]
    text = "\n".join([f"--data {config.data} cannot be used as it is:", *lines[:MAX_SHOWN]])
    words, flag_for_words = ask_words(table, problems, config.missing_values)
    if words:
        too = " --missing impute" if config.missing == "refuse" else ""
        text += f"\nIf {words} means a missing value, add {flag_for_words}{too}"
    if not good or refused - learned.keys():
        one_way = "1234.5, $1,234.50, 1.234,50 EUR or 5%"
        return f"{text}\nWrite all numbers of a column in one way: {one_way}"
    no_numbers = [name for name in texts if "is not a number" in texts[name]]
    if kinds := [name for name in no_numbers if table[name].nunique() <= MAX_CATEGORIES]:
        text += f"\nIf their values are kinds, not amounts, add --categorical {typed(*kinds)}"
    return f"{text}\nThis works: {shlex.join(['python', *sys.argv])} --features {typed(*good)}"
