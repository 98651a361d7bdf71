"""What is wrong in a loop is told in one sentence before the second epoch.

`Script` is a training script in parts. A mistake is a function that replaces one of its parts, or
does something beside it; step into it to see what the script then does.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
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

    def is_second_micro_batch(self) -> bool:
        return bool(self.run.step.num_done_in_step)


MISTAKES = []


def told(sentence: str) -> Callable:
    """The function below is a mistake in a script, of which its author is told this (a pattern)."""

    def register(mistake: Callable[[Script], None]) -> Callable[[Script], None]:
        MISTAKES.append(pytest.param(mistake, sentence, id=mistake.__name__))
        return mistake

    return register


# Data and loaders.


class Stream(IterableDataset):
    """Data without an index."""

    __iter__ = iter


class CountedStream(Stream):
    """The same with a length, which it may have."""

    def __len__(self) -> int:
        return NUM_SAMPLES


@told("returned a InMemory: let it return the training set and the evaluation set, in this order")
def one_set_where_two_are_needed(script):
    script.make_sets = lambda: InMemory(torch.zeros(NUM_SAMPLES, 2))


@told("returned a dict: let it")
def sets_by_name(script):
    script.make_sets = lambda: {"train": Numbers(), "test": Numbers()}


@told("there are 0 samples to train on and 1 to evaluate on")
def no_sample_to_train_on(script):
    script.make_sets = lambda: ([], [1])


@told("the evaluation set is a CountedStream, whose samples have no index")
def a_part_of_a_stream_to_evaluate_on(script):
    script.make_sets = lambda: (Numbers(), Subset(CountedStream(), range(9)))


@told(r"the training loader that make_loaders\(...\) made")
def steps_over_a_loader_of_torch(script):
    script.steps = lambda: script.run.steps(DataLoader(Numbers()))


@told(r"a loader that make_loaders\(...\) did not make")
def prepares_a_loader_of_torch(script):
    begin = script.begin

    def prepare_and_begin():
        script.run.accelerator.prepare(DataLoader(Numbers()))
        begin()

    script.begin = prepare_and_begin


# The mean of a step.


@told('step_mean.* got a single number for a batch of 4 samples: .*reduction="none"')
def a_mean_of_a_single_number(script):
    script.before_the_loss = lambda batch: script.run.step_mean(torch.ones((), requires_grad=True))


@told(r"values of shape \(4,\), with mask= or weights= of shape \(4, 2\) .* same shape, a mask")
def a_mask_of_another_shape(script):
    def take_a_mean(batch):
        script.run.step_mean(torch.ones(4), mask=torch.ones(4, 2) > 0)

    script.before_the_loss = take_a_mean


@told('step_mean.* got a float and no tensor: .*reduction="none"')
def a_mean_of_an_item(script):
    script.mean = lambda losses: script.run.step_mean(losses.mean().item())


@told("--accumulate 2: .*before the first backward: .*count=function.* or use --accumulate 1")
def a_mask_that_was_not_counted(script):
    script.mean = lambda losses: script.run.step_mean(losses, mask=losses > -1)


@told("over=None: it goes with mask= .* which are 'boxes'")
def a_mask_without_its_count(script):
    def take_a_mean(batch):
        script.run.step.divisors.given["boxes"] = None
        script.run.step_mean(torch.ones(4), torch.ones(4) > 0)

    script.before_the_loss = take_a_mean


@told("different trailing sizes .*mask= if they are padded")
def a_mean_of_rows_that_were_padded(script):
    def take_a_mean(batch):
        script.run.step_mean(torch.ones(4, 1 + script.is_second_micro_batch()))

    script.before_the_loss = take_a_mean


@told(r"no gradient came to what run.step_mean\(...\) returned, .*run.step_mean\(losses\)")
def trains_another_mean_than_that_of_the_step(script):
    def mean(losses):
        script.run.step_mean(losses)
        return losses.mean()

    script.mean = mean


# The parts of a step.


@told(r"with accelerator.accumulate\(model")
def does_not_accumulate(script):
    script.accumulate = ExitStack


@told(r"optimizer.zero_grad\(\) before the step drops .* after optimizer.step")
def no_step_of_the_optimizers(script):
    script.parts_that_step = lambda: script.schedules


@told(r"scheduler.step\(\) was called 2 times since the last step")
def a_schedule_steps_twice(script):
    script.parts_that_step = lambda: [
        *script.optimizers,
        *script.schedules,
        script.schedules[1],
    ]


@told(r"scheduler.step\(\) was called 2 times since .* not at the end of an epoch")
def a_schedule_steps_at_the_end_of_an_epoch(script):
    script.before_the_evaluation = lambda: script.schedules[0].scheduler.step()


@told(r"scheduler.step\(\) was called 0 times since")
def no_step_of_the_schedules(script):
    script.parts_that_step = lambda: script.optimizers


@told(r"optimizer.zero_grad\(\) before the step drops")
def drops_gradients_before_the_step(script):
    def drop(batch):
        script.run.accelerator.gradient_state._set_sync_gradients(True)
        script.optimizers[0].zero_grad()

    script.before_the_loss = drop


@told(r"optimizer.zero_grad\(\) was not called since")
def keeps_gradients_after_the_step(script):
    script.zero_grad = lambda optimizer: None


@told("mask= for 'los', but")
def a_mask_for_another_name(script):
    def add(batch):
        script.run.add(mask={"los": torch.ones(4) > 0}, loss=torch.ones(4))

    script.before_the_loss = add


@told("--accumulate 2: this loss .*--accumulate 1")
def compares_the_samples_of_a_micro_batch(script):
    script.before_the_loss = lambda batch: script.run.gather(torch.ones(4, 1))


@told("the next batch .* next is .*end_step")
def does_not_end_the_step(script):
    script.end_step = lambda: None


@told("the next batch .* next is run.save.., because run.end_step.. retu")
def does_not_save(script):
    script.save = lambda: None


@told("weights are not finite after")
def saves_weights_that_are_not_finite(script):
    def save():
        script.one.weight.data.fill_(math.inf)
        script.run.save()

    script.save = save


# Models and optimizers.


class Extra(nn.Linear):
    """A layer as quantisation has them: what it remembers is no tensor."""

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": 1.0}


@told("_extra_state of a model is not a tensor with its own")
def a_state_that_is_no_tensor(script):
    script.make_second_model = lambda: Extra(4, 1)


@told("bias was replaced, added or removed after accelerator.prepare")
def replaces_a_weight(script):
    def replace():
        script.one.bias = nn.Parameter(torch.zeros(4))

    script.before_the_evaluation = replace


@told("call model.train.. before run")
def leaves_a_model_in_evaluation_mode(script):
    script.before_the_evaluation = lambda: script.one.eval()


@told(r"add_param_group\(...\) changed an optimizer .* factor of 0 until then")
def adds_a_group_to_an_optimizer(script):
    def add():
        script.optimizers[0].add_param_group({"params": nn.Parameter(torch.ones(1))})

    script.before_the_evaluation = add


@told("requires_grad of a weight was changed .*--start-from")
def freezes_a_model_while_it_is_trained(script):
    script.before_the_evaluation = lambda: script.one.requires_grad_(False)


@told("got 1 model and accelerator.prepare 2: .* such as a teacher, need not be prepared")
def begins_with_one_of_two_models(script):
    script.begin = lambda: script.run.begin(script.one, {"pictures": "test"})


@told("2 of the optimizers' weights are in no model that accelerator.prepare was given")
def trains_a_weight_of_no_model(script):
    script.make_optimizer = lambda model: make_optimizer(
        script.run.accelerator,
        [*model.parameters(), nn.Parameter(torch.ones(1))],
        script.config,
    )


@told("LBFGS computes the loss several times in a step, .* use another optimizer")
def an_optimizer_with_several_passes(script):
    script.make_optimizer = lambda model: torch.optim.LBFGS(model.parameters())


@told("accelerator.prepare was given no optimizer")
def does_not_prepare_the_optimizers(script):
    script.prepare_optimizer = lambda optimizer: optimizer


# Evaluations, and the ends of epochs and runs.


@told("for loss, got 1 rows for a batch of 10 samples")
def evaluates_to_too_few_rows(script):
    script.judge = lambda batch: script.losses_of(batch)[:1]


@told(r"run.end_epoch\(...\) got predictions, or metadata, that")
def predictions_that_are_no_tensors(script):
    script.end_epoch = lambda metrics: script.run.end_epoch(metrics, {"seen": ["a"]})


@told(r"the next epoch is .* next is run\.end_epoch")
def does_not_end_the_epoch(script):
    script.end_epoch = lambda metrics: None


@told("the metadata of run.begin.* holds 'classes'")
def metadata_that_json_does_not_hold(script):
    script.begin = lambda: script.run.begin((script.one, script.two), {"classes": {1}})


@told("run.state holds 'x': {0: 1}, which JSON does not preserve: use strings as keys")
def a_state_that_json_does_not_hold(script):
    def remember():
        script.run.state["x"] = {0: 1}

    script.before_the_evaluation = remember


@told("after run.save.. or run.end_epoch.*, so the checkpoint lacks the change")
def a_schedule_steps_after_the_end_of_an_epoch(script):
    script.after_the_epoch = lambda: script.schedules[0].scheduler.step()


@told("the end of `with Run.* next is accelerator.prepare")
def leaves_before_the_start(script):
    def train():
        with Run(script.config, "test") as run:
            script.make(run)

    script.train = train


@pytest.mark.parametrize("mistake, sentence", MISTAKES)
def test_a_mistake_in_the_loop_is_told_before_the_second_epoch(tmp_path, mistake, sentence):
    script = Script(f"--accumulate 2 --save-every 1 --run-dir {tmp_path}")
    mistake(script)
    with pytest.raises((RuntimeError, UsageError), match=sentence):
        script.train()
    assert len(script.batches) <= 13  # the first step of the second epoch


CORRECT = []


def correct(change: Callable) -> Callable:
    CORRECT.append(pytest.param(change, id=change.__name__))
    return change


@correct
def nothing_is_changed(script):
    pass


@correct
def expands_a_penalty(script):
    def mean(losses):
        penalty = losses.softmax(0).square().sum().expand(script.run.num_samples or 1)
        return script.run.step_mean(losses) + script.run.step_mean(0.1 * penalty)

    script.mean = mean


@correct
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


@pytest.mark.parametrize("change", CORRECT)
def test_a_script_without_a_mistake_is_told_nothing(tmp_path, capfd, change):
    script = Script(f"--accumulate 2 --save-every 1 --run-dir {tmp_path}")
    change(script)
    script.train()
    assert len(script.batches) == 22
    assert "note: " not in capfd.readouterr().out
