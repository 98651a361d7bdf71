"""What ends a run because a number would be wrong: a value, a gradient, a weight, or a call.

Only what nothing else can see is here. What shows in a script's source, or when two runs of it are
compared, is found by `python -m trainkit.tools.rehearse`.
"""

import functools
import math
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from torch import nn

from trainkit.errors import LoneFailure, RunFailure
from trainkit.launch.contact import own_rank
from trainkit.numbers.optim import BY_STEP, total_norm, weights_of
from trainkit.repairs.private_names import named_weights, prepared_optimizers, prepared_schedulers
from trainkit.repairs.replaced import watch
from trainkit.text import shorten

# The stages of a run, and the call that comes next in each.
NEXT = {
    "new": "`with Run(...) as run`",
    "entered": "run.load(load_data)",
    "loaded": "accelerator.prepare(...), then run.begin(model, ...)",
    "ready": "the next epoch of run.epochs(), or run.finish() when there is none left",
    "epoch": "`for batch in run.steps(train_loader)`, to its end",
    "batch": "accelerator.backward(run.step_mean(losses)), in every batch",
    "backward": "optimizer.step(), then `if run.end_step(): run.save()`",
    "must save": "run.save(), because run.end_step() returned True",
    "counted": "the next batch of run.steps(...)",
    "trained": "run.end_epoch(metrics)",
    "over": "nothing, the run is over",
}
IN_BATCH = ("batch", "backward")
IN_LOOP = (*IN_BATCH, "must save", "counted")

NUM_WATCHED = 3  # steps: every body of a loop has then shown what it forgets
MAX_SKIPPED = 30  # fp16 halves its loss scale at each skip, so 2**16 has become 2**-14
DIFFERENT = 1e-5  # relative difference of norms; equal GPUs give equal bits, others nearly


def out_of_order(call: str, stage: str) -> RuntimeError:
    """The error of a call that may not be made in this stage."""
    sentence = f"{call} is out of order: what comes next is {NEXT[stage]}"
    if stage in IN_LOOP:
        sentence += (
            ". `continue` and `break` must not leave the body of run.steps(...): to end the run "
            "early, call run.stop() before run.end_step(); to evaluate sooner, give --eval-every"
        )
    return RuntimeError(sentence)


def need(run: Any, call: str, *stages: str) -> None:
    """Raise RuntimeError unless the run is in one of these stages."""
    if run.stage not in stages:
        raise out_of_order(call, run.stage)


def allowed(*stages: str, then: str | None = None) -> Callable[[Callable], Callable]:
    """Decorate a method that may be called only in these stages; `then`: the stage after it."""

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def checked(run: Any, *args: Any, **options: Any) -> Any:
            need(run, f"run.{method.__name__}(...)", *stages)
            result = method(run, *args, **options)
            run.stage = then or run.stage
            return result

        return checked

    return decorate


