"""Find which files of a folder are read, with their splits and classes, and hash their content."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from trainkit.errors import UsageError
from trainkit.hashes import digest, digest_file
from trainkit.reading.paths import is_read
from trainkit.reading.splits import WORDS, find_split
from trainkit.text import shorten

PICTURES = re.compile(
    r"\.(a?png|jp(e?g|e|2|f|x|c)|jfif|j2[kc]|mpo|gif|bmp|dib|p[pgbn]m|tiff?|webp|ico|avif|hei[cf])",
    re.I,
)
TABLES = re.compile(r"\.(parquet|arrow)", re.I)
LISTS = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # lists of the labels of pictures
# Files that nobody would take for pictures, and files that list pictures.
NO_DATA = re.compile(
    r"README|LICENSE|dataset_infos?\.json|metadata\.|Thumbs\.db|desktop\.ini|\.DS_Store", re.I
)


class Folder(NamedTuple):
    """The files of a folder of pictures, as relative paths in the order of their names."""

    splits: dict[str, list[Path]]  # of "train", "test" and "validation"
    # The folder that is the class of each file; empty of tables, and of pictures with a list.
    classes: dict[Path, str]
    unread: str  # how many files that a person might take for data are in no split, or ""


def find_files(folder: Path, where: str) -> Folder:
    """Look through a folder. Folders behind links are not followed. Raises UsageError.

    Classes are the subfolders, whatever the files are called, and deeper folders belong to the
    class above them. Splits of pictures are folders called train, test, val and so on, at the top
    level only; splits of tables are words in their names, as for `datasets`.
    """
    below = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    paths = sorted((path.relative_to(folder) for path in below), key=str)
    files = [path for path in paths if (folder / path).is_file()]
    pictures = [path for path in files if is_picture(path)]
    visible = [path for path in files if is_read(path.as_posix())]
    tables = [p for p in visible if TABLES.fullmatch(p.suffix) and not NO_DATA.match(p.name)]
    lists = [path for path in visible if path.name in LISTS]
    are_pictures = len(pictures) > len(tables)
    split_folders = find_split_folders(pictures, bool(lists), where)
    parts: dict[str, list[Path]] = {}
    for path in pictures + lists if are_pictures else tables:
        named = split_folders.get(path.parts[0], "") if are_pictures else find_split(str(path))
        parts.setdefault(named, []).append(path)
    found = {split: parts[split] for split in WORDS if split in parts}
    found = found or {"train": parts.get("", [])}
    read = {path for paths in found.values() for path in paths}
    left = [str(path) for path in paths if path not in read and seems_data(path)]
    unread = f"{len(left)} not read: {shorten(left)}" if left else ""
    if not read:
        others = f" ({unread}; archives must be unpacked)" if unread else ""
        raise UsageError(f"{where} cannot be read: it has no picture files{others}")
    if not are_pictures or lists:
        return Folder(found, {}, unread)
    depth = int({*parts} != {""})  # of the folders that are classes: 1 in those of splits
    if loose := [path for path in read if len(path.parts) < depth + 2]:
        raise UsageError(
            f"{where}: {min(loose)} is in no class: put each picture into the folder of its class"
        )
    return Folder(found, {path: path.parts[depth] for path in read}, unread)


def seems_data(path: Path) -> bool:
    """Return whether a person might take a path for data."""
    suffixes = (PICTURES.fullmatch(path.suffix), TABLES.fullmatch(path.suffix))
    return not NO_DATA.match(path.name) and (is_read(path.as_posix()) or any(suffixes))


def is_picture(path: Path) -> bool:
    """Return whether a path has the suffix of a picture and is not hidden."""
    # Files, unlike folders, may begin with _: many cameras write names such as _DSC0001.JPG.
    shown = path.with_name(path.name.lstrip("_") or "_")
    return bool(PICTURES.fullmatch(path.suffix)) and is_read(shown.as_posix())


def find_split_folders(pictures: list[Path], are_listed: bool, where: str) -> dict[str, str]:
    """Return the splits of the folders at the top that are called like one.

    Such words may also be classes. They are splits if all folders have such names, if some are to
    train on and others are not, or if a list has the classes. Raises UsageError for one folder
    beside others that may be either, because it has folders.
    """
    tops = {path.parts[0] for path in pictures if len(path.parts) > 1}
    named = {top: find_split(top, whole=True) for top in tops if find_split(top, whole=True)}
    if are_listed or named.keys() == tops or {"train"} < {*named.values()}:
        return named
    if deep := [p.parts[0] for p in pictures if len(p.parts) > 2 and p.parts[0] in named]:
        other = min(tops - named.keys())
        raise UsageError(
            f"{where}: {min(deep)}/ may be a class beside {other}/ or a split: put all classes "
            f"into one folder train/, or {other}/ elsewhere"
        )
    return {}


def hash_files(folder: Path, paths: list[Path]) -> str:
    """Return one hash of the content of files and of their paths below the folder."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # unlike ThreadPool it needs no /dev/shm
        digests = [*pool.map(digest_file, [folder / path for path in paths])]
    return digest("\0".join([*map(str, paths), *digests]))
