"""What a run consists of, for those who describe it or compare it; nothing here acts."""

from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator

from trainkit.config import TrainingConfig
from trainkit.numbers.orders import Length


@dataclass(frozen=True)
class Facts:
    """A run that has data, models and optimizers, before its first step.

    Attributes:
        sets: the training set and the evaluation set.
        data_fingerprint: the hash of both.
        length: how long the run is in steps, and when it evaluates.
        prepared: what went through accelerator.prepare.
    """

    accelerator: Accelerator
    config: TrainingConfig
    sets: tuple[Any, Any]
    data_fingerprint: str
    length: Length
    prepared: Any
