"""Is a checkpoint folder whole? Its MANIFEST.json lists size and hash of every file."""

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainkit.errors import RunFailure
from trainkit.folder.rundir import sync

FORMAT = 3
# What save_state writes of models, optimizers and schedules, of which there may be several.
FILE_NAME = re.compile(
    r"trainer\.json|state/((model|average)(_\d+)?\.safetensors|(optimizer|scheduler)(_\d+)?\.bin"
    r"|scaler\.pt|random_states_\d+\.pkl|shard-\d{5}\.bin)"
)


def write_manifest(folder: Path, step: int) -> None:
    """Make all files below `folder` durable, and write down their sizes and hashes.

    Raises RunFailure if there is a file that a resume would refuse.
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
    manifest.write_bytes(seal({"format": FORMAT, "step": step, "files": files}))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sync, [folder / name for name in files]))  # raises what went wrong there
    for path in (manifest, *{(folder / name).parent for name in files}, folder):
        sync(path)


def verify(path: Path) -> str | None:
    """Why a folder is not a whole checkpoint, or None if every byte is the one that was saved."""
    file = path / "MANIFEST.json"
    if path.is_symlink() or file.is_symlink():
        return "it or its MANIFEST.json is a symbolic link"
    if not file.is_file():
        return "it has no MANIFEST.json" if path.is_dir() else "there is no such folder"
    try:
        manifest = json.loads(file.read_bytes())
        del manifest["sha256"]
        if seal(manifest) != file.read_bytes() or manifest["format"] != FORMAT:
            return f"MANIFEST.json was changed, or is not of format {FORMAT}"
        if path.name.startswith("step-") and path.name != f"step-{manifest['step']:010d}":
            return f"it holds step {manifest['step']}"
        files, there = manifest["files"], describe(path)
        for name in sorted(files.keys() | there.keys()):
            if name not in there:
                return f"{name} is missing"
            if name not in files or not FILE_NAME.fullmatch(name):
                return f"{name} does not belong there"
            if files[name] != there[name]:
                return f"{name} was changed"
    except Exception as problem:  # whatever a forged manifest makes a reader raise
        return f"MANIFEST.json cannot be read ({type(problem).__name__})"
    return None


def describe(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of each file below a folder but its manifest; none of a link or a pipe."""
    paths = [p for p in sorted(folder.rglob("*")) if p.is_symlink() or not p.is_dir()]
    plain = {p for p in paths if p.is_file() and not p.is_symlink()}
    names = {p.relative_to(folder).as_posix(): p for p in paths if p.name != "MANIFEST.json"}
    return {
        # A pipe has no bytes either, and reading it would never end.
        name: {"bytes": p.stat().st_size, "sha256": sha256_of(p)} if p in plain else {}
        for name, p in names.items()
    }


def seal(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON that carries its own hash."""
    sha256 = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": sha256}, indent=2).encode()


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
