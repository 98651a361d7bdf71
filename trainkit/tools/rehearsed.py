"""Be one process of a rehearsal: run a script as it stands, shortened, in a folder of its own.

rehearse.py starts these processes. What a rehearsal needs to know and the files of a run do not
have is written down on the way: the layers of the models, and what the script's variables hold at
each checkpoint and at the end.
"""

import contextlib
import faulthandler
import inspect
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any

from trainkit import Run, config, rng

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainkit.checkpoints.contents import hash_of
from trainkit.checkpoints.save import Checkpoints
from trainkit.hashes import digest
from trainkit.launch import startup
from trainkit.numbers.loaders import EpochBatches
from trainkit.numbers.orders import Length
from trainkit.repairs.private_names import BatchNorm, hooked
from trainkit.run.step import Step

STEPS_IN_EPOCH = 4  # more are cut out of the middle of an epoch, so that its last batch stays
NUM_STEPS = 20
# Attributes of a module that are the rate of a dropout, where F.dropout is not what applies it.
RATES = ("drop_prob", "dropout", "attention_dropout", "activation_dropout", "hidden_dropout_prob")


@dataclass
class Plan:
    """What a process of a rehearsal has to be; it travels to the process by pickle.

    Attributes:
        script, flags: what a person types after `python`.
        folder: of this world; each process writes its output there, and the run is in folder/run.
        settings: fields of the script's config, and their values in this world.
        env: variables of the environment, None: not set.
        num_epochs: at least so many.
        still: "dropout" and "BatchNorm": what draws or computes by process is held still.
        nudge: change each weight by a rounding, before the first step.
        stacks_at: when the stacks of this process are written down, by time.time().
    """

    script: str
    flags: list[str]
    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str | None] = field(default_factory=dict)
    num_epochs: int = 5
    still: tuple[str, ...] = ()
    nudge: bool = False
    stacks_at: float = math.inf


def be(plan: Plan, rank: int) -> None:
    """Run the script to its end in this process, which does nothing else and then exits."""
    _die_with_parent()
    outputs = [open(plan.folder / f"{name}-{rank}", "ab") for name in ("stdout", "stderr")]  # noqa: SIM115
    for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), *map(_handle, outputs))):
        os.dup2(file, stream)
    stacks = open(plan.folder / f"stacks-{rank}", "w")  # noqa: SIM115
    seconds = min(1e6, max(0.1, plan.stacks_at - time.time()))
    faulthandler.dump_traceback_later(seconds, file=stacks)
    for name, value in plan.env.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    tempfile.tempdir = os.environ["TMPDIR"] = str(plan.folder)
    sys.dont_write_bytecode = True
    multiprocessing.set_start_method(None, force=True)  # loader workers start as in a run
    _watch(plan, rank)
    _run_as_main(plan.script, plan.flags)


def note_card(path: Path) -> None:
    """Make this file if torch sees a card, which a process that forks others must not ask."""
    if torch.accelerator.is_available():
        path.touch()


def _handle(file: Any) -> int:
    return file.fileno()


