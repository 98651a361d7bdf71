"""Find which files of a folder are read, with their splits and classes, and hash their content."""

import functools
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from trainkit.errors import UsageError, as_usage_error
from trainkit.hashes import digest, digest_file
from trainkit.reading.paths import is_read, refuse_pipe
from trainkit.reading.splits import WORDS, find_split, may_say_split, read_split_columns
from trainkit.text import nfc, shorten

SURE = ("train", "test", "val", "validation")  # folders that are splits and never classes
PICTURES = re.compile(
    r"\.(a?png|jp(e?g|e|2|f|x|c)|jfif|j2[kc]|mpo|gif|bmp|dib|p[pgbn]m|tiff?|webp|ico|avif|hei[cf])",
    re.I,
)
HOLDERS = re.compile(r"\.(parquet|arrow|zip|tar|tgz|gz|bz2|xz|zst|7z|rar)", re.I)
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
            are not pictures in such folders, but tables, archives, or pictures with a list of
            their labels.
        unread: why files that a person might take for data are in no split.
    """

    splits: dict[str, list[Path]]
    classes: dict[Path, str]
    unread: dict[Path, str]


def find_files(folder: Path, list_of_labels: Path | None = None, flag: str = "--dataset") -> Folder:
    """Look through a folder. Folders behind links are not followed. Raises UsageError.

    Classes are the subfolders, whatever the files are called, and deeper folders belong to the
    class above them. Splits of pictures are folders called train, test, val and so on, at the top
    level only; splits of tables and archives are words in their names, as for `datasets`.

    Args:
        list_of_labels: a CSV file that names pictures and their classes; others are not read.
        flag: by which the user named the folder.
    """
    where = f"{flag} {name_of(folder)}"
    if not is_text(folder):
        raise UsageError(f"{where}: rename it: its name is not UTF-8")
    paths = list_paths(folder)
    files = [path for path in paths if is_text(path) and (folder / path).is_file()]
    pictures = [path for path in files if is_picture(path)]
    visible = [path for path in files if is_read(path.as_posix())]
    holders = [p for p in visible if HOLDERS.fullmatch(p.suffix) and not NO_DATA.match(p.name)]
    lists = [path for path in visible if path.name in LISTS]
    classes: dict[Path, str] = {}
    listed: dict[Path, str] = {}
    if list_of_labels:
        classes, listed = read_list(list_of_labels, pictures, flag)
    are_pictures = bool(classes) or len(pictures) > len(holders)
    chosen = [*classes] or holders
    if are_pictures and not classes:
        chosen = pictures + lists
    split_folders = find_split_folders(pictures)
    parts: dict[str, list[Path]] = {}
    for path in chosen:
        named = split_folders.get(path.parts[0], "") if are_pictures else find_split(str(path))
        if listed and not split_folders:
            named = listed[path]
        parts.setdefault(named, []).append(path)
    found = {split: parts[split] for split in WORDS if split in parts}
    found = found or {"train": parts.get("", [])}
    read = {path for paths in found.values() for path in paths}
    unread = explain_unread(folder, [path for path in paths if path not in read])
    if not read:
        others = f" ({describe_unread(unread)})" if unread else ""
        raise UsageError(f"{where} cannot be read: it has no picture files{others}")
    if are_pictures and not classes and not lists:
        classes = classes_of_folders(read, int({*parts} != {""}), where)
    return Folder(found, classes, unread)


def list_paths(folder: Path) -> list[Path]:
    """Return the files and links below a folder, relative to it, in the order of their names."""
    below = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return sorted((path.relative_to(folder) for path in below), key=str)


def explain_unread(folder: Path, paths: list[Path]) -> dict[Path, str]:
    """Return those paths, none of which is read, that a person might take for data, and why."""
    return {
        path: reason_unread(folder, path)
        for path in paths
        if not NO_DATA.match(path.name)
        if is_read(path.as_posix())
        or PICTURES.fullmatch(path.suffix)
        or HOLDERS.fullmatch(path.suffix)
    }


def reason_unread(folder: Path, path: Path) -> str:
    """Return why a path is in no split."""
    if not is_text(path):
        return "names that are not UTF-8"
    if (folder / path).is_dir():
        return "linked folders"
    if not (folder / path).exists():
        return "links that lead nowhere"
    if not is_read(path.as_posix()):
        return "hidden"
    return "in no split or list" if PICTURES.fullmatch(path.suffix) else "no picture files"


def describe_unread(unread: dict[Path, str]) -> str:
    """Return how many files are not read, why, and the first of them."""
    paths: dict[str, list[str]] = {}
    for path, reason in unread.items():
        paths.setdefault(reason, []).append(name_of(path))
    reasons = (f"{reason} ({len(names)}): {shorten(names)}" for reason, names in paths.items())
    return f"{len(unread)} not read: {'; '.join(reasons)}"


def is_text(path: Path) -> bool:
    """Return whether a path is UTF-8, as tables, JSON and class names must be."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def name_of(path: Path) -> str:
    """Return a path for a message, with each byte that is not UTF-8 as in caf\\xe9."""
    return os.fsencode(path).decode(errors="backslashreplace")


