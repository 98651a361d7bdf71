"""Says how a world stands beside the first run and, if its numbers are others, why."""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from trainkit.tools.rehearse import pages
from trainkit.tools.rehearse.worlds import Outcome

SAME = 1e-4  # relative difference that rounding makes of what a loss is made of
NUM_NAMED = 3
# Worlds differ by rounding, up to these parts of the largest value of a column: in the first steps,
# and later, because training amplifies it.
FLOOR, NUM_FIRST, FLOOR_LATER = 1e-5, 3, 1e-4


class Verdict(NamedTuple):
    """What is printed of a world, whether it keeps the promises, and a row of a page."""

    text: str
    is_kept: bool
    row: str = ""


class Difference(NamedTuple):
    """The first value of metrics.jsonl that differs between two worlds; no text if none does.

    `worst` is the largest relative difference of the rows before it.
    """

    text: str
    step: int = 0
    column: str = ""
    worst: float = 0.0


def judge(first: Outcome, again: Outcome, other: Outcome) -> Verdict:
    """Say whether a world has the numbers of the first run, which was also run again."""
    return Judge(first, again, other).verdict()


class Judge:
    """Compares a world with the first run, and names what makes its numbers others.

    Attributes:
        facts, facts_here: what was noted of the first run, and of the world.
        num_parts: micro-batches of a step.
    """

    def __init__(self, first: Outcome, again: Outcome, other: Outcome):
        self.first, self.again, self.other, self.world = first, again, other, other.world
        self.facts, self.facts_here = first.noted("facts"), other.noted("facts")
        self.num_parts = self.world.settings.get("accumulate", 1)

    def verdict(self) -> Verdict:
        """Say how the world stands."""
        if self.other.problem:
            return self._of_problem(self.other.problem)
        here, there = (each.get("num_samples") for each in (self.facts_here, self.facts))
        if here != there:
            texts = (" and ".join(map(str, each)) for each in (here, there))
            return Verdict(pages.NUM_SAMPLES.format(*texts), False, pages.NO_INDEX)
        if has_same_files(self.first, self.other):
            lost = self._changed("held-end", "held-end") if self.world.is_exact else {}
            if states := [name for name, kind in lost.items() if kind == "state"]:
                home, row = pages.HOMES["state"]
                text = f"equal bytes, but at the end {say(states)} differs: {home}"
                return Verdict(text, False, row)
            unused = f"; {say([*lost])} differs at the end, which changes no number" if lost else ""
            return Verdict(f"equal bytes{unused}", True)
        difference = first_difference(self.first, self.other)
        if not difference.text:
            return Verdict(f"equal to {number(difference.worst)}", True)
        sentence, row = next(self._causes(difference))
        return Verdict(f"{difference.text}{sentence and '; '}{sentence}", False, row)

    def _of_problem(self, problem: str) -> Verdict:
        """Say why the world did not come to its end. A refusal is none of what is promised."""
        place = self.facts.get("broadcast") or self.facts.get("broadcast_in_evaluation")
        if place and "sizes" in problem:
            return Verdict(f"fails: {pages.BROADCAST.format(place)}", False)
        if gathers := "lost contact" in problem and self.facts.get("gathers"):  # unequal shares
            return Verdict(f"fails: {pages.GATHERS.format(gathers)}", False, pages.FOLLOWS)
        found = (cure for said, cure in pages.SAID.items() if re.search(said, problem))
        also, row = next(found, ("", ""))
        is_refusal = self.other.is_refusal
        if self.world.resumed_after and is_refusal:
            return Verdict(f"cannot resume what it has saved: {problem}{also}", False, row)
        kind = "refused" if is_refusal else "fails"
        return Verdict(f"{kind}: {problem}{also}", is_refusal, row)

    def _changed(self, there: str, here: str) -> dict[str, str]:
        """The variables that did not hold what they held in the first run, and their kinds.

        What differs when the same is run again, such as a clock, is left out.
        """
        twin, own = self.again.noted(there), self.other.noted(here)
        found = {
            name: held["kind"]
            for name, held in self.first.noted(there).items()
            if name in own and own[name] != held and twin.get(name, held) == held
        }
        return dict(sorted(found.items(), key=lambda pair: [*pages.HOMES].index(pair[1])))

    def _causes(self, difference: Difference) -> Iterator[tuple[str, ...]]:
        """What makes the numbers of a world others, the most telling first."""
        facts, twin = self.facts, self.again.noted("facts")
        is_split = self.world.num_processes * self.num_parts > 1
        is_new = {name: facts.get(name) != twin.get(name) for name in ("data", "weights")}
        yield from told(facts | is_new, pages.IN_SAMPLES)
        if self.world.resumed_after:
            yield from self._in_resume("learning_rate" in difference.column)
        elif not is_split:
            yield "", pages.ORDER_OF_CHANCE
        yield from told(self.facts_here, pages.IN_STEP)
        if difference.column.startswith("eval_"):
            yield from told(facts, pages.IN_EVALUATION)
            if size := self.facts_here.get("eval_batch_size"):
                yield pages.EVAL_BATCH.format(size), pages.OWN_MEAN
            yield pages.SHARE_MEAN, pages.OWN_MEAN
        yield from told(facts, pages.IN_LOOP)
        yield from self._in_carried(difference.step - 1)
        yield from self._in_loss(difference.step)
        yield from self._in_carried(difference.step)
        yield "", pages.SAMPLES_COMPARED if is_split else pages.ON_DEVICE

    def _in_resume(self, is_rate: bool) -> Iterator[tuple[str, str]]:
        """What a resume has not restored."""
        step = self.world.resumed_after
        lost = self._changed(f"held-{step}", "held-resumed")
        lost = {name: kind for name, kind in lost.items() if self._may_decide(name)}
        for name, kind in lost.items():
            home, row = pages.HOMES["start" if self._is_made_at_start(name) else kind]
            others = f", nor is {say([*lost][1:])}" if len(lost) > 1 else ""
            text = f"after the resume `{name}` is not what it was{others}: {home}"
            yield text, pages.OWN_SCHEDULE if is_rate else row
        yield from self._in_counts(step + 1)
        yield "", pages.OWN_SCHEDULE if is_rate else pages.OWN_STATE

    def _may_decide(self, name: str) -> bool:
        """Does the script read this variable, and not only add to it or print it?"""
        read = self.facts.get("read")
        return read is None or "." in name or name in read

    def _is_made_at_start(self, name: str) -> bool:
        """Does a variable stay as it is within an epoch, and has a resume made it anew?"""
        one, two = (self.first.noted(f"carried-{step}").get(name) for step in (1, 2))
        begun, resumed = (each.noted("held-resumed").get(name) for each in (self.first, self.other))
        return one is not None and one == two and begun != resumed

    def _in_counts(self, step: int) -> Iterator[tuple[str, str]]:
        """What counts the batches that this process has seen, as enumerate(...) does."""
        there, here = (each.noted(f"carried-{step}") for each in (self.first, self.other))
        steps = [self.first.noted(f"carried-{n}") for n in (1, 2, 3)]
        for name in sorted(there.keys() - self.first.noted("held-resumed")):  # made in the loop
            counts = [held.get(name, {}).get("parts", {}).get("") for held in (*steps, there, here)]
            if all(type(count) is int for count in counts):
                one, two, three, whole, count = counts
                if two - one == three - two == 1 and whole != count:
                    yield pages.COUNTED.format(name), pages.STEP_IN_EPOCH

    def _in_carried(self, step: int) -> Iterator[tuple[str, str]]:
        """What the script has carried out of this step, and reads, is another one here."""
        worlds = self.first, self.other, self.again
        there, here, twin = (each.noted(f"carried-{step}") for each in worlds)
        names = [
            name
            for name in self.first.noted("held-resumed")
            if self._may_decide(name) and name in there and name in here
            if twin.get(name) == there[name] and there[name]["kind"] != "state"
            if not are_like(there[name]["parts"], here[name]["parts"])
        ]
        if names:
            sentence = pages.BY_MICRO_BATCH if self.num_parts > 1 else pages.BY_SHARE
            yield sentence.format(say(names)), pages.FOLLOWS
        yield from self._in_counts(step)

    def _in_loss(self, last: int) -> Iterator[tuple[str, str]]:
        """What the loop does to its means, seen in the first step that makes them otherwise."""
        whole, split = (each.get("losses", {}) for each in (self.facts, self.facts_here))
        steps = sorted((step for step in whole.keys() & split.keys() if int(step) <= last), key=int)
        for one, two in ((whole[step][0], share) for step in steps for share in split[step]):
            for factor, theirs in zip(one["factors"], two["factors"], strict=False):
                if self.num_parts > 1 and not are_apart(factor, theirs * self.num_parts):
                    yield pages.DIVIDED, ""
                if are_apart(factor, theirs):
                    yield pages.FACTOR.format(factor, theirs), pages.SEVERAL
            for rest, theirs in zip(one["rests"], two["rests"], strict=False):
                if abs(rest - theirs) > SAME * max(one["size"], two["size"]):
                    yield pages.TERM.format(rest, theirs), pages.SEVERAL
            if one["is_one_number"] and two["is_one_number"]:
                yield pages.ONE_NUMBER, pages.SAMPLES_COMPARED


def say(names: list[str]) -> str:
    """The first of these names, for a sentence."""
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(f"`{name}`" for name in names[:NUM_NAMED]) + more


def told(facts: dict[str, Any], table: tuple[tuple[str, ...], ...]) -> Iterator[tuple[str, ...]]:
    """The sentences of a table about what was noted, each with what follows it there."""
    for name, sentence, *row in table:
        if value := facts.get(name):
            yield sentence.format(say(value) if isinstance(value, list) else value), *row


def are_like(one: Any, other: Any) -> bool:
    """Are the parts of a variable equal but for rounding? Of tensors the norms are compared."""
    if isinstance(one, dict):
        places = [place for place in one if f"{place} is like" not in one]
        are_alike = one.keys() == other.keys()
        return are_alike and all(are_like(one[place], other[place]) for place in places)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(are_like, one, other))
    are_numbers = all(isinstance(value, int | float) for value in (one, other))
    return one == other or (are_numbers and not are_apart(one, other))


def are_apart(one: float, other: float) -> bool:
    """Do numbers differ by more than rounding?"""
    return abs(one - other) > SAME * max(abs(one), abs(other))


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
