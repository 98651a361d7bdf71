"""What is wrong in a loop is told in one sentence before the second epoch.

`Script` is a training script in parts. A mistake replaces one of its parts.
"""

import math
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from conftest import forget_accelerator
from loops import NUM_SAMPLES, Numbers, make_config
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from trainkit.errors import UsageError
from trainkit.numbers.loaders import InMemory, make_loaders
from trainkit.numbers.optim import make_optimizer, make_scheduler
from trainkit.run.run import Run

Batch = dict[str, torch.Tensor]


class Script:
    """A small training with two models and two optimizers, its parts in the order of a script."""

    def __init__(self, *flags: object):
        self.config = make_config(*flags)
        self.batches: list[Any] = []

    def train(self):
        forget_accelerator()
        with Run(self.config, "test") as run:
            self.make(run)
            self.begin()
            for _ in run.epochs():
                for batch in self.steps():
                    self.batches.append(None)
                    self.before_the_loss(batch)
                    self.make_a_step(batch)
                    self.before_the_end_of_the_step(batch)
                    self.end_step()
                self.before_the_evaluation()
                self.end_epoch(self.evaluate())
                self.after_the_epoch()
            run.finish()

    def make(self, run: Run):
        self.run = run
        sets = run.load(lambda config: self.make_sets())
        self.loaders = make_loaders(run.accelerator, *sets, self.config)
        self.one, self.two = nn.Linear(2, 4), self.make_second_model()
        self.optimizers = [self.make_optimizer(model) for model in (self.one, self.two)]
        self.schedules = [
            make_scheduler(each, self.config, run.steps_per_epoch) for each in self.optimizers
        ]
        self.one, self.two, *self.loaders = run.accelerator.prepare(
            self.one, self.two, *self.loaders
        )
        self.optimizers = [self.prepare_optimizer(each) for each in self.optimizers]
        self.schedules = [self.prepare_schedule(each) for each in self.schedules]

    def make_sets(self):
        return Numbers(), Numbers()

    def make_second_model(self):
        return nn.Linear(4, 1)

    def make_optimizer(self, model: nn.Module):
        return make_optimizer(self.run.accelerator, model.parameters(), self.config)

    def prepare_optimizer(self, optimizer):
        return self.run.accelerator.prepare(optimizer)

    def prepare_schedule(self, schedule):
        return self.run.accelerator.prepare(schedule)

    def begin(self):
        self.run.begin((self.one, self.two), {"pictures": "test"})

    def steps(self):
        return self.run.steps(self.loaders[0])

    def before_the_loss(self, batch: Batch):
        pass

    def losses_of(self, batch: Batch) -> torch.Tensor:
        return (self.two(self.one(batch["x"])) - batch["y"]).square()

    def make_a_step(self, batch: Batch):
        with self.accumulate():
            self.losses = self.losses_of(batch)
            self.backward(self.mean(self.losses))
            for part in self.parts_that_step():
                part.step()
            for optimizer in self.optimizers:
                self.zero_grad(optimizer)

    def accumulate(self):
        return self.run.accelerator.accumulate(self.one, self.two)

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        return self.run.step_mean(losses)

    def backward(self, loss: torch.Tensor):
        self.run.accelerator.backward(loss)

    def parts_that_step(self) -> list[Any]:
        return [*self.optimizers, *self.schedules]

    def zero_grad(self, optimizer):
        optimizer.zero_grad()

    def before_the_end_of_the_step(self, batch: Batch):
        pass

    def end_step(self):
        self.run.add(loss=self.losses)
        if self.run.end_step():
            self.save()

    def save(self):
        self.run.save()

    def before_the_evaluation(self):
        pass

    def evaluate(self):
        return self.run.evaluate(self.loaders[1], lambda batch: {"loss": self.judge(batch)})

    def judge(self, batch: Batch) -> torch.Tensor:
        return self.losses_of(batch)

    def end_epoch(self, metrics: dict[str, float]):
        self.run.end_epoch(metrics, {"seen": torch.ones(3)})

    def after_the_epoch(self):
        pass


