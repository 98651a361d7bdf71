"""A run with weighted draws, weighted losses and a state of its own, for tests to start."""

from dataclasses import dataclass
from functools import partial

from trainkit import InMemory, Run, make_loaders, make_optimizer

import torch
import torch.nn.functional as F
from torch import nn

from trainkit.config import MayChange, TrainingConfig, parse

NUM_SAMPLES = 43  # a prime
WEIGHTS = torch.arange(NUM_SAMPLES) % 4  # of a sample; every fourth is never drawn
OF_CLASSES = torch.tensor([0.3, 1.7, 0.9])
FLAGS = ["--batch-size", "12", "--epochs", "20", "--log-every", "1", "--no-pictures"]
SAMPLES = torch.linspace(-1, 1, NUM_SAMPLES)[:, None], torch.arange(NUM_SAMPLES) % 3


def compute_losses(model, batch):
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return {"loss": losses, "weights": OF_CLASSES[batch[1]]}


@dataclass
class Config(TrainingConfig):
    power: MayChange[float] = 1.0


def main(argv):
    """Count in run.state how often sample 1 was drawn; stop at its 7th draw."""
    config = parse(Config, [*FLAGS, *argv])
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
        evaluate = partial(run.evaluate, eval_loader, partial(compute_losses, model))
        evaluate()  # before any step
        for _ in run.epochs():
            for batch in run.steps(train_loader):
                with accelerator.accumulate(model):
                    values = compute_losses(model, batch)
                    accelerator.backward(run.step_mean(values["loss"], weights=values["weights"]))
                    run.clip_and_check(optimizer)
                    with torch.no_grad():
                        model(batch[0])  # computed before the step, and not to be used after it
                    optimizer.step()
                    optimizer.zero_grad()
                run.add(**values)
                drawn = accelerator.reduce((batch[2] == 1).sum(), reduction="sum")
                run.state["drawn"] = run.state.get("drawn", 0) + int(drawn)
                if run.state["drawn"] >= 7:
                    run.stop()
                if run.end_step():
                    run.save()
            run.end_epoch(evaluate())
        return run.finish()
