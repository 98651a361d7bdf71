"""A run with weighted draws, weighted losses and a state of its own, for tests to start."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainkit import InMemory, Run, make_loaders, make_optimizer

import torch
import torch.nn.functional as F
from torch import nn

from trainkit.config import MayChange, TrainingConfig, parse

NUM_SAMPLES = 43  # a prime
WEIGHTS = torch.arange(NUM_SAMPLES) % 4  # of a sample; every fourth is never drawn
OF_CLASSES = torch.tensor([0.3, 1.7, 0.9])
SAMPLES = torch.linspace(-1, 1, NUM_SAMPLES)[:, None], torch.arange(NUM_SAMPLES) % 3


def compute_losses(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return {"loss": losses, "weights": OF_CLASSES[batch[1]]}


@dataclass
class Config(TrainingConfig):
    power: MayChange[float] = 1.0
    batch_size: int = 12
    epochs: int = 20
    log_every: int | None = 1
    pictures: bool = False


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Count in run.state how often each sample was drawn; stop at the 7th draw of number 1."""
    config = parse(Config, argv)
    with Run(config, "weighted") as run:
        accelerator = run.accelerator
        sets = run.load(lambda _: (InMemory(*SAMPLES), InMemory(*SAMPLES)))
        weights = WEIGHTS.double() ** config.power
        train_loader, eval_loader = make_loaders(accelerator, *sets, config, weights=weights)
        model = nn.Linear(1, 3)
        optimizer = make_optimizer(accelerator, model.parameters(), config)
        model, optimizer, train_loader, eval_loader = accelerator.prepare(
            model, optimizer, train_loader, eval_loader
        )
        run.begin(model, {})
        run.evaluate(eval_loader, lambda batch: compute_losses(model, batch))  # before any step
        for _ in run.epochs():
            for batch in run.steps(train_loader):
                with accelerator.accumulate(model):
                    values = compute_losses(model, batch)
                    accelerator.backward(run.step_mean(values["loss"], weights=values["weights"]))
                    run.clip_and_check(optimizer)
                    optimizer.step()
                    optimizer.zero_grad()
                run.add(**values)
                drawn = torch.bincount(batch[2], minlength=NUM_SAMPLES)
                drawn = accelerator.reduce(drawn, reduction="sum")
                before = torch.tensor(run.state.get("drawn", [0] * NUM_SAMPLES))
                run.state["drawn"] = (before + drawn).tolist()
                if run.state["drawn"][1] >= 7:
                    run.stop()
                if run.must_save():
                    run.save()
            run.end_epoch(run.evaluate(eval_loader, lambda batch: compute_losses(model, batch)))
        run.print(f"drawn {run.state['drawn']}")
        return run.finish()
