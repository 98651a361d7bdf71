"""Train a digit recogniser on MNIST, on whatever the YAML under accelerate_configs/ describes.

python train_mnist.py
accelerate launch --config_file accelerate_configs/4gpu_fp16.yaml train_mnist.py
python train_mnist.py --resume auto
"""

import argparse
import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit import (
    EXIT_TARGET_MISSED,
    Dropout,
    InMemory,
    Run,
    arguments,
    keyed_uniform,
    make_loaders,
    make_optimizer,
    make_scheduler,
    shorten,
    startup,
)

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from trainkit.data.small import fit_to_small_set, parse_sizes
from trainkit.tools import plots
from trainkit.tools.calibration import calibrate
from trainkit.tools.photos import learn_framing, read_photo

SIZE = 28  # pixels; every picture is brought to SIZE x SIZE grey values
MEAN, STD = 0.1307, 0.3081  # of the MNIST training pixels, as fractions of 255


class Compact(nn.Sequential):
    """Two convolutions, one hidden layer; no BatchNorm, which depends on how a batch is split."""

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
    """26 million parameters and dropout: large enough that averaging gradients takes time."""

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


# Flag, type or choices, default, what a value must be, help.
FLAGS: arguments.Flags = (
    ("--dataset", str, str(Path(__file__).parent / "data" / "mnist"), None,
     "folder or Hub id that holds a column of pictures and one of classes"),
    ("--label", str, None, None, "column of classes; None: the only one"),
    ("--model", MODELS, "compact", None, "the network"),
    ("--label-smoothing", float, 0.1, arguments.FRACTION, "of the training loss"),
    ("--augment", bool, True, None,
     "shift, turn and warp each training picture, differently in each epoch"),
    ("--max-shift", float, 1.0, arguments.AT_LEAST_0, "of --augment, in pixels"),
    ("--max-turn", float, 5.0, arguments.AT_LEAST_0, "of --augment, in degrees"),
    ("--max-warp", float, 0.0, arguments.AT_LEAST_0, "of --augment, of 4 x 4 points, in pixels"),
    ("--validation-split", int, 0, arguments.AT_LEAST_0,
     "evaluate on this many held-out training pictures, not the test set: for tuning"),
    ("--target-accuracy", float, None, (lambda value: 0 <= value <= 1, "0 to 1"),
     "exit with 3 if the last evaluation is below this fraction"),
)  # fmt: skip


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.Parser(__doc__)
    arguments.add_flags(parser, "problem", FLAGS)
    arguments.add_training_arguments(parser)
    arguments.add_run_arguments(
        parser, "runs/mnist", not_the_experiment=["dataset", "target_accuracy"]
    )
    parser.set_defaults(learning_rate=None, schedule="onecycle", warmup=0.2, eval_batch_size=512)
    # For MNIST; load_data fits them to a set that is much smaller, unless one of them is typed.
    args = parse_sizes(
        parser, argv, epochs=3, batch_size=128, drop_last=True, max_shift=1.0, max_turn=5.0
    )
    if args.learning_rate is None:
        args.learning_rate = 0.1 if args.optimizer == "sgd" else 6e-3
    return args


def check_arguments(args: argparse.Namespace, num_processes: int) -> None:
    arguments.refuse(arguments.find_problems(args, num_processes, FLAGS))


def load_data(args: argparse.Namespace) -> tuple[InMemory, InMemory, dict[str, Any]]:
    """Return training set, evaluation set and what is saved with the weights."""
    # Imported here: predict.py, which uses Predictor alone, starts in a third of the time.
    from trainkit.data.pictures import describe_values, load_images

    what, number = (SIZE, args.label), args.validation_split
    train_set, classes, *found = load_images(args.dataset, "train", *what, None, number)
    eval_set, _, *more = load_images(args.dataset, "test", *what, classes, number)
    framing = learn_framing(SIZE, *found, *more)
    plan = {
        "data": f"{args.dataset}, {len(classes)} classes: {shorten(classes)}",
        "pictures": framing["read_as"],
    }
    if "RGB" in framing["read_as"]:
        plan["pictures"] += "; for their colour: examples/colour_pictures.py --dataset"
    if (num_read := found[0][1].total()) > len(train_set):
        plan["held out"] = f"{len(eval_set)} of {num_read} training pictures, to evaluate on"
    plan |= describe_values(*found, *more)
    plan |= fit_to_small_set(args, len(train_set), max_shift=3.0, max_turn=20.0)
    return train_set, eval_set, {"classes": classes, "pictures": framing, "plan": plan}


