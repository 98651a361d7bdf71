"""Describe the plan of a run, read from the objects that carry it out, its world and metrics."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend
from torch import nn

from trainkit.config import TrainingConfig
from trainkit.launch.environment import num_copies
from trainkit.numbers.optim import num_parameters, weights_of
from trainkit.repairs.private_names import prepared_schedulers
from trainkit.store.rehearsals import mark_of_rehearsal
from trainkit.text import count

if TYPE_CHECKING:
    from trainkit.run.run import Run

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# Scripts that are rehearsed by the tests of this repository, at its top and in examples/.
SHIPPED = "train_mnist train_regression docstrings finetune gan gpt mixture pictures preference "
SHIPPED += "table text two_towers windows"


def describe_plan(run: "Run", plan: dict[str, str]) -> str:
    """Return the plan of a run that has begun, including the script's own lines."""
    config, accelerator, length = run.config, run.accelerator, run.length
    models, optimizers = run.models, run.prepared.optimizers
    num_train, num_eval = map(len, run.sets)
    num_processes = accelerator.num_processes
    num_parts = num_processes * config.accumulate
    left_out = num_train - length.num_used
    unused = f" (the last {left_out} of each shuffle are left out)" if left_out else ""
    num_steps = config.epochs * length.steps_per_epoch
    ends = f"{length.last_step} (--stop-after-steps) of " if config.stop_after_steps else ""
    lines = {
        "device": describe_world(accelerator),
        **{name: text for name, text in plan.items() if name != "next"},
        "samples": f"{num_train}{unused}, {num_eval} to evaluate",
        "model": "; ".join(describe_model(accelerator, model) for model in models),
        "batch": f"{config.batch_size} per step = {count(num_processes, 'process')} x "
        f"{count(config.accumulate, 'micro-batch')} x {config.batch_size // num_parts}",
        "updates": f"{ends}{num_steps} = {count(config.epochs, 'epoch')} x "
        f"{count(length.steps_per_epoch, 'step')}",
        "optimizer": "; ".join(describe_optimizer(accelerator, o) for o in optimizers),
        "run folder": str(config.run_dir),
    }
    layers = (layer for model in models for layer in model.modules())
    if num_parts > 1 and any(isinstance(layer, BATCH_NORMS) and layer.training for layer in layers):
        lines["note"] = (
            "BatchNorm: its numbers depend on how a batch is split, so other processes or "
            "micro-batches give other losses"
        )
    trained = {*weights_of(*optimizers)}
    if any(weight.dtype.itemsize == 2 for weight in trained):
        lines["precision"] = (
            "weights of 16 bits, which small steps leave as they are: keep them float32, and give "
            "--mixed_precision bf16 to accelerate launch"
        )
    named = (pair for model in models for pair in model.named_parameters())
    if untrained := [n for n, weight in named if weight.requires_grad and weight not in trained]:
        lines["not trained"] = (
            f"{count(len(untrained), 'weight')} in no optimizer, such as {untrained[0]}"
        )
    lines |= describe_rehearsal(Path(sys.argv[0]))
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def describe_rehearsal(script: Path) -> dict[str, str]:
    """Return a line of the plan if this is a script of the user that no rehearsal has passed."""
    folder, top = script.resolve().parent, Path(__file__).parents[2]
    is_shipped = folder in (top, top / "examples") and script.stem in SHIPPED.split()
    is_installed = folder.is_relative_to(sys.prefix)  # as what starts a notebook
    if is_shipped or is_installed or script.suffix != ".py" or not script.is_file():
        return {}
    if mark_of_rehearsal(script).exists():
        return {}
    return {"not rehearsed": f"python -m trainkit.tools.rehearse {script}"}


def describe_model(accelerator: Accelerator, model: nn.Module) -> str:
    backend = accelerator.state.dynamo_plugin.backend
    compiled = ""
    if backend != DynamoBackend.NO:
        compiled = f", compiled with {backend.value.lower()} (the first step waits for it)"
    name = type(model).__name__.removeprefix("FSDP")  # torch's prefix for sharded models
    number = num_parameters([model])
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    frozen = ""
    if trained < number:  # by --lora, or in the script
        frozen = f", of which {trained:,} are trained ({trained / number:.2%})"
    return f"{name}, {number:,} parameters{frozen}{compiled}"


def describe_optimizer(accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> str:
    schedules = [
        type(wrapped.scheduler).__name__
        for wrapped in prepared_schedulers(accelerator)
        if optimizer in wrapped.optimizers
    ]
    groups = optimizer.param_groups
    peaks = [group.get("max_lr", group.get("initial_lr", group.get("lr"))) for group in groups]
    rates = dict.fromkeys("its own" if peak is None else f"{float(peak):g}" for peak in peaks)
    return (
        f"{type(optimizer.optimizer).__name__}, {', '.join(schedules) or 'no schedule'},"
        f" learning rate {' and '.join(rates)} at its peak"
    )


def describe_world(accelerator: Accelerator) -> str:
    """Return one line: number of processes, device, precision and threads."""
    device = accelerator.device.type
    threads = f", {count(torch.get_num_threads(), 'thread')} each" if device == "cpu" else ""
    if device == "cuda":
        device = torch.cuda.get_device_name(accelerator.device)
    precision = {"no": "float32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    processes = count(accelerator.num_processes, "process")
    sharded = ", sharded" if accelerator.is_fsdp2 else ""
    if (copies := num_copies(accelerator.num_processes)) > 1:
        sharded = f", {copies} copies, each sharded over {accelerator.num_processes // copies}"
    return f"{processes} on {device}, {precision}{threads}{sharded}"


def describe_run(accelerator: Accelerator, config: TrainingConfig) -> dict[str, Any]:
    """Return what a result depends on: arguments, versions, revision, world and hardware."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "accelerate")}
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "arguments": vars(config),
        "git_revision": git_revision(),
        "versions": {"python": platform.python_version(), **versions},
        "world": describe_world(accelerator),
        "num_processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def git_revision() -> str | None:
    """Return the commit of the script's folder, "-dirty" if files were edited; None without git."""
    git = ["git", "-C", str(Path(sys.argv[0]).resolve().parent), "describe", "--always", "--dirty"]
    try:
        said = subprocess.run(git, capture_output=True, text=True, check=False).stdout
    except OSError:  # there is none
        return None
    return said.strip() or None
