"""Is a checkpoint folder whole? Its MANIFEST.json lists size and hash of every file."""

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainkit.errors import RunFailure
from trainkit.rundir import sync

FORMAT = 3
# What save_state writes of models, optimizers and schedules, of which there may be several.
FILE_NAME = re.compile(
    r"trainer\.json|state/((model|average)(_\d+)?\.safetensors|(optimizer|scheduler)(_\d+)?\.bin"
    r"|scaler\.pt|random_states_\d+\.pkl|shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors)"
)


def write_manifest(folder: Path, step: int) -> None:
    """Make all files below `folder` durable, and write down their sizes and hashes.

    Raises RunFailure if there is a file that a resume would refuse.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if not FILE_NAME.fullmatch(name):
            raise RunFailure(
                f"the checkpoint would hold {name}, which no resume reads, because that could "
                "execute code: give its content to a module that accelerator.prepare takes, as a "
                "buffer"
            )
    with ThreadPoolExecutor(8) as pool:  # hashing goes on while the disk is waited for
        synced = pool.map(sync, paths)
        hashes = list(pool.map(sha256_of, paths))
        list(synced)  # raises what went wrong there
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256}
        for path, sha256 in zip(paths, hashes, strict=True)
    }
    manifest = folder / "MANIFEST.json"
    manifest.write_bytes(seal({"format": FORMAT, "step": step, "files": files}))
    for path in (manifest, *{path.parent for path in paths}, folder):
        sync(path)


def verify(path: Path) -> str | None:
    """Why a folder is not a whole checkpoint, or None if every byte is the one that was saved."""
    for file in (path, path / "MANIFEST.json"):
        if file.is_symlink():
            return f"{file.name} is a symbolic link"
    if not (path / "MANIFEST.json").is_file():
        return "it has no MANIFEST.json" if path.is_dir() else "there is no such folder"
    try:
        content = (path / "MANIFEST.json").read_bytes()
        manifest = json.loads(content)
        del manifest["sha256"]
        if seal(manifest) != content:
            return "MANIFEST.json was changed"
        if manifest["format"] != FORMAT:
            return f"its format is {manifest['format']!r}, and {FORMAT} is known here"
        if path.name.startswith("step-") and path.name != f"step-{manifest['step']:010d}":
            return f"it holds step {manifest['step']}"
        files = manifest["files"]
        paths = [p for p in path.rglob("*") if p.is_symlink() or not p.is_dir()]
        there = {p.relative_to(path).as_posix() for p in paths} - {"MANIFEST.json"}
        for name in sorted(files.keys() - there):
            return f"{name} is missing"
        for name in sorted(there):
            file, known = path / name, name in files and FILE_NAME.fullmatch(name)
            if not known or file.is_symlink() or not file.is_file():
                return f"{name} does not belong there"
            if file.stat().st_size != files[name]["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, not {files[name]['bytes']}"
            if sha256_of(file) != files[name]["sha256"]:
                return f"{name} was changed"
    except Exception as problem:  # whatever a forged manifest makes a reader raise
        return f"MANIFEST.json cannot be read ({type(problem).__name__})"
    return None


def seal(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON that carries its own hash."""
    sha256 = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": sha256}, indent=2).encode()


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
