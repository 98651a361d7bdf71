"""Train a GAN that draws digits, with two models, two optimizers and two schedules.

python examples/gan.py                 see samples-*.png in runs/gan/ after each epoch
accelerate launch --config_file accelerate_configs/2cpu.yaml examples/gan.py --accumulate 2
"""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/
from trainkit import (  # pip install .
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
from torchvision.utils import save_image

from trainkit.config import MayChange, Optimizer, Schedule, TrainingConfig, parse
from trainkit.pictures import load_unlabelled

NUM_NOISE = 64
FIXED_SEED = 0  # of the noise that evaluation and the drawn samples use


class Generator(nn.Sequential):
    """Maps noise (n, 64) to pictures (n, 1, 28, 28), -1 to 1. No BatchNorm: docs/loop.md."""

    def __init__(self, width: int = 32):
        super().__init__(
            nn.Linear(NUM_NOISE, 2 * width * 49), nn.Unflatten(1, (2 * width, 7, 7)), nn.SiLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.GroupNorm(4, width), nn.SiLU(),
            nn.ConvTranspose2d(width, 1, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip


class Discriminator(nn.Sequential):
    """Maps pictures to logits (n, 1), where above 0 means real. Unlike ReLU, SiLU is smooth."""

    def __init__(self, width: int = 32):
        super().__init__(
            nn.Conv2d(1, width, 4, 2, 1), nn.SiLU(),
            nn.Conv2d(width, 2 * width, 4, 2, 1), nn.GroupNorm(4, 2 * width), nn.SiLU(),
            nn.Flatten(), nn.Linear(2 * width * 49, 1),
        )  # fmt: skip


def scale(pictures: torch.Tensor) -> torch.Tensor:
    return pictures / 127.5 - 1


def make_noise(seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
    """Return noise that depends on the sample's index, so it is the same for any process count."""
    return keyed_uniform(seed, epoch, indices, NUM_NOISE) * 2 - 1


@dataclass
class Config(TrainingConfig):
    dataset: MayChange[str] = str(Path(__file__).resolve().parents[1] / "data" / "mnist")
    """folder or Hub id of pictures"""
    eval_data: MayChange[str | None] = None
    """other pictures to evaluate on (default: a split called test, or a fifth of each class)"""
    run_dir: Path = Path("runs/gan")
    epochs: int = 3
    learning_rate: float = 5e-4
    optimizer: Optimizer = "adam"
    schedule: Schedule = "cosine"


def load_data(config: Config) -> tuple:
    """Load pictures without labels: a batch is pictures and their indices. Last are plan lines."""
    return load_unlabelled(config.dataset, 28, config.eval_data)


def compute_losses(
    generator: nn.Module, discriminator: nn.Module, batch: tuple[torch.Tensor, ...]
) -> dict[str, torch.Tensor]:
    """Evaluate the discriminator on held-out pictures and as many drawn ones."""
    pictures, indices = batch
    real = discriminator(scale(pictures))
    fake = discriminator(generator(make_noise(FIXED_SEED, 0, indices)))
    return {"loss": F.softplus(-real) + F.softplus(fake), "fooled": fake > 0}


@torch.no_grad()
def draw(accelerator: Accelerator, generator: nn.Module, path: Path) -> None:
    """Draw sixty-four pictures, from the same noise each time. Every process must call this."""
    noise = make_noise(FIXED_SEED, 0, torch.arange(64, device=accelerator.device))
    pictures = generator(noise)  # if it is sharded, it gathers its weights from all processes
    if accelerator.is_main_process:
        save_image(pictures, path, normalize=True, value_range=(-1, 1))


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, draw, write the run folder; return the last metrics."""
    config = parse(Config, argv)
    with Run(config, "gan") as run:
        accelerator = run.accelerator
        train_set, eval_set, plan = run.load(load_data)
        train_loader, eval_loader = make_loaders(accelerator, train_set, eval_set, config)
        models = Generator(), Discriminator()
        # DCGAN's betas: a group may bring any option of its optimizer.
        groups = ([{"params": model.parameters(), "betas": (0.5, 0.999)}] for model in models)
        optimizers = [make_optimizer(accelerator, group, config) for group in groups]
        schedulers = [make_scheduler(o, config, run.steps_per_epoch) for o in optimizers]
        generator, discriminator, *rest, train_loader, eval_loader = accelerator.prepare(
            *models, *optimizers, *schedulers, train_loader, eval_loader
        )
        optimizers, schedulers = rest[:2], rest[2:]
        run.begin((generator, discriminator), {"script": Path(__file__).stem}, plan)
        for epoch in run.epochs():
            for pictures, indices in run.steps(train_loader):
                with accelerator.accumulate(generator, discriminator):
                    drawn = generator(make_noise(config.seed, epoch, indices))
                    logits = discriminator(torch.cat((scale(pictures), drawn.detach())))
                    real, fake = logits.tensor_split(2)
                    # softplus(-x) is the cross-entropy of a logit that should say real
                    losses_d = F.softplus(-real) + F.softplus(fake)
                    accelerator.backward(run.step_mean(losses_d))
                    # Not through DistributedDataParallel, which would wait for the gradients of the
                    # discriminator; `inputs`: nothing is added to them.
                    losses_g = F.softplus(-models[1](drawn))
                    accelerator.backward(run.step_mean(losses_g), inputs=[*models[0].parameters()])
                    # Both steps come after both passes: --accumulate then changes no number.
                    for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
                run.add(loss_discriminator=losses_d, loss_generator=losses_g)
                if run.end_step():
                    run.save()
            draw(accelerator, models[0], config.run_dir / f"samples-{epoch + 1:03d}.png")
            losses = functools.partial(compute_losses, generator, discriminator)
            run.end_epoch(run.evaluate(eval_loader, losses))
        return run.finish()


if __name__ == "__main__":
    startup.run(main)
