"""Find complete checkpoints: MANIFEST.json lists the size and hash of every file."""

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainkit.errors import RunFailure, UsageError
from trainkit.run_dir.files import sync

FORMAT = 3
STEP_NAME = re.compile(r"step-\d{10}")
# The files of save_state; there may be several models, optimizers and schedules.
FILE_NAME = re.compile(
    r"trainer\.json|state/((model|average)(_\d+)?\.safetensors|(optimizer|scheduler)(_\d+)?\.bin"
    r"|scaler\.pt|random_states_\d+\.pkl|shard-\d{5}\.bin)"
)


def steps_in(directory: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; the numbers in their names are zero-padded."""
    return sorted(p for p in directory.glob("step-*") if STEP_NAME.fullmatch(p.name))


def choose(directory: Path, wanted: str | None, notices: list[str]) -> Path | None:
    """Return the checkpoint in `directory` that --resume names, verified, or None for a new run.

    Raises UsageError if that checkpoint is not complete, or if none of several is.
    """
    if wanted is None:
        return None
    candidates = steps_in(directory)
    if wanted not in ("auto", "latest"):
        candidates = [Path(wanted)]
        if candidates[0].resolve().parent != directory.resolve():
            raise UsageError(
                f"--resume {wanted} is not in {directory}, and a run continues only in "
                "its own folder: name that folder, or a copy of it, with --run-dir"
            )
    damaged: list[str] = []
    for path in reversed(candidates):
        problem = verify(path)
        if problem is None:
            notices.extend([*damaged, f"resuming from {path}"])
            return path
        damaged.append(f"passed over {path}: {problem}")
    if damaged:
        raise UsageError(
            f"--resume {wanted}: no checkpoint is whole ({'; '.join(damaged)}); without "
            "--resume a new run starts and this folder is renamed"
        )
    if wanted == "latest":
        raise UsageError(f"--resume latest: there is no checkpoint in {directory}")
    notices.append(f"no checkpoint in {directory}: starting from the beginning")
    return None


def write_manifest(folder: Path) -> None:
    """Make all files below `folder` durable, and write their sizes and hashes to MANIFEST.json.

    Raises RunFailure if it finds a file that a resume would refuse.
    """
    files = describe(folder)
    for name in files:
        if not FILE_NAME.fullmatch(name):
            raise RunFailure(
                f"the checkpoint would hold {name}, which no resume reads, because that could "
                "execute code: give its content to a module that accelerator.prepare takes, as a "
                "buffer"
            )
    manifest = folder / "MANIFEST.json"
    manifest.write_text(json.dumps({"format": FORMAT, "files": files}, indent=2) + "\n")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sync, [folder / name for name in files]))  # list() raises their errors
    for path in (manifest, *{(folder / name).parent for name in files}, folder):
        sync(path)


def verify(path: Path) -> str | None:
    """Say why a folder is not a complete checkpoint; None if every file is as it was saved."""
    file = path / "MANIFEST.json"
    if not file.is_file():
        return "it has no MANIFEST.json"
    try:
        manifest = json.loads(file.read_bytes())
        if manifest["format"] != FORMAT:
            return f"it is of format {manifest['format']}, not {FORMAT}"
        files, there = manifest["files"], describe(path)
        for name in sorted(files | there):
            if name not in there:
                return f"{name} is missing"
            if name not in files or not FILE_NAME.fullmatch(name):
                return f"{name} does not belong there"
            if files[name] != there[name]:
                return f"{name} was changed"
    except Exception as problem:  # a forged manifest may raise anything
        return f"MANIFEST.json cannot be read ({type(problem).__name__})"
    return None


def describe(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of each file below a folder except its manifest; empty for links and pipes."""
    paths = [p for p in sorted(folder.rglob("*")) if p.is_symlink() or not p.is_dir()]
    plain = {p for p in paths if p.is_file() and not p.is_symlink()}
    names = {p.relative_to(folder).as_posix(): p for p in paths if p.name != "MANIFEST.json"}
    return {
        # Links and pipes are not read: reading a pipe would never end.
        name: {"bytes": p.stat().st_size, "sha256": sha256_of(p)} if p in plain else {}
        for name, p in names.items()
    }


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
