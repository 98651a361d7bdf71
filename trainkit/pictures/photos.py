"""Colour photos in the folders of their classes, decoded once into a file of uint8 squares.

A batch maps the file into memory for as long as it takes to copy its rows, so the process needs no
more memory for more pictures. A set whose file would be too large is decoded for each batch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from torch.utils.data import Dataset

from trainkit.config import UNSET, Count, MayChange, NonNegative, TrainingConfig
from trainkit.errors import UsageError
from trainkit.pictures import files
from trainkit.pictures import grey as pictures
from trainkit.pictures.decoding import decode_once, source_of
from trainkit.private import fingerprint_of
from trainkit.text import shorten

NUM_SHOWN, SIDE_SHOWN = 100, 96  # of the evaluation pictures that plots and page show


@dataclass
class PhotoConfig(TrainingConfig):
    """The flags about pictures and the network; a script adds those about training."""

    dataset: MayChange[str] = ""
    """folder with a folder for each class, or a Hub id"""
    label: str | None = None
    """column of the classes in a set that is no folder of pictures (default: the only one)"""
    labels: MayChange[Path | None] = None
    """CSV file of file names and classes, instead of a folder for each class"""
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
    """the short side of a picture, before squares are cut out of it (default: --size / 0.95)"""
    cache_bytes: MayChange[NonNegative[int]] = 2**35
    """decode pictures for each batch if they would take more bytes on disk"""
    epochs: int = UNSET
    """passes over the pictures (default: 5, or up to 20 if they are few; 20 with --freeze)"""
    learning_rate: float = UNSET
    """peak learning rate of the last layer (default: 1e-3; 2e-3 with --freeze)"""
    weight_decay: float = UNSET
    """decoupled for adamw, else an L2 penalty (default: 0.05; 1 with --freeze)"""

    def find_problems(self, num_processes: int) -> list[str]:
        """What is wrong with the values, one phrase each."""
        problems = super().find_problems(num_processes)
        if not self.dataset:
            problems.append("--dataset must name a folder with a folder of pictures for each class")
        if self.base and (self.model or self.scratch):
            problems.append("--base names a network and its weights: leave out --model, --scratch")
        if self.freeze and self.scratch:
            problems.append("--freeze needs a network that was trained: leave out --scratch")
        if self.resize and self.size and self.resize < self.size:
            problems.append(f"--resize {self.resize} must be at least --size {self.size}")
        return problems


class Photos(Dataset):
    """A sample is a picture, uint8 (3, side, side), its class and its index.

    Args:
        path: of the file that holds all rows, uint8 (num_rows, side, side, 3), and is named by
            their content.
        rows: the row of each sample, int64.
        labels: the class of each sample, int64.
        classes: their names.
    """

    def __init__(self, path: Path, rows: torch.Tensor, labels: torch.Tensor, classes: list[str]):
        self.path, self.rows, self.labels, self.classes = path, rows, labels, classes

    def __len__(self) -> int:
        return len(self.rows)

    def make_batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See pick; a loader calls this."""
        return self.pick(indices)

    def pick(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the pictures, uint8 (n, 3, side, side) in channels-last memory, and the rest."""
        mapped = np.load(self.path, mmap_mode="r")  # for this batch: mapped pages count as memory
        pixels = torch.from_numpy(mapped[self.rows[indices].numpy()]).permute(0, 3, 1, 2)
        return pixels, self.labels[indices], indices

    def fingerprint(self) -> dict[str, Any]:
        """Return what is compared when a run is resumed."""
        chosen = xxhash.xxh3_128_hexdigest(self.rows.numpy().tobytes())
        return {"pictures": f"{self.path.stem}-{chosen}"}


class Files(Photos):
    """The same samples, decoded each time they are read, if possible by loader workers."""

    def __init__(self, cells: datasets.Dataset, side: int, *options: Any):
        super().__init__(*options)
        self.cells, self.side = cells, side

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        (cell,) = self.cells[int(self.rows[index])].values()
        pixels = torch.from_numpy(files.read_centre(source_of(cell), self.side)[0])
        return pixels.permute(2, 0, 1), self.labels[index], index

    def pick(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See Photos.pick."""
        return torch.utils.data.default_collate([self[int(index)] for index in indices])


def load_photos(
    config: PhotoConfig, split: str, classes: list[str] | None = None
) -> tuple[Photos, dict[str, str]]:
    """Return a split, and lines for the plan. The short side of a picture becomes config.resize.

    Raises UsageError, which names all pictures that cannot be read, unless config.skip_unreadable
    leaves them out. For the other arguments see pictures.read_split.
    """
    rows, labels, classes, chosen, where = pictures.read_split(
        config.dataset, split, config.label, classes, 0, config.labels
    )
    if len(classes) < 2:
        raise UsageError(
            f"{where}: all pictures are of one class, {classes[0]}: give each class a folder, or "
            "name a list of the classes with --labels"
        )
    (image,) = rows.column_names
    cells, side = rows.cast_column(image, datasets.Image(decode=False)), config.resize
    stored = len(rows) * side * side * 3 <= config.cache_bytes
    key = f"{fingerprint_of(rows)} {side} centre ".encode() + files.READER
    decoded = decode_once(
        cells, (side, side, 3), lambda file: files.read_centre(file, side), key, stored
    )
    plan, problems = {}, decoded.problems
    if problems and not config.skip_unreadable:
        said = pictures.describe_problems(problems, len(rows))
        raise UsageError(f"{where}: {said}; add --skip-unreadable to go on without them")
    if problems:
        plan["unreadable"] = f"{len(problems)} left out: {shorten([*problems.values()])}"
        chosen = chosen[~torch.isin(chosen, torch.tensor([*problems]))]
    options = decoded.path, chosen, labels[chosen], classes
    if stored:
        return Photos(*options), plan
    plan["decoding"] = "for each batch (--cache-bytes): use --num-workers"
    return Files(cells, side, *options), plan


def describe_largest(held_out: Photos) -> dict[str, str]:
    """Return a line of the plan: how often it is right to always say the largest class."""
    counts = held_out.labels.bincount()
    number = int(counts.argmax())
    share = f"{100 * counts[number].item() / len(held_out):.1f} % of the pictures to evaluate on"
    return {"largest": f"{held_out.classes[number]}, {share}"}


def normalise(images: torch.Tensor, about: dict[str, Any]) -> torch.Tensor:
    """Cut out the centre and scale colours 0 to 255 to what the network was trained on.

    Features of photos, which have no height and width, are returned as they are.

    Args:
        images: (n, 3, height, width).
        about: has "size", "mean" and "std".
    """
    if images.ndim == 2:
        return images
    images = pictures.cut_centre(images, about["size"]).float()
    shift, scale = (images.new_tensor(about[name]).view(3, 1, 1) for name in ("mean", "std"))
    images = (images - 255 * shift) / (255 * scale)
    return images.contiguous(memory_format=torch.channels_last)


def colour(images: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Change the colours, 0 to 255. factors (n, 3): of brightness, contrast and saturation."""
    brightness, contrast, saturation = factors.view(-1, 3, 1, 1, 1).unbind(1)
    grey = images.mean(1, keepdim=True)
    images = grey * (1 - saturation) + images * saturation
    return ((images - 127.5) * contrast + 127.5).mul_(brightness).clamp_(0, 255)


def mix(
    kind: str,
    first: tuple[torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor],
    numbers: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put a second picture into each; return them, and the shares of the classes.

    mixup blends the two (Zhang et al. 2018, arXiv:1710.09412), cutmix pastes a square of the second
    (Yun et al. 2019, arXiv:1905.04899). The share of the first picture is at least a half.

    Args:
        first: pictures (n, 3, size, size), and the shares of the classes in each (n, classes).
        second: the same of the second pictures.
        numbers: for each picture, three in [0, 1), which decide.
    """
    share = 1 - numbers[:, 0] / 2
    weight = share.view(-1, 1, 1, 1)
    if kind == "cutmix":
        size, side = first[0].shape[-1], (1 - share).sqrt()[:, None]
        places = (torch.arange(size, device=share.device) + 0.5) / size
        starts = numbers[:, 1:] * (1 - side)
        y, x = ((places >= at[:, None]) & (places < at[:, None] + side) for at in starts.unbind(1))
        weight = 1 - (y[:, None, :, None] & x[:, None, None]).float()
        share = weight.mean((1, 2, 3))
    images = second[0] + weight * (first[0] - second[0])
    return images, second[1] + share[:, None] * (first[1] - second[1])


def hardest(photos: Photos, losses: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the numbers of the photos with the largest losses, and these small: uint8."""
    shown = losses.argsort(descending=True, stable=True)[:NUM_SHOWN]
    small = F.interpolate(photos.pick(shown)[0].float(), SIDE_SHOWN, mode="area")
    return {"shown": shown, "image": small.round().byte()}
