"""Write files that survive a crash."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainkit.store.jsons import to_json


@contextmanager
def replacing(path: Path, tag: str = "") -> Iterator[Path]:
    """Yield the path of a file to write in the body, which then replaces `path` atomically.

    If writing fails, nothing of it is left. tag: of its name, if several processes may write it.
    """
    temporary = path.with_name(f".tmp-{tag}{path.name}")
    temporary.unlink(missing_ok=True)  # it may be a link that somebody left there
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_durably(path: Path, content: bytes | Iterable[bytes | memoryview]) -> None:
    """Replace the content of `path` as replacing() does. The bytes may come in parts."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.writelines([content] if isinstance(content, bytes) else content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """write_durably for a JSON object."""
    write_durably(path, (to_json(content, indent=2, default=str) + "\n").encode())


def sync(path: Path) -> None:
    """Make the bytes of a file, or the names inside a folder, durable."""
    folder = path.is_dir()
    try:
        # Windows cannot sync a file that is open only for reading, and cannot open a folder.
        handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    except PermissionError:
        if folder:
            return
        raise
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_tree(path: Path) -> None:
    """Remove a folder; after a crash all of it is there, or what is left is called .tmp-..."""
    trash = path.with_name(f".tmp-del-{path.name.removeprefix('.tmp-')}")
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def rename_free(path: Path, name: str) -> Path:
    """Rename to `name` in the same folder, or to the first free one of NAME.1, NAME.2, ..."""
    new = path.with_name(name)
    number = 0
    while new.exists():
        number += 1
        new = path.with_name(f"{name}.{number}")
    os.rename(path, new)
    return new
