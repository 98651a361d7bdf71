"""Classify colour pictures with a pretrained network: a folder with a subfolder for each class.

python examples/pictures.py --dataset fruit --freeze    trains the last layer alone, in seconds
python examples/pictures.py --dataset fruit
"""

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/
from trainkit import (
    InMemory,
    Run,
    keyed_uniform,
    make_loaders,
    make_optimizer,
    make_scheduler,
    startup,
)

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from trainkit.cli.text import shorten
from trainkit.config import UNSET, Count, MayChange, Schedule, Share, TrainingConfig, parse
from trainkit.data import photos
from trainkit.data.backbones import compute_features, load_network, normalise, write_network
from trainkit.data.pictures import cut_centre


@dataclass
class Config(TrainingConfig):
    dataset: MayChange[str] = ""  # folder with a folder for each class, or Hub id
    labels: MayChange[Path | None] = None  # CSV of file names and classes, instead of the folders
    skip_unreadable: bool = False  # go on without the files that are no pictures
    model: str | None = None  # a name of timm (default: tf_efficientnet_lite0)
    base: MayChange[str | None] = None  # folder or Hub id of a network of timm and its weights
    scratch: bool = False  # random weights
    freeze: bool = False  # train the last layer alone
    size: Count = UNSET  # side of the pictures, in pixels (default: by the model, at most 224)
    resize: Count = UNSET  # of the short side, before the centre is cut out (default: size / 0.95)
    balance: bool = False  # draw all classes equally often
    mix: Literal["mixup", "cutmix"] | None = None  # blend, or cut, a second picture into each
    smallest_crop: Share = 0.35  # share of the picture that a random crop has at least
    colour: Share = 0.3  # most change of brightness, contrast and saturation
    label_smoothing: Share = 0.1
    cache_bytes: MayChange[Count] = 2**31 - 1  # decoded pictures beyond it are not kept on disk
    run_dir: Path = Path("runs/pictures")
    epochs: int = UNSET
    batch_size: int = 32
    eval_batch_size: int = 64
    learning_rate: float = UNSET
    weight_decay: float = UNSET
    schedule: Schedule = "onecycle"
    warmup: float = 0.2

    def __post_init__(self):
        values = FROZEN if self.freeze else WHOLE
        vars(self).update({n: v for n, v in values.items() if getattr(self, n) is None})


FROZEN = {"epochs": 20, "learning_rate": 2e-3, "weight_decay": 1.0}
WHOLE = {"epochs": 4, "learning_rate": 1e-3, "weight_decay": 0.05}


def make_model(metadata: dict[str, Any]) -> nn.Module:
    """Make the network that the metadata name, without weights."""
    import timm

    return timm.create_model(metadata["model"], num_classes=len(metadata["classes"]))


def load_data(config: Config, device: torch.device) -> tuple:
    """Return what to train on and to evaluate on, the photos of both, the network, metadata."""
    network, source = load_network(config.model, config.base, config.scratch)
    about = network.pretrained_cfg
    config.size = config.size or min(224, about["input_size"][-1])
    config.resize = config.resize or round(config.size / 0.95)
    options = {"skip_unreadable": config.skip_unreadable, "cache_bytes": config.cache_bytes}
    how = config.dataset, config.resize, config.labels
    train, classes, plan = photos.load_photos("train", *how, None, **options)
    held_out, _, more = photos.load_photos("test", *how, classes, **options)
    plan = {"data": f"{config.dataset}, {len(classes)} classes: {shorten(classes)}"} | plan | more
    plan |= {"weights": source} | photos.describe_largest(held_out.labels, classes)
    colours = {name: [*map(float, about[name])] for name in ("mean", "std")}
    metadata = {"input": "photo", "script": Path(__file__).stem, "model": about["architecture"]}
    metadata |= {"size": config.size, "resize": config.resize, **colours}
    metadata |= {"classes": classes, "freeze": config.freeze, "plan": plan}
    sets = train, held_out
    if config.freeze:
        options = (config.size, *colours.values(), device)
        sets = (InMemory(compute_features(network, x, *options), x.labels) for x in sets)
    return *sets, train, held_out, network, metadata


def augment(
    images: torch.Tensor, indices: torch.Tensor, epoch: int, config: Config
) -> torch.Tensor:
    """Cut, flip and colour each picture by amounts fixed by (seed, epoch, sample index) alone."""
    numbers = keyed_uniform(config.seed, epoch, indices, 8)
    area = 1 - (1 - config.smallest_crop) * numbers[:, 0]
    ratio = torch.exp((numbers[:, 1] * 2 - 1) * math.log(4 / 3))  # width / height
    size = torch.stack(((area * ratio).sqrt(), (area / ratio).sqrt()), 1).clamp(max=1)
    centre = (numbers[:, 2:4] * 2 - 1) * (1 - size)
    affine = torch.zeros(len(images), 2, 3, device=images.device)
    affine[:, 0, 0] = size[:, 0] * torch.where(numbers[:, 4] < 0.5, -1, 1)
    affine[:, 1, 1], affine[:, :, 2] = size[:, 1], centre
    grid = F.affine_grid(affine, [len(images), 3, config.size, config.size], align_corners=False)
    images = F.grid_sample(images.float(), grid, align_corners=False, padding_mode="border")
    bright, contrast, saturation = (
        (1 + config.colour * (2 * numbers[:, 5:] - 1)).view(-1, 3, 1, 1, 1).unbind(1)
    )
    grey = images.mean(1, keepdim=True)
    images = (grey + (images - grey) * saturation - 127.5) * contrast + 127.5
    return (images * bright).clamp(0, 255)


