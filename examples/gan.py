"""A GAN that draws digits: two models, two optimizers, two schedules.

python examples/gan.py                 see samples-*.png in runs/gan/ after each epoch
accelerate launch --config_file accelerate_configs/2cpu.yaml examples/gan.py --accumulate 2
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from torchvision.utils import save_image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/

from datakit.pictures import load_images
from trainkit import arguments, startup
from trainkit.optim import make_optimizer, make_scheduler
from trainkit.order import InMemory, keyed_uniform, make_loaders
from trainkit.run import Run

MNIST = Path(__file__).resolve().parents[1] / "data" / "mnist"
NUM_NOISE = 64
FIXED_SEED = 0  # of the noise that evaluation and the drawn samples use


class Generator(nn.Sequential):
    """Noise (n, 64) to pictures (n, 1, 28, 28), -1 to 1; for BatchNorm see colour_pictures.py."""

    def __init__(self, width: int = 32):
        super().__init__(
            nn.Linear(NUM_NOISE, 2 * width * 49), nn.Unflatten(1, (2 * width, 7, 7)), nn.SiLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.GroupNorm(4, width), nn.SiLU(),
            nn.ConvTranspose2d(width, 1, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip


class Discriminator(nn.Sequential):
    """Pictures to logits (n, 1): above 0 is taken for real. SiLU: rounding can cross no kink."""

    def __init__(self, width: int = 32):
        super().__init__(
            nn.Conv2d(1, width, 4, 2, 1), nn.SiLU(),
            nn.Conv2d(width, 2 * width, 4, 2, 1), nn.GroupNorm(4, 2 * width), nn.SiLU(),
            nn.Flatten(), nn.Linear(2 * width * 49, 1),
        )  # fmt: skip


def scale(pictures: torch.Tensor) -> torch.Tensor:
    return pictures / 127.5 - 1


def make_noise(seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
    """Noise that belongs to a sample, so that it is the same on any number of processes."""
    return keyed_uniform(seed, epoch, indices, NUM_NOISE) * 2 - 1


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument_group("problem").add_argument
    add("--dataset", default=str(MNIST), help="folder or Hub id of pictures")
    arguments.add_training_arguments(parser)
    arguments.add_run_arguments(parser, run_dir="runs/gan")
    parser.set_defaults(epochs=5, learning_rate=5e-4, schedule="cosine", optimizer="adam")
    return parser.parse_args(argv)


def load_data(args: argparse.Namespace) -> tuple[InMemory, InMemory]:
    """Pictures alone: a batch is pictures and their indices."""
    sets = (load_images(args.dataset, split, 28)[0] for split in ("train", "test"))
    return tuple(InMemory(pictures) for pictures, _ in (part.tensors for part in sets))


@torch.inference_mode()
def validate(
    accelerator: Accelerator, generator: nn.Module, discriminator: nn.Module, loader: DataLoader
) -> dict[str, float]:
    """The discriminator on held-out pictures and as many drawn ones. Every process must call it."""
    sums = torch.zeros(3, device=accelerator.device)
    for pictures, indices in loader:
        real = discriminator(scale(pictures))
        fake = discriminator(generator(make_noise(FIXED_SEED, 0, indices)))
        sums[0] += F.softplus(-real).sum() + F.softplus(fake).sum()
        sums[1] += (fake > 0).sum()
        sums[2] += len(pictures)
    loss, num_fooled, num = accelerator.reduce(sums, reduction="sum").tolist()
    return {"eval_loss": loss / num, "eval_fooled": num_fooled / num, "eval_samples": int(num)}


@torch.inference_mode()
def draw(generator: nn.Module, device: torch.device, path: Path) -> None:
    """Sixty-four pictures of the same noise each time."""
    noise = make_noise(FIXED_SEED, 0, torch.arange(64, device=device))
    save_image(generator(noise), path, normalize=True, value_range=(-1, 1))


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, draw, write the run folder; return the last metrics."""
    args = parse_args(argv)
    with Run(args, "gan") as run:
        accelerator = run.accelerator
        train_set, eval_set = run.load(load_data)
        train_loader, eval_loader = make_loaders(accelerator, train_set, eval_set, args)
        models = Generator(), Discriminator()
        # DCGAN's betas: a group may bring any option of its optimizer.
        groups = ([{"params": model.parameters(), "betas": (0.5, 0.999)}] for model in models)
        optimizers = [make_optimizer(accelerator, group, args) for group in groups]
        steps_per_epoch = math.ceil(len(train_loader) / args.accumulate)
        schedulers = [make_scheduler(each, args, steps_per_epoch) for each in optimizers]
        generator, discriminator, *both, train_loader, eval_loader = accelerator.prepare(
            *models, *optimizers, *schedulers, train_loader, eval_loader
        )
        optimizers, schedulers = both[:2], both[2:]
        run.begin((generator, discriminator), train_loader, {"script": Path(__file__).stem})

        for epoch in run.epochs():
            for pictures, indices in run.steps():
                with accelerator.accumulate(generator, discriminator):
                    drawn = generator(make_noise(args.seed, epoch, indices))
                    logits = discriminator(torch.cat((scale(pictures), drawn.detach())))
                    real, fake = logits.tensor_split(2)
                    # softplus(-x) is the cross-entropy of a logit that should say real
                    loss_d = F.softplus(-real).sum() + F.softplus(fake).sum()
                    accelerator.backward(run.step_mean(loss_d))
                    loss_g = F.softplus(-discriminator(drawn)).sum()
                    # `inputs`: nothing is added to the discriminator's gradients.
                    accelerator.backward(run.step_mean(loss_g), inputs=[*models[0].parameters()])
                    # Both steps come after both passes: --accumulate then changes no number.
                    for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                        run.clip_and_check(optimizer)
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
                run.add(len(pictures), loss_discriminator=loss_d, loss_generator=loss_g)
            if accelerator.is_main_process:
                draw(models[0], accelerator.device, args.run_dir / f"samples-{epoch + 1:03d}.png")
            run.end_epoch(validate(accelerator, generator, discriminator, eval_loader))
        return run.finish()


if __name__ == "__main__":
    startup.run(main)
