"""Which checkpoint a run goes on with, and what must be equal for it to be the same run.

The world of a run (its processes, device and versions) may differ, but then rounding does too.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from trainkit.checkpoints.hashing import hash_fixed, text_of
from trainkit.checkpoints.mirror import Mirror, open_mirror
from trainkit.checkpoints.sharded import hash_frozen
from trainkit.config import TrainingConfig
from trainkit.errors import UsageError, as_usage_error
from trainkit.hashes import digest
from trainkit.launch.environment import num_copies
from trainkit.launch.nodes import check_same
from trainkit.launch.processes import failing_together, on_main
from trainkit.numbers.loaders import batches_of
from trainkit.numbers.optim import num_parameters
from trainkit.numbers.orders import Progress
from trainkit.numbers.randoms import NUM_HELD
from trainkit.repairs.private_names import prepared_loaders, prepared_models
from trainkit.store.atomic import remove_tree, rename_free, sync
from trainkit.store.manifest import step_name, steps_in, verify
from trainkit.store.weights import check_weights_file

# A flag, or an entry of the metadata (JSON), that an older script did not have, changes nothing.
NOT_IN_USE: tuple[Any, ...] = (None, False, 0, "", [], {}, "null", "false", '""', "[]", "{}")


def check_given(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Refuse --start-from, --resume and --mirror that cannot be used, before data are loaded.

    Every process must call this. Raises UsageError on all of them.
    """
    directory = config.run_dir / "checkpoints"
    with failing_together(accelerator, "--start-from or --resume cannot be read"):
        if accelerator.is_main_process:
            if config.start_from is not None:
                check_weights_file(config.start_from)
            if config.resume not in (None, "auto", "latest"):
                check_in(directory, config.resume)
    open_mirror(accelerator, config)


def check_in(directory: Path, wanted: str) -> None:
    """Raise UsageError if the checkpoint that --resume names is not one of this folder."""
    if Path(wanted).resolve().parent != directory.resolve():
        raise UsageError(
            f"--resume {wanted} is not in {directory}, and a run continues only in "
            "its own folder: name that folder, or a copy of it, with --run-dir"
        )


def choose(
    accelerator: Accelerator,
    directory: Path,
    mirror: Mirror | None,
    wanted: str | None,
    check: Callable[[Path], dict[str, Any]],
) -> tuple[Path | None, dict[str, Any], list[str]]:
    """Return the checkpoint that --resume names, its trainer.json, and what to say about it.

    It is None for a new run. Every process must call this; check(path) returns trainer.json.
    """

    def find() -> tuple[Path | None, dict[str, Any], list[str]]:
        for leftover in list(directory.glob(".tmp-*")):
            remove_tree(leftover)
        if wanted is None:
            return None, {}, []
        if mirror:
            mirror.look()
            mirror.check_run(check)
        path, notices = _newest_whole(directory, mirror, wanted)
        return path, check(path) if path else {}, notices

    found = on_main(accelerator, f"cannot resume from {directory}", find)
    (found,) = broadcast_object_list(found or [None])
    return found


