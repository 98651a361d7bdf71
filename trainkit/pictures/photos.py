"""Colour photos in the folders of their classes, decoded once into a file of uint8 squares."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from trainkit.hashes import digest
from trainkit.pictures.files import read_centre
from trainkit.pictures.flags import PhotoConfig
from trainkit.pictures.sets import Split, load_labelled

NUM_SHOWN, SIDE_SHOWN = 100, 96  # evaluation pictures saved for plots and page, and their side


class Batch(NamedTuple):
    """Photos of a batch.

    Attributes:
        images: uint8 (n, 3, side, side) in channels-last memory; with --freeze their features,
            float32 (n, width).
        labels: the class of each, int64.
        indices: the number of each in its set, int64.
    """

    images: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor


class Photos(Dataset):
    """The photos of a split, whose file is uint8 (num_rows, side, side, 3). A sample is a Batch."""

    def __init__(self, split: Split, device: torch.device | None = None):
        self.split = split
        self.classes = split.classes
        self.labels = split.labels.to(device)
        self.pixels = None if device is None else split.read().to(device)

    def __len__(self) -> int:
        return len(self.labels)

    def pick(self, indices: torch.Tensor) -> Batch:
        """Return the photos of these indices, int64."""
        if self.pixels is None:
            pixels = self.split.read(indices)
        else:
            indices = indices.to(self.pixels.device)
            pixels = self.pixels.index_select(0, indices)
        return Batch(pixels.permute(0, 3, 1, 2), self.labels.index_select(0, indices), indices)

    make_batch = pick  # a loader calls this

    @property
    def nbytes(self) -> int:
        """The bytes of all photos."""
        return len(self) * self.split.read(torch.arange(1)).nbytes

    def to(self, device: torch.device) -> "Photos":
        """The same photos, which lie on a device."""
        return Photos(self.split, device)

    def fingerprint(self) -> dict[str, Any]:
        """Return what is compared when a run is resumed."""
        rows = digest(self.split.rows.numpy().tobytes() + self.split.labels.numpy().tobytes())
        return {"pictures": f"{self.split.path.stem}-{rows}"}


def load_photos(config: PhotoConfig) -> tuple[Photos, Photos, dict[str, str]]:
    """Return the photos to train and to evaluate on, and lines of the plan.

    The short side of a picture becomes config.resize. Raises UsageError, which names all pictures
    that cannot be read.
    """
    side = config.resize
    options = {"seen": config.size} if config.fit in (None, "pad") else {}
    train, held_out, plan = load_labelled(config, read_centre, (side, side, 3), **options)
    return Photos(train), Photos(held_out), plan


def measure(
    logits: torch.Tensor, held_out: Photos
) -> tuple[dict[str, float], dict[str, torch.Tensor], dict[str, Any]]:
    """Return the metrics of an evaluation, and the tensors and metadata of its predictions.

    The photos with the largest losses are among them, small; "shown" has their numbers.
    """
    logits = logits.float()
    targets = held_out.labels
    prediction = logits.argmax(1)
    losses = F.cross_entropy(logits, targets, reduction="none").double()
    hits = (prediction == targets).double()
    recalls = [hits[targets == label].mean().item() for label in targets.unique()]
    metrics = {"eval_loss": losses.mean().item(), "eval_accuracy": hits.mean().item()}
    metrics |= {"eval_balanced_accuracy": sum(recalls) / len(recalls), "eval_samples": len(targets)}
    shown = losses.argsort(descending=True, stable=True)[:NUM_SHOWN]
    small = F.interpolate(held_out.pick(shown).images.float(), SIDE_SHOWN, mode="area")
    predictions = {"logits": logits, "prediction": prediction, "target": targets}
    predictions |= {"shown": shown, "image": small.round().byte()}
    return metrics, predictions, {"classes": held_out.classes}
