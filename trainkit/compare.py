"""Runs side by side: what differs, last metrics, seconds, and whether a difference is chance."""

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from trainkit import plots
from trainkit.errors import UsageError
from trainkit.history import read_rows

# They differ between any two runs and say nothing about either.
NEVER_SHOWN = {"arguments.run_dir", "arguments.resume", "command"}


def compare_runs(run_dirs: Sequence[Path]) -> str:
    """A table of what differs, the last metrics and the seconds, and McNemar's test of each pair.

    Raises UsageError if a file cannot be read.
    """
    settings = [_flat(_json(run_dir / "run.json")) for run_dir in run_dirs]
    names = dict.fromkeys(name for values in settings for name in values if name not in NEVER_SHOWN)
    different = [n for n in names if len({_text(values.get(n)) for values in settings}) > 1]
    metrics = [last_row(run_dir) | _seconds(run_dir) for run_dir in run_dirs]
    measured = dict.fromkeys(name for values in metrics for name in values)
    table = [["", *map(str, run_dirs)]]
    table += [[name.removeprefix("arguments."), *(_text(values.get(name)) for values in settings)]
              for name in different]  # fmt: skip
    table += [[name, *(_text(values.get(name)) for values in metrics)] for name in measured]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
             for row in table]  # fmt: skip
    verdicts = (_verdict(*pair) for pair in combinations(run_dirs, 2))
    return "\n".join([*lines, *filter(None, verdicts)])


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p-value of McNemar's test.

    only_first, only_second: samples that one of two classifiers alone got right. How often does a
    fair coin, thrown once for each of them, give as uneven a result? (McNemar 1947; the binomial
    form.)
    """
    num, tail, ways = only_first + only_second, 0, 1
    for k in range(min(only_first, only_second) + 1):
        tail += ways
        ways = ways * (num - k) // (k + 1)  # of choosing k + 1 of num
    return min(1.0, 2 * tail / 2**num)


def last_row(run_dir: Path) -> dict[str, Any]:
    """The last evaluation in metrics.jsonl, empty if there was none."""
    rows = read_rows(run_dir / "metrics.jsonl")
    return next((row for row in reversed(rows) if "eval_loss" in row), {})


def _verdict(first: Path, second: Path) -> str:
    """What the difference of two accuracies means, a line; none unless both are classifiers."""
    paths = [run_dir / plots.PREDICTIONS for run_dir in (first, second)]
    if not all(path.exists() for path in paths):
        return ""
    (a, about_a), (b, about_b) = map(plots.load_predictions, paths)
    if "classes" not in about_a or "classes" not in about_b:
        return ""
    if not torch.equal(a["target"], b["target"]):
        return f"\n{first} and {second} were evaluated on different pictures: no test"
    right, also = (t["prediction"] == t["target"] for t in (a, b))
    alone = int((right & ~also).sum()), int((also & ~right).sum())
    p = mcnemar(*alone)
    meaning = "more than chance explains" if p < 0.05 else "no more than chance explains"
    return (
        f"\nof {len(right)} pictures {first} alone gets {alone[0]} right, {second} alone "
        f"{alone[1]}:"
        f"\n{meaning} (McNemar's exact test, p = {p:.2g})"
    )


def _seconds(run_dir: Path) -> dict[str, float]:
    path = run_dir / "timing.jsonl"
    timing = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    names = ("train_seconds", "eval_seconds") if timing else ()
    return {name: sum(row.get(name, 0) for row in timing) for name in names}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        deep = isinstance(value, dict)
        flat |= _flat(value, f"{prefix}{name}.") if deep else {f"{prefix}{name}": value}
    return flat


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise UsageError(f"{path} cannot be read: {problem}") from problem


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