@torch.no_grad()
def validate(
    accelerator: Accelerator,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    loader: DataLoader,
    held_out: photos.Photos,
    classes: list[str],
) -> tuple[dict[str, float], dict[str, torch.Tensor], dict[str, Any]]:
    """Return the metrics, and the tensors and metadata of predictions.safetensors.

    Every process must call this.
    """
    targets = held_out.labels
    # Each process fills in its own rows; the last column counts how often one was evaluated.
    outputs = torch.zeros(len(targets), len(classes) + 1, device=accelerator.device)
    for images, _, indices in loader:
        outputs[indices, :-1] = compute_logits(images).float()
        outputs[indices, -1] += 1
    outputs = accelerator.reduce(outputs, reduction="sum").cpu()
    assert (outputs[:, -1] == 1).all(), "a sample was evaluated twice or not at all"
    logits, prediction = outputs[:, :-1], outputs[:, :-1].argmax(1)
    losses = F.cross_entropy(logits, targets, reduction="none")
    hit = prediction == targets
    recall = {n: hit[targets == n].double().mean().item() for n in targets.unique().tolist()}
    shown = losses.argsort(descending=True, stable=True)[:100]
    small = F.interpolate(held_out.pick(shown)[0].float(), (96, 96), mode="area")
    metrics = {
        "eval_loss": losses.double().mean().item(),
        "eval_accuracy": hit.double().mean().item(),
        "eval_balanced_accuracy": sum(recall.values()) / len(recall),
        "eval_samples": len(targets),
    }
    predictions = {"logits": logits, "prediction": prediction, "target": targets}
    predictions |= {"shown": shown, "image": small.round().byte()}
    return metrics, predictions, {"classes": classes}


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate, write the run folder and RUN_DIR/pretrained; return the last metrics."""
    config = parse(Config, argv)
    with Run(config, "pictures") as run:
        accelerator = run.accelerator
        load = functools.partial(load_data, device=accelerator.device)
        train_set, eval_set, train, held_out, network, metadata = run.load(load)
        classes, plan = metadata["classes"], metadata.pop("plan")
        colours = metadata["mean"], metadata["std"]
        weights = 1 / train.labels.bincount()[train.labels] if config.balance else None
        loaders = make_loaders(accelerator, train_set, eval_set, config, weights=weights)
        network.reset_classifier(len(classes))
        head = network.get_classifier()
        nn.init.zeros_(head.weight)
        model = head if config.freeze else network.to(memory_format=torch.channels_last)
        groups = [{"params": [*head.parameters()]}]
        if not config.freeze:
            own = {*head.parameters()}
            body = [weight for weight in network.parameters() if weight not in own]
            groups += [{"params": body, "lr": config.peak_learning_rate / 3}]
        optimizer = make_optimizer(accelerator, groups, config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, *loaders, scheduler
        )
        run.begin(model, metadata, plan)

        def compute_logits(images: torch.Tensor) -> torch.Tensor:
            if not config.freeze:  # else they are features
                images = normalise(cut_centre(images, config.size), *colours)
            return model(images)

        for epoch in run.epochs():
            for layer in network.train().modules():
                if isinstance(layer, nn.BatchNorm2d):  # it keeps its pretrained mean and variance
                    layer.eval()
            for images, labels, indices in run.steps(train_loader):
                with accelerator.accumulate(model):
                    if not config.freeze:
                        images = augment(images, indices, epoch, config)
                        images = normalise(images, *colours)
                    logits = model(images)
                    losses = F.cross_entropy(
                        logits, labels, reduction="none", label_smoothing=config.label_smoothing
                    )
                    accelerator.backward(run.step_mean(losses))
                    run.clip_and_check(optimizer)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(loss=losses, accuracy=logits.argmax(1) == labels)
                if run.must_save():
                    run.save()
            network.eval()
            results = validate(accelerator, compute_logits, eval_loader, held_out, classes)
            run.end_epoch(*results)
        run.print(photos.describe_recall(results[1], classes))
        metrics = run.finish(f"python app.py {config.run_dir}")
    write_network(run, network, metadata)
    return metrics


if __name__ == "__main__":
    startup.run(main)
