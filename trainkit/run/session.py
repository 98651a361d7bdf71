"""Set up the devices, processes, precision and sharding that the YAML asks for, or refuse."""

import signal
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs

from trainkit.checkpoints import sharded as shards
from trainkit.checkpoints.resume import check_given
from trainkit.config import TrainingConfig
from trainkit.launch import environment, nodes, processes
from trainkit.launch.signals import Signals
from trainkit.launch.startup import compute_float32_in_full, keep_printing, refuse_pickled_code
from trainkit.repairs.private_names import mesh_groups
from trainkit.repairs.replaced import (
    end_workers,
    look_for_lomo_once,
    look_only_at_what_is_imported,
    share_frozen_weights,
)
from trainkit.run.reporter import Reporter
from trainkit.store.log import JsonlTracker, make_trackers

# The process groups of runs that have ended: see end_training.
ENDED: list[Any] = []


def start_accelerator(config: TrainingConfig, project: str) -> tuple[Accelerator, Reporter]:
    """Connect to the other processes and check that all were started as asked for, and alike."""
    keep_printing()  # for scripts that startup.run() has not called
    refuse_pickled_code()
    compute_float32_in_full()
    precision = environment.check_launch()
    look_for_lomo_once()
    look_only_at_what_is_imported()
    tracker = JsonlTracker(config.run_dir)
    with processes.deadline(config.time_limit):
        accelerator = Accelerator(
            cpu=not torch.accelerator.is_available(),
            mixed_precision=precision,
            gradient_accumulation_steps=max(1, config.accumulate),
            # A batch is split over the processes, so --batch-size means the same under every YAML.
            dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=True),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=config.time_limit)],
            log_with=make_trackers(config, tracker, project),
        )
    shards.shard(accelerator)
    share_frozen_weights(accelerator, shards.frozen)
    nodes.check_world(accelerator)
    nodes.check_nodes(accelerator, config)
    config.validate(accelerator.num_processes)
    check_given(accelerator, config)
    return accelerator, Reporter(accelerator, config, tracker)


def leave_processes(
    accelerator: Accelerator, signals: Signals, error: BaseException | None, is_over: bool
) -> None:
    """End the joint work of the processes; no collectives after an error: some may be gone."""
    if error is not None and accelerator.num_processes > 1:
        # The launcher sends it to all others when the first leaves; they must print first.
        signals.ignore(signal.SIGTERM)
    if is_over:
        signals.wait()
        end_workers(accelerator)
        end_training(accelerator)


def end_training(accelerator: Accelerator) -> None:
    """Call accelerator.end_training(), and keep the process group until the process exits.

    torch, at least 2.11 and 2.13, frees a process group of gloo while it holds the interpreter, and
    then joins a thread that may wait for the interpreter to free a tensor: seen with 3 of some 300
    runs that had finished and then never ended.
    """
    ENDED.extend((torch.distributed.group.WORLD, *mesh_groups(accelerator).values()))
    accelerator.end_training()
