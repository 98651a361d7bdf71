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
FORMAT = 10  # a resume reads this one alone
STEP_NAME = re.compile(r"step-\d{10}")
# The files of save_state; there may be several models, optimizers and schedules.
FILE_NAME = re.compile(
    r"trainer\.json|metrics\.jsonl|(predictions|best)\.safetensors"  # the last three for --mirror
    r"|state/((model|average)(_\d+)?\.safetensors|(optimizer|scheduler)(_\d+)?\.bin"
    r"|(registered|rest)\.bin|scaler\.pt|random_states_\d+\.pkl"
    r"|shard-\d{5}-model-00001-of-00001\.safetensors)"
)


def is_listed(name: str) -> bool:
    """May a manifest list a file of this name? What other programs leave there is passed over."""
    return FILE_NAME.fullmatch(name) is not None


def step_name(step: int) -> str:
    """The name of the checkpoint of a step; the numbers are zero-padded, so the names sort."""
    return f"step-{step:010d}"


def steps_in(directory: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(p for p in directory.glob("step-*") if STEP_NAME.fullmatch(p.name))


def make_durable(folder: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Make the files that this process wrote durable; return the size and hash of each."""
    own = {name: path for name, path in _listed_files(folder).items() if writer_of(name) == rank}
    for path in own.values():
        sync(path)
    return {name: _described(path) for name, path in own.items()}


def write_manifest(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Write MANIFEST.json, and make it and all names in the folder durable."""
    manifest = folder / "MANIFEST.json"
    manifest.write_text(json.dumps({"format": FORMAT, "files": files}, indent=2) + "\n")
    for path in (manifest, *{(folder / name).parent for name in files}, folder):
        sync(path)


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of each file of a checkpoint, by its name."""
    return json.loads((folder / "MANIFEST.json").read_bytes())["files"]


def leave_hashes(folder: Path, rank: int, files: dict[str, Any]) -> None:
    """Let the main process have what make_durable returned in this one: see await_hashes."""
    # Not synced: once it has its name, the main process may rename the folder.
    unnamed = folder / f".tmp-{_hashes(folder, rank).name}"
    unnamed.write_text(json.dumps(files))
    os.replace(unnamed, _hashes(folder, rank))


def await_hashes(folder: Path, rank: int, leaving: Event) -> dict[str, Any]:
    """Return and remove what another process leaves. Raises RunFailure when this one is leaving."""
    path = _hashes(folder, rank)
    while not path.exists():
        if leaving.wait(0.01):
            raise RunFailure("another process has not made its files durable")
    files = json.loads(path.read_text())
    path.unlink()
    return files


def _hashes(folder: Path, rank: int) -> Path:
    return folder / f"hashes-{rank:05d}.json"


def verify(path: Path) -> str | None:
    """Say why a folder is not a complete checkpoint; None if every file is as it was saved."""
    file = path / "MANIFEST.json"
    if not file.is_file():
        return "it has no MANIFEST.json"
    try:
        manifest = json.loads(file.read_bytes())
        if manifest["format"] != FORMAT:
            return f"another version saved it, in format {manifest['format']}, not {FORMAT}"
        files, there = manifest["files"], _listed_files(path)
        for name in sorted(files.keys() | there.keys()):
            if name not in there:
                return f"{name} is missing"
            if name not in files:
                return f"{name} does not belong there"
            if files[name] != _described(there[name]):
                return f"{name} was changed"
    except Exception as problem:  # a forged manifest may raise anything
        return f"MANIFEST.json cannot be read ({type(problem).__name__})"
    return None


def _listed_files(folder: Path) -> dict[str, Path]:
    """What is below a folder and may be listed, by name; nothing else is ever opened."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    return {name: path for name, path in paths.items() if is_listed(name)}


def _described(path: Path) -> dict[str, Any]:
    if path.is_symlink() or not path.is_file():
        return {}  # links and pipes are not read: reading a pipe would never end
    return {"bytes": path.stat().st_size, KIND: digest_file(path)}


def writer_of(name: str) -> int:
    """The process that writes this file: the main one, unless its number is in the name."""
    match = re.search(r"(random_states_|shard-)(\d+)", name)
    if match is None:
        return 0
    return int(match[2]) - (match[1] == "shard-")  # torch counts these from 1
