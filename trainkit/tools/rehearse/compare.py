"""Compares the rows of two worlds: which value is the first that rounding does not explain."""

import math
import re
from typing import Any, NamedTuple

from trainkit.tools.rehearse.outcome import Outcome

# Worlds differ by rounding, up to these parts of the largest value of a column: in the first steps,
# and later, because training amplifies it.
FLOOR, NUM_FIRST, FLOOR_LATER = 1e-5, 3, 1e-4


class Difference(NamedTuple):
    """The first difference between two worlds; no text if there is none.

    Attributes:
        text: where it is, for a person.
        step, column: of the row of metrics.jsonl that it is in.
        worst: the largest relative difference of the rows before it.
    """

    text: str
    step: int = 0
    column: str = ""
    worst: float = 0.0


def scales(*outcomes: Outcome) -> dict[str, float]:
    """The largest absolute value of each column: values near zero are compared against it."""
    largest: dict[str, float] = {}
    for row in (row for outcome in outcomes for row in outcome.rows):
        for name, value in row.items():
            if isinstance(value, float) and math.isfinite(value):
                largest[name] = max(largest.get(name, 0.0), abs(value))
    return largest


def gap_of(one: Any, other: Any, scale: float) -> float:
    """How much two values of a column differ, relative to it; infinite if not by rounding."""
    if one == other or (one != one and other != other):
        return 0.0
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    if not numbers or not math.isfinite(one) or not math.isfinite(other):
        return math.inf
    return abs(one - other) / scale if scale else math.inf


def has_same_files(first: Outcome, other: Outcome) -> bool:
    """Whether the log and the weights are equal to the last byte."""
    names = "metrics.jsonl", "*.safetensors" if other.world.is_exact else "model.safetensors"
    return other.bytes_of(*names) == first.bytes_of(*names)


def first_difference(first: Outcome, other: Outcome) -> Difference:
    """The first value that differs by more than it may."""
    worst, is_exact = 0.0, other.world.is_exact
    scale = scales(first, other)
    for row, theirs in zip(first.rows, other.rows, strict=False):
        step = row.get("step", 0)
        if row.keys() != theirs.keys() or step != theirs.get("step"):
            names = ", ".join(sorted(row.keys() ^ theirs.keys())) or "step"
            return Difference(f"first differs in step {step}: only one has {names}", step)
        floor = FLOOR if step <= NUM_FIRST else FLOOR_LATER
        if (num_samples := row.get("eval_samples", 0)) >= 1000:
            floor = max(floor, 1.5 / num_samples)  # one whose two classes are nearly equal
        for name, value in row.items():
            gap = gap_of(value, theirs[name], scale.get(name, 0.0))
            if gap > (0 if is_exact else floor):
                text = f"first differs in step {step}: {name} {told_apart(value, theirs[name])}"
                return Difference(text, step, name)
            worst = max(worst, gap)
    if len(first.rows) != len(other.rows):
        return Difference(f"has {len(other.rows)} rows and not {len(first.rows)}")
    if is_exact:
        return Difference("has the same rows, and other bytes in the weights or another file")
    return Difference("", worst=worst)


def number(value: float) -> str:
    """1.6e-07 as 2e-7."""
    return re.sub(r"e-0*", "e-", f"{value:.0e}") if value else "the last digit"


def told_apart(one: Any, other: Any) -> str:
    """Two values with as many digits as tell them apart."""
    for digits in (4, 6, 9, 17):
        texts = [f"{v:.{digits}g}" if isinstance(v, float) else str(v) for v in (one, other)]
        if texts[0] != texts[1]:
            break
    return " and ".join(texts)
