"""Refuse, or name, what a loop does to its loss that shows in the first steps of a run."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from trainkit.checkpoints.changes import Marks
from trainkit.errors import UsageError
from trainkit.numbers.optim import weights_of

MAX_NODES = 64  # of the graph of a loss are looked at, from its end
MAX_GRAPH = 10_000  # the same of a loss after the step of an optimizer
SAME = 1e-5  # relative difference that rounding makes
NUM_ROUNDED = 4  # roundings of a loss of few bits, such as bfloat16
NUM_SINGLE = 3  # steps in which all samples of a share have one value: some alike do so by chance
HOW_IT_IS_SPLIT = "so the numbers depend on how a batch is split over processes and micro-batches"


@dataclass
class Pass:
    """A backward pass.

    Attributes:
        loss: what accelerator.backward was given.
        flows: the gradient that came to each mean of the micro-batch, by its number.
    """

    loss: Any
    flows: dict[int, torch.Tensor]


@dataclass
class Share:
    """What a micro-batch of a process made of its means.

    A loss that is a sum of means, each times a number, and of a penalty on the weights has equal
    factors and rests in all micro-batches and processes.

    Attributes:
        factors: what its backward passes multiplied the means by.
        rests: what is left of the losses without the means.
        roundings: how far apart rounding can bring rests.
        single: the number that all samples have as a value, for each mean; NaN if they differ.
    """

    factors: list[float]
    rests: list[float]
    roundings: list[float]
    single: list[float]


class Losses:
    """Looks at the means of the micro-batches of a step, and at what is done to them.

    Args:
        say: prints a note on the main process.

    Attributes:
        means: of the micro-batch.
        single: see Share.
        passes: the backward passes of the micro-batch.
        in_backward: the last of them has not ended.
        is_quotient: the loss of the micro-batch ends with a division.
        weights_then: some of their numbers, as they were after the last backward pass of the
            micro-batch. The forward pass of the next may change them: it may normalise weights.
        gradients_then: what they were like after the last backward pass of the step.
        is_open: no gradients have been clipped in this micro-batch.
        stepped: the weights of the optimizers that were stepped in it.
        shares: of the step.
        singles: what note_of_one_number said of the steps so far that had one number.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        weights: list[nn.Parameter],
        accumulate: int,
        say: Callable[[str], object],
    ):
        self.accelerator = accelerator
        self.weights = weights
        self.accumulate = accumulate
        self.say = say
        self.is_split = accelerator.num_processes * accumulate > 1
        self.shares: list[Share] = []
        self.singles: list[str] = []
        self.gradients_then: Marks | None = None
        self.start_micro_batch()

    def start_micro_batch(self) -> None:
        self.means: list[torch.Tensor] = []
        self.single: list[float] = []
        self.passes: list[Pass] = []
        self.in_backward = False
        self.is_quotient = False
        self.is_open = True
        self.stepped: list[torch.Tensor] = []
        self.weights_then: torch.Tensor | None = None

    def watch_mean(self, mean: torch.Tensor, values: torch.Tensor) -> None:
        """Remember a mean of run.step_mean, and the gradient that comes to it."""
        if not mean.requires_grad:
            return
        mean.register_hook(partial(self._note_flow, len(self.means)))
        self.means.append(mean.detach())
        if self.is_split:
            self.single.append(single_value(values))

    def _note_flow(self, number: int, gradient: torch.Tensor) -> None:
        if self.in_backward:  # else the script itself computes gradients
            flows = self.passes[-1].flows
            flows[number] = gradient.detach() + flows.get(number, 0)

    def note_backward(self, loss: Any) -> None:
        """Raise UsageError or RuntimeError if weights or gradients were changed within a step.

        SAM does so with the weights: its second pass is at others, which depend on --accumulate.
        """
        self.passes.append(Pass(loss.detach() if isinstance(loss, torch.Tensor) else loss, {}))
        self.in_backward = True
        if self.accumulate == 1:
            return
        if isinstance(loss, torch.Tensor):
            self.is_quotient = self.is_quotient or ends_with_division(loss)
        self._check_weights()
        if self._have_gradients_changed():
            raise RuntimeError(
                "the gradients of the earlier micro-batches of --accumulate were changed before "
                "the last one was there, as model.zero_grad(), clipping and GradScaler.unscale_ "
                "do: change gradients `if accelerator.sync_gradients:`, and call "
                "optimizer.zero_grad() after optimizer.step()"
            )
        if isinstance(loss, torch.Tensor) and self.stepped and uses(loss, self.stepped):
            raise UsageError(
                f"--accumulate {self.accumulate}: an optimizer was stepped before the last "
                "backward pass of a step, whose loss uses its weights. In the earlier "
                "micro-batches they were not stepped: make all passes before the first "
                "optimizer.step(), as examples/gan.py does, or use --accumulate 1"
            )

    def end_backward(self) -> None:
        """Note that accelerator.backward has returned."""
        self.in_backward = False
        if self.accumulate > 1 and self.is_open:
            self.weights_then = first_numbers(self.weights)
            self.gradients_then = Marks(self._gradients())

    def close_window(self) -> None:
        """Let weights and gradients change: the optimizers are stepped now."""
        self.weights_then = self.gradients_then = None
        self.is_open = False

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the weights of an optimizer that is stepped now."""
        self.stepped += weights_of(optimizer)

    def _check_weights(self) -> None:
        """Raise UsageError if weights were changed after a backward pass of the micro-batch."""
        if self.weights_then is None:
            return
        if not torch.equal(self.weights_then, first_numbers(self.weights)):
            raise UsageError(
                f"--accumulate {self.accumulate}: the weights were changed after a backward pass "
                "and before the last one of a step, as SAM does. They would move by the gradient "
                "of a micro-batch, not by that of the step: use --accumulate 1, or, if it is to be "
                "done once in a step, do it `if accelerator.sync_gradients:`"
            )

    def _gradients(self) -> dict[str, torch.Tensor]:
        gradients = ((str(number), weight.grad) for number, weight in enumerate(self.weights))
        return {number: gradient for number, gradient in gradients if gradient is not None}

    def _have_gradients_changed(self) -> bool:
        then, now = self.gradients_then, self._gradients()
        if then is None:
            return False
        are_same = all(now.get(number) is gradient for number, gradient in then.tensors.items())
        # Not then.changed(): a clipping that only reads the norm multiplies by 1.
        return not are_same or bool(then.changed_in(then.tensors))

    def finish_micro_batch(self, num_micro_batches: int) -> None:
        """Raise RuntimeError if the loss has no mean, or one that was divided by --accumulate.

        UsageError if the weights were changed before the step. num_micro_batches: of the step.
        """
        self._check_weights()
        if self.means and not any(each.flows for each in self.passes):
            raise RuntimeError(
                "the loss that accelerator.backward(...) got has nothing of what "
                "run.step_mean(...) returned, so it is a mean by hand, as losses.mean() is, over "
                "a process's share of the batch: give it run.step_mean(losses)"
            )
        self._check_divided(num_micro_batches)
        if self.is_split:
            self.shares.append(self._share(num_micro_batches))
        self.start_micro_batch()

    def _scale(self) -> float:
        """What fp16 multiplies a loss by."""
        scaler = self.accelerator.scaler
        return 1.0 if scaler is None else scaler.get_scale()

    def _check_divided(self, num_micro_batches: int) -> None:
        """Raise RuntimeError if the loss was divided by --accumulate, as Accelerate does it.

        A mean of as many terms as there are micro-batches looks the same and is let through.
        """
        if not self.is_quotient or num_micro_batches == 1:
            return
        flows = [flow.item() for each in self.passes for flow in each.flows.values()]
        if flows and len(flows) != self.accumulate:
            share = self._scale() / num_micro_batches / self.accumulate
            if all(math.isclose(flow, share, rel_tol=1e-4) for flow in flows):
                raise RuntimeError(
                    f"the loss was divided by {self.accumulate}, which accelerator.backward(...) "
                    "does already: leave out the division by --accumulate, or, if it is meant "
                    "otherwise, divide the values before run.step_mean(...)"
                )

    def _share(self, num_micro_batches: int) -> Share:
        share = Share([], [], [], self.single)
        scale = self._scale() / num_micro_batches
        have_flows = any(each.flows for each in self.passes)
        for each in self.passes:
            if not isinstance(each.loss, torch.Tensor) or hasattr(each.loss, "full_tensor"):
                continue
            if have_flows and not each.flows:  # it passes on a gradient, as GradCache does
                continue
            factors = {number: flow.item() / scale for number, flow in each.flows.items()}
            terms = [factor * self.means[number].item() for number, factor in factors.items()]
            loss = each.loss.sum().item()
            rounding = max(SAME, NUM_ROUNDED * torch.finfo(each.loss.dtype).eps)
            share.factors.extend(factors.values())
            share.rests.append(loss - sum(terms))
            share.roundings.append(rounding * max(map(abs, (loss, *terms))))
        return share

    def finish_step(self) -> None:
        """Say if losses were made of more than means. Every process must call this."""
        if not self.is_split:
            return
        shares = gather_object(self.shares)
        self.shares = []
        note = note_of_shares(shares)
        single = note_of_one_number(shares)
        if single is not None:
            self.singles.append(single)
        if len(self.singles) == NUM_SINGLE:
            note = note or max(self.singles)
        if note:
            self.say(note)
            self.is_split = False


def single_value(values: torch.Tensor) -> float:
    """The value of all samples if there are several and it is one, or NaN."""
    if values.ndim == 0 or values.is_nested or len(values) < 2 or not values.numel():
        return math.nan
    if is_expanded(values):
        return math.nan
    lowest, highest = values.detach().aminmax()
    return lowest.item() if lowest == highest else math.nan


def is_expanded(values: torch.Tensor) -> bool:
    """Is it a number that was expanded on purpose, as docs/loop.md has it for a penalty?

    It may be multiplied by another afterwards.
    """
    node = values.grad_fn
    while node is not None and not node.name().startswith("ExpandBackward"):
        following = [each for each, _ in node.next_functions if each is not None]
        node = following[0] if len(following) == 1 else None
    return node is not None


def note_of_one_number(shares: Sequence[Share]) -> str | None:
    """A line about a mean of one number, "" if it is equal everywhere; None if it is not one."""
    singles = [[*filter(math.isfinite, share.single)] for share in shares]
    if not all(singles) or len({*map(len, singles)}) > 1:
        return None
    for numbers in zip(*singles, strict=True):
        one, two = min(numbers), max(numbers)
        if are_others(one, two):
            return (
                f"note: run.step_mean(...) got one number for all samples, {one:.4g} of one share "
                f"of the batch and {two:.4g} of another, {HOW_IT_IS_SPLIT}: let each sample have "
                "a value of its own, or compute the number from the whole batch, by run.gather(...)"
            )
    return ""


def note_of_shares(shares: Sequence[Share]) -> str:
    """A line about what differs between micro-batches and processes; "" if nothing does."""
    first = shares[0]
    for other in shares[1:]:
        for one, two in zip(first.factors, other.factors, strict=False):
            if are_others(one, two):
                return (
                    "note: what run.step_mean(...) returned is multiplied by a factor, "
                    f"{one:.4g} of one share of the batch and {two:.4g} of another, "
                    f"{HOW_IT_IS_SPLIT}: put it into the values of each sample, and use a mean "
                    "as it is, not its root or logarithm"
                )
        rests = zip(first.rests, other.rests, first.roundings, other.roundings, strict=False)
        for one, two, *roundings in rests:
            if abs(one - two) > max(roundings):
                return (
                    "note: the loss has a term that run.step_mean(...) did not make, "
                    f"{one:.4g} of one share of the batch and {two:.4g} of another, "
                    f"{HOW_IT_IS_SPLIT}: give its values, one for each sample, to "
                    "run.step_mean(...) as well (docs/loop.md, Several means)"
                )
    return ""


def are_others(one: float, other: float) -> bool:
    """Do numbers differ by more than rounding? NaN is not known."""
    return abs(one - other) > SAME * max(abs(one), abs(other))


def ends_with_division(loss: torch.Tensor) -> bool:
    """Is there a division among the last operations that made a loss?"""
    nodes = deque([loss.grad_fn])
    for _ in range(MAX_NODES):
        node = nodes.popleft() if nodes else None
        if node is not None and node.name().startswith("DivBackward"):
            return True
        if node is not None:
            nodes.extend(following for following, _ in node.next_functions)
    return False


def uses(loss: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Do these weights get a gradient from a loss? False if its graph is too large to be told."""
    wanted = {id(weight) for weight in weights}
    nodes = [loss.grad_fn] if loss.grad_fn else []
    seen = set(nodes)
    while nodes and len(seen) < MAX_GRAPH:
        node = nodes.pop()
        if id(getattr(node, "variable", None)) in wanted:
            return True
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        nodes += following
    return False


def first_numbers(weights: list[nn.Parameter]) -> torch.Tensor:
    """The first number of each weight, of those that this process has."""
    local = (getattr(weight.detach(), "to_local", weight.detach)() for weight in weights)
    numbers = [rows.flatten()[0].float() for rows in local if rows.numel()]
    return torch.stack(numbers) if numbers else torch.empty(0)
