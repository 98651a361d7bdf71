"""Colour pictures, 32 x 32: which capital letter is it, in any colour on any colour?

python examples/colour_pictures.py --num-workers 2
python examples/colour_pictures.py --norm batch
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/
from trainkit import Run, arguments, make_loaders, make_optimizer, make_scheduler, shorten, startup

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from PIL import Image, ImageDraw, ImageFont
from torch import nn
from torch.utils.data import Dataset
from torchvision.models import resnet18
from torchvision.transforms import v2

from trainkit.data.small import fit_to_small_set, parse_sizes

LETTERS = "ABCDEFGH"
FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"  # installed anyway
TO_TENSOR = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.25])]
AUGMENT = [
    v2.RandomAffine(degrees=10, translate=(0.1, 0.1), scale=(0.8, 1.1)),
    v2.ColorJitter(brightness=0.3, contrast=0.3, saturation=0.3),
]


class Pictures(Dataset):
    """A sample: picture (3, 32, 32), its class, its number."""

    def __init__(self, pictures: Sequence, labels: list[int], transforms: list):
        self.pictures, self.labels = pictures, labels
        self.transform = v2.Compose([*transforms, *TO_TENSOR])

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        return self.transform(self.pictures[index]), self.labels[index], index


def draw_letters(fonts: str, num: int, seed: int) -> tuple[list[Image.Image], list[int]]:
    """Pictures of letters and which they are."""
    rng, pictures, labels = np.random.default_rng(seed), [], [n % len(LETTERS) for n in range(num)]
    files = sorted(str(path) for path in FONTS.glob(fonts))
    for label in labels:
        paper, ink = (tuple(colour) for colour in rng.integers(256, size=(2, 3)).tolist())
        font = ImageFont.truetype(rng.choice(files), rng.integers(20, 28).item())
        pictures.append(Image.new("RGB", (32, 32), paper))
        ImageDraw.Draw(pictures[-1]).text((16, 16), LETTERS[label], ink, font, anchor="mm")
    return pictures, labels


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.Parser(__doc__)
    add = parser.add_argument_group("problem").add_argument
    add("--num-pictures", type=int, default=4000, help="to train on; a fourth of it to evaluate on")
    add("--dataset", default=None, help="folder with a folder of pictures for each class")
    norm = "group: the numbers do not depend on the processes; batch: they do"
    add("--norm", choices=("group", "batch"), default="group", help=norm)
    arguments.add_training_arguments(parser)
    arguments.add_run_arguments(parser, run_dir="runs/colour_pictures")
    sgd = {"optimizer": "sgd", "schedule": "onecycle", "learning_rate": 0.05, "weight_decay": 5e-4}
    parser.set_defaults(**sgd, warmup=0.2)
    return parse_sizes(parser, argv, epochs=6, batch_size=60, drop_last=False)


def load_data(args: argparse.Namespace) -> tuple[Dataset, Dataset, Sequence[str], dict[str, str]]:
    """The folder of --dataset; or fonts of one family to train on, of another to evaluate on."""
    if args.dataset is None:
        train_set = Pictures(*draw_letters("DejaVu*-*.ttf", args.num_pictures, 1), AUGMENT)
        drawn = draw_letters("STIXGeneral*.ttf", args.num_pictures // 4, 2)
        return train_set, Pictures(*drawn, []), LETTERS, {}
    from trainkit.data.pictures import describe_values, load_images

    sets, seen, classes = [], [], None
    for split, transforms in (("train", AUGMENT), ("test", [])):  # held out if there is no test/
        loaded, classes, some = load_images(args.dataset, split, 32, None, classes, mode="RGB")
        pictures, labels = loaded.tensors
        sets.append(Pictures(pictures, labels.tolist(), transforms))
        seen.append(some)
    plan = {"classes": shorten(classes)} | describe_values(*seen)
    return *sets, classes, plan | fit_to_small_set(args, len(sets[0]))


def make_model(accelerator: Accelerator, norm: str, num_classes: int) -> nn.Module:
    """ResNet-18, with GroupNorm in the place of BatchNorm unless that is asked for.

    BatchNorm takes mean and variance of the samples that a process has at a time, so with it all
    losses depend on the number of processes and of micro-batches. On GPUs SyncBatchNorm takes them
    over all processes: what is left is the number of micro-batches. It does not exist on CPUs.
    """
    layer = nn.BatchNorm2d if norm == "batch" else functools.partial(nn.GroupNorm, 8)
    model = resnet18(num_classes=num_classes, norm_layer=layer, zero_init_residual=True)
    if accelerator.num_processes > 1 and accelerator.device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model


def compute_losses(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """The loss of each sample, and whether it was recognised."""
    pictures, labels, _ = batch
    logits = model(pictures)
    loss = F.cross_entropy(logits, labels, reduction="none")
    return {"loss": loss, "accuracy": logits.argmax(1) == labels}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, write the run folder; return the last metrics."""
    args = parse_args(argv)
    with Run(args, "colour_pictures") as run:
        accelerator = run.accelerator
        train_set, eval_set, classes, plan = run.load(load_data)
        train_loader, eval_loader = make_loaders(accelerator, train_set, eval_set, args)
        model = make_model(accelerator, args.norm, len(classes))
        optimizer = make_optimizer(accelerator, model.parameters(), args)
        scheduler = make_scheduler(optimizer, args, run.steps_per_epoch)
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