class LoopGuard:
    """Refuses what a copied loop forgets: zero_grad(), scheduler.step(), the mean of the step.

    Attributes:
        num_left: steps that are still looked at for the mean, and by Run for more that costs time.
        left: a gradient of each optimizer in its last step, until zero_grad() is called.
        in_window: the step has earlier micro-batches, and no optimizer was stepped yet.
        positions: how often each schedule of make_scheduler was stepped until the last step's end.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.num_left = NUM_WATCHED
        self.left: dict[torch.optim.Optimizer, torch.Tensor | None] = {}
        self.in_window = self.has_mean = self.has_gradient = False
        self.positions: dict[Any, int] = {}
        for prepared in prepared_optimizers(accelerator):
            optimizer = prepared.optimizer
            watch(optimizer, "zero_grad", partial(self._note_zeroed, optimizer))

    def _note_zeroed(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        if self.in_window:
            raise RuntimeError(
                "optimizer.zero_grad() before the step drops the gradients of the earlier "
                "micro-batches of --accumulate: call it after optimizer.step()"
            )
        self.left.pop(optimizer, None)

    def watch_mean(self, mean: torch.Tensor) -> None:
        """See whether a gradient comes to what step_mean has returned."""
        if self.num_left and mean.requires_grad:
            self.has_mean = True
            mean.register_hook(lambda _: vars(self).update(has_gradient=True))

    def finish_micro_batch(self, is_last: bool) -> None:
        """Raise RuntimeError if nothing was learned from the mean; is_last: a step followed."""
        if self.has_mean and not self.has_gradient:
            raise RuntimeError(
                "no gradient came to what run.step_mean(...) returned, so the weights do not learn "
                "from the mean of the step: call accelerator.backward(run.step_mean(losses)), with "
                "losses that the model has computed"
            )
        self.has_mean = self.has_gradient = False
        self.in_window = not is_last

    def enter_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError if the gradients of the last step are still in those of this one."""
        gradients = (weight.grad for weight in weights_of(optimizer))
        gradient = next((one for one in gradients if one is not None), None)
        if gradient is not None and gradient is self.left.get(optimizer):
            raise RuntimeError(
                "optimizer.zero_grad() was not called since the last step, whose gradients are "
                "still in those of this one: call it after optimizer.step()"
            )
        self.left[optimizer] = gradient

    def finish_step(self, stepped: Set[torch.optim.Optimizer]) -> None:
        """Raise RuntimeError unless each schedule of make_scheduler was stepped once."""
        schedules = (prepared.scheduler for prepared in prepared_schedulers(self.accelerator))
        positions = {each: each.last_epoch for each in schedules if each in BY_STEP}
        for schedule, now in positions.items():
            moved = now - self.positions.get(schedule, now - 1)
            if moved > 1 or (moved == 0 and schedule.optimizer in stepped):
                raise RuntimeError(
                    f"scheduler.step() was called {moved} times since the last step, and a "
                    "schedule of make_scheduler(...) goes by steps: call it once, after "
                    "optimizer.step() and before run.end_step(), and not at the end of an epoch"
                )
        self.positions = positions
        self.num_left -= bool(self.num_left and stepped)


def check_gradients(models: Sequence[nn.Module], *optimizers: torch.optim.Optimizer) -> None:
    """Raise LoneFailure if a weight got no gradient here, for which the other processes wait."""
    missing = {w for w in weights_of(*optimizers) if w.requires_grad and w.grad is None}
    if missing:
        named = (pair for model in models for pair in named_weights(model))
        names = shorten([name for name, weight in named if weight in missing])
        raise LoneFailure(
            f"{names} of a model got no gradient in this step on process {own_rank()}, for which "
            "several processes wait: where only some steps use it, add "
            "0 * sum(p.sum() for p in part.parameters()) to the loss; else call "
            "requires_grad_(False) on it before the optimizer is made"
        )


def check_rows(call: str, values: Any, num_samples: int) -> None:
    """Raise RuntimeError unless there is a row for each of the samples, or for a padding sample."""
    is_number = getattr(values, "ndim", None) == 0 or not hasattr(values, "__len__")
    if is_number or len(values) != max(1, num_samples):
        rows = "a single number" if is_number else f"{len(values)} rows"
        raise RuntimeError(
            f"{call} got {rows} for a batch of {num_samples} samples: give it the values of each "
            'sample, as losses with reduction="none" are, or say which values count with mask='
        )


class EqualSizes:
    """Refuses values (samples, ...) with different trailing sizes where one mean goes over them.

    Such values were padded, each batch to its own longest sample, so their mean would depend on how
    the samples are shared out.
    """

    def __init__(self):
        self.num_steps = 0
        self.sizes: dict[tuple[int, str, int], tuple[int, ...]] = {}  # since the last comparison

    def check(self, call: str, values: torch.Tensor, num_samples: int, number: int = 0) -> None:
        """Raise RuntimeError if values of earlier calls with this number had other sizes."""
        check_rows(call, values, num_samples)
        if values.ndim > 1 and num_samples:
            self._compare({(self.num_steps, call, number): tuple(values.shape[1:])})

    def check_processes(self, accelerator: Accelerator) -> None:
        """Raise RuntimeError if other processes had other sizes. Every process must call this."""
        if accelerator.num_processes > 1:
            for theirs in gather_object([self.sizes]):
                self._compare(theirs)
        self.sizes = {}

    def _compare(self, others: dict[tuple[int, str, int], tuple[int, ...]]) -> None:
        for place, sizes in others.items():
            if self.sizes.setdefault(place, sizes) != sizes:
                raise RuntimeError(
                    f"{place[1]} got values of shape (samples, ...) with different trailing sizes "
                    "in different processes, micro-batches or batches: pass mask= if they are "
                    "padded, or one value for each sample"
                )