def normalise(images: torch.Tensor) -> torch.Tensor:
    """Grey values 0 to 255 to mean 0 and standard deviation 1, channels last."""
    images = images.to(torch.float32, copy=True).sub_(255 * MEAN).mul_(1 / (255 * STD))
    return images.contiguous(memory_format=torch.channels_last)


class Predictor(nn.Module):
    """What predict.py uses and exports: uint8 (n, 1, SIZE, SIZE) to the classes' probabilities."""

    def __init__(self, about: dict[str, Any]):
        super().__init__()
        self.model, self.about = MODELS[about["model"]](len(about["classes"])), about
        self.calibration = {"temperature": 1.0, "threshold": 0.0} | about.get("calibration", {})

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # Calibrated: a temperature learned on the evaluation pictures makes 92 % mean 92 %.
        return (self.model(normalise(images)) / self.calibration["temperature"]).softmax(1)

    def example_inputs(self) -> torch.Tensor:
        return torch.randint(0, 256, (64, 1, SIZE, SIZE), dtype=torch.uint8)

    def predict_file(self, path: Path, as_is: bool = False) -> str:
        """The most probable classes of a picture, or `unsure` before them. Raises UsageError."""
        pixels, doubt = read_photo(path, SIZE, self.about["pictures"], as_is)
        probabilities = self(pixels)[0]
        best = zip(*probabilities.topk(min(3, len(probabilities))), strict=True)
        first, *others = (f"{self.about['classes'][number]} {p:.2%}" for p, number in best)
        if doubt or probabilities.max() < self.calibration["threshold"]:
            first = f"unsure{f' ({doubt})' * bool(doubt)}, perhaps {first}"
        return f"{path}: {first}" + (f"  (then {', '.join(others)})" if others else "")


@functools.cache
def pixel_centres(device: torch.device) -> torch.Tensor:
    """Coordinates x, y, 1 of all pixels, from -1 to 1: (3, SIZE * SIZE)."""
    axis = (2 * torch.arange(SIZE, device=device) + 1) / SIZE - 1
    x, y = axis.repeat(SIZE), axis.repeat_interleave(SIZE)
    return torch.stack((x, y, torch.ones_like(x)))


@functools.cache
def knot_shares(device: torch.device) -> torch.Tensor:
    """Bilinear weights of 4 x 4 control points at each pixel: (16, SIZE * SIZE)."""
    knots = torch.linspace(-1, 1, 4, device=device).unsqueeze(1)
    distance = (pixel_centres(device)[:2, None] - knots).abs()  # (2, 4, SIZE * SIZE)
    x, y = (1 - distance * 3 / 2).clamp(min=0)
    return (y.unsqueeze(1) * x).flatten(0, 1)


def augment(
    images: torch.Tensor, indices: torch.Tensor, epoch: int, args: argparse.Namespace
) -> torch.Tensor:
    """Shift, turn and warp each picture by amounts fixed by (seed, epoch, sample index) alone."""
    noise = keyed_uniform(args.seed, epoch, indices, 35 if args.max_warp else 3) * 2 - 1
    turn, right, down = noise[:, :3].unbind(1)
    turn = turn * math.radians(args.max_turn)
    shift = 2 * args.max_shift / SIZE  # coordinates run from -1 to 1
    cos, sin = turn.cos(), turn.sin()
    affine = torch.stack((cos, -sin, right * shift, sin, cos, down * shift), 1).view(-1, 3)
    # F.affine_grid as one matrix product, eight times as fast.
    grid = affine @ pixel_centres(images.device)
    if args.max_warp:
        moves = noise[:, 3:].reshape(-1, 16) * (2 * args.max_warp / SIZE)  # x, then y
        grid += moves @ knot_shares(images.device)
    grid = grid.view(-1, 2, SIZE, SIZE).permute(0, 2, 3, 1)
    return F.grid_sample(images.float(), grid, align_corners=False)  # outside a picture: 0, black


