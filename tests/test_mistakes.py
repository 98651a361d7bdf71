"""What is wrong in a loop is told in one sentence before the second epoch.

A mistake replaces a text of `loops.train`, or stands before one.
"""

import math
from itertools import count
from typing import Any

import pytest
from loops import NUM_SAMPLES, changed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from trainkit.errors import UsageError
from trainkit.numbers.loaders import InMemory


class CountedStream(IterableDataset):
    """Data without an index, and with a length, which it may have."""

    __iter__ = iter

    def __len__(self) -> int:
        return NUM_SAMPLES


class Extra(nn.Linear):
    """A layer as quantisation has them: what it remembers is no tensor."""

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": 1.0}


def before(line: str, text: str) -> tuple[str, str]:
    """Insert a text before the line that begins with a pattern."""
    return rf"^( +)(?={line})", rf"\1{text}\n\1"


SETS, LOSS, EVALUATION = r"\(Numbers\(\), Numbers\(\)\)", "loss = ", "metrics = "
SCHEDULE_STEPS = "schedules[0].scheduler.step()"
# What the author wrote in the place of a text, and what he is told of it (a pattern).
MISTAKES: dict[str, tuple[tuple[str, str], str]] = {
    # Data and loaders.
    "one set": (
        (SETS, "InMemory(torch.zeros(NUM_SAMPLES, 2))"),
        "returned a InMemory: let it return the training set and the evaluation set, in this order",
    ),
    "a part of a stream": (
        (SETS, "(Numbers(), Subset(CountedStream(), range(9)))"),
        "the evaluation set is a CountedStream, whose samples have no index",
    ),
    "a stream with an index": (
        (SETS, "(Numbers(), type('Counted', (Numbers, CountedStream), {})())"),
        "the evaluation set is a Counted, whose samples have no index that is the same in any num",
    ),
    "a stream behind a set": (
        (SETS, "(Numbers(), (s := Numbers(), setattr(s, 'rows', CountedStream()))[0])"),
        "the evaluation set is a CountedStream, whose samples have no index",
    ),
    "a loader of torch": (
        (r"run.steps\(.*\)", "run.steps(DataLoader(Numbers()))"),
        r"the training loader that make_loaders\(...\) made",
    ),
    # The mean of a step.
    "a mean of a single number": (
        before(LOSS, "run.step_mean(torch.ones((), requires_grad=True))"),
        'step_mean.* got a single number for a batch of 4 samples: .*reduction="none"',
    ),
    "a mask that was not counted": (
        (r"step_mean\(loss\)", "step_mean(loss, mask=loss > -1)"),
        "--accumulate 2: .*count=function.* or use --accumulate 1",
    ),
    "another mean is trained": (
        (r"run.step_mean\(loss\)", "(run.step_mean(loss), loss.mean())[1]"),
        r"no gradient came to what run.step_mean\(...\) returned, .*run.step_mean\(losses\)",
    ),
    # The parts of a step.
    "no accumulate": (
        (r"with run.accelerator.accumulate\(one, two\)", "if True"),
        r"with accelerator.accumulate\(model",
    ),
    "no step of the optimizers": (
        (r"in \(\*optimizers, \*schedules\)", "in schedules"),
        r"optimizer.zero_grad\(\) before the step drops .* after optimizer.step",
    ),
    "a schedule twice": (
        (r"in \(\*optimizers, \*schedules\)", "in (*optimizers, *schedules, schedules[1])"),
        r"scheduler.step\(\) was called 2 times since the last step",
    ),
    "no step of the schedules": (
        (r"in \(\*optimizers, \*schedules\)", "in optimizers"),
        r"scheduler.step\(\) was called 0 times since",
    ),
    "no zero_grad": (
        (r"optimizer.zero_grad\(\)", "pass"),
        r"optimizer.zero_grad\(\) was not called since",
    ),
    "samples of a micro-batch are compared": (
        before(LOSS, "run.gather(torch.ones(4, 1))"),
        "--accumulate 2: this loss .*--accumulate 1",
    ),
    "no end_step": (
        (r"if run.end_step\(\)", "if False"),
        "the next batch .* next is .*end_step",
    ),
    "no save": (
        (r"run.save\(\)", "pass"),
        "the next batch .* next is run.save.., because run.end_step.. retu",
    ),
    "weights that are not finite": (
        before(r"run.save\(\)", "one.weight.data.fill_(math.inf)"),
        "weights are not finite after",
    ),
    # Models and optimizers.
    "a state that is no tensor": (
        (r"nn.Linear\(4, 1\)", "Extra(4, 1)"),
        "_extra_state of a model is not a tensor with its own",
    ),
    "a weight is replaced": (
        before(EVALUATION, "one.bias = nn.Parameter(torch.zeros(4))"),
        "bias was replaced, added, removed, frozen .* after accelerator.prepare",
    ),
    "a model stays in evaluation mode": (
        before(EVALUATION, "one.eval()"),
        "call model.train.. before run",
    ),
    "a model is frozen": (
        before(EVALUATION, "one.requires_grad_(False)"),
        "weight was replaced, .*frozen .*--start-from",
    ),
    "one of two models": (
        (r"run.begin\(\(one, two\)", "run.begin(one"),
        "got 1 model and accelerator.prepare 2: .* not trained need not be prepared",
    ),
    "a weight of no model": (
        (r"m.parameters\(\)", "[*m.parameters(), nn.Parameter(torch.ones(1))]"),
        "2 of the optimizers' weights are in no model that accelerator.prepare was given",
    ),
    "an optimizer with a closure": (
        (r"make_optimizer\(.*\) for m", "torch.optim.LBFGS(m.parameters()) for m"),
        "LBFGS computes the loss several times in a step, by a closure",
    ),
    "an optimizer that is not prepared": (
        (r"\[run.accelerator.prepare\(each\) for each in optimizers\]", "optimizers"),
        "accelerator.prepare was given no torch.optim.Optimizer",
    ),
    # Evaluations, and the ends of epochs.
    "too few rows": (
        (r"change\((.*)\)\},", r"change(\1)[:1]},"),
        "for loss, got 1 rows for a batch of 10 samples",
    ),
    "no end_epoch": (
        (r"run.end_epoch\(.*", "pass"),
        r"the next epoch is .* next is run\.end_epoch",
    ),
    "a state that no checkpoint holds": (
        before(LOSS, "run.state.update(x=[{1}])"),
        r"run.state\['x'\]\[0\] is a set that no checkpoint holds",
    ),
    "a schedule steps after an epoch": (
        (r"^( +)run.end_epoch\(.*", rf"\g<0>\n\1{SCHEDULE_STEPS}"),
        "after run.save.. or run.end_epoch.*, so the checkpoint lacks the change",
    ),
}
NAMES: dict[str, Any] = {"CountedStream": CountedStream, "DataLoader": DataLoader, "Extra": Extra}
NAMES |= {"InMemory": InMemory, "Subset": Subset, "math": math}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_loop_is_told_before_the_second_epoch(tmp_path, mistake):
    edit, sentence = MISTAKES[mistake]
    batches = count(1)
    with pytest.raises((RuntimeError, UsageError), match=sentence):
        changed(edit, **NAMES)(
            f"--accumulate 2 --save-every 1 --run-dir {tmp_path}",
            body=lambda run, number: next(batches),
        )
    assert next(batches) <= 14  # the first step of the second epoch


PENALTY = "loss.softmax(0).square().sum().expand(run.num_samples or 1)"
# Of a step: the weights of `one` get the gradient of its outputs.
PASSED_ON = r"""\1hidden = one(batch["x"]).detach().requires_grad_()
\1again = run.step_mean((two(hidden) - batch["y"]).square())
\1run.accelerator.backward(again)
\1run.accelerator.backward((one(batch["x"]) * hidden.grad).sum())"""


@pytest.mark.parametrize(
    "edit",
    [
        (r"run.step_mean\(loss\)", rf"run.step_mean(loss) + run.step_mean(0.1 * {PENALTY})"),
        (r"^( +)run.accelerator.backward.*", PASSED_ON),
    ],
)
def test_a_script_without_a_mistake_is_told_nothing(tmp_path, capfd, edit):
    losses = changed(edit)(f"--accumulate 2 --save-every 1 --run-dir {tmp_path}")
    assert len(losses) == 22
    assert "note: " not in capfd.readouterr().out
