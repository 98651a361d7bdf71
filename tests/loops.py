"""A small training loop, which a test may disturb or change, for the promises of `Run`."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from conftest import (
    forget_accelerator,
    split_flags,
)
from torch import nn
from torch.utils.data import Dataset

from trainkit.config import TrainingConfig, parse
from trainkit.numbers.loaders import make_loaders
from trainkit.numbers.optim import make_optimizer, make_scheduler
from trainkit.run.run import Run

# The head of scripts that tests write: they add load_data(config) and main(argv).
HEAD = """
import os, signal
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainkit import InMemory, Run, make_loaders, make_optimizer
from trainkit.config import TrainingConfig, parse


@dataclass
class Config(TrainingConfig):
    run_dir: Path = Path("runs/test")
    epochs: int = 2
    batch_size: int = 8
"""

NUM_SAMPLES = 43  # a prime: batches of 8 leave 3 for the last


class Numbers(Dataset):
    """An ordinary map-style data set, with random noise as from torchvision's transforms."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.tensor([index / NUM_SAMPLES, 1.0])
        return {"x": x + 0.01 * torch.randn(2), "y": 3 * x[:1], "index": index}


@dataclass
class Config(TrainingConfig):
    run_dir: Path = Path("runs/test")
    eval_batch_size: int = 10
    epochs: int = 2
    batch_size: int = 8
    log_every: int | None = 1
    pictures: bool = False
    learning_rate: float = 0.01


def make_config(*argv: object) -> Config:
    return parse(Config, split_flags(argv))


def train(
    *argv: object,
    body=lambda run, number: None,
    change=lambda losses: losses,
    first=lambda: nn.Linear(2, 4),
) -> list[float]:
    """A small run with two models and two optimizers; `body` may disturb it. Losses by step."""
    forget_accelerator()
    args, losses, numbers = make_config(*argv), [], count(1)
    with Run(args, "test") as run:
        sets = run.load(lambda args: (Numbers(), Numbers()))
        loaders = make_loaders(run.accelerator, *sets, args)
        models = one, two = first(), nn.Linear(4, 1)
        optimizers = [make_optimizer(run.accelerator, m.parameters(), args) for m in models]
        schedules = [make_scheduler(each, args, run.steps_per_epoch) for each in optimizers]
        one, two, *loaders = run.accelerator.prepare(one, two, *loaders)
        optimizers = [run.accelerator.prepare(each) for each in optimizers]
        schedules = [run.accelerator.prepare(each) for each in schedules]
        run.begin((one, two), {"pictures": "test"})
        for _ in run.epochs():
            for batch in run.steps(loaders[0]):
                body(run, next(numbers))
                with run.accelerator.accumulate(one, two):
                    loss = (two(one(batch["x"])) - batch["y"]).square()
                    run.accelerator.backward(run.step_mean(loss))
                    for part in (*optimizers, *schedules):
                        part.step()
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                losses.append(loss.sum().item())
                run.add(loss=loss)
                if run.end_step():
                    run.save()
            metrics = run.evaluate(
                loaders[1],
                lambda batch: {"loss": change((two(one(batch["x"])) - batch["y"]).square())},
            )
            run.end_epoch(metrics, {"seen": torch.ones(3)})
        run.finish()
    return losses


def changed(*edits: tuple[str, str], **names: Any) -> Callable[..., list[float]]:
    """`train` with other texts in the place of these patterns; they may use these names."""
    source = inspect.getsource(train)
    for pattern, text in edits:
        source, num = re.subn(pattern, text, source, flags=re.MULTILINE)
        assert num, pattern
    exec(source, scope := globals() | names)
    return scope["train"]


class Still(Numbers):
    """The same samples in every epoch."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.tensor([index / 8, 1.0])
        return {"x": x, "y": x[:1].sin()}
