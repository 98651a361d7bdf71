"""Compare runs: different settings, last metrics, seconds, and if a difference may be chance."""

import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import datasets
import evaluate
import numpy as np
import torch

from trainkit.config import metric_and_direction
from trainkit.run.reporter import by_interest
from trainkit.store.records import (
    PREDICTIONS,
    last_evaluation,
    load_predictions,
    read_run_json,
    read_seconds,
)

# Settings that are not part of the experiment.
NEVER_SHOWN = (
    "command run_dir resume keep save_every log_every timeout tracker pictures profile "
    "not_the_experiment target"
)


def compare_runs(run_dirs: Sequence[Path]) -> str:
    """Return a line for each run, the best first, and McNemar's test of the two best.

    A line has the settings that differ, the metrics of the last evaluation and the seconds.
    Raises UsageError if a file cannot be read.
    """
    import pandas as pd  # here: it takes 0.4 s, and is not needed to train

    rows = [last_evaluation(run_dir) for run_dir in run_dirs]
    names = by_interest(rows[0], read_run_json(run_dirs[0])["arguments"].get("keep_best"))
    name = next((name for name in names if metric_and_direction(name)[1]), None)
    if name and all(name in row for row in rows):
        is_max = metric_and_direction(name)[1] == "max"
        order = sorted(range(len(rows)), key=lambda n: rows[n][name], reverse=is_max)
        run_dirs, rows = [run_dirs[n] for n in order], [rows[n] for n in order]
    settings = pd.json_normalize([read_run_json(run_dir) for run_dir in run_dirs]).map(_text)
    settings.columns = settings.columns.str.removeprefix("arguments.")
    settings = settings.loc[:, settings.nunique() > 1].drop(
        columns=NEVER_SHOWN.split(), errors="ignore"
    )
    measured = pd.DataFrame(
        [
            {name: row[name] for name in row if name.startswith("eval_")} | read_seconds(run_dir)
            for row, run_dir in zip(rows, run_dirs, strict=True)
        ]
    )
    table = settings.join(measured.astype(object).map(_text))
    table.insert(0, "run", [*map(str, run_dirs)])
    return table.to_string(index=False) + _mcnemar_line(*run_dirs[:2])


class McNemar(evaluate.Comparison):
    """How many samples only one of two classifiers gets right, and the p-value by mcnemar()."""

    def _info(self) -> evaluate.ComparisonInfo:
        names = ("references", "predictions1", "predictions2")
        features = datasets.Features({name: datasets.Value("int64") for name in names})
        return evaluate.ComparisonInfo(description=self.__doc__, citation="", features=features)

    def _compute(self, references: list, predictions1: list, predictions2: list) -> dict:
        first, second = (np.equal(each, references) for each in (predictions1, predictions2))
        alone = [int(sum(first & ~second)), int(sum(second & ~first))]
        return {"alone": alone, "p": mcnemar(*alone)}


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value of McNemar's test (McNemar 1947, in the binomial form).

    only_first, only_second: the number of samples that only one of two classifiers got right.
    """
    num = only_first + only_second
    tail = sum(math.comb(num, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**num)


def _mcnemar_line(first: Path, second: Path) -> str:
    """Say what the difference of two accuracies means; "" unless both classify the same samples."""
    (a, metadata_a), (b, metadata_b) = (
        load_predictions(run_dir / PREDICTIONS) for run_dir in (first, second)
    )
    classes = metadata_a.get("classes")
    if not classes or classes != metadata_b.get("classes"):
        return ""
    if not torch.equal(a["target"], b["target"]):
        return ""
    test = McNemar(keep_in_memory=True, cache_dir=gettempdir()).compute(
        references=a["target"], predictions1=a["prediction"], predictions2=b["prediction"]
    )
    (only_a, only_b), p = test["alone"], test["p"]
    return (
        f"\n\nof {len(a['target'])} samples {first} alone gets {only_a} right, {second} alone "
        f"{only_b}:\n{'a' if p < 0.05 else 'no'} significant difference "
        f"(McNemar's exact test, p = {p:.2g})"
    )


def _text(value: Any) -> str:
    if value is None or value != value:  # NaN: the run does not have it
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
