"""A run on photos as examples/pictures.py leaves it, of a network that knows the mean colour alone.

predict.py is given this file as the script that made the run.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from trainkit.pictures.files import read_photo_pixels
from trainkit.store import records
from trainkit.store.weights import write_tensors

CLASSES = ["blue", "green", "red"]
ABOUT = {"script": "colours", "input": "photo", "model": "mean", "classes": CLASSES, "size": 64}
ABOUT |= {"resize": 72, "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4], "freeze": True}


def make_model(metadata: dict[str, Any]) -> nn.Module:
    """Return a network of 12 numbers."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))


def photograph(folder: Path, name: str, share: float) -> Path:
    """A picture whose middle has so much of a class's colour, on grey, 150 x 110."""
    values = np.full((110, 150, 3), 90.0) + np.random.default_rng(0).normal(0, 4, (110, 150, 3))
    values[20:90, 40:110, 2 - CLASSES.index(name)] += 150 * share
    path = folder / f"{name}{share}.png"
    Image.fromarray(values.clip(0, 255).astype(np.uint8)).save(path)
    return path


def make_run(folder: Path) -> Path:
    """A run folder whose evaluation had 60 photos, two of them with the label of another class."""
    model, run_dir = make_model(ABOUT), folder / "run"
    (run_dir / "pretrained").mkdir(parents=True)
    (run_dir / "pretrained" / "config.json").write_text("{}")
    mean, std = (torch.tensor(ABOUT[name]) for name in ("mean", "std"))
    weights = {"2.weight": 40 * std.diag().flip(0), "2.bias": 40 * mean.flip(0)}
    model.load_state_dict(weights)
    write_tensors(run_dir / "pretrained" / "model.safetensors", weights, {})
    write_tensors(run_dir / "model.safetensors", {"last": torch.zeros(1)}, ABOUT)
    target = torch.arange(60) % 3
    paths = [photograph(folder, CLASSES[n], 0.1 + i / 70) for i, n in enumerate(target.tolist())]
    pixels = torch.stack([read_photo_pixels(path, 72, 64) for path in paths])
    with torch.no_grad():
        logits = model((pixels / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1))
    target[[11, 40]] = target[[12, 41]]
    losses = F.cross_entropy(logits, target, reduction="none")
    shown = losses.argsort(descending=True)[:50]
    images = (0.9 * F.interpolate(pixels[shown].float(), (48, 48))).byte()  # not as they were seen
    tensors = {"logits": logits, "prediction": logits.argmax(1), "target": target}
    tensors |= {"shown": shown, "image": images}
    write_tensors(run_dir / records.PREDICTIONS, tensors, {"classes": CLASSES})
    versions = {"torch": torch.__version__}
    about = {"command": ["colours.py"], "world": "-", "machine": "-", "versions": versions}
    (run_dir / "run.json").write_text(json.dumps(about))
    row = {"step": 1, "eval_loss": losses.mean().item(), "eval_accuracy": 58 / 60}
    (run_dir / "metrics.jsonl").write_text(json.dumps(row | {"eval_samples": 60}) + "\n")
    return run_dir
