"""Names what makes the numbers of a world others, with the cure, and says how it stands."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from trainkit.tools.rehearse.compare import (
    Difference,
    Rounding,
    first_difference,
    has_same_files,
    number,
)
from trainkit.tools.rehearse.outcome import Outcome
from trainkit.tools.rehearse.pages import (
    BATCH_NORM,
    CHANGED_SET,
    DRAWN_FOR_BATCH,
    GRADIENTS,
    HOMES,
    NO_GRADIENT,
    ON_DEVICE,
    ORDER_OF_CHANCE,
    OWN_MEAN,
    OWN_SCHEDULE,
    OWN_STATE,
    REGISTERED,
    SAID,
    SAMPLES_COMPARED,
    SEVERAL,
)

DIVIDED = (
    "the loss is divided by --accumulate, which accelerator.backward(...) does already: leave the "
    "division out"
)
FACTOR = (
    "what run.step_mean(...) returned is multiplied by {:.4g} and here by {:.4g}: put that into "
    "the value of each sample, and use a mean as it is, not its root or logarithm"
)
TERM = (
    "the loss has a term that run.step_mean(...) did not make, {:.4g} and here {:.4g}: give "
    "run.step_mean(...) its values as well, one for each sample"
)
ONE_NUMBER = (
    "run.step_mean(...) got one number for all samples of a share: let each sample have a value "
    "of its own, or compute it from the whole batch, by run.gather(...)"
)
RAW_BACKWARD = (
    "loss.backward() came past accelerator.backward(loss), which divides by --accumulate and "
    "scales under fp16: call accelerator.backward(loss)"
)
BROADCAST = (
    "predictions (n, 1) and targets (n,) make (n, n) in {}: give both one shape, as by "
    "predictions.squeeze(1)"
)
DRAWS_IN_EVALUATION = (
    "the function of run.evaluate(...) or run.predict(...) draws random numbers: F.dropout(x) is "
    "always on, so use nn.Dropout or F.dropout(x, training=self.training)"
)
OWN_MEAN_IN_SHARE = "a mean over samples comes from run.evaluate(...), not from a process's share"
CHANGES_EARLY = (
    "gradients or weights are changed before the last micro-batch of a step is there, as clipping, "
    "zero_grad() and SAM do: do it `if accelerator.sync_gradients:`"
)
BY_SHARE = "by a process's share of a batch: change it by the whole batch, or keep it as it is"
CHANGE_ONCE = (
    "change it once in a step, `if accelerator.sync_gradients:`, and by the whole batch, which "
    "run.gather(...) gives"
)
NOT_AVERAGED = (
    "; call the model that accelerator.prepare(...) returned, not the one that it was given"
)
SAME = 1e-4  # relative difference that rounding makes of what a loss is made of
NUM_NAMED = 3


class Verdict(NamedTuple):
    """What is printed of a world, whether it keeps the promises, and a row of a page."""

    text: str
    is_kept: bool
    row: str = ""


def judge(first: Outcome, again: Outcome, other: Outcome, rounding: Rounding) -> Verdict:
    """Say whether a world has the numbers of the first run, which was also run again."""
    world = other.world
    if other.problem:
        row = next((row for said, row in SAID.items() if re.search(said, other.problem)), "")
        if world.resumed_after and other.is_refusal:
            return Verdict(f"cannot resume what it has saved: {other.problem}", False, row)
        if row == NO_GRADIENT and (names := first.noted("facts").get("untrained")):
            other.problem += f"; {say(names)} got none in any step"
        if "differ between the processes" in other.problem:
            other.problem += NOT_AVERAGED
        facts = first.noted("facts")
        place = facts.get("broadcast") or facts.get("broadcast_in_evaluation")
        if place and "sizes" in other.problem:
            return Verdict(f"fails: {BROADCAST.format(place)}", False)
        kind = "refused" if other.is_refusal else "fails"
        return Verdict(f"{kind}: {other.problem}", other.is_refusal, row)
    if has_same_files(first, other):
        lost = changed(first, again, other, "held-end", "held-end") if world.is_exact else {}
        if states := [name for name, kind in lost.items() if kind == "state"]:
            text = f"equal bytes, but at the end {say(states)} differs: "
            return Verdict(text + HOMES["state"][0], False, REGISTERED)
        unused = f"; {say([*lost])} differs at the end, which changes no number" if lost else ""
        return Verdict(f"equal bytes{unused}", True)
    difference = first_difference(first, other, rounding)
    if not difference.text:
        grown = ": rounding, which training amplifies here"
        grown = grown if difference.worst > world.floor else ""
        held = "".join(f"; {name} is held still: see its row" for name in world.still)
        return Verdict(f"equal to {number(difference.worst)}{grown}{held}", True)
    causes = causes_in_resume if world.is_exact and world.resumed_after else causes_in_split
    sentence, row = next(causes(first, again, other, difference))
    return Verdict(f"{difference.text}{sentence and '; '}{sentence}", False, row)


def say(names: list[str]) -> str:
    """The first of these names, for a sentence."""
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(f"`{name}`" for name in names[:NUM_NAMED]) + more


def changed(
    first: Outcome, again: Outcome, other: Outcome, there: str, here: str
) -> dict[str, str]:
    """The variables that did not hold what they held in the first run, and their kinds.

    What differs when the same is run again, such as a clock, is left out.
    """
    theirs, twin, own = first.noted(there), again.noted(there), other.noted(here)
    found = {
        name: held["kind"]
        for name, held in theirs.items()
        if name in own and own[name] != held and twin.get(name, held) == held
    }
    return dict(sorted(found.items(), key=lambda pair: [*HOMES].index(pair[1])))


def causes_in_resume(
    first: Outcome, again: Outcome, other: Outcome, difference: Difference
) -> Iterator[tuple[str, str]]:
    """What a resume has not restored, the most telling first."""
    yield from causes_in_samples(first, again)
    step = other.world.resumed_after
    lost = changed(first, again, other, f"held-{step}", "held-resumed")
    is_rate = "learning_rate" in difference.column
    for name, kind in lost.items():
        home, row = HOMES[kind]
        others = f", nor is {say([*lost][1:])}" if len(lost) > 1 else ""
        text = f"after the resume `{name}` is not what it was{others}: {home}"
        yield text, OWN_SCHEDULE if is_rate else row
    yield "", OWN_SCHEDULE if is_rate else OWN_STATE


def causes_in_samples(first: Outcome, again: Outcome) -> Iterator[tuple[str, str]]:
    """What makes samples others, as they were seen to be when some were made again."""
    facts, twin = first.noted("facts"), again.noted("facts")
    samples = facts.get("samples", {})
    if drawn := samples.get("drawn"):
        text = f"{say(drawn)} of a sample is another one when it is made again with the same seeds"
        yield f"{text}: let no generator of its own, clock or counter decide it", ORDER_OF_CHANCE
    if samples.get("changed"):
        yield "the samples are no longer what they were at the start", CHANGED_SET
    if facts.get("data") != twin.get("data"):
        yield "load_data(config) returns other samples in each run: seed what it draws", ""


def causes_in_split(
    first: Outcome, again: Outcome, other: Outcome, difference: Difference
) -> Iterator[tuple[str, str]]:
    """What depends on how a batch is split, or on chance, the most telling first."""
    facts, twin, world = first.noted("facts"), again.noted("facts"), other.world
    yield from causes_in_samples(first, again)
    if facts.get("weights") != twin.get("weights"):
        yield "the weights begin otherwise in each run: make them as Run has seeded torch", ""
    if not world.is_split and world.env:  # else it is on a card
        yield "", ORDER_OF_CHANCE
    if drawn := facts.get("samples", {}).get("by_batch"):
        yield f"{say(drawn)} of a sample depends on the others of its batch", DRAWN_FOR_BATCH
    if difference.column.startswith("eval_"):
        if facts.get("draws_in_evaluation"):
            yield DRAWS_IN_EVALUATION, ON_DEVICE
        if place := facts.get("broadcast_in_evaluation"):
            yield BROADCAST.format(place), ""
        yield OWN_MEAN_IN_SHARE, OWN_MEAN
    if place := facts.get("broadcast"):
        yield BROADCAST.format(place), ""
    if facts.get("passes_backward_by"):
        yield RAW_BACKWARD, ""
    yield from causes_in_loss(first, other, difference.step)
    if other.noted("facts").get("changes_early"):
        yield CHANGES_EARLY, GRADIENTS
    if buffers := facts.get("buffers"):
        yield f"the buffer {say(buffers)} changes in the run, {BY_SHARE}", BATCH_NORM
    if draws := facts.get("draws"):
        yield f"the loop draws from {' and '.join(draws)}", ON_DEVICE
    if hooks := facts.get("hooked"):
        yield f"{hooks[0]} has a hook, which is given the gradient of a share", GRADIENTS
    if names := numbers_apart(first, again, other):
        yield f"{say(names)} is another number than in the first run: {CHANGE_ONCE}", REGISTERED
    yield "", SAMPLES_COMPARED if world.is_split else ON_DEVICE


def causes_in_loss(first: Outcome, other: Outcome, last: int) -> Iterator[tuple[str, str]]:
    """What the loop does to its means, seen in the first step whose losses are made otherwise."""
    whole, split = (each.noted("facts").get("losses", {}) for each in (first, other))
    accumulate = other.world.settings.get("accumulate", 1)
    steps = sorted((step for step in whole.keys() & split.keys() if int(step) <= last), key=int)
    for one, two in ((whole[step][0], share) for step in steps for share in split[step]):
        for factor, theirs in zip(one["factors"], two["factors"], strict=False):
            if accumulate > 1 and not are_apart(factor, theirs * accumulate):
                yield DIVIDED, ""
            if are_apart(factor, theirs):
                yield FACTOR.format(factor, theirs), SEVERAL
        for rest, theirs in zip(one["rests"], two["rests"], strict=False):
            if abs(rest - theirs) > SAME * max(one["size"], two["size"]):
                yield TERM.format(rest, theirs), SEVERAL
        if one["is_one_number"] and two["is_one_number"]:
            yield ONE_NUMBER, SAMPLES_COMPARED


def are_apart(one: float, other: float) -> bool:
    """Do numbers differ by more than rounding?"""
    return abs(one - other) > SAME * max(abs(one), abs(other))


def numbers_apart(first: Outcome, again: Outcome, other: Outcome) -> list[str]:
    """The variables whose numbers differ at the first checkpoint by more than rounding."""
    name = min((path.stem for path in first.folder.glob("held-[0-9]*.json")), key=len, default="")
    theirs, own = first.noted(name), other.noted(name)
    found = []
    for each in changed(first, again, other, name, name):
        if theirs[each]["kind"] == "number":
            pairs = [(v, own[each]["parts"].get(k)) for k, v in theirs[each]["parts"].items()]
            numbers = [pair for pair in pairs if all(isinstance(v, int | float) for v in pair)]
            if any(are_apart(*pair) for pair in numbers):
                found.append(each)
    return found


def remarks(first: Outcome) -> list[str]:
    """What a script may mean to do, and should know of, though all worlds agree."""
    facts = first.noted("facts")
    samples, lines = facts.get("samples", {}), []
    if share := samples.get("shared"):
        lines.append(
            f"about {100 * share:.0f} % of the evaluation set is in the training set too, so its "
            "metrics say little about new data: split the samples before anything is copied"
        )
    if drawn := samples.get("drawn_to_evaluate"):
        lines.append(
            f"{say(drawn)} of a sample of the evaluation set depends on random numbers: as it "
            "should where tokens are hidden, but augmentation belongs into the training set alone"
        )
    if untrained := facts.get("untrained"):
        lines.append(
            f"{say(untrained)} got no gradient in any step, and several processes wait for it: use "
            "it in the loss, or call requires_grad_(False) before accelerator.prepare(...)"
        )
    return lines
