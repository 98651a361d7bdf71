"""What a finished run says of new inputs: the base of what each wing has for predict.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

TEMPERATURES = torch.logspace(-0.6, 0.6, 49)
UNSURE_SHARE = 0.05  # of the evaluated samples: those of which the model is least sure


class Predictor(nn.Module):
    """A trained model that takes inputs as they are in files, and answers as a person reads it.

    A kind of input is a subclass: forward maps inputs (n, ...) to outputs; predict_file returns
    what the model says of a file, or raises UsageError; example_inputs makes random inputs, with
    which an exported model is checked. metadata: saved with the weights. evaluated: the tensors of
    predictions.safetensors.
    """

    options: tuple[str, ...] = ()  # arguments of predict_file that are flags of predict.py
    weights = "model.safetensors"  # the file in the run folder that has all weights
    example_inputs: Callable[[], torch.Tensor]
    predict_file: Callable[..., str]

    def __init__(
        self, model: nn.Module, metadata: dict[str, Any], evaluated: dict[str, torch.Tensor]
    ):
        super().__init__()
        self.model = model
        self.metadata = metadata
        self.evaluated = evaluated

    def open(self, script: Any, run_dir: Path) -> None:
        """Load what else this kind of input needs, from the script or from the run folder."""

    def numbers(self, name: str) -> torch.Tensor:
        """Return numbers of the metadata, float64."""
        return torch.tensor(self.metadata[name], dtype=torch.float64)


class Classifier(Predictor):
    """Maps inputs to class probabilities, (n, classes), calibrated on the evaluated samples.

    In a subclass, read returns a file as inputs of forward (n = 1) and what is doubtful about it or
    "", or raises UsageError; prepare returns the inputs as the model takes them.
    """

    read: Callable[..., tuple[torch.Tensor, str]]

    def __init__(self, *run: Any):
        super().__init__(*run)
        self.calibration = {"temperature": 1.0, "threshold": 0.0}
        if "logits" in self.evaluated:
            self.calibration = calibrate(self.evaluated["logits"], self.evaluated["target"])

    def prepare(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits = self.model(self.prepare(inputs))
        return (logits / self.calibration["temperature"]).softmax(1)

    def predict_file(self, path: Path, **options: Any) -> str:
        """Return the most probable classes, or say that the model is unsure. Raises UsageError."""
        text, _ = self.answer_file(path, **options)
        return text

    def answer_file(self, path: Path, **options: Any) -> tuple[str, dict[str, Any]]:
        """Return what predict_file does, and the row of the file for --csv. Raises UsageError."""
        inputs, doubt = self.read(path, **options)
        probabilities = self(inputs)[0]
        share, number = probabilities.max(0)
        row = {"prediction": self.metadata["classes"][number], "probability": share.item()}
        answer = f"{path}: {self.describe(probabilities, doubt)}"
        if not doubt and share < self.calibration["threshold"]:
            doubt = "less sure than of 95 in 100 evaluated samples"
        return answer, row | {"doubt": doubt}

    def describe(self, probabilities: torch.Tensor, doubt: str = "") -> str:
        """Say which classes are the most probable ones, or that the model is unsure."""
        best = zip(*probabilities.topk(min(3, len(probabilities))), strict=True)
        first, *others = (f"{self.metadata['classes'][number]} {p:.2%}" for p, number in best)
        if doubt:
            first = f"unsure ({doubt}), perhaps {first}"
        elif probabilities.max() < self.calibration["threshold"]:
            first = f"unsure, perhaps {first}"
        return first + (f"  (then {', '.join(others)})" if others else "")


def calibrate(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Learn a temperature and a threshold from the logits for evaluated samples, (n, classes).

    temperature: logits are divided by it, so that predictions made with 92 % confidence are right
    about 92 % of the time (Guo et al., 2017). threshold: an answer that is less probable than this
    is called unsure.
    """
    losses = [F.cross_entropy(logits / value, targets) for value in TEMPERATURES]
    temperature = TEMPERATURES[torch.stack(losses).argmin()].item()
    if (logits.argmax(1) == targets).all():  # the lowest would always have the smallest loss
        temperature = max(temperature, 1.0)
    sure = (logits / temperature).softmax(1).amax(1)
    return {"temperature": temperature, "threshold": sure.quantile(UNSURE_SHARE).item()}
