"""Classify colour pictures, 32 x 32: capital letters, in any colour on any colour.

python examples/colour_pictures.py --num-workers 2
python examples/colour_pictures.py --norm batch
"""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/
from trainkit import Run, make_loaders, make_optimizer, make_scheduler, shorten, startup

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from PIL import Image, ImageDraw, ImageFont
from torch import nn
from torchvision.models import resnet18
from torchvision.transforms import v2

from trainkit.config import UNSET, Count, Optimizer, Schedule, TrainingConfig, parse
from trainkit.data.small import SMALL, fit_to_size

LETTERS = "ABCDEFGH"
FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"  # come with matplotlib
TO_TENSOR = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.25])]
AUGMENT = [v2.RandomAffine(10, (0.1, 0.1), (0.8, 1.1)), v2.ColorJitter(0.3, 0.3, 0.3)]
LARGE = {"batch_size": 60, "epochs": 6, "drop_last": False}  # for fonts, or many pictures


class Pictures(torch.utils.data.Dataset):
    """A sample is a picture (3, 32, 32), its class and its index."""

    def __init__(self, pictures: Sequence, labels: list[int], transforms: list):
        self.pictures, self.labels = pictures, labels
        self.transform = v2.Compose([*transforms, *TO_TENSOR])

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        return self.transform(self.pictures[index]), self.labels[index], index


def draw_letters(fonts: str, num: int, seed: int) -> tuple[list[Image.Image], list[int]]:
    """Draw pictures of letters, and return them with their classes."""
    rng, pictures, labels = np.random.default_rng(seed), [], [n % len(LETTERS) for n in range(num)]
    files = sorted(str(path) for path in FONTS.glob(fonts))
    for label in labels:
        paper, ink = (tuple(colour) for colour in rng.integers(256, size=(2, 3)).tolist())
        font = ImageFont.truetype(rng.choice(files), rng.integers(20, 28).item())
        pictures.append(Image.new("RGB", (32, 32), paper))
        ImageDraw.Draw(pictures[-1]).text((16, 16), LETTERS[label], ink, font, anchor="mm")
    return pictures, labels


@dataclass
class Config(TrainingConfig):
    num_pictures: Count = 4000  # to train on; a fourth of it to evaluate on
    dataset: str | None = None  # folder with a folder for each class (default: drawn letters)
    norm: Literal["group", "batch"] = "group"  # the numbers of batch depend on the processes
    run_dir: Path = Path("runs/colour_pictures")
    epochs: int = UNSET
    batch_size: int = UNSET
    drop_last: bool = UNSET
    learning_rate: float = 0.05
    weight_decay: float = 5e-4
    optimizer: Optimizer = "sgd"
    schedule: Schedule = "onecycle"
    warmup: float = 0.2


def load_data(config: Config) -> tuple:
    """Load --dataset, or draw letters: fonts of one family to train on, of another to evaluate."""
    if config.dataset is None:
        fit_to_size(config, SMALL, LARGE)
        train_set = Pictures(*draw_letters("DejaVu*-*.ttf", config.num_pictures, 1), AUGMENT)
        drawn = draw_letters("STIXGeneral*.ttf", config.num_pictures // 4, 2)
        return train_set, Pictures(*drawn, []), LETTERS, {}
    from trainkit.data.pictures import describe_values, load_images

    sets, seen, classes = [], [], None
    for split, transforms in (("train", AUGMENT), ("test", [])):  # held out if there is no test/
        loaded, classes, some = load_images(config.dataset, split, 32, None, classes, mode="RGB")
        sets.append(Pictures(loaded.tensors[0], loaded.tensors[1].tolist(), transforms))
        seen.append(some)
    plan = {"classes": shorten(classes)} | describe_values(*seen)
    return *sets, classes, plan | fit_to_size(config, len(sets[0]), LARGE)


def make_model(accelerator: Accelerator, norm: str, num_classes: int) -> nn.Module:
    """Make a ResNet-18, with GroupNorm instead of BatchNorm unless BatchNorm is asked for.

    BatchNorm uses the mean and variance of one process's micro-batch, so all losses depend on how a
    batch is split; with SyncBatchNorm, which needs GPUs, they depend on the micro-batches alone.
    """
    layer = nn.BatchNorm2d if norm == "batch" else functools.partial(nn.GroupNorm, 8)
    model = resnet18(num_classes=num_classes, norm_layer=layer, zero_init_residual=True)
    if accelerator.num_processes > 1 and accelerator.device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model


def compute_losses(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Return the loss of each sample, and whether it was classified correctly."""
    pictures, labels, _ = batch
    logits = model(pictures)
    loss = F.cross_entropy(logits, labels, reduction="none")
    return {"loss": loss, "accuracy": logits.argmax(1) == labels}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, write the run folder; return the last metrics."""
    config = parse(Config, argv)
    with Run(config, "colour_pictures") as run:
        accelerator = run.accelerator
        train_set, eval_set, classes, plan = run.load(load_data)
        train_loader, eval_loader = make_loaders(accelerator, train_set, eval_set, config)
        model = make_model(accelerator, config.norm, len(classes))
        optimizer = make_optimizer(accelerator, model.parameters(), config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, scheduler
        )
        run.begin(model, {"script": Path(__file__).stem, "classes": classes}, plan)

        for _ in run.epochs():
            for batch in run.steps(train_loader):
                with accelerator.accumulate(model):
                    values = compute_losses(model, batch)
                    accelerator.backward(run.step_mean(values["loss"]))
                    run.clip_and_check(optimizer)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(**values)
                if run.must_save():
                    run.save()
            run.end_epoch(run.evaluate(eval_loader, lambda batch: compute_losses(model, batch)))
        return run.finish()


if __name__ == "__main__":
    startup.run(main)
