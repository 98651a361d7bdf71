"""Say how many samples of each class a finished run recognised."""

from pathlib import Path

from trainkit.run_dir.records import PREDICTIONS, load_predictions
from trainkit.text import shorten

NUM_WORST = 5  # classes that are named


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
