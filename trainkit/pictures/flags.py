"""The flags about pictures: those of every script, of small grey pictures, of photos in colour."""

from dataclasses import dataclass
from typing import Annotated, Literal

from trainkit.config import (
    UNSET,
    Count,
    MayChange,
    NonNegative,
    ReadOnlyIf,
    Schedule,
    TrainingConfig,
)

Fit = Literal["crop", "pad", "squash"]
# The defaults with --freeze, and without.
FROZEN = {"learning_rate": 2e-3, "weight_decay": 1.0}
TRAINED = {"learning_rate": 1e-3, "weight_decay": 0.05}


@dataclass
class PictureConfig(TrainingConfig):
    """What pictures are read, and how; a script adds the flags about training."""

    dataset: MayChange[str] = UNSET
    """folder with a folder for each class, file of rows, or Hub id"""
    label: str | None = None
    """column of the classes in a set that is not a folder of pictures (default: the only one)"""
    eval_data: MayChange[str | None] = None
    """other pictures to evaluate on (default: a split called test, or a fifth of each class)"""
    fit: Fit | None = None
    """of pictures that are not square: crop reads the centre square, pad all of it, with its border
    colour around it, squash all of it in another shape (default of photos: crop, or pad beyond
    2 : 1)"""
    grey_range: tuple[float, float] | None = None
    """values of black and of white in grey pictures of more than 8 bits (default: 0 65535, or 0 1
    of fractions)"""

    # These defaults differ from those of trainkit.config.
    schedule: Schedule = "onecycle"
    warmup: float = 0.2

    def find_problems(self, num_processes: int) -> list[str]:
        """What is wrong with the values, one phrase each."""
        problems = super().find_problems(num_processes)
        if not self.dataset:
            problems.append("--dataset must name a folder with a folder of pictures for each class")
        if self.grey_range and not self.grey_range[0] < self.grey_range[1]:
            problems.append("--grey-range needs the value of black and a larger one of white")
        return problems


@dataclass
class GreyConfig(PictureConfig):
    """Those of small grey pictures."""

    fit: Fit = "squash"
    validation_split: Annotated[NonNegative[int], ReadOnlyIf("eval_data", (None,))] = 0
    """evaluate on this many held-out training pictures, not the test set: for tuning"""

    # These defaults differ from those of trainkit.config. set_by_number sets what is UNSET.
    epochs: int = UNSET
    """passes over the training data (default: 3; more for a small data set)"""
    batch_size: int = UNSET
    """samples per step, over all processes and micro-batches (default: 128; 32 if there are few)"""
    drop_last: bool = UNSET
    """leave out the last short batch of each epoch (default: unless the data set is small)"""
    eval_batch_size: int = 512


@dataclass
class PhotoConfig(PictureConfig):
    """Those of photos in colour and of their network."""

    MOVED = TrainingConfig.MOVED | {"--skip-unreadable": "remove the files that cannot be read"}

    model: Annotated[str | None, ReadOnlyIf("base", (None,))] = None
    """a name of timm (default: tf_efficientnet_lite0)"""
    base: MayChange[str | None] = None
    """folder or Hub id of a timm network with its weights, instead of --model"""
    scratch: Annotated[bool, ReadOnlyIf("base", (None,))] = False
    """begin with random weights"""
    freeze: bool = False
    """train the last layer alone"""
    size: Count = UNSET
    """side of the squares that the network sees, in pixels (default: the model's, at most 224)"""
    epochs: int = UNSET
    """passes over the pictures (default: 5, or up to 20 if they are few; 20 with --freeze)"""
    learning_rate: float = UNSET
    """peak learning rate of the last layer (default: 1e-3; 2e-3 with --freeze)"""
    weight_decay: float = UNSET
    """decoupled for adamw, else an L2 penalty (default: 0.05; 1 with --freeze)"""

    @property
    def resize(self) -> int:
        """The side of the squares that are kept: with the margin of a crop, but all of others."""
        return self.size if self.fit in ("pad", "squash") else round(self.size / 0.95)

    def __post_init__(self):
        self.set_unset(FROZEN if self.freeze else TRAINED)

    def find_problems(self, num_processes: int) -> list[str]:
        """What is wrong with the values, one phrase each."""
        problems = super().find_problems(num_processes)
        if self.freeze and self.scratch:
            problems.append("--freeze needs a network that was trained: leave out --scratch")
        return problems
