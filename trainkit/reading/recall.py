"""Say what an accuracy is worth: which classes there are, and how many samples were recognised."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from trainkit.run_dir.records import PREDICTIONS, load_predictions
from trainkit.text import shorten

NUM_WORST = 5  # classes that are named
RARE = 5  # samples: with fewer of a class, none may be left to evaluate on


def describe_classes(
    labels: Tensor, held_out: Tensor, classes: Sequence[str], noun: str
) -> dict[str, str]:
    """Return lines of the plan: the classes, the largest one, and which are rare or missing.

    labels, held_out: of what is trained and evaluated on. noun: what a sample is called.
    """
    trained, tested = (part.bincount(minlength=len(classes)) for part in (labels, held_out))
    share = f"{100 * tested.max().item() / len(held_out):.1f} %"
    plan = {
        "classes": f"{len(classes)}: {shorten(classes, 10)}",
        "largest class": f"{classes[int(tested.argmax())]}, {share} of the {noun}s to evaluate on",
    }
    groups = {
        f"no {noun} to train on": trained == 0,
        f"no {noun} to evaluate on": tested == 0,
        f"fewer than {RARE} {noun}s": trained + tested < RARE,
    }
    for text, of in groups.items():
        if of.any():
            plan[text] = shorten([classes[n] for n in of.nonzero().flatten()], 10)
    return plan


def describe_recall(run_dir: Path) -> str:
    """Name the classes that were recognised least, and say what the accuracy is worth.

    Raises UsageError if predictions.safetensors cannot be read.
    """
    predictions, metadata = load_predictions(run_dir / PREDICTIONS)
    targets, classes = predictions["target"], metadata["classes"]
    hits = targets[predictions["prediction"] == targets]
    counts, num_hits = (rows.bincount(minlength=len(classes)).tolist() for rows in (targets, hits))
    evaluated = [label for label, number in enumerate(counts) if number]
    evaluated.sort(key=lambda label: num_hits[label] / counts[label])
    rows = [f"{classes[label]} {num_hits[label]} of {counts[label]}" for label in evaluated]
    text = f"recognised: {len(hits)} of {len(targets)}; worst: {shorten(rows, NUM_WORST)}"
    if len(hits) <= max(counts):
        largest = classes[counts.index(max(counts))]
        text += (
            f"\nthis network is no better than always saying {largest!r}, which is right for "
            f"{max(counts)} of {len(targets)}: it recognised {len(hits)}"
        )
    return text
