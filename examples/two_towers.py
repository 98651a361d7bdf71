"""Match lower halves of digits to upper halves, with two towers and a contrastive loss.

python examples/two_towers.py
accelerate launch --config_file accelerate_configs/2cpu.yaml examples/two_towers.py --resume auto
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/
from trainkit import Run, make_loaders, make_optimizer, make_scheduler, startup  # pip install .

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from trainkit.config import MayChange, Schedule, TrainingConfig, parse
from trainkit.pictures import load_unlabelled

WIDTH = 64
NUM_CHOICES = 1000  # in an evaluation: chance is 0.001


class Towers(nn.Module):
    """Maps pictures (n, 1, 28, 28) to an embedding of each half, (n, 2, WIDTH)."""

    def __init__(self, hidden: int = 256):
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Flatten(), nn.Linear(392, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))
            for _ in range(2)
        )
        # CLIP's begins at 14 = exp(2 * 1.3). It is not a scalar, because FSDP2 shards no scalars.
        self.scale = nn.Parameter(torch.tensor([1.3]))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        halves = (pictures / 127.5 - 1).chunk(2, dim=2)
        rows = [tower(half) for tower, half in zip(self.towers, halves, strict=True)]
        return F.normalize(torch.stack(rows, 1), dim=2) * self.scale.exp()


def contrast(rows: torch.Tensor, choices: torch.Tensor, first: int) -> torch.Tensor:
    """Return InfoNCE in both directions, (n,): row i belongs to choice first + i alone."""
    right = first + torch.arange(len(rows), device=rows.device)
    upper = F.cross_entropy(rows[:, 0] @ choices[:, 1].T, right, reduction="none")
    lower = F.cross_entropy(rows[:, 1] @ choices[:, 0].T, right, reduction="none")
    return (upper + lower) / 2


def validate(run: Run, model: nn.Module, loader: DataLoader) -> dict[str, float]:
    """Measure how often the right half is nearest of NUM_CHOICES. Every process must call this."""
    rows = run.predict(loader, lambda batch: model(batch[0]))  # of all samples, in their order
    loss_sum = num_found = 0.0
    for part in rows.split(NUM_CHOICES):
        nearest = (part[:, 0] @ part[:, 1].T).argmax(1)
        num_found += (nearest == torch.arange(len(part), device=nearest.device)).sum().item()
        loss_sum += contrast(part, part, 0).sum().item()
    num = len(rows)
    return {"eval_loss": loss_sum / num, "eval_accuracy": num_found / num, "eval_samples": num}


@dataclass
class Config(TrainingConfig):
    dataset: MayChange[str] = str(Path(__file__).resolve().parents[1] / "data" / "mnist")
    """folder or Hub id of pictures"""
    eval_data: MayChange[str | None] = None
    """other pictures to evaluate on (default: a split called test, or a fifth of each class)"""
    run_dir: Path = Path("runs/two_towers")
    epochs: int = 5
    batch_size: int = 240
    weight_decay: float = 0.05
    schedule: Schedule = "cosine"
    warmup: float = 0.1


def load_data(config: Config) -> tuple:
    """Load pictures without labels: a batch is pictures and their indices. Last are plan lines."""
    return load_unlabelled(config.dataset, 28, config.eval_data)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, write the run folder; return the last metrics."""
    config = parse(Config, argv)
    with Run(config, "two_towers") as run:
        accelerator = run.accelerator
        train_set, eval_set, plan = run.load(load_data)
        train_loader, eval_loader = make_loaders(accelerator, train_set, eval_set, config)
        model = Towers()
        optimizer = make_optimizer(accelerator, model.parameters(), config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, scheduler
        )
        run.begin(model, {"script": Path(__file__).stem}, plan)

        for _ in run.epochs():
            for pictures, _ in run.steps(train_loader):
                with accelerator.accumulate(model):
                    rows = model(pictures)
                    # The others of the whole batch, also those that other processes have.
                    losses = contrast(rows, *run.gather(rows))
                    accelerator.backward(run.step_mean(losses))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(loss=losses)
                if run.end_step():
                    run.save()
            run.end_epoch(validate(run, model, eval_loader))
        return run.finish()


if __name__ == "__main__":
    startup.run(main)