def is_picture(path: Path) -> bool:
    """Return whether a path has the suffix of a picture and is not hidden.

    Files, unlike folders, may begin with _, because many cameras write names such as _DSC0001.JPG.
    """
    shown = path.with_name(path.name.lstrip("_") or "_")
    return bool(PICTURES.fullmatch(path.suffix)) and is_read(shown.as_posix())


def read_list(
    path: Path, pictures: list[Path], flag: str
) -> tuple[dict[Path, str], dict[Path, str]]:
    """Return the pictures that a CSV file lists, with their classes, and with their splits if any.

    One column has their names, with or without folder and ending; the next one, or the one before
    it if it is the last, their classes. A column that tells which rows are evaluated, as
    splits.read_split_columns finds it, has the splits. Raises UsageError.

    flag: by which the user named the folder of the pictures.
    """
    where = f"{'--labels' if flag == '--dataset' else '--eval-labels'} {path}"
    with as_usage_error(f"{where} cannot be read"):
        refuse_pipe(path, where)
        table = pd.read_csv(path, dtype=str, keep_default_na=False, skipinitialspace=True)
    named_so = find_names(pictures)
    own = read_split_columns({name: table[name] for name in table if may_say_split(name)})
    columns = [name for name in table if name not in own.columns]
    hits = [table[name].map(nfc).isin(named_so.keys()).sum() for name in columns]
    if len(columns) < 2 or not any(hits):
        raise UsageError(
            f"{where}: no column of {columns} has the names of pictures of the folder, such as "
            f"{pictures[0].name if pictures else 'a.jpg'}; another must have their classes"
        )
    named = hits.index(max(hits))
    label = named + 1 if named + 1 < len(columns) else named - 1
    split_of = {row: split for split, rows in own.rows.items() for row in rows}
    classes: dict[Path, str] = {}
    splits: dict[Path, str] = {}
    problems = []
    rows = zip(table[columns[named]], table[columns[label]], strict=True)
    for row, (name, text) in enumerate(rows):
        candidates = named_so.get(nfc(name), [])
        if not candidates:
            problems.append(f"{name} is not a picture")
        elif len(candidates) > 1:
            problems.append(f"{name} means several pictures")
        elif classes.setdefault(candidates[0], text) != text or not text:
            problems.append(f"{name} has no single class")
        elif own.rows:
            splits[candidates[0]] = split_of[row]
    if problems:
        raise UsageError(f"{where}: {shorten(problems)}")
    return dict(sorted(classes.items(), key=lambda item: str(item[0]))), splits


def find_names(pictures: list[Path]) -> dict[str, list[Path]]:
    """Return the pictures that a name in a list may mean, with or without folder and ending."""
    named_so: dict[str, list[Path]] = {}
    for picture in pictures:
        for name in {str(picture), picture.as_posix(), picture.name, picture.stem}:
            named_so.setdefault(nfc(name), []).append(picture)
    return named_so


def find_split_folders(pictures: list[Path]) -> dict[str, str]:
    """Return the splits of the folders at the top that are called like one.

    Words such as Test, dev or valid may also be classes. They are splits if all folders have such
    names, or if some are to train on and others are not.
    """
    tops = {path.parts[0] for path in pictures if len(path.parts) > 1}
    splits = {top: find_split(top, whole=True) for top in sorted(tops)}
    named = {top: split for top, split in splits.items() if split}
    if named.keys() == tops or {"train"} < {*named.values()}:
        return named
    return {top: split for top, split in named.items() if top in SURE}


def classes_of_folders(pictures: set[Path], depth: int, where: str) -> dict[Path, str]:
    """Return the class of each picture. Raises UsageError if a picture is in no class.

    depth: of the folders that are classes; 1 if they are in those of splits.
    """
    if loose := [path for path in pictures if len(path.parts) < depth + 2]:
        raise UsageError(
            f"{where}: {min(loose)} is in no class: put each picture into the folder of its class"
        )
    classes = {path: path.parts[depth] for path in pictures}
    if len({*map(nfc, classes.values())}) == 1 < len({path.parent for path in pictures}) and all(
        len(path.parts) > depth + 2 for path in pictures
    ):
        name = next(iter(pictures)).parents[-depth - 2]
        raise UsageError(
            f"{where}: there is one class, {name}: if the classes are in it, name or "
            "move the folder that holds them"
        )
    return classes


@functools.cache
def hash_once(path: Path, *_: int) -> str:
    """Hash a file's content; a process reads it again only if its size or times have changed."""
    return digest_file(path)


def hash_files(folder: Path, paths: list[Path]) -> str:
    """Return one hash of the content of files and of their paths below the folder.

    Threads read the files. Equal sizes and times prove nothing, because `rsync -a` and tar keep
    them.
    """

    def hash_one(path: Path) -> str:
        full = folder / path
        stat = full.stat()
        return hash_once(full, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # unlike ThreadPool it needs no /dev/shm
        digests = [*pool.map(hash_one, paths)]
    return digest("\0".join([*map(str, paths), *digests]))
