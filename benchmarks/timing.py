"""What train_mnist.py measured of itself."""

import json
from pathlib import Path


def training_time(run_dir: Path) -> tuple[float, int]:
    """Seconds of training and number of pictures, summed over all epochs of a finished run."""
    lines = (run_dir / "timing.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return sum(row["train_seconds"] for row in rows), sum(row["train_images"] for row in rows)


def images_per_second(run_dir: Path) -> float:
    """Pictures trained per second of training."""
    seconds, num_images = training_time(run_dir)
    return num_images / seconds
