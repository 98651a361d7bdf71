"""Colour photos in the folders of their classes, decoded once into a file of uint8 squares.

A batch maps the file into memory for as long as it takes to copy its rows, so on a CPU the process
needs no more memory for more pictures. On a GPU up to 1 GiB of photos lies there. A set whose file
would be too large is decoded for each batch.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from trainkit.config import (
    UNSET,
    Count,
    MayChange,
    NonNegative,
    ReadOnlyIf,
    TrainingConfig,
)
from trainkit.errors import UsageError
from trainkit.hashes import digest
from trainkit.numbers.randoms import keyed_uniform
from trainkit.pictures import files, splits
from trainkit.pictures.decoding import source_of
from trainkit.pictures.shown import describe_reading
from trainkit.text import shorten

NUM_SHOWN, SIDE_SHOWN = 100, 96  # evaluation pictures saved for plots and page, and their side
# The defaults with --freeze, and without.
FROZEN = {"learning_rate": 2e-3, "weight_decay": 1.0}
TRAINED = {"learning_rate": 1e-3, "weight_decay": 0.05}


@dataclass
class PhotoConfig(TrainingConfig):
    """The flags about pictures and the network; a script adds those about training."""

    dataset: MayChange[str] = ""
    """folder with a folder for each class, file of rows, or Hub id"""
    label: str | None = None
    """column of the classes in a set that is not a folder of pictures (default: the only one)"""
    eval_data: MayChange[str | None] = None
    """other pictures to evaluate on (default: a split called test, or a fifth of each class)"""
    labels: MayChange[Path | None] = None
    """CSV file of file names and classes, instead of a folder for each class"""
    eval_labels: Annotated[MayChange[Path | None], ReadOnlyIf("eval_data")] = None
    """the same list for --eval-data"""
    skip_unreadable: bool = False
    """go on without the files that cannot be read"""
    model: str | None = None
    """a name of timm (default: tf_efficientnet_lite0)"""
    base: MayChange[str | None] = None
    """folder or Hub id of a timm network with its weights, instead of --model"""
    scratch: bool = False
    """begin with random weights"""
    freeze: bool = False
    """train the last layer alone"""
    size: Count = UNSET
    """side of the squares that the network sees, in pixels (default: the model's, at most 224)"""
    resize: Count = UNSET
    """the short side of a picture, before squares are cut out of it (default: --size / 0.95; with
    --fit pad or squash it is --size)"""
    fit: files.Fit | None = None
    """of pictures that are not square: crop reads the centre square, pad all of it, with its border
    colour around it, squash all of it in another shape (default: crop, but pad beyond 2 : 1)"""
    grey_range: tuple[float, float] | None = None
    """values of black and of white in grey pictures of more than 8 bits (default: by all values)"""
    cache_bytes: MayChange[NonNegative[int]] = 2**35
    """decode pictures for each batch if they would take more bytes on disk"""
    epochs: int = UNSET
    """passes over the pictures (default: 5, or up to 20 if they are few; 20 with --freeze)"""
    learning_rate: float = UNSET
    """peak learning rate of the last layer (default: 1e-3; 2e-3 with --freeze)"""
    weight_decay: float = UNSET
    """decoupled for adamw, else an L2 penalty (default: 0.05; 1 with --freeze)"""

    def __post_init__(self):
        self.set_unset(FROZEN if self.freeze else TRAINED)

    def find_problems(self, num_processes: int) -> list[str]:
        """What is wrong with the values, one phrase each."""
        problems = super().find_problems(num_processes)
        if self.grey_range and not self.grey_range[0] < self.grey_range[1]:
            problems.append("--grey-range needs the value of black and a larger one of white")
        if not self.dataset:
            problems.append("--dataset must name a folder with a folder of pictures for each class")
        if self.base and (self.model or self.scratch):
            problems.append("--base names a network and its weights: leave out --model, --scratch")
        if self.freeze and self.scratch:
            problems.append("--freeze needs a network that was trained: leave out --scratch")
        if self.resize and self.size and self.resize < self.size:
            problems.append(f"--resize {self.resize} must be at least --size {self.size}")
        return problems


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


class MixedBatch(NamedTuple):
    """Photos of a batch, and one to mix into each: the fields of Batch, and two of the second."""

    images: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor
    second_images: torch.Tensor
    second_labels: torch.Tensor


class Photos(Dataset):
    """The photos of a split, whose file is uint8 (num_rows, side, side, 3). A sample is a Batch."""

    def __init__(self, split: splits.Split):
        self.split = split
        self.labels = split.labels
        self.classes = split.classes

    def __len__(self) -> int:
        return len(self.labels)

    def pick(self, indices: torch.Tensor) -> Any:
        """Return the photos of these indices, int64, as a Batch."""
        mapped = np.load(self.split.path, mmap_mode="r")  # anew: mapped pages count as memory
        pixels = torch.from_numpy(mapped[self.split.rows[indices].numpy()]).permute(0, 3, 1, 2)
        return Batch(pixels, self.labels[indices], indices)

    def make_batch(self, indices: torch.Tensor) -> Any:
        """The same for loaders, whose workers decode those of Files."""
        return self.pick(indices)

    @property
    def nbytes(self) -> int:
        """The bytes of all photos."""
        shape = np.load(self.split.path, mmap_mode="r").shape
        return len(self) * math.prod(shape[1:])

    def to(self, device: torch.device) -> "Photos":
        """The same photos, which lie on a device."""
        return PhotosThere(self.split, device)

    def fingerprint(self) -> dict[str, Any]:
        """Return what is compared when a run is resumed."""
        rows = digest(self.split.rows.numpy().tobytes() + self.labels.numpy().tobytes())
        return {"pictures": f"{self.split.path.stem}-{rows}"}


class PhotosThere(Photos):
    """The same photos, copied to a device, which picks those of a batch by itself."""

    def __init__(self, split: splits.Split, device: torch.device):
        super().__init__(split)
        mapped = np.load(split.path, mmap_mode="r")
        self.pixels = torch.from_numpy(mapped[split.rows.numpy()]).to(device)
        self.labels_there = self.labels.to(device)

    def pick(self, indices: torch.Tensor) -> Batch:
        """See Photos.pick."""
        indices = indices.to(self.pixels.device)
        pixels = self.pixels.index_select(0, indices).permute(0, 3, 1, 2)
        return Batch(pixels, self.labels_there.index_select(0, indices), indices)


class Files(Photos):
    """The same samples, decoded each time they are read, if possible by loader workers."""

    def __init__(self, split: splits.Split, side: int):
        super().__init__(split)
        self.side = side

    def __getitem__(self, index: int) -> Batch:
        (cell,) = self.split.cells[int(self.split.rows[index])].values()
        values, _ = files.read_centre(source_of(cell), self.side, **self.split.how)
        pixels = torch.from_numpy(values)
        return Batch(pixels.permute(2, 0, 1), self.labels[index], torch.tensor(index))

    def pick(self, indices: torch.Tensor) -> Any:
        """See Photos.pick."""
        return torch.utils.data.default_collate([self[int(index)] for index in indices])


class Mixed(Photos):
    """The same photos, each with a second one to mix into it. A sample is a MixedBatch.

    Which is fixed by (seed, epoch, index) alone. A loader reads both, because a step that asked a
    GPU for the second ones would wait for it.
    """

    def __init__(self, photos: Photos, seed: int):
        super().__init__(photos.split)
        self.photos = photos
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose others; a loader calls this."""
        self.epoch = epoch

    def choose(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the indices of the second photos, int64."""
        numbers = keyed_uniform(self.seed, self.epoch, indices + len(self), 4)
        return (numbers[:, 0] * len(self)).long()  # the others are for mix_photos

    def pick(self, indices: torch.Tensor) -> MixedBatch:
        """See Photos.pick."""
        images, labels, _ = self.photos.pick(indices)
        second = self.photos.pick(self.choose(indices))
        return MixedBatch(images, labels, indices, second.images, second.labels)

    def to(self, device: torch.device) -> "Mixed":
        """See Photos.to. Photos of a subclass stay, as make_loaders leaves them where they are."""
        if "to" not in vars(type(self.photos)):
            return self
        return Mixed(self.photos.to(device), self.seed)


class MixedFiles(Mixed):
    """The same of Files, which loader workers decode."""

    def __getitem__(self, index: int) -> MixedBatch:
        images, labels, indices = self.photos[index]
        (number,) = self.choose(torch.tensor([index])).tolist()
        second = self.photos[number]
        return MixedBatch(images, labels, indices, second.images, second.labels)


def with_second(photos: Photos, seed: int) -> Mixed:
    """Give each photo a second one, another in each epoch."""
    return MixedFiles(photos, seed) if isinstance(photos, Files) else Mixed(photos, seed)


def load_photos(
    config: PhotoConfig, split: str, classes: list[str] | None = None
) -> tuple[Photos, dict[str, str]]:
    """Return a split, and lines for the plan. The short side of a picture becomes config.resize.

    Raises UsageError, which names all pictures that cannot be read, unless config.skip_unreadable
    leaves them out. For the other arguments see splits.read_split.
    """
    side = config.resize
    how: dict[str, Any] = {"fit": config.fit}
    if config.fit in (None, "pad"):
        how["seen"] = config.size
    if config.grey_range:
        how["greys"] = {"any": [*config.grey_range]}
    part = splits.load_split(
        config.dataset,
        split,
        files.read_centre,
        (side, side, 3),
        label=config.label,
        classes=classes,
        list_of_labels=config.labels,
        eval_data=config.eval_data,
        eval_labels=config.eval_labels,
        skip_unreadable=config.skip_unreadable,
        max_bytes=config.cache_bytes,
        **how,
    )
    plan = {}
    if part.problems:
        plan["unreadable"] = f"{len(part.problems)} left out: {shorten(part.problems)}"
    if part.path.is_file():
        return Photos(part), plan
    plan["decoding"] = "for each batch (--cache-bytes): use --num-workers"
    return Files(part, side), plan


def load_sets(config: PhotoConfig) -> tuple[Photos, Photos, dict[str, str]]:
    """Return the photos to train on and those to evaluate on, and lines for the plan."""
    train, plan = load_photos(config, "train")
    classes = train.classes
    if len(classes) < 2:
        raise UsageError(
            f"--dataset {config.dataset}: all pictures are of one class, {classes[0]}: give each "
            "class a folder, or name a list of the classes with --labels"
        )
    held_out, more = load_photos(config, "test", classes)
    if not len(held_out):
        raise UsageError(
            f"--dataset {config.dataset}: all {len(train)} pictures look the same, or are too few "
            "to hold some out"
        )
    plan = {"data": config.dataset} | plan | more | describe_reading(train.split, held_out.split)
    return train, held_out, plan | splits.describe_evaluation(train.split, held_out.split)


def recolour(images: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Change the colours, 0 to 255. factors (n, 3): of brightness, contrast and saturation."""
    brightness, contrast, saturation = factors.view(-1, 3, 1, 1, 1).unbind(1)
    grey = images.mean(1, keepdim=True)
    images = grey * (1 - saturation) + images * saturation
    return ((images - 127.5) * contrast + 127.5).mul_(brightness).clamp_(0, 255)


def mix_photos(
    method: str,
    first: tuple[torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor],
    numbers: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put a second picture into each; return them, and the shares of the classes.

    The share of the first picture is at least a half.

    Args:
        method: mixup blends the two (Zhang et al. 2018, arXiv:1710.09412), cutmix pastes a square
            of the second (Yun et al. 2019, arXiv:1905.04899).
        first: pictures (n, 3, size, size), and the shares of the classes in each (n, classes).
        second: the same of the second pictures.
        numbers: for each picture, three in [0, 1), which decide.
    """
    share = 1 - numbers[:, 0] / 2
    weight = share.view(-1, 1, 1, 1)
    if method == "cutmix":
        size = first[0].shape[-1]
        side = (1 - share).sqrt()[:, None]
        centres = (torch.arange(size, device=share.device) + 0.5) / size
        starts = numbers[:, 1:] * (1 - side)
        y, x = (
            (centres >= at[:, None]) & (centres < at[:, None] + side) for at in starts.unbind(1)
        )
        weight = 1 - (y[:, None, :, None] & x[:, None, None]).float()
        share = weight.mean((1, 2, 3))
    images = second[0] + weight * (first[0] - second[0])
    return images, second[1] + share[:, None] * (first[1] - second[1])


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
