"""Which checkpoint a run goes on with."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from trainkit.files.atomic import remove_tree
from trainkit.files.manifest import (
    choose_checkpoint,
)
from trainkit.launch.together import on_main
from trainkit.mirror.mirror import Mirror, whole_checkpoints


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
        path = choose_checkpoint(directory, wanted, notices, fetch)
        if path is None:
            return None, {}
        # One that was saved without --mirror lacks what is beside it.
        missing = path.name not in fetch and (path / "metrics.jsonl").exists()
        return path, check(path) | {"is_missing": missing}

    result = on_main(accelerator, f"cannot resume from {directory}", find)
    (pair,) = broadcast_object_list(result or [None])
    return pair