class FiniteGuard:
    """Stops all processes at the first step whose gradient is not finite.

    All processes see the same norm. On a GPU it is read one step late, because reading it makes the
    host wait for the device: the weights in memory may be lost by then, the checkpoints are not.
    Under fp16 GradScaler skips a step that overflows, and only MAX_SKIPPED in a row are an error.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.step = ""  # the last one, by number and learning rate
        # What reads the norm of a step, the losses of the step, and its name.
        self.pending: list[tuple[Callable[[], float], Sequence[torch.Tensor], str]] = []
        self.num_skipped = 0  # in a row, under fp16

    def check(self, grad_norm: torch.Tensor, losses: Sequence[torch.Tensor], step: str) -> None:
        """Check the norm of averaged gradients; losses: this process's shares, for the message."""
        self._read_pending(before=step)
        self.step = step
        if self.accelerator.scaler is None:
            self.pending.append((copy_to_host(grad_norm), [*losses], step))
            if grad_norm.device.type == "cpu":
                self._read_pending()

    def count_skipped(self, skipped: bool, losses: Sequence[torch.Tensor]) -> None:
        """Raise RunFailure on all processes if fp16 skipped MAX_SKIPPED steps in a row."""
        self.num_skipped = self.num_skipped + 1 if skipped else 0
        if self.num_skipped == MAX_SKIPPED:
            self._fail(math.inf, losses, self.step)

    def finish(self, *optimizers: AcceleratedOptimizer) -> None:
        """Check the norms still being copied, and the weights. Call before a checkpoint."""
        self._read_pending()
        for optimizer in optimizers:
            norm = total_norm(weights_of(optimizer))
            rates = norm.new_tensor(
                sum(float(group.get("lr") or 0) for group in optimizer.param_groups)
            )
            numbers = self.accelerator.gather(torch.stack((norm, rates))[None]).T
            norms = numbers[0].tolist()
            if not math.isfinite(sum(norms)):
                raise RunFailure(
                    f"the weights are not finite after {self.step}: their norm is {norms[0]:.4g}; "
                    "the checkpoints are untouched: try a smaller --learning-rate"
                )
            lowest, highest = numbers.aminmax(dim=1)
            if (highest - lowest > DIFFERENT * highest).any():
                raise RunFailure(
                    "the weights or learning rates differ between the processes after "
                    f"{self.step}, norms of the weights {min(norms):.4g} to {max(norms):.4g}: "
                    "change them in the same way on every process"
                )

    def _read_pending(self, before: str | None = None) -> None:
        while self.pending and self.pending[0][2] != before:
            read, losses, step = self.pending.pop(0)
            if not math.isfinite(norm := read()):
                self._fail(norm, losses, step)

    def _fail(self, norm: float, losses: Sequence[torch.Tensor], step: str) -> NoReturn:
        # All processes come here in the same step, so they may communicate.
        shares = torch.stack([loss.float() for loss in losses])
        sums = self.accelerator.reduce(shares, reduction="sum").tolist()
        raise RunFailure(
            f"loss or gradient is not finite at {step}: loss "
            f"{' and '.join(f'{loss:.4g}' for loss in sums)}, gradient norm {norm:.4g}; the "
            "checkpoints are untouched: try a smaller --learning-rate, a longer --warmup or "
            "--clip-norm 1"
        )


def copy_to_host(number: torch.Tensor) -> Callable[[], float]:
    """Begin to copy a number, without waiting; what is returned waits for the copy and gives it."""
    copied = number.detach().to("cpu", non_blocking=True)
    if number.device.type == "cpu":
        return copied.item
    event = torch.Event(device=number.device)
    event.record()

    def read() -> float:
        event.synchronize()
        return copied.item()

    return read
