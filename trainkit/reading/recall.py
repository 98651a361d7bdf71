"""Say what an accuracy is worth: which classes there are, and how many samples were recognised."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from trainkit.store.records import PREDICTIONS, load_predictions
from trainkit.text import shorten

NUM_WORST = 5  # classes that are named
RARE = 5  # samples to evaluate on: with fewer of a class its recall says little


def describe_classes(
    labels: Tensor, held_out: Tensor, classes: Sequence[str], noun: str
) -> dict[str, str]:
    """Return lines of the plan: the classes, the largest one, which are rare, and not trained on.

    labels, held_out: of what is trained and evaluated on. noun: what a sample is called.
    """
    trained, tested = (part.bincount(minlength=len(classes)) for part in (labels, held_out))
    share = f"{100 * tested.max().item() / max(1, len(held_out)):.1f} %"
    plan = {
        "classes": f"{len(classes)}: {shorten(classes, 10)}",
        "largest class": f"{classes[int(tested.argmax())]}, {share} of the {noun}s to evaluate on",
    }
    counts = sorted(zip(tested.tolist(), classes, strict=True))
    if rare := [f"{name} {number}" for number, name in counts if number < RARE]:
        few = f"fewer than {RARE} {noun}s to evaluate on: {shorten(rare)}"
        plan["rare"] = f"{len(rare)} of {len(classes)} classes have {few}"
    if unknown := [classes[n] for n in (trained == 0).nonzero().flatten()]:
        plan["not trained"] = f"classes without {noun}s to train on: {shorten(unknown)}"
    return plan


def describe_recall(run_dir: Path) -> str:
    """Name the classes that were recognised least, and say what the accuracy is worth.

    Raises UsageError if predictions.safetensors cannot be read.
    """
    predictions, metadata = load_predictions(run_dir / PREDICTIONS)
    targets, classes = predictions["target"], metadata["classes"]
    hits = targets[predictions["prediction"] == targets]
    counts, num_hits = (rows.bincount(minlength=len(classes)).tolist() for rows in (targets, hits))
    worst = [label for label, number in enumerate(counts) if num_hits[label] < number]
    worst.sort(key=lambda label: num_hits[label] / counts[label])
    rows = [f"{classes[label]} {num_hits[label]} of {counts[label]}" for label in worst]
    text = f"recognised: {len(hits)} of {len(targets)}"
    if rows:
        text += f"; worst: {shorten(rows, NUM_WORST)}"
    if len(hits) <= max(counts):
        largest = classes[counts.index(max(counts))]
        text += (
            f"\nthis network is no better than always saying {largest!r}, which is right for "
            f"{max(counts)} of {len(targets)}: it recognised {len(hits)}"
        )
    return text
