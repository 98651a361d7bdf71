"""Which checkpoint a run goes on with."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from trainkit.checkpoints.mirror import Mirror, open_mirror, whole_checkpoints
from trainkit.config import TrainingConfig
from trainkit.errors import UsageError
from trainkit.launch.processes import failing_together, on_main
from trainkit.store.atomic import remove_tree, rename_free, sync
from trainkit.store.manifest import not_listed, step_name, steps_in, verify
from trainkit.store.weights import check_weights_file
from trainkit.text import shorten


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
            if config.resume and not config.mirror:
                if config.resume == "latest" and not steps_in(directory):
                    raise UsageError(f"--resume latest: there is no checkpoint in {config.run_dir}")
                if config.resume not in ("auto", "latest") and not Path(config.resume).is_dir():
                    raise UsageError(f"--resume {config.resume}: there is no such checkpoint")
    if not config.dry_run:  # it writes nothing
        open_mirror(accelerator, config)


def check_in(directory: Path, wanted: str) -> None:
    """Raise UsageError if the checkpoint that --resume names is not one of this folder."""
    if Path(wanted).resolve().parent != directory.resolve():
        raise UsageError(
            f"--resume {wanted} is not in {directory}, and a run continues only in "
            "its own folder: name that folder, or a copy of it, with --run-dir"
        )


def choose(
    directory: Path,
    mirror: Mirror | None,
    wanted: str | None,
    notices: list[str],
    check: Callable[[Path], dict[str, Any]],
    accelerator: Accelerator,
) -> tuple[Path | None, dict[str, Any]]:
    """Return the checkpoint that --resume names and its trainer.json, or (None, {}) for a new run.

    Every process must call this. Raises UsageError on all of them, also that of check(path), which
    returns trainer.json. "is_missing" in it says that the mirror lacks this checkpoint.
    """

    def find() -> tuple[Path | None, dict[str, Any]]:
        for leftover in list(directory.glob(".tmp-*")):
            remove_tree(leftover)
        fetch: dict[str, Callable] = {}
        if mirror and wanted:
            mirror.open()
            fetch = dict.fromkeys(
                whole_checkpoints(mirror.listed), partial(mirror.fetch, check=check)
            )
            mirror.check_run(check)
        where = f"{directory} or --mirror {mirror.url}" if mirror else str(directory)
        path = choose_checkpoint(directory, wanted, notices, fetch, where)
        if path is None:
            return None, {}
        # One that was saved without --mirror lacks what is beside it.
        missing = path.name not in fetch and (path / "metrics.jsonl").exists()
        return path, check(path) | {"is_missing": missing}

    result = on_main(accelerator, f"cannot resume from {directory}", find)
    (pair,) = broadcast_object_list(result or [None])
    return pair


def choose_checkpoint(
    directory: Path,
    wanted: str | None,
    notices: list[str],
    mirrored: Mapping[str, Callable[[Path], str | None]],
    where: str,
) -> Path | None:
    """Return the checkpoint in `directory` that --resume names, verified, or None for a new run.

    Raises UsageError if that checkpoint is not complete, or if none of several is.

    mirrored: by the name of a checkpoint of the mirror what copies it to a path, or says why not.
    where: all places that were looked at, for messages.
    """
    if wanted is None:
        return None
    candidates = sorted({*steps_in(directory), *(directory / name for name in mirrored)})
    if wanted not in ("auto", "latest"):
        candidates = [Path(wanted)]
        check_in(directory, wanted)
    damaged: list[str] = []
    for path in reversed(candidates):
        problem = verify(path)
        if problem and path.name in mirrored:
            problem = mirrored[path.name](path)
        if problem is None:
            notices.extend([*damaged, f"resuming from {path}"])
            if others := not_listed(path):
                notices.append(f"not read, as the checkpoint does not list it: {shorten(others)}")
            return path
        damaged.append(f"skipped {path}: {problem}")
    if damaged:
        raise UsageError(
            f"--resume {wanted}: no checkpoint is complete ({'; '.join(damaged)}); without "
            "--resume a new run starts and this folder is renamed"
        )
    if wanted == "latest":
        raise UsageError(f"--resume latest: there is no checkpoint in {where}")
    notices.append(f"no checkpoint in {where}: starting from the beginning")
    return None


def abandon_later(directory: Path, step: int, used: Path | None) -> list[str]:
    """Rename the checkpoints after this step, the last first; return a sentence for each.

    A run that continues from the checkpoint `used` no longer leads to them.
    """
    sentences = []
    for path in reversed(steps_in(directory)):
        if path.name >= step_name(step) and (used is None or path.name != used.name):
            new = rename_free(path, f"abandoned-{path.name}")
            sentences.append(f"{path.name} is now {new.name}")
    sync(directory)
    return sentences