@torch.inference_mode()
def validate(
    accelerator: Accelerator,
    model: nn.Module,
    loader: DataLoader,
    eval_set: InMemory,
    classes: list[str],
) -> tuple[dict[str, float], dict[str, torch.Tensor], dict[str, Any]]:
    """Return the metrics, what predictions.safetensors holds, and what is said beside it.

    Every process must call this. Each sample counts once at any number of processes, or an
    AssertionError is raised.
    """
    model.eval()
    pictures, targets = eval_set.tensors
    loss_sum = torch.zeros((), device=accelerator.device)
    # Each process fills in its own samples and leaves zeros elsewhere: the sum has them all. The
    # last column counts how often a sample was evaluated.
    outputs = torch.zeros(len(targets), len(classes) + 1, device=accelerator.device)
    for images, labels, indices in loader:
        logits = model(normalise(images))
        loss_sum += F.cross_entropy(logits, labels, reduction="sum")
        outputs[indices, :-1] = logits.float()
        outputs[indices, -1] += 1
    model.train()
    outputs = accelerator.reduce(outputs, reduction="sum").cpu()
    assert (outputs[:, -1] == 1).all(), "a sample was evaluated twice or not at all"
    outputs = outputs[:, :-1]
    prediction, probability = outputs.argmax(1), outputs.softmax(1).amax(1)
    metrics = {
        "eval_loss": accelerator.reduce(loss_sum, reduction="sum").item() / len(targets),
        "eval_accuracy": (prediction == targets).double().mean().item(),
        "eval_samples": len(targets),
    }
    predictions = {
        "prediction": prediction,
        "target": targets,
        "probability": probability,
        "mistake_images": pictures[plots.worst_mistakes(prediction, targets, probability)],
    }
    # Calibration makes 92 % mean 92 %; predict.py uses it.
    return metrics, predictions, {"classes": classes, "calibration": calibrate(outputs, targets)}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, write the run folder; return the last metrics."""
    args = parse_args(argv)
    with Run(args, "mnist", check_arguments) as run:  # creates run.accelerator; cleans up on exit
        accelerator = run.accelerator
        train_set, eval_set, about = run.load(load_data)
        train_loader, eval_loader = make_loaders(accelerator, train_set, eval_set, args)
        model = MODELS[args.model](len(about["classes"])).to(memory_format=torch.channels_last)
        optimizer = make_optimizer(accelerator, model.parameters(), args)
        scheduler = make_scheduler(optimizer, args, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, scheduler
        )
        known = {"size": SIZE, "mean": MEAN, "std": STD}
        about |= {"script": Path(__file__).stem, "model": args.model} | known
        run.begin(model, about, about.pop("plan"))  # locks the run folder, loads the checkpoint

        for epoch in run.epochs():
            for images, labels, indices in run.steps(train_loader):
                with accelerator.accumulate(model):
                    if args.augment:
                        images = augment(images, indices, epoch, args)
                    logits = model(normalise(images))
                    losses = F.cross_entropy(
                        logits, labels, reduction="none", label_smoothing=args.label_smoothing
                    )
                    # The mean over the whole step, whatever the processes and micro-batches.
                    accelerator.backward(run.step_mean(losses))
                    run.clip_and_check(optimizer)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(
                    loss=F.cross_entropy(logits.detach(), labels, reduction="none"),  # as eval_loss
                    loss_smoothed=losses,  # what is minimised
                    accuracy=logits.argmax(1) == labels,
                )
                if run.must_save():  # --save-every, or a signal to any process
                    run.save()  # accelerator.save_state; after a signal it ends the run with 75
            results = validate(accelerator, model, eval_loader, eval_set, about["classes"])
            run.end_epoch(*results)

        metrics = run.finish(f"python app.py {args.run_dir}", plots.draw_run)
    if args.target_accuracy is not None and metrics["eval_accuracy"] < args.target_accuracy:
        sys.exit(EXIT_TARGET_MISSED)
    return metrics


if __name__ == "__main__":
    startup.run(main)