class CountedStream(IterableDataset):
    """Data without an index, and with a length, which it may have."""

    __iter__ = iter

    def __len__(self) -> int:
        return NUM_SAMPLES


class Extra(nn.Linear):
    """A layer as quantisation has them: what it remembers is no tensor."""

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": 1.0}


def one_mean_and_another(s: Script, losses: torch.Tensor) -> torch.Tensor:
    s.run.step_mean(losses)
    return losses.mean()


def save_infinity(s: Script):
    s.one.weight.data.fill_(math.inf)
    s.run.save()


def of(*weights: torch.Tensor) -> dict[str, Any]:
    return {"params": [*weights, nn.Parameter(torch.ones(1))]}


# What stands in the place of a part of the script (its name before a colon), and what the author
# is told of it (a pattern).
MISTAKES = {
    # Data and loaders.
    "make_sets: one set": (
        lambda s: InMemory(torch.zeros(NUM_SAMPLES, 2)),
        "returned a InMemory: let it return the training set and the evaluation set, in this order",
    ),
    "make_sets: a part of a stream": (
        lambda s: (Numbers(), Subset(CountedStream(), range(9))),
        "the evaluation set is a CountedStream, whose samples have no index",
    ),
    "make_sets: a stream with an index": (
        lambda s: (Numbers(), type("Counted", (Numbers, CountedStream), {})()),
        "the evaluation set is a Counted, whose samples have no index that is the same in any num",
    ),
    "steps: over a loader of torch": (
        lambda s: s.run.steps(DataLoader(Numbers())),
        r"the training loader that make_loaders\(...\) made",
    ),
    # The mean of a step.
    "before_the_loss: a mean of a single number": (
        lambda s, batch: s.run.step_mean(torch.ones((), requires_grad=True)),
        'step_mean.* got a single number for a batch of 4 samples: .*reduction="none"',
    ),
    "mean: a mask that was not counted": (
        lambda s, losses: s.run.step_mean(losses, mask=losses > -1),
        "--accumulate 2: .*count=function.* or use --accumulate 1",
    ),
    "before_the_loss: rows that were padded": (
        lambda s, batch: s.run.step_mean(torch.ones(4, 1 + bool(s.run.step.num_done_in_step))),
        "different trailing sizes .*mask= if they are padded",
    ),
    "mean: another one is trained": (
        one_mean_and_another,
        r"no gradient came to what run.step_mean\(...\) returned, .*run.step_mean\(losses\)",
    ),
    # The parts of a step.
    "accumulate: not at all": (lambda s: ExitStack(), r"with accelerator.accumulate\(model"),
    "parts_that_step: no optimizer": (
        lambda s: s.schedules,
        r"optimizer.zero_grad\(\) before the step drops .* after optimizer.step",
    ),
    "parts_that_step: a schedule twice": (
        lambda s: [*s.optimizers, *s.schedules, s.schedules[1]],
        r"scheduler.step\(\) was called 2 times since the last step",
    ),
    "before_the_evaluation: a schedule steps": (
        lambda s: s.schedules[0].scheduler.step(),
        r"scheduler.step\(\) was called 2 times since .* not at the end of an epoch",
    ),
    "parts_that_step: no schedule": (
        lambda s: s.optimizers,
        r"scheduler.step\(\) was called 0 times since",
    ),
    "zero_grad: not at all": (
        lambda s, optimizer: None,
        r"optimizer.zero_grad\(\) was not called since",
    ),
    "before_the_loss: compares the samples of a micro batch": (
        lambda s, batch: s.run.gather(torch.ones(4, 1)),
        "--accumulate 2: this loss .*--accumulate 1",
    ),
    "end_step: not at all": (lambda s: None, "the next batch .* next is .*end_step"),
    "save: not at all": (
        lambda s: None,
        "the next batch .* next is run.save.., because run.end_step.. retu",
    ),
    "save: weights that are not finite": (save_infinity, "weights are not finite after"),
    # Models and optimizers.
    "make_second_model: a state that is no tensor": (
        lambda s: Extra(4, 1),
        "_extra_state of a model is not a tensor with its own",
    ),
    "before_the_evaluation: replaces a weight": (
        lambda s: setattr(s.one, "bias", nn.Parameter(torch.zeros(4))),
        "bias was replaced, added, removed, frozen .* after accelerator.prepare",
    ),
    "before_the_evaluation: leaves a model in evaluation mode": (
        lambda s: s.one.eval(),
        "call model.train.. before run",
    ),
    "before_the_evaluation: freezes a model": (
        lambda s: s.one.requires_grad_(False),
        "weight was replaced, .*frozen .*--start-from",
    ),
    "begin: with one of two models": (
        lambda s: s.run.begin(s.one, {"pictures": "test"}),
        "got 1 model and accelerator.prepare 2: .* not trained need not be prepared",
    ),
    "make_optimizer: a weight of no model": (
        lambda s, model: torch.optim.AdamW([of(*model.parameters())]),
        "2 of the optimizers' weights are in no model that accelerator.prepare was given",
    ),
    "prepare_optimizer: not at all": (
        lambda s, optimizer: optimizer,
        "accelerator.prepare was given no optimizer",
    ),
    # Evaluations, and the ends of epochs and runs.
    "judge: too few rows": (
        lambda s, batch: s.losses_of(batch)[:1],
        "for loss, got 1 rows for a batch of 10 samples",
    ),
    "end_epoch: not at all": (
        lambda s, metrics: None,
        r"the next epoch is .* next is run\.end_epoch",
    ),
    "begin: metadata that JSON does not hold": (
        lambda s: s.run.begin((s.one, s.two), {"classes": {1}}),
        "the metadata of run.begin.* holds 'classes'",
    ),
    "before_the_loss: a state that no checkpoint holds": (
        lambda s, batch: s.run.state.update(x=[{1}]),
        r"run.state\['x'\]\[0\] is a set, which cannot be saved without pickle",
    ),
    "after_the_epoch: a schedule steps": (
        lambda s: s.schedules[0].scheduler.step(),
        "after run.save.. or run.end_epoch.*, so the checkpoint lacks the change",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_loop_is_told_before_the_second_epoch(tmp_path, mistake):
    script = Script(f"--accumulate 2 --save-every 1 --run-dir {tmp_path}")
    instead, sentence = MISTAKES[mistake]
    setattr(script, mistake.partition(":")[0], partial(instead, script))
    with pytest.raises((RuntimeError, UsageError), match=sentence):
        script.train()
    assert len(script.batches) <= 13  # the first step of the second epoch


def expands_a_penalty(script):
    def mean(losses):
        penalty = losses.softmax(0).square().sum().expand(script.run.num_samples or 1)
        return script.run.step_mean(losses) + script.run.step_mean(0.1 * penalty)

    script.mean = mean


def passes_on_the_gradient_of_outputs(script):
    def backward(loss):
        hidden = script.hidden.detach().requires_grad_()
        loss = script.run.step_mean((script.two(hidden) - script.y).square())
        script.run.accelerator.backward(loss)
        script.run.accelerator.backward((script.hidden * hidden.grad).sum())

    def losses_of(batch):
        script.hidden, script.y = script.one(batch["x"]), batch["y"]
        return (script.two(script.hidden) - script.y).square()

    script.losses_of, script.backward = losses_of, backward


@pytest.mark.parametrize("change", [expands_a_penalty, passes_on_the_gradient_of_outputs])
def test_a_script_without_a_mistake_is_told_nothing(tmp_path, capfd, change):
    script = Script(f"--accumulate 2 --save-every 1 --run-dir {tmp_path}")
    change(script)
    script.train()
    assert len(script.batches) == 22
    assert "note: " not in capfd.readouterr().out
