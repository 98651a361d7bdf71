"""Train a pretrained network on your own colour pictures, in a folder for each class.

python examples/pictures.py --dataset fruit
python examples/pictures.py --dataset fruit --freeze    trains the last layer alone: much faster
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/
from trainkit import Run, keyed_uniform, make_loaders, make_optimizer, make_scheduler, startup

import torch
import torch.nn.functional as F
from torch import nn

from trainkit.config import Schedule, Share, parse
from trainkit.pictures import backbones, photos
from trainkit.pictures.backbones import make_model as make_model  # predict.py calls it
from trainkit.pictures.photos import Photos, normalise


@dataclass
class Config(photos.PhotoConfig):
    balance: bool = False  # draw all classes equally often
    smallest_crop: Share = 0.6  # of the area of a picture that a random crop has
    colour: Share = 0.3  # largest change of brightness, contrast and saturation
    mix: Literal["mixup", "cutmix"] | None = None  # blend a second picture in, or a piece of it
    label_smoothing: Share = 0.1  # of the training loss
    run_dir: Path = Path("runs/pictures")
    batch_size: int = 32
    eval_batch_size: int = 64
    schedule: Schedule = "onecycle"
    warmup: float = 0.2

    def __post_init__(self):
        self.learning_rate = self.learning_rate or (2e-3 if self.freeze else 1e-3)
        if self.weight_decay is None:
            self.weight_decay = 1.0 if self.freeze else 0.05


def augment(images: torch.Tensor, keys: torch.Tensor, epoch: int, config: Config) -> torch.Tensor:
    """Crop, flip and colour each picture by amounts fixed by (seed, epoch, key) alone."""
    numbers = keyed_uniform(config.seed, epoch, keys, 8)
    area = 1 - (1 - config.smallest_crop) * numbers[:, 0]
    stretch = torch.exp((numbers[:, 1] - 0.5) * math.log(4 / 3))
    sides = torch.stack((area.sqrt() * stretch, area.sqrt() / stretch), 1).clamp(max=1)
    centres = (numbers[:, 3:5] * 2 - 1) * (1 - sides)
    flips = torch.where(numbers[:, 2:3] < 0.5, -1, 1)
    places = (2 * torch.arange(config.size, device=images.device) + 1) / config.size - 1
    x, y = places * sides[:, :1] * flips + centres[:, :1], places * sides[:, 1:] + centres[:, 1:]
    grid = torch.stack(torch.broadcast_tensors(x[:, None], y[:, :, None]), -1)
    images = F.grid_sample(images.float(), grid, align_corners=False, padding_mode="border")
    return photos.colour(images, 1 + config.colour * (2 * numbers[:, 5:] - 1))


def make_input(
    batch: tuple, epoch: int, config: Config, train: Photos
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the network gets, and the share of each class in each sample."""
    images, labels, indices = batch
    targets = F.one_hot(labels, len(train.classes)).float()
    if config.freeze:  # the images are features
        return images, targets
    images = augment(images, indices, epoch, config)
    if config.mix is None:
        return images, targets
    numbers = keyed_uniform(config.seed, epoch, keys := indices + len(train), 4)
    others, labels, _ = train.pick((numbers[:, 0] * len(train)).long().cpu())
    others = augment(others.to(images.device), keys, epoch, config)
    second = F.one_hot(labels.to(images.device), len(train.classes))
    return photos.mix(config.mix, (images, targets), (others, second), numbers[:, 1:])


def validate(run: Run, model: nn.Module, loader: Any, held_out: Photos, about: dict) -> tuple:
    """Return metrics, predictions and their metadata. Every process must call this."""
    targets, classes = held_out.labels, held_out.classes
    logits = run.predict(loader, lambda batch: model(normalise(batch[0], about)).float())
    prediction = logits.argmax(1)
    losses = F.cross_entropy(logits, targets, reduction="none").double()
    hits = (prediction == targets).double()
    recalls = [hits[targets == label].mean().item() for label in targets.unique()]
    metrics = {"eval_loss": losses.mean().item(), "eval_accuracy": hits.mean().item()}
    metrics |= {"eval_balanced_accuracy": sum(recalls) / len(recalls), "eval_samples": len(targets)}
    predictions = {"logits": logits, "prediction": prediction, "target": targets}
    return metrics, predictions | photos.hardest(held_out, losses), {"classes": classes}


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate, write the run folder and RUN_DIR/pretrained; return the last metrics."""
    config = parse(Config, argv)
    with Run(config, "pictures") as run:
        accelerator = run.accelerator
        train, held_out, network, about, plan = run.load(backbones.load_data)
        # With --freeze the sets are features, which are computed once.
        head, sets = backbones.begin(accelerator, config, network, about, train, held_out)
        model, groups = head, [{"params": head.parameters()}]
        if not config.freeze:
            body = [
                w for w in network.parameters() if all(w is not own for own in head.parameters())
            ]
            model = network.to(memory_format=torch.channels_last)
            groups += [{"params": body, "lr": config.peak_learning_rate / 3}]
        weights = 1 / train.labels.bincount()[train.labels] if config.balance else None
        loaders = make_loaders(accelerator, *sets, config, weights=weights)
        optimizer = make_optimizer(accelerator, groups, config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, *loaders, scheduler
        )
        run.begin(model, about | {"script": Path(__file__).stem}, plan)

        for epoch in run.epochs():
            backbones.train_but_norms(model)  # they keep their mean and variance
            for batch in run.steps(train_loader):
                with accelerator.accumulate(model):
                    images, targets = make_input(batch, epoch, config, train)
                    logits = model(normalise(images, about))
                    losses = F.cross_entropy(
                        logits, targets, reduction="none", label_smoothing=config.label_smoothing
                    )
                    accelerator.backward(run.step_mean(losses))
                    run.clip_and_check(optimizer)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(loss=losses, accuracy=logits.argmax(1) == batch[1])
                if run.end_step():
                    run.save()
            run.end_epoch(*validate(run, model, eval_loader, held_out, about))
        backbones.write_results(run, network, about)
        return run.finish(f"python app.py {config.run_dir}")


if __name__ == "__main__":
    startup.run(main)
