"""The fingerprint of a run: what must be equal on all nodes, and when the run is resumed.

The world of a run, its processes and device, may differ: then rounding does.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainkit import shards

import torch
from accelerate import Accelerator

from trainkit.checks.data import fingerprint_data
from trainkit.cli.console import num_parameters
from trainkit.errors import UsageError
from trainkit.launch import nodes
from trainkit.loaders import InMemory, batches_of
from trainkit.private import prepared_loaders
from trainkit.rng import NUM_HELD


def fingerprint_run(run: Any, metadata: dict[str, Any], started_from: str) -> dict[str, Any]:
    """The values, by names for messages; started_from: SHA-256. Every process must call this.

    A data set with fingerprint() says it of each of its files, so that a message can name the one
    that changed. Raises UsageError on all processes if theirs differ.
    """
    config = run.config
    files = [dataset.fingerprint() for dataset in run.sets if hasattr(dataset, "fingerprint")]
    loaders = filter(None, map(batches_of, prepared_loaders(run.accelerator)))
    orders = [
        InMemory(batches.order(0, 0, min(batches.num_samples, NUM_HELD)))
        for batches in loaders
        if batches.is_custom
    ]
    found = {
        **config.experiment(),
        **{name: value for of in files for name, value in of.items()},
        "data": run.data_fingerprint,
        "weights of samples": fingerprint_data(*orders),  # or order=; older checkpoints say this
        "size": num_parameters(run.models),
        **{
            f"metadata[{name}]": json.dumps(value)
            for name, value in metadata.items()
            if name not in config.nodes_may_differ
        },
    }
    frozen = run.frozen  # of a sharded run: what prepare was given
    if started_from:
        found["start_from"] = started_from
    if started_from or not frozen:  # --start-from may have replaced what is frozen
        frozen = shards.fingerprint_frozen(run.models)
    nodes.check_same(run.accelerator, found | frozen | run.frozen)
    return found | frozen


def check_same_run(path: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise UsageError if the checkpoint at `path`, with this fingerprint, is of another run."""
    # Older checkpoints say about[...].
    before = {name.replace("about[", "metadata["): value for name, value in saved.items()}
    # Files first: the name of one that is gone says more than a hash over all of them.
    for name in sorted(now | before, key=lambda name: not name.startswith("/")):
        if before.get(name) != now.get(name):
            raise UsageError(
                f"{path} belongs to another run: {name} is {before.get(name)!r} there and "
                f"{now.get(name)!r} here"
            )


def describe_world(accelerator: Accelerator) -> dict[str, Any]:
    """What may differ after a resume, but then changes rounding."""
    return {
        "num_processes": accelerator.num_processes,
        "sharded": accelerator.is_fsdp2,
        "mixed_precision": accelerator.mixed_precision,
        "micro_batches": accelerator.gradient_accumulation_steps,
        "device": accelerator.device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def compare_worlds(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """A sentence for each difference of two describe_world(...)."""
    for name in now:
        if before.get(name, now[name]) != now[name]:
            yield (
                f"{name} was {before[name]!r} and is {now[name]!r}: the run continues at the same "
                "sample, but bits may differ from here"
            )
