"""Train a digit recogniser on MNIST, on whatever the YAML under accelerate_configs/ describes.

By default, 3 epochs on 2 CPU cores, 9.9 s of training, give a test accuracy of 99.43 %, the mean
of 10 seeds (benchmarks/RECORDS.md).

python train_mnist.py
accelerate launch --config_file accelerate_configs/4gpu_fp16.yaml train_mnist.py
python train_mnist.py --resume auto
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from trainkit import (  # pip install .
    UNSET,
    Dropout,
    NonNegative,
    ReadOnlyIf,
    Run,
    Share,
    compiled_with_model,
    keyed_uniform,
    make_loaders,
    make_optimizer,
    make_scheduler,
    parse,
    startup,
)

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit.pictures import GreyConfig, draw_input, load_grey

SIZE = 28  # pixels; every picture is brought to SIZE x SIZE grey values
MEAN, STD = 0.1307, 0.3081  # of the MNIST training pixels, as fractions of 255


class Compact(nn.Sequential):
    """Two convolutions, one hidden layer; BatchNorm would depend on how a batch is split."""

    def __init__(self, num_classes: int, first: int = 24, second: int = 32, hidden: int = 256):
        super().__init__(
            nn.Conv2d(1, first, 5, stride=2), nn.ReLU(),  # (n, 24, 12, 12)
            nn.Conv2d(first, second, 3), nn.MaxPool2d(2), nn.ReLU(),  # (n, 32, 5, 5)
            nn.Flatten(), nn.Linear(25 * second, hidden), nn.ReLU(), nn.Linear(hidden, num_classes),
        )  # fmt: skip


class LeNet(nn.Sequential):
    """The LeNet of from-scratch tutorials: average pooling, ReLU after each layer."""

    def __init__(self, num_classes: int):
        super().__init__(
            nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2),  # (n, 20, 13, 13)
            nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2),  # (n, 50, 4, 4)
            nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, num_classes),
        )  # fmt: skip


class Wide(nn.Sequential):
    """26 million parameters and dropout: so many that averaging the gradients takes time."""

    def __init__(self, num_classes: int):
        super().__init__(
            nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(),
            nn.Conv2d(64, 128, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),  # (n, 128, 14, 14)
            nn.Flatten(), nn.Linear(25088, 1024), nn.ReLU(), Dropout(0.5),
            nn.Linear(1024, num_classes),
        )  # fmt: skip


class Deep(nn.Sequential):
    """Four convolutions, LayerNorm and dropout: the most accurate, if trained for long."""

    def __init__(self, num_classes: int):
        super().__init__(
            nn.Conv2d(1, 16, 3), nn.ReLU(),
            nn.Conv2d(16, 16, 3), nn.MaxPool2d(2), nn.ReLU(),  # (n, 16, 12, 12)
            nn.Conv2d(16, 64, 3), nn.ReLU(),
            nn.Conv2d(64, 64, 3), nn.MaxPool2d(2), nn.ReLU(),  # (n, 64, 4, 4)
            nn.Flatten(), Dropout(0.3), nn.Linear(1024, 256), nn.LayerNorm(256), nn.ReLU(),
            Dropout(0.3), nn.Linear(256, num_classes),
        )  # fmt: skip


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "compact": Compact,
    "small": functools.partial(Compact, first=16, second=16, hidden=64),
    "lenet": LeNet,
    "wide": Wide,
    "deep": Deep,
}


def make_model(metadata: dict[str, Any]) -> nn.Module:
    """Make the model that the metadata name; predict.py loads the saved weights into it."""
    return MODELS[metadata["model"]](len(metadata["classes"]))


@dataclass
class Config(GreyConfig):
    """Fields that are UNSET are set below, or by the number of pictures in load_data."""

    model: Literal["compact", "small", "lenet", "wide", "deep"] = "compact"
    """the network"""
    label_smoothing: Share = 0.1
    """of the training loss"""
    augment: bool = True
    """shift, turn and warp each training picture, differently in each epoch"""
    max_shift: Annotated[NonNegative[float], ReadOnlyIf("augment")] = UNSET
    """of --augment, in pixels (default: 1; 3 for a small data set)"""
    max_turn: Annotated[NonNegative[float], ReadOnlyIf("augment")] = UNSET
    """of --augment, in degrees (default: 5; 20 for a small data set)"""
    max_warp: Annotated[NonNegative[float], ReadOnlyIf("augment")] = 0.0
    """of --augment, of 4 x 4 points, in pixels"""
    run_dir: Path = Path("runs/mnist")
    learning_rate: float = UNSET
    """peak learning rate (default: 6e-3; 0.1 for --optimizer sgd)"""

    def __post_init__(self):
        self.set_unset({"dataset": str(Path(__file__).parent / "data" / "mnist")})
        self.set_unset({"learning_rate": 0.1 if self.optimizer == "sgd" else 6e-3})


# The defaults of the augmentation, and those for a small data set.
AUGMENTED = {"max_shift": 1.0, "max_turn": 5.0}, {"max_shift": 3.0, "max_turn": 20.0}


def load_data(config: Config) -> tuple[TensorDataset, TensorDataset, dict[str, Any], dict]:
    """Return the sets to train and to evaluate on, what is saved with the weights, plan lines."""
    train_set, eval_set, metadata, plan = load_grey(config, SIZE, *AUGMENTED)
    metadata |= {"input": "picture", "size": SIZE, "mean": MEAN, "std": STD}
    metadata |= {"script": Path(__file__).stem, "model": config.model}  # for predict.py
    return train_set, eval_set, metadata, plan


def normalise(images: torch.Tensor) -> torch.Tensor:
    """Scale grey values 0 to 255 to mean 0 and standard deviation 1, in channels-last memory."""
    images = (images.float() - 255 * MEAN).mul_(1 / (255 * STD))
    return images.contiguous(memory_format=torch.channels_last)


@functools.cache
def pixel_centres(device: torch.device) -> torch.Tensor:
    """Return the coordinates x and y, from -1 to 1, and a 1 for each pixel: (3, SIZE * SIZE)."""
    axis = (2 * torch.arange(SIZE, device=device) + 1) / SIZE - 1
    x, y = axis.repeat(SIZE), axis.repeat_interleave(SIZE)
    return torch.stack((x, y, torch.ones_like(x)))


@functools.cache
def knot_shares(device: torch.device) -> torch.Tensor:
    """Return the bilinear weights of 4 x 4 control points at each pixel: (16, SIZE * SIZE)."""
    knots = torch.linspace(-1, 1, 4, device=device).unsqueeze(1)
    distance = (pixel_centres(device)[:2, None] - knots).abs()  # (2, 4, SIZE * SIZE)
    x, y = (1 - distance * 3 / 2).clamp(min=0)
    return (y.unsqueeze(1) * x).flatten(0, 1)


def augment(
    images: torch.Tensor, indices: torch.Tensor, epoch: int, config: Config
) -> torch.Tensor:
    """Shift, turn and warp each picture by amounts fixed by (seed, epoch, sample index) alone."""
    if not config.augment:
        return images
    numbers = keyed_uniform(config.seed, epoch, indices, 35 if config.max_warp else 3)
    knots = knot_shares(images.device) if config.max_warp else None
    return move_pixels(images, numbers, pixel_centres(images.device), knots, config)


@compiled_with_model  # where the YAML compiles
def move_pixels(
    images: torch.Tensor,
    numbers: torch.Tensor,
    centres: torch.Tensor,
    knots: torch.Tensor | None,
    config: Config,
) -> torch.Tensor:
    """Shift, turn and warp each picture by amounts that its numbers, from 0 to 1, decide."""
    noise = numbers * 2 - 1
    turn = noise[:, 0] * math.radians(config.max_turn)
    # Coordinates run from -1 to 1.
    right, down = (noise[:, 1:3] * (2 * config.max_shift / SIZE)).unbind(1)
    cos, sin = turn.cos(), turn.sin()
    affine = torch.stack((cos, -sin, right, sin, cos, down), 1).view(-1, 3)
    # The same as F.affine_grid, but as one matrix product, which is eight times as fast.
    grid = affine @ centres
    if knots is not None:
        moves = noise[:, 3:].reshape(-1, 16) * (2 * config.max_warp / SIZE)  # x, then y
        grid += moves @ knots
    grid = grid.view(-1, 2, SIZE, SIZE).permute(0, 2, 3, 1)
    return F.grid_sample(images.float(), grid, align_corners=False)  # 0 outside: black


def validate(
    run: Run, model: nn.Module, loader: DataLoader, eval_set: TensorDataset, classes: list[str]
) -> tuple[dict[str, float], dict[str, torch.Tensor], dict[str, Any]]:
    """Return the metrics, and the tensors and metadata of predictions.safetensors.

    Every process must call this.
    """
    pictures, targets = eval_set.tensors
    # Of each sample once, in the order of the set, on every process.
    logits = run.predict(loader, lambda batch: model(normalise(batch[0])).float())
    prediction = logits.argmax(1)
    metrics = {
        "eval_loss": F.cross_entropy(logits.double(), targets).item(),
        "eval_accuracy": (prediction == targets).double().mean().item(),
        "eval_samples": len(targets),
    }
    # trainkit/tools draw pictures of these, and predict.py calibrates its confidence on them.
    predictions = {
        "logits": logits,
        "prediction": prediction,
        "target": targets,
        "image": pictures,
    }
    return metrics, predictions, {"classes": classes}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train and evaluate the model, write the run folder and return the last metrics."""
    config = parse(Config, argv)
    with Run(config, "mnist") as run:  # creates run.accelerator; cleans up on exit
        accelerator = run.accelerator
        train_set, eval_set, metadata, plan = run.load(load_data)
        train_loader, eval_loader = make_loaders(accelerator, train_set, eval_set, config)
        model = make_model(metadata).to(memory_format=torch.channels_last)
        optimizer = make_optimizer(accelerator, model.parameters(), config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, scheduler
        )
        run.begin(model, metadata, plan)  # locks the run folder, loads the checkpoint
        draw_input(run, train_set, eval_set, metadata, lambda x, i: augment(x, i, 0, config))

        for epoch in run.epochs():
            for images, labels, indices in run.steps(train_loader):
                with accelerator.accumulate(model):
                    moved = augment(images, indices, epoch, config)
                    logits = model(normalise(moved))
                    losses = F.cross_entropy(
                        logits, labels, reduction="none", label_smoothing=config.label_smoothing
                    )
                    # The mean over the whole step, whatever the processes and micro-batches.
                    accelerator.backward(run.step_mean(losses))
                    optimizer.step()  # clipped to --clip-norm and checked first
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(
                    loss=F.cross_entropy(logits.detach(), labels, reduction="none"),  # as eval_loss
                    loss_smoothed=losses,  # what is minimised
                    accuracy=logits.argmax(1) == labels,
                )
                if run.end_step():  # --save-every, or a signal to any process
                    run.save()  # accelerator.save_state; after a signal it ends the run with 75
            results = validate(run, model, eval_loader, eval_set, metadata["classes"])
            run.end_epoch(*results)
        return run.finish()


if __name__ == "__main__":
    startup.run(main)
