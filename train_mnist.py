"""Train a digit recogniser on MNIST, on whatever the YAML under accelerate_configs/ describes.

By default, 3 epochs on 2 CPU cores, 14.3 s of training, give a test accuracy of 99.44 %, the mean
of 10 seeds (benchmarks/RECORDS.md).

python train_mnist.py
accelerate launch --config_file accelerate_configs/4gpu_fp16.yaml train_mnist.py
python train_mnist.py --resume auto
"""

import functools
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from trainkit import (
    EXIT_TARGET_MISSED,
    Dropout,
    InMemory,
    Run,
    compiled_with_model,
    keyed_uniform,
    make_loaders,
    make_optimizer,
    make_scheduler,
    startup,
)

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from trainkit.config import (
    UNSET,
    MayChange,
    NonNegative,
    ReadOnlyIf,
    Schedule,
    Share,
    TrainingConfig,
    parse,
)
from trainkit.pictures.drawn import draw_input, spread

SIZE = 28  # pixels; every picture is brought to SIZE x SIZE grey values
MEAN, STD = 0.1307, 0.3081  # of the MNIST training pixels, as fractions of 255


class Compact(nn.Sequential):
    """Two convolutions, one hidden layer; BatchNorm would depend on how a batch is split."""

    def __init__(self, num_classes: int):
        super().__init__(
            nn.Conv2d(1, 24, 5, stride=2), nn.ReLU(),  # (n, 24, 12, 12)
            nn.Conv2d(24, 32, 3), nn.MaxPool2d(2), nn.ReLU(),  # (n, 32, 5, 5)
            nn.Flatten(), nn.Linear(800, 256), nn.ReLU(), nn.Linear(256, num_classes),
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


MODELS: dict[str, type] = {"compact": Compact, "lenet": LeNet, "wide": Wide, "deep": Deep}


def make_model(metadata: dict[str, Any]) -> nn.Module:
    """Make the model that the metadata name; predict.py loads the saved weights into it."""
    return MODELS[metadata["model"]](len(metadata["classes"]))


@dataclass
class Config(TrainingConfig):
    dataset: MayChange[str] = str(Path(__file__).parent / "data" / "mnist")
    """folder, file of rows or Hub id with a column of pictures and one of classes"""
    eval_data: MayChange[str | None] = None
    """other pictures to evaluate on (default: a split called test, or a fifth of each class)"""
    label: str | None = None
    """column of classes (default: the only one)"""
    model: Literal["compact", "lenet", "wide", "deep"] = "compact"
    """the network"""
    fit: Literal["crop", "pad", "squash"] = "squash"
    """of pictures that are not square: crop reads the centre square, pad all of it, with its border
    colour around it, squash all of it in another shape"""
    grey_range: tuple[float, float] | None = None
    """values of black and of white in grey pictures of more than 8 bits (default: by all values)"""
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
    validation_split: Annotated[NonNegative[int], ReadOnlyIf("eval_data", (None,))] = 0
    """evaluate on this many held-out training pictures, not the test set: for tuning"""
    target_accuracy: MayChange[Share | None] = None
    """exit with 3 if the last evaluation is below this fraction"""

    # These defaults differ from those of trainkit.config. choose_defaults sets what is UNSET.
    run_dir: Path = Path("runs/mnist")
    epochs: int = UNSET
    """passes over the training data (default: 3; more for a small data set)"""
    batch_size: int = UNSET
    """samples per step, over all processes and micro-batches (default: 128; 32 if there are few)"""
    drop_last: bool = UNSET
    """leave out the last short batch of each epoch (default: unless the data set is small)"""
    learning_rate: float = UNSET
    """peak learning rate (default: 6e-3; 0.1 for --optimizer sgd)"""
    schedule: Schedule = "onecycle"
    warmup: float = 0.2
    eval_batch_size: int = 512

    def __post_init__(self):
        self.set_unset({"learning_rate": 0.1 if self.optimizer == "sgd" else 6e-3})

    def find_problems(self, num_processes: int) -> list[str]:
        problems = super().find_problems(num_processes)
        if self.grey_range and not self.grey_range[0] < self.grey_range[1]:
            problems.append("--grey-range needs the value of black and a larger one of white")
        return problems


# Defaults for MNIST, and those that differ for a much smaller data set, on which LARGE would take
# few steps and leave out up to a batch of 128 in each epoch.
LARGE = {"batch_size": 128, "epochs": 3, "max_shift": 1.0, "max_turn": 5.0, "drop_last": True}
SMALL = {"batch_size": 32, "max_shift": 3.0, "max_turn": 20.0, "drop_last": False}
SMALL_SET = 10_000  # pictures; with fewer it is small
NUM_SEEN = 16_384  # pictures, about, that a run on a small data set sees, each several times


def choose_defaults(config: Config, num_train: int) -> dict[str, str]:
    """Set the flags that are UNSET by the number of training pictures; return a line of the plan.

    There is a line for a small data set only. If the user chose --batch-size or --drop-last, no
    data set counts as small.
    """
    is_small = num_train < SMALL_SET and config.batch_size is None and config.drop_last is None
    if not is_small:
        config.set_unset(LARGE)
        return {}
    epochs = max(3, NUM_SEEN // max(1, num_train))
    flags = config.set_unset(LARGE | SMALL | {"epochs": epochs})
    return {"small set": f"of {num_train} pictures: {flags}"}


def load_data(config: Config) -> tuple[InMemory, InMemory, dict[str, Any]]:
    """Return the training set, the evaluation set and what is saved with the weights."""
    # Imported here, because predict.py only needs make_model: it starts in a third of the time.
    from trainkit.pictures.grey import (
        are_photos,
        describe_pictures,
        describe_values,
        load_images,
        sample,
    )
    from trainkit.pictures.shown import describe_reading, how_read
    from trainkit.pictures.splits import describe_evaluation

    name = config.dataset
    label = config.label
    number = config.validation_split
    how: dict[str, Any] = {"fit": config.fit, "eval_data": config.eval_data}
    if config.grey_range:
        how["greys"] = {"any": [*config.grey_range]}
    train_set, train = load_images(name, "train", SIZE, label, None, number, **how)
    classes = train.classes
    eval_set, held_out = load_images(name, "test", SIZE, label, classes, number, **how)
    sampled = sample((train_set, train), (eval_set, held_out))
    pictures = describe_pictures(SIZE, sampled)
    plan = {
        "data": config.dataset,
        "pictures": pictures["read_as"],
    }
    for_colour = f"python examples/pictures.py --dataset {shlex.quote(config.dataset)}"
    if config.eval_data:
        for_colour += f" --eval-data {shlex.quote(config.eval_data)}"
    is_photo = are_photos(sampled.forms)
    if is_photo:
        plan["pictures"] += f"; for their colour: {for_colour}"
    num_read = train.forms.total()
    if num_read > len(train_set):
        plan["held out"] = f"{len(eval_set)} of {num_read} training pictures, to evaluate on"
    plan |= describe_reading(train, held_out) | describe_values(sampled)
    plan |= describe_evaluation(train, held_out)
    plan |= choose_defaults(config, len(train_set))
    plan["next"] = for_colour if is_photo else f"python app.py {shlex.quote(str(config.run_dir))}"
    metadata = {"classes": classes, "pictures": pictures, "reading": how_read(train, held_out)}
    return train_set, eval_set, metadata | {"plan": plan}


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


def first_input(
    train_set: InMemory, eval_set: InMemory, config: Config
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return some pictures of each side as the network gets them, and their classes."""
    train_indices, eval_indices = spread(train_set), spread(eval_set)
    images, labels = (values[train_indices] for values in train_set.tensors)
    if config.augment:
        images = augment(images, train_indices, 0, config)
    held_out, targets = (values[eval_indices] for values in eval_set.tensors)
    return {"to train on": (images, labels), "to evaluate on": (held_out, targets)}


def validate(
    run: Run, model: nn.Module, loader: DataLoader, eval_set: InMemory, classes: list[str]
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
        train_set, eval_set, metadata = run.load(load_data)
        metadata |= {"input": "picture", "size": SIZE, "mean": MEAN, "std": STD}
        metadata |= {"script": Path(__file__).stem, "model": config.model}
        train_loader, eval_loader = make_loaders(accelerator, train_set, eval_set, config)
        model = make_model(metadata).to(memory_format=torch.channels_last)
        optimizer = make_optimizer(accelerator, model.parameters(), config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, scheduler
        )
        plan = metadata.pop("plan")
        next_command = plan.pop("next")
        run.begin(model, metadata, plan)  # locks the run folder, loads the checkpoint
        draw_input(run, lambda: first_input(train_set, eval_set, config), metadata["classes"])

        for epoch in run.epochs():
            for images, labels, indices in run.steps(train_loader):
                with accelerator.accumulate(model):
                    if config.augment:
                        images = augment(images, indices, epoch, config)
                    logits = model(normalise(images))
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

        metrics = run.finish(next_command)
    if config.target_accuracy is not None and metrics["eval_accuracy"] < config.target_accuracy:
        sys.exit(EXIT_TARGET_MISSED)
    return metrics


if __name__ == "__main__":
    startup.run(main)
