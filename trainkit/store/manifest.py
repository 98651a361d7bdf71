"""Find complete checkpoints: MANIFEST.json lists the size and hash of every file."""

import json
import os
import re
from pathlib import Path
from threading import Event
from typing import Any

from trainkit.errors import RunFailure
from trainkit.hashes import KIND, digest_file
from trainkit.store.atomic import sync

# A hash in a manifest finds damage. It cannot find forgery, because whoever changes a file can
# change the manifest too; that is why nothing in a checkpoint can execute.
FORMAT = 9  # a resume reads this one alone
STEP_NAME = re.compile(r"step-\d{10}")
# The files of save_state; there may be several models, optimizers and schedules.
FILE_NAME = re.compile(
    r"trainer\.json|metrics\.jsonl|(predictions|best)\.safetensors"  # the last three for --mirror
    r"|state/((model|average)(_\d+)?\.safetensors|(optimizer|scheduler)(_\d+)?\.bin"
    r"|(registered|rest)\.bin|scaler\.pt|random_states_\d+\.pkl"
    r"|shard-\d{5}-model-00001-of-00001\.safetensors)"
)

# What accelerator.load_state would open besides, some of it without asking whether it is code.
OPENED_BY_ACCELERATE = re.compile(
    r"state/(custom_checkpoint_\d+\.pkl|(pytorch_model|sampler|dl_state_dict)(_\d+)?\.bin)"
)


def is_listed(name: str) -> bool:
    """May a manifest list a file of this name? Nothing else in a checkpoint is ever opened."""
    return FILE_NAME.fullmatch(name) is not None


def step_name(step: int) -> str:
    """The name of the checkpoint of a step; the numbers are zero-padded, so the names sort."""
    return f"step-{step:010d}"


def steps_in(directory: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(p for p in directory.glob("step-*") if STEP_NAME.fullmatch(p.name))


def make_durable(folder: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Make the files that this process wrote durable; return the size and hash of each.

    On a network file system the machine of the process that wrote a file may alone hold the bytes.
    Raises RunFailure for a file that a resume would refuse.
    """
    names = [name for name in _paths(folder) if writer_of(name.rpartition("/")[2]) == rank]
    for name in filter(OPENED_BY_ACCELERATE.fullmatch, names):
        raise RunFailure(
            f"the checkpoint would hold {name}, which no resume reads, because that could "
            "execute code: keep its content in a buffer of a module that accelerator.prepare "
            "is given"
        )
    # Others may write there too: a file manager, a network file system, a virus scanner.
    files = {name: _described(folder / name) for name in names if is_listed(name)}
    for name in files:
        sync(folder / name)
    return files


def write_manifest(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Write MANIFEST.json, and make it and all names in the folder durable."""
    manifest = folder / "MANIFEST.json"
    manifest.write_text(json.dumps({"format": FORMAT, "files": files}, indent=2) + "\n")
    for path in (manifest, *{(folder / name).parent for name in files}, folder):
        sync(path)


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of each file of a checkpoint, by its name."""
    return json.loads((folder / "MANIFEST.json").read_bytes())["files"]


def write_part(folder: Path, rank: int, content: dict[str, Any]) -> None:
    """Let the main process have this content of another one: see read_part."""
    # Not synced: once it has its name, the main process may rename the folder.
    unnamed = folder / f".tmp-{_part(folder, rank).name}"
    unnamed.write_text(json.dumps(content))
    os.replace(unnamed, _part(folder, rank))


def read_part(folder: Path, rank: int, leaving: Event) -> dict[str, Any]:
    """Return what another process gave to write_part, as soon as it is there, and remove it.

    Raises RunFailure when this process is leaving.
    """
    path = _part(folder, rank)
    while not path.exists():
        if leaving.wait(0.01):
            raise RunFailure("another process has not made its files durable")
    content = json.loads(path.read_text())
    path.unlink()
    return content


def _part(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank:05d}.json"


def verify(path: Path) -> str | None:
    """Say why a folder is not a complete checkpoint; None if every file is as it was saved."""
    file = path / "MANIFEST.json"
    if not file.is_file():
        return "it has no MANIFEST.json"
    try:
        manifest = json.loads(file.read_bytes())
        if manifest["format"] != FORMAT:
            return f"another version saved it, in format {manifest['format']}, not {FORMAT}"
        files = manifest["files"]
        there = _paths(path)
        for name in sorted(files):
            if name not in there:
                return f"{name} is missing"
            if not is_listed(name):
                return f"{name} does not belong there"
            if files[name] != _described(there[name]):
                return f"{name} was changed"
        for name in sorted(there.keys() - files):
            if is_listed(name) or OPENED_BY_ACCELERATE.fullmatch(name):
                return f"{name} does not belong there"
    except Exception as problem:  # a forged manifest may raise anything
        return f"MANIFEST.json cannot be read ({type(problem).__name__})"
    return None


def _paths(folder: Path) -> dict[str, Path]:
    """What is below a folder, by name, except folders and the manifest."""
    paths = [p for p in sorted(folder.rglob("*")) if p.is_symlink() or not p.is_dir()]
    return {p.relative_to(folder).as_posix(): p for p in paths if p.name != "MANIFEST.json"}


def _described(path: Path) -> dict[str, Any]:
    if path.is_symlink() or not path.is_file():
        return {}  # links and pipes are not read: reading a pipe would never end
    return {"bytes": path.stat().st_size, KIND: digest_file(path)}


def writer_of(name: str) -> int:
    """The process that writes this file: the main one, unless its number is in the name."""
    match = re.search(r"(random_states_|part-|shard-)(\d+)", name)
    if match is None:
        return 0
    return int(match[2]) - (match[1] == "shard-")  # torch counts these from 1