def _newest_whole(
    directory: Path, mirror: Mirror | None, wanted: str
) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of those that --resume names, and what to say about it."""
    mirrored = mirror.whole() if mirror else set()
    candidates = sorted({*steps_in(directory), *(directory / name for name in mirrored)})
    if wanted not in ("auto", "latest"):
        candidates = [Path(wanted)]
        check_in(directory, wanted)
    damaged: list[str] = []
    for path in reversed(candidates):
        problem = verify(path)
        if problem and mirror and path.name in mirrored:
            problem = mirror.fetch(path)
        if problem is None:
            return path, [*damaged, f"resuming from {path}"]
        damaged.append(f"skipped {path}: {problem}")
    if damaged:
        raise UsageError(
            f"--resume {wanted}: no checkpoint is complete ({'; '.join(damaged)}); without "
            "--resume a new run starts and this folder is renamed"
        )
    where = f"{directory} or --mirror {mirror.url}" if mirror else str(directory)
    if wanted == "latest":
        raise UsageError(f"--resume latest: there is no checkpoint in {where}")
    return None, [f"no checkpoint in {where}: starting from the beginning"]


def abandon_later(directory: Path, step: int, used: Path | None) -> list[str]:
    """Rename the checkpoints after this step, the last first; return a sentence for each."""
    sentences = []
    for path in reversed(steps_in(directory)):
        if path.name >= step_name(step) and (used is None or path.name != used.name):
            new = rename_free(path, f"abandoned-{path.name}")
            sentences.append(f"{path.name} is now {new.name}")
    sync(directory)
    return sentences


def fingerprint_run(
    accelerator: Accelerator,
    config: TrainingConfig,
    data_hashes: dict[str, str],
    metadata: dict[str, Any],
    started_from: str,
    fixed: dict[str, Any],
) -> dict[str, Any]:
    """Return what a resume compares, by the names used in messages. Every process must call this.

    data_hashes are those of the sets, started_from is that of --start-from. Raises UsageError on
    all processes if their values differ.
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
        "size": num_parameters(prepared_models(accelerator)),
        **{f"metadata[{name}]": json.dumps(value) for name, value in metadata.items()},
        **hashes,
    }
    if started_from:
        fingerprint["start_from"] = started_from
    for number, model in enumerate(prepared_models(accelerator)):
        frozen = hash_frozen(model).items()
        fingerprint |= {f"{name} of model {number}": value for name, value in frozen}
    check_same(accelerator, fingerprint)
    return fingerprint


def read_same_run(path: Path, now: dict[str, Any], last_step: int) -> dict[str, Any]:
    """Return trainer.json of the checkpoint at `path`, with its "progress" as a Progress.

    Raises UsageError if its fingerprint is not `now`, or if it is from after the last step.
    """
    with as_usage_error(f"{path / 'trainer.json'} cannot be used"):
        trainer = json.loads((path / "trainer.json").read_text())
        before = trainer["fingerprint"]
        progress = Progress(**trainer["progress"])
    # Files come first: the name of a missing file says more than a hash of all files.
    for name in sorted(now | before, key=lambda name: not name.startswith("/")):
        values = before.get(name), now.get(name)
        came_since = name not in before and now[name] in NOT_IN_USE
        if values[0] == values[1] or came_since:
            continue
        remedy = "resume with what it had, or start anew without --resume"
        if name == "epochs":  # the schedule is made for them
            remedy += ", in another --run-dir with --start-from and model.safetensors of this one"
        raise UsageError(
            f"{path} belongs to another run: {name} is {values[0]!r} there and "
            f"{values[1]!r} here: {remedy}"
        )
    if progress.step > last_step:
        raise UsageError(
            f"{path} is of step {progress.step} and this run ends at step {last_step}: raise "
            "--epochs or --stop-after-steps, or resume from an older checkpoint"
        )
    return trainer | {"progress": progress}


def world_facts(accelerator: Accelerator, num_micro_batches: int) -> dict[str, Any]:
    """What may change on a resume; a change makes rounding differ."""
    return {
        "num_processes": accelerator.num_processes,
        "sharded": accelerator.is_fsdp2,
        "copies": num_copies(accelerator.num_processes),
        "mixed_precision": accelerator.mixed_precision,
        "micro_batches": num_micro_batches,
        "device": accelerator.device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def what_differs(trainer: dict[str, Any], world: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each difference between the worlds of a checkpoint and of this run."""
    before = trainer.get("world", world)  # there is no checkpoint of a new run
    for name in world:
        if before[name] != world[name]:
            yield (
                f"{name} was {before[name]!r} and is {world[name]!r}: the run continues at the "
                "same sample, but bits may differ from here"
            )
