"""The fingerprint of a run: what must be equal on all nodes and after a resume.

The world of a run (its processes, device and versions) may differ, but then rounding does too.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from trainkit.checkpoints import sharded as shards
from trainkit.checkpoints.content import hash_fixed, text_of
from trainkit.config import TrainingConfig
from trainkit.errors import UsageError, as_usage_error
from trainkit.hashes import digest
from trainkit.launch import nodes
from trainkit.launch.environment import num_copies
from trainkit.launch.processes import failing_together
from trainkit.numbers.loaders import batches_of
from trainkit.numbers.optim import num_parameters
from trainkit.numbers.orders import Progress
from trainkit.numbers.randoms import NUM_HELD
from trainkit.repairs.private_names import prepared_loaders
from trainkit.store.jsons import from_exact_json, to_json
from trainkit.store.manifest import FORMAT, name_revision
from trainkit.text import shorten

# A flag, or an entry of the metadata (JSON), that an older version did not have, changes nothing.
NOT_IN_USE: tuple[Any, ...] = (None, False, 0, "", [], {}, "null", "false", '""', "[]", "{}")

# What format 6 hashed in another way, so that it cannot be compared.
HASHES_OF_BEFORE = (
    "data",
    "weights= or order= of the samples",
    "start_from",
    "pictures",
    "metadata[reference]",  # of preference.py
)


def fingerprint_run(
    accelerator: Accelerator,
    config: TrainingConfig,
    models: Sequence[nn.Module],
    data_hashes: dict[str, str],
    metadata: dict[str, Any],
    started_from: str,
    fixed: dict[str, Any],
) -> dict[str, Any]:
    """Return the values by the names used in messages. Every process must call this.

    data_hashes are those of the sets; started_from is that of --start-from; fixed has what is used
    and not trained, by name. Raises UsageError on all processes if their values differ.
    """
    with failing_together(accelerator, "run.begin(...) cannot read what is fixed"):
        hashes = {f"fixed[{name}]": hash_fixed(name, value) for name, value in fixed.items()}
    orders = []
    for batches in filter(None, map(batches_of, prepared_loaders(accelerator))):
        if batches.is_custom:
            order = batches.order(0, 0, min(batches.num_samples, NUM_HELD))
            orders.append(text_of(order))
    fingerprint = {
        **config.experiment(),
        **data_hashes,
        "weights= or order= of the samples": digest("".join(orders)),
        "size": num_parameters(models),
        **{f"metadata[{name}]": json.dumps(value) for name, value in metadata.items()},
        **hashes,
    }
    if started_from:
        fingerprint["start_from"] = started_from
        shards.HASHED.clear()  # the file may have replaced frozen weights
    for number, model in enumerate(models):
        frozen = shards.HASHED.get(model) or shards.hash_frozen(model)
        fingerprint |= {f"{name} of model {number}": value for name, value in frozen.items()}
    nodes.check_same(accelerator, fingerprint)
    return fingerprint


def read_same_run(
    path: Path, now: dict[str, Any], last_step: int, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return trainer.json of the checkpoint at `path`, with its "progress" as a Progress.

    Raises UsageError if it does not belong to the run with the fingerprint `now`, or is from after
    the last step of this run.

    Args:
        defaults: of the flags, by name. A flag that has come since the checkpoint was saved is by
            default what was done before it: a checkpoint without it belongs to a run that has that.
    """
    with as_usage_error(f"{path / 'trainer.json'} cannot be used"):
        trainer = from_exact_json((path / "trainer.json").read_text())
        before = json.loads(to_json(trainer["fingerprint"]))  # older ones have Infinity
        progress = Progress(**trainer["progress"])
    is_older = not is_of_this_format(trainer)
    # Files come first: the name of a missing file says more than a hash of all files.
    for name in sorted(now | before, key=lambda name: not name.startswith("/")):
        values = before.get(name), now.get(name)
        if values[0] == values[1] or (is_older and _cannot_be_compared(name, before)):
            continue
        came_since = name not in before and name in now
        if came_since and now[name] in (*NOT_IN_USE, defaults.get(name)):
            continue
        version = name_revision(path) if is_older else ""
        remedy = "resume with what it had, or start anew without --resume"
        if name == "epochs":  # the schedule is made for them
            remedy += ", in another --run-dir with --start-from and model.safetensors of this one"
        raise UsageError(
            f"{path} belongs to another run: {name} is {values[0]!r} there and "
            f"{values[1]!r} here{version}: {remedy}"
        )
    if progress.step > last_step:
        raise UsageError(
            f"{path} is of step {progress.step} and this run ends at step {last_step}: raise "
            "--epochs or --stop-after-steps, or resume from an older checkpoint"
        )
    return trainer | {"progress": progress}


def _cannot_be_compared(name: str, before: dict[str, Any]) -> bool:
    """Was this hashed in another way in format 6, or is it metadata that has come since?"""
    return name in HASHES_OF_BEFORE or (name.startswith("metadata[") and name not in before)


def is_of_this_format(trainer: dict[str, Any]) -> bool:
    """Was trainer.json written in this format, and not in the one before?"""
    return trainer.get("format") == FORMAT


def compare_sources(trainer: dict[str, Any], now: dict[str, str]) -> Iterator[str]:
    """Yield a sentence if source files differ from those that wrote this trainer.json.

    now: the result of hash_sources(); trainer: empty for a new run.
    """
    before = trainer.get("sources", {})
    changed = sorted(name for name in now if before.get(name, now[name]) != now[name])
    if trainer and not is_of_this_format(trainer):
        yield (
            "an older version saved this checkpoint, which drew other random numbers: orders, "
            "augmentation and dropout differ from here on, so that the rest of this epoch may "
            "repeat samples; the data, weights= or order= and --start-from cannot be compared"
        )
    elif changed:
        yield (
            f"{shorten(changed)} differs from what wrote this checkpoint: the run continues with "
            "the code as it is now"
        )


def world_facts(accelerator: Accelerator) -> dict[str, Any]:
    """What may change on a resume; a change makes rounding differ."""
    return {
        "num_processes": accelerator.num_processes,
        "sharded": accelerator.is_fsdp2,
        "copies": num_copies(accelerator.num_processes),
        "mixed_precision": accelerator.mixed_precision,
        "micro_batches": accelerator.gradient_accumulation_steps,
        "device": accelerator.device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def compare_worlds(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each difference between two results of world_facts(...)."""
    for name in now:
        if before.get(name, now[name]) != now[name]:
            yield (
                f"{name} was {before[name]!r} and is {now[name]!r}: the run continues at the same "
                "sample, but bits may differ from here"
            )
