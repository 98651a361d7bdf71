"""Compares the numbers of worlds: which value is the first that rounding does not explain."""

import math
import re
from typing import Any, NamedTuple

from trainkit.tools.rehearse.outcome import Outcome

# Training amplifies rounding. How much is measured: a run whose weights are changed by one rounding
# at the start may differ by a TIMES-th of what two worlds may.
TIMES = 50.0
# A unit of ReLU that switches changes gradients more than the loss: so many times.
TIMES_FOR_GRADIENTS = 10
FLOOR_OF_WEIGHTS = 1e-3  # of the largest value of a tensor


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


def is_one_sample(one: float, other: float, num_samples: int | None) -> bool:
    """Whether two shares of many samples differ by one: a sample whose values are nearly equal."""
    num_samples = num_samples or 0
    counts = one * num_samples, other * num_samples
    are_counts = all(abs(count - round(count)) < 1e-6 * num_samples for count in counts)
    return num_samples >= 1000 and are_counts and abs(round(counts[0]) - round(counts[1])) <= 1


class Rounding:
    """What rounding alone makes of a run: a nudged one differs by it from the same unchanged.

    Attributes:
        rows: for each row, the largest relative difference of each column so far.
        weights: the relative difference of each tensor at the end.
    """

    def __init__(self, first: Outcome, nudged: Outcome):
        self.rows: list[dict[str, float]] = []
        self.weights: dict[str, float] = {}
        if first.problem or nudged.problem:
            return
        so_far: dict[str, float] = {}
        scale = scales(first)
        for row, other in zip(first.rows, nudged.rows, strict=False):
            for name in row.keys() & other.keys():
                gap = gap_of(row[name], other[name], scale.get(name, 0.0))
                so_far[name] = max(so_far.get(name, 0.0), gap)
            self.rows.append(dict(so_far))
        self.weights = gaps_of_weights(first, nudged)

    def of(self, row: int, name: str) -> float:
        """What may be rounding in this column, up to this row."""
        return TIMES * self.rows[row].get(name, 0.0) if row < len(self.rows) else 0.0


def has_same_files(first: Outcome, other: Outcome) -> bool:
    """Whether the log and the weights are equal to the last byte."""
    names = "metrics.jsonl", "*.safetensors" if other.world.is_exact else "model.safetensors"
    return other.bytes_of(*names) == first.bytes_of(*names)


def first_difference(first: Outcome, other: Outcome, rounding: Rounding) -> Difference:
    """The first value that differs by more than it may."""
    worst, world = 0.0, other.world
    scale = scales(first, other)
    for n, (row, theirs) in enumerate(zip(first.rows, other.rows, strict=False)):
        step = row.get("step", 0)
        if row.keys() != theirs.keys() or step != theirs.get("step"):
            names = ", ".join(sorted(row.keys() ^ theirs.keys())) or "step"
            return Difference(f"first differs in step {step}: only one has {names}", step)
        for name, value in row.items():
            gap = gap_of(value, theirs[name], scale.get(name, 0.0))
            floor = world.floor * (TIMES_FOR_GRADIENTS if name.startswith("grad_norm") else 1)
            if gap <= (0 if world.is_exact else max(floor, rounding.of(n, name))):
                worst = max(worst, gap)
            elif world.is_exact or not is_one_sample(value, theirs[name], row.get("eval_samples")):
                text = f"first differs in step {step}: {name} {told_apart(value, theirs[name])}"
                return Difference(text, step, name)
    if len(first.rows) != len(other.rows):
        return Difference(f"has {len(other.rows)} rows and not {len(first.rows)}")
    for name, gap in gaps_of_weights(first, other).items():
        may_differ = max(FLOOR_OF_WEIGHTS, TIMES * rounding.weights.get(name, 0.0))
        if gap > (0 if world.is_exact else may_differ):
            last = first.rows[-1].get("step", 0) if first.rows else 0
            return Difference(f"has the same rows, and other weights at the end: {name}", last)
    if world.is_exact:
        return Difference("has the same rows and weights, and other bytes in another file")
    return Difference("", worst=worst)


def gaps_of_weights(first: Outcome, other: Outcome) -> dict[str, float]:
    """By how much each tensor of model.safetensors differs, relative to its largest value."""
    gaps = {}
    for name, one in first.weights.items():
        two = other.weights.get(name)
        if two is None or two.shape != one.shape:
            gaps[name] = math.inf
        elif one.numel():
            largest = one.abs().max().double().item()
            gap = (one.double() - two.double()).abs().max().item()
            gaps[name] = gap_of(gap, 0.0, largest)
    return gaps


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
