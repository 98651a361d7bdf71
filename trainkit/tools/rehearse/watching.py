"""Shortens a run, and writes down what the files of a run do not say: see Watch."""

import inspect
import json
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any

from trainkit import Run

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.overrides import TorchFunctionMode

from trainkit.checkpoints.hashing import hash_tensor, text_of
from trainkit.checkpoints.save import Checkpoints
from trainkit.errors import UsageError
from trainkit.hashes import digest
from trainkit.numbers.loaders import EpochBatches, WholeBatches, batches_of
from trainkit.numbers.orders import Length
from trainkit.repairs.private_names import BatchNorm, prepared_loaders, version_of
from trainkit.run.step import Step
from trainkit.tools.rehearse.held import held, is_own, names_read
from trainkit.tools.rehearse.samples import SeenSamples
from trainkit.tools.rehearse.stage import Role

STEPS_IN_EPOCH = 4  # more are cut out of the middle of an epoch, so that its last batch stays
NUM_STEPS = 20
NUM_NOTED = 5  # of the first steps: what the script carries is noted after them
# Attributes of a module that are the rate of a dropout, where F.dropout is not what applies it.
RATES = ("drop_prob", "dropout", "attention_dropout", "activation_dropout", "hidden_dropout_prob")


class Watch:
    """Lets the config, the length and the calls of the run be those of the rehearsal.

    Attributes:
        run: the one that this process has begun.
        seen: what is written down at the end: see pages.py.
        draws: which global generators the loop has drawn from; generators: how they stood.
        means, flows: of the micro-batch, what run.step_mean returned, and the gradients of a pass.
        share: what the loop made of them.
        marks: how weights and gradients were after a backward pass that was not the last of a step.
    """

    run: Run | None = None
    in_evaluation = has_begun = in_step = False
    last_step = 0  # that the script was in
    share: dict[str, Any]

    def __init__(self, role: Role):
        self.role, self.world = role, role.world
        self.script = Path(role.script).resolve()
        self.saved = {self.world.resumed_after}
        self.models: list[nn.Module] = []
        self.still: set[str] = set()
        self.draws: set[str] = set()
        self.seen: dict[str, Any] = {"losses": {}}
        self.samples = SeenSamples()
        self.untrained: dict[str, torch.Tensor] = {}
        self.flows: dict[int, float] = {}
        self.marks: list[Any] = []
        look: Any = Broadcasts if self.world.is_looked_at else nullcontext
        self.broadcasts = {"broadcast": look(), "broadcast_in_evaluation": look()}
        self.dropout, F.dropout = F.dropout, self._dropout
        for kind, name, replacement in (
            (Run, "__init__", self._make_run),
            (Run, "load", self._load),
            (Run, "begin", self._begin),
            (Run, "step_mean", self._step_mean),
            (Run, "end_step", self._end_step),
            (Run, "evaluate", self._evaluate),
            (Run, "predict", self._evaluate),
            (Run, "finish", self._finish),
            (Accelerator, "backward", self._backward),
            (Accelerator, "gather", partial(self._gather, "gather")),
            (Accelerator, "gather_for_metrics", partial(self._gather, "gather_for_metrics")),
            (Accelerator, "reduce", partial(self._gather, "reduce")),
            (Step, "start_micro_batch", self._start_micro_batch),
            (Checkpoints, "save", self._save),
            (Length, "__init__", self._make_length),
            (EpochBatches, "__init__", self._make_batches),
            (WholeBatches, "make", self._make_samples),
        ):
            around(kind, name, replacement)

    def _dropout(
        self, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if p and training and not self.in_evaluation:
            self.still.add("dropout")
            return input
        return self.dropout(input, p, training, inplace)

    def _make_run(self, original: Callable, run: Run, config: Any, project: str) -> None:
        if self.run is not None:
            raise UsageError("it has several runs: rehearse a script that has one of them")
        self.run = run
        vars(config).update(self.role.settings)
        original(run, config, project)

    def _make_length(self, original: Callable, length: Any, config: Any, num: int) -> None:
        """Several short epochs: what begins in a later one, or at an evaluation, is seen as well.

        The checkpoints are in the middle of an epoch if it has more than one step, and at an end.
        """
        original(length, config, num)
        self.seen["steps_in_whole_epoch"] = length.steps_per_epoch
        length.num_used = shorter(length.num_used, config.batch_size)
        length.steps_per_epoch = steps = math.ceil(length.num_used / config.batch_size)
        config.epochs = max(self.role.num_epochs, math.ceil(NUM_STEPS / max(1, steps)))
        config.save_every = 6 if steps == STEPS_IN_EPOCH else 7
        length.last_step = config.epochs * steps
        length.log_every = 1

    def _make_batches(
        self, original: Callable, batches: Any, num: int, size: int, **kw: Any
    ) -> None:
        if kw.get("seed") is None and "accumulate" in self.world.settings:
            size = self.seen["eval_batch_size"] = max(1, min(num, size) // 2)
        original(batches, num, size, **kw)
        if kw.get("seed") is not None:  # without one it is not a loader to train with
            batches.num_used = shorter(batches.num_used, size)

    def _load(self, original: Callable, run: Run, load_data: Callable) -> tuple:
        data = original(run, load_data)
        self.seen["num_samples"] = [len(each) for each in data[:2]]
        return data

    def _gather(self, name: str, original: Callable, *args: Any, **kw: Any) -> Any:
        frame: Any = inspect.currentframe()
        is_called = is_own(frame.f_back.f_back.f_globals, self.script)
        if is_called and self.in_step and not self.in_evaluation:
            self.seen["gathers"] = f"accelerator.{name}(...) in {line_of_script()}"
        return original(*args, **kw)

    def _make_samples(self, original: Callable, whole: WholeBatches, indices: Any) -> Any:
        batch = original(whole, indices)
        if self.world.is_looked_at:
            self.samples.note(whole, indices, batch)
        return batch

    def _begin(self, original: Callable, run: Run, model: Any, *args: Any, **kw: Any) -> None:
        self.models = models = [model] if isinstance(model, nn.Module) else list(model)
        layers = [layer for each in models for layer in each.modules()]
        self.still |= hold_still(layers)
        self.buffers = buffers_of(models)
        named = [pair for each in models for pair in each.named_parameters()]
        self.seen["weights"] = digest(text_of([weight for _, weight in named]))
        if self.world.is_looked_at:
            self.untrained = {name: weight for name, weight in named if weight.requires_grad}
        original(run, model, *args, **kw)

    def _start_micro_batch(self, original: Callable, step: Any, loader: Any) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._write_held("resumed")
        done = self.run.progress.step if self.run else 0
        if done != self.last_step and (done <= NUM_NOTED or done - 1 in self.saved):
            self._write_held(done, "carried")
        self.last_step = done
        original(step, loader)
        self.in_step = True
        self.generators = generators()
        self.means: list[torch.Tensor] = []
        self.share = {"factors": [], "rests": [], "size": 0.0, "is_one_number": False}
        self.broadcasts["broadcast"].__enter__()

    def _step_mean(self, original: Callable, run: Run, values: Any, *args: Any, **kw: Any) -> Any:
        mean = original(run, values, *args, **kw)
        if mean.requires_grad:
            mean.register_hook(partial(self._note_flow, len(self.means)))
            self.means.append(mean.detach())
            if isinstance(values, torch.Tensor) and not values.is_nested and len(values) > 1:
                self.share["is_one_number"] |= bool((values == values.flatten()[0]).all())
        return mean

    def _note_flow(self, number: int, gradient: torch.Tensor) -> None:
        self.flows[number] = self.flows.get(number, 0.0) + float(gradient)

    def _backward(
        self, original: Callable, accelerator: Any, loss: torch.Tensor, **kw: Any
    ) -> None:
        if self.marks and self.marks != self._marks():
            self.seen["changes_early"] = True
        self.flows = {}
        original(accelerator, loss, **kw)
        self.untrained = {n: w for n, w in self.untrained.items() if w.grad is None}
        self.marks = [] if accelerator.sync_gradients else self._marks()
        if self.flows or not self.share.get("factors"):  # else it passes a gradient on
            times = accelerator.gradient_accumulation_steps
            factors = {number: times * flow for number, flow in self.flows.items()}
            terms = [factor * float(self.means[number]) for number, factor in factors.items()]
            total = float(loss.detach().sum())
            self.share["factors"] += factors.values()
            self.share["rests"].append(total - sum(terms))
            self.share["size"] = max(self.share["size"], *map(abs, (total, *terms)))

    def _marks(self) -> list[Any]:
        """What changes if a weight or its gradient does."""
        weights = [weight for model in self.models for weight in model.parameters()]
        tensors = [t for weight in weights for t in (weight, weight.grad)]
        return [None if each is None else (id(each), version_of(each)) for each in tensors]

    def _end_step(self, original: Callable, run: Run) -> bool:
        self.in_step = False
        self.broadcasts["broadcast"].__exit__(None, None, None)
        now = generators()
        self.draws |= {name for name in now if now[name] != self.generators[name]}
        if self.means and not self.share["rests"]:
            self.seen["passes_backward_by"] = True
            self.untrained = {}  # they are looked at in accelerator.backward
        self.seen["losses"].setdefault(str(run.progress.step + 1), []).append(self.share)
        if run.accelerator.sync_gradients:
            self.marks = []
        return original(run)

    def _evaluate(self, original: Callable, run: Run, *args: Any, **kw: Any) -> Any:
        def watch(function: Any) -> Any:
            def watched(batch: Any) -> Any:
                before, self.in_evaluation = generators(), True
                with self.broadcasts["broadcast_in_evaluation"]:
                    result = function(batch)
                self.in_evaluation = False
                if generators() != before:
                    self.seen["draws_in_evaluation"] = True
                return result

            return watched if callable(function) else function

        return original(run, *map(watch, args), **{name: watch(each) for name, each in kw.items()})

    def _save(self, original: Callable, checkpoints: Any, progress: Any, *args: Any) -> None:
        original(checkpoints, progress, *args)
        self.saved.add(progress.step)
        self._write_held(progress.step)

    def _finish(self, original: Callable, run: Run, *args: Any, **kw: Any) -> Any:
        if self.world.is_looked_at:
            pairs = [(batches_of(each), each) for each in prepared_loaders(run.accelerator)]
            made = {b.seed is not None: each.dataset for b, each in pairs if b is not None}
            if len(made) == 2:
                self.seen |= self.samples.look(made[True], made[False])
        now = buffers_of(self.models)
        self.seen |= {n: getattr(each, "place", "") for n, each in self.broadcasts.items()} | {
            "data": str(run.data_hashes),
            "steps_per_epoch": run.length.steps_per_epoch,
            "epochs": run.config.epochs,
            "still": sorted(self.still),
            "draws": sorted(self.draws),
            "buffers": [name for name in now if now[name] != self.buffers.get(name)],
            "untrained": [*self.untrained],
            "read": sorted(names_read(self.script)) if self.world.is_looked_at else [],
        }
        self._write("facts", self.seen)
        self._write_held("end")
        return original(run, *args, **kw)

    def _write_held(self, when: object, what: str = "held") -> None:
        is_whole = what == "held"
        if self.run and (self.world.is_exact or self.world.is_looked_at or not is_whole):
            state = self.run.checkpoints.state.values
            self._write(f"{what}-{when}", held(self.script, state, is_whole))

    def _write(self, name: str, content: Any) -> None:
        if self.role.rank == 0:
            (self.role.folder / f"{name}.json").write_text(json.dumps(content))


class Broadcasts(TorchFunctionMode):
    """Looks for (n, 1) against (n,), which gives (n, n); `place` is the line of the script."""

    place = ""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self.place and isinstance(result, torch.Tensor) and result.ndim == 2:
            tensors = [each for each in args[:2] if isinstance(each, torch.Tensor)]
            num, shapes = len(result), {tuple(tensor.shape) for tensor in tensors}
            if num > 1 and result.shape == (num, num) and shapes == {(num, 1), (num,)}:
                one, other = (tensor.untyped_storage().data_ptr() for tensor in tensors)
                if one != other:  # else each sample is compared with the others on purpose
                    self.place = line_of_script()
        return result


def line_of_script() -> str:
    """The line of the script that is being executed."""
    frame = inspect.currentframe()
    while frame and frame.f_back and frame.f_globals.get("__name__") != "__main__":
        frame = frame.f_back
    return "" if not frame else f"line {frame.f_lineno} of {Path(frame.f_code.co_filename).name}"


def around(kind: Any, name: str, replacement: Callable) -> None:
    """Let this be called in place of a method or function, with that as its first argument."""
    original = getattr(kind, name)
    setattr(kind, name, wraps(original)(lambda *a, **kw: replacement(original, *a, **kw)))


def generators() -> dict[str, str]:
    """Hashes of the states of the global generators."""
    states = {
        "numpy": repr(np.random.get_state()),
        "random": repr(random.getstate()),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    return {name: digest(state) for name, state in states.items()}


def buffers_of(models: list[nn.Module]) -> dict[str, str]:
    """Hashes of the float buffers of models, without those of BatchNorm."""
    found = {}
    for layer_name, layer in (pair for model in models for pair in model.named_modules()):
        for name, buffer in layer.named_buffers(recurse=False):
            if buffer.is_floating_point() and not isinstance(layer, BatchNorm):
                found[f"{layer_name}.{name}".lstrip(".")] = hash_tensor(buffer)
    return found


def shorter(num_used: int, batch_size: int) -> int:
    """Leave out whole batches, so that an epoch has few steps and its last batch stays short."""
    num_steps = math.ceil(num_used / batch_size)
    return num_used - max(0, num_steps - STEPS_IN_EPOCH) * batch_size


def hold_still(layers: list[nn.Module]) -> set[str]:
    """Let layers have no dropout, and no BatchNorm learn from a batch; say which of them they have.

    Both give other numbers if a batch is split otherwise, as the docs say.
    """
    found = set()
    for layer in layers:
        for name in RATES:
            if isinstance(rate := vars(layer).get(name), float) and rate:
                setattr(layer, name, 0.0)
                found.add("dropout")
        if isinstance(layer, BatchNorm):
            found.add("BatchNorm")
    BatchNorm.forward = batch_norm_of_the_start  # type: ignore[method-assign]
    return found


def batch_norm_of_the_start(self: BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """What a BatchNorm in evaluation mode computes: its mean and variance are not changed."""
    options = (self.weight, self.bias, False, 0.0, self.eps)
    mean, variance = self.running_mean, self.running_var
    if mean is None:
        mean = input.new_zeros(input.shape[1])
        variance = input.new_ones(input.shape[1])
    return F.batch_norm(input, mean, variance, *options)