def _die_with_parent() -> None:
    """So that nothing is left if the rehearsal itself is killed. Only Linux has it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _run_as_main(script: str, flags: list[str]) -> None:
    """Do what `python SCRIPT FLAGS` does; a main(argv) that nothing has called is called."""
    path = Path(script).resolve()
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module
    sys.argv = [script, *flags]
    sys.path.insert(0, str(path.parent))
    exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    if not WATCHED and callable(main := getattr(module, "main", None)):
        startup.run(partial(main, flags))


# The runs that this process has begun.
WATCHED: list[Any] = []


@dataclass
class Found:
    """What is seen while a run trains.

    Attributes:
        by_process: "dropout" and "BatchNorm", if the models have them.
        generators: the states of the global generators at the start of the micro-batch.
        draws: which of them the loop, or a model, has drawn from.
        models, buffers: the models, and the hashes of their float buffers at the start.
        averages: hashes of the running means of BatchNorm that registered things had at the start.
        hooked: the weights and layers with a hook that is given gradients.
    """

    by_process: set[str] = field(default_factory=set)
    generators: dict[str, str] = field(default_factory=dict)
    draws: set[str] = field(default_factory=set)
    models: list[nn.Module] = field(default_factory=list)
    buffers: dict[str, str] = field(default_factory=dict)
    averages: dict[str, str] = field(default_factory=dict)
    hooked: list[str] = field(default_factory=list)

    def changed_buffers(self) -> list[str]:
        """Float buffers that are not as they were, without those of BatchNorm."""
        now = _buffers(self.models)
        return [name for name, value in now.items() if value != self.buffers.get(name)]


def _generators() -> dict[str, str]:
    states = {
        "numpy": repr(np.random.get_state()),
        "random": repr(random.getstate()),
        "torch": str(torch.get_rng_state().tolist()),
    }
    return {name: digest(state) for name, state in states.items()}


def _buffers(models: list[nn.Module]) -> dict[str, str]:
    found: dict[str, str] = {}
    for model in models:
        for place, layer in model.named_modules():
            for name, buffer in layer.named_buffers(recurse=False):
                if buffer.is_floating_point() and not isinstance(layer, BatchNorm):
                    _flatten(f"{place}.{name}".lstrip("."), buffer, found)
    return found


def _averages(run: Run) -> dict[str, str]:
    """Hashes of the running means of BatchNorm that registered things have, as of a teacher."""
    entries = run.checkpoints.contents.registered.entries()
    return {
        f"{name}, {entry}": hash_of({entry: value})
        for name, of in entries.items()
        for entry, value in of.items()
        if "running_mean" in entry or "running_var" in entry
    }


def _watch(plan: Plan, rank: int) -> None:
    """Let the config, the length and the calls of each run be those of the rehearsal."""
    dropout = F.dropout

    def watched_dropout(
        input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if p and training:
            found.by_process.add("dropout")
        return input if "dropout" in plan.still else dropout(input, p, training, inplace)

    F.dropout = watched_dropout
    if "BatchNorm" in plan.still:
        BatchNorm.forward = _batch_norm_of_the_start  # type: ignore[method-assign]
    found = Found()

    read = config.parse

    def parse(kind: type, argv: Any = None) -> Any:
        parsed: Any = read(kind, argv)
        if isinstance(parsed, config.TrainingConfig):
            _set(parsed, plan.settings)
        return parsed

    config.parse = parse

    @_around(Run, "__init__")
    def init(original: Callable, run: Run, config: Any, project: str) -> None:
        _set(config, plan.settings)
        WATCHED.append(run)
        if len(WATCHED) > 1:  # a script with several runs has them in one process
            config.run_dir = config.run_dir.with_name(f"run-{len(WATCHED)}")
        original(run, config, project)

    @_around(Length, "__init__")
    def make_length(original: Callable, length: Any, config: Any, num_samples: int) -> None:
        original(length, config, num_samples)
        _shorten(length, config, plan.num_epochs)

    @_around(EpochBatches, "__init__")
    def make_batches(original: Callable, batches: Any, num: int, size: int, **kw: Any) -> None:
        original(batches, num, size, **kw)
        if kw.get("seed") is not None:  # without one it is not a loader to train with
            batches.num_used = _shorter(batches.num_used, size)

    @_around(Run, "begin")
    def begin(original: Callable, run: Run, model: Any, *args: Any, **kw: Any) -> None:
        models = [model] if isinstance(model, nn.Module) else list(model)
        layers = [layer for each in models for layer in each.modules()]
        found.by_process.update(_by_process(layers))
        found.buffers = _buffers(models)
        found.models = models
        found.hooked = hooked(models)
        if "dropout" in plan.still:
            _set_rates(layers)
        if plan.nudge:
            _nudge(models)
        original(run, model, *args, **kw)
        found.averages = _averages(run)

    @_around(Step, "start_micro_batch")
    def start_micro_batch(original: Callable, step: Any, loader: Any) -> None:
        original(step, loader)
        found.generators = _generators()

    @_around(Run, "end_step")
    def end_step(original: Callable, run: Run) -> bool:
        now = _generators()
        found.draws |= {name for name in now if now[name] != found.generators.get(name)}
        return original(run)

    @_around(Checkpoints, "save")
    def save(original: Callable, checkpoints: Any, progress: Any, *args: Any) -> None:
        original(checkpoints, progress, *args)
        _write(plan.folder / f"held-{progress.step}.json", _held(), rank)

    @_around(Run, "steps")
    def steps(original: Callable, run: Run, *args: Any, **kw: Any) -> Iterator[Any]:
        if not (plan.folder / "held-resumed.json").exists():
            _write(plan.folder / "held-resumed.json", _held(), rank)
        return until_evaluation(run, original(run, *args, **kw))

    def until_evaluation(run: Run, batches: Iterator[Any]) -> Iterator[Any]:
        """Note where an error is raised that comes after the steps and before the next of them."""
        between = plan.folder / "between.json"
        if rank == 0:
            between.unlink(missing_ok=True)
        yield from batches
        _write(between, run.progress.step, rank)

    @_around(Run, "finish")
    def finish(original: Callable, run: Run, *args: Any, **kw: Any) -> Any:
        facts = {
            "steps_in_whole_epoch": run.length.whole,
            "steps_per_epoch": run.length.steps_per_epoch,
            "epochs": run.config.epochs,
            "num_processes": run.accelerator.num_processes,
            "device": run.accelerator.device.type,
            "by_process": sorted(found.by_process),
            "draws": sorted(found.draws),
            "buffers": found.changed_buffers(),
            "hooked": found.hooked,
            "moves_registered_averages": _averages(run) != found.averages,
        }
        _write(plan.folder / "facts.json", facts, rank)
        _write(plan.folder / "held-end.json", _held(), rank)
        return original(run, *args, **kw)


def _around(kind: type, name: str) -> Callable[[Callable], None]:
    """Decorate what is called in place of a method, with the method as its first argument."""

    def decorate(replacement: Callable) -> None:
        original = getattr(kind, name)
        setattr(kind, name, wraps(original)(lambda *a, **kw: replacement(original, *a, **kw)))

    return decorate


def _set(config: Any, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        setattr(config, name, value)


def _shorter(num_used: int, batch_size: int) -> int:
    """Leave out whole batches, so that an epoch has few steps and its last batch stays short."""
    num_steps = math.ceil(num_used / batch_size)
    return num_used - max(0, num_steps - STEPS_IN_EPOCH) * batch_size


def _shorten(length: Any, config: Any, num_epochs: int) -> None:
    """Several short epochs: what begins in a later one, or at an evaluation, is seen as well.

    The checkpoints are in the middle of an epoch if it has more than one step, and at an end.
    """
    length.whole = length.steps_per_epoch
    length.num_used = _shorter(length.num_used, config.batch_size)
    length.steps_per_epoch = math.ceil(length.num_used / config.batch_size)
    config.epochs = max(num_epochs, math.ceil(NUM_STEPS / max(1, length.steps_per_epoch)))
    config.save_every = 6 if length.steps_per_epoch == STEPS_IN_EPOCH else 7
    length.last_step = config.epochs * length.steps_per_epoch
    length.log_every = 1


def _by_process(layers: list[nn.Module]) -> set[str]:
    """Which of these layers give other numbers if a batch is split otherwise, as documented."""
    found = set()
    for layer in layers:
        if isinstance(layer, BatchNorm) and layer.training:
            found.add("BatchNorm")
        is_dropout = "Drop" in type(layer).__name__ and not isinstance(layer, rng.Dropout)
        rates = [rate for _, rate in _rates(layer)]
        if is_dropout:
            rates.append(getattr(layer, "p", 0.0))
        if any(rates):
            found.add("dropout")
    return found


def _rates(layer: nn.Module) -> Iterator[tuple[str, float]]:
    for name in RATES:
        if isinstance(rate := vars(layer).get(name), float):
            yield name, rate


def _set_rates(layers: list[nn.Module]) -> None:
    for layer in layers:
        for name, _ in _rates(layer):
            setattr(layer, name, 0.0)


def _batch_norm_of_the_start(self: Any, input: Any) -> Any:
    """What a BatchNorm in evaluation mode computes: its mean and variance are not changed."""
    options = (self.weight, self.bias, False, 0.0, self.eps)
    mean, variance = self.running_mean, self.running_var
    if mean is None:
        mean = input.new_zeros(input.shape[1])
        variance = input.new_ones(input.shape[1])
    return F.batch_norm(input, mean, variance, *options)


@torch.no_grad()
def _nudge(models: list[nn.Module]) -> None:
    """Change each weight by a rounding: what two runs may differ by that sum in another order."""
    generator = torch.Generator().manual_seed(0)
    for weight in (weight for model in models for weight in model.parameters()):
        if weight.requires_grad and weight.is_floating_point():
            signs = torch.randint(-1, 2, weight.shape, generator=generator)
            weight.mul_(1 + torch.finfo(weight.dtype).eps * signs.to(weight))


def _held() -> dict[str, dict[str, Any]]:
    """What the variables of the script hold now, by name: all that has a state_dict.

    They are those of the functions of the script that are being called, and the global ones.
    """
    found: dict[str, Any] = {}
    frame = inspect.currentframe()
    while frame:
        if frame.f_globals.get("__name__") == "__main__":
            for name, value in [*frame.f_locals.items()]:
                found.setdefault(name, value)
        frame = frame.f_back
    return {name: state for name, value in found.items() if (state := _state_of(value))}


def _state_of(value: Any) -> dict[str, Any]:
    if isinstance(value, list | tuple):
        parts = [(str(n), part) for n, part in enumerate(value)]
    elif isinstance(value, dict):
        parts = [(str(n), part) for n, part in value.items()]
    else:
        parts = [("", value)]
    state: dict[str, Any] = {}
    for name, part in parts[:100]:
        is_class = isinstance(part, type)
        if is_class or not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
            continue
        with contextlib.suppress(Exception):  # of an object that is not ready; it is not compared
            _flatten(name, part.state_dict(), state)
    return state


def _flatten(name: str, value: Any, into: dict[str, Any]) -> None:
    if isinstance(value, torch.Tensor):
        numbers = value.detach().to("cpu", copy=True).contiguous().view(-1)
        into[name] = digest(numbers.view(torch.uint8).numpy())[:8]
    elif isinstance(value, dict):
        for key, part in value.items():
            _flatten(f"{name}.{key}" if name else str(key), part, into)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            _flatten(f"{name}.{number}", part, into)
    elif isinstance(value, bool | int | float | str):
        into[name] = value


def _write(path: Path, content: Any, rank: int) -> None:
    if rank == 0 and len(WATCHED) == 1:  # of several runs, it is about the first
        path.write_text(json.dumps(content))
