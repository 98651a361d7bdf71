"""Find which files of a folder are read, with their splits and classes, and hash their content."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import UsageError
from trainkit.hashes import digest, digest_file
from trainkit.reading.paths import is_read
from trainkit.reading.splits import WORDS, find_split
from trainkit.text import shorten

SURE = ("train", "test", "val", "validation")  # folders that are mostly splits
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


@dataclass
class Folder:
    """The files of a folder of pictures, as relative paths in the order of their names.

    Attributes:
        splits: the files of each of "train", "test" and "validation" that exists.
        classes: for each of these files, the name of the folder that is its class. Empty if they
            are not pictures in such folders, but tables, or pictures with a list of their labels.
        unread: files in no split that a person might take for data.
    """

    splits: dict[str, list[Path]]
    classes: dict[Path, str]
    unread: list[Path]


def find_files(folder: Path, where: str) -> Folder:
    """Look through a folder. Folders behind links are not followed. Raises UsageError.

    Classes are the subfolders, whatever the files are called, and deeper folders belong to the
    class above them. Splits of pictures are folders called train, test, val and so on, at the top
    level only; splits of tables are words in their names, as for `datasets`.

    where: begins the sentence.
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
    unread = [path for path in paths if path not in read and seems_data(path)]
    if not read:
        others = f" ({describe_unread(unread)}; archives must be unpacked)" if unread else ""
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


def describe_unread(unread: list[Path]) -> str:
    """Return how many files are not read, and the first of them."""
    return f"{len(unread)} not read: {shorten([*map(str, unread)])}"


def is_picture(path: Path) -> bool:
    """Return whether a path has the suffix of a picture and is not hidden.

    Files, unlike folders, may begin with _, because many cameras write names such as _DSC0001.JPG.
    """
    shown = path.with_name(path.name.lstrip("_") or "_")
    return bool(PICTURES.fullmatch(path.suffix)) and is_read(shown.as_posix())


def find_split_folders(pictures: list[Path], are_listed: bool, where: str) -> dict[str, str]:
    """Return the splits of the folders at the top that are called like one.

    Such words may also be classes. They are splits if all folders have such names, or if some are
    to train on and others are not. Raises UsageError for one folder beside others that may be
    either, because it has folders.

    are_listed: a list has the classes, so that no folder is one.
    """
    tops = {path.parts[0] for path in pictures if len(path.parts) > 1}
    splits = {top: find_split(top, whole=True) for top in sorted(tops)}
    named = {top: split for top, split in splits.items() if split}
    if named.keys() == tops or {"train"} < {*named.values()}:
        return named
    sure = {top: split for top, split in named.items() if top in SURE}
    if are_listed:
        return sure
    deep = {path.parts[0] for path in pictures if len(path.parts) > 2}
    if doubtful := sorted(deep & {*sure}):
        other = min(tops - named.keys())
        raise UsageError(
            f"{where}: {doubtful[0]}/ may be a class beside {other}/ or a split: put all classes "
            f"into one folder train/, or {other}/ elsewhere"
        )
    return {}


def hash_files(folder: Path, paths: list[Path]) -> str:
    """Return one hash of the content of files and of their paths below the folder.

    Threads read the files. Equal sizes and times prove nothing, because `rsync -a` and tar keep
    them.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # unlike ThreadPool it needs no /dev/shm
        digests = [*pool.map(digest_file, [folder / path for path in paths])]
    return digest("\0".join([*map(str, paths), *digests]))
