"""What a name of the user's leads to: a path or a Hub id; and which files of a folder are read."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from trainkit.errors import UsageError, as_usage_error, is_main_rank
from trainkit.text import count

# A part of the path that begins with . or _, by which Spark and Hive hide files, such as
# .ipynb_checkpoints, ._part, _temporary and _delta_log; but not _year=2020, which is a partition.
HIDDEN = re.compile(r"(^|/)(\.|_(?![^/]*=))")

# OWNER/NAME or NAME, but not what somebody calls a file: the Hub would not be meant.
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
FILE_NAME = re.compile(
    r"\.(csv|tsv|txt|jsonl?|ndjson|parquet|arrow|feather|xlsx?|gz|zip|tar|tgz|jpe?g|png)$", re.I
)


@contextmanager
def read_here_or_from_hub(name: str, where: str) -> Iterator[None]:
    """Turn what goes wrong in the body, which reads a path or a Hub id, into a UsageError.

    A name that is not here and can be none on the Hub is refused before.
    """
    what = f"{where} cannot be read"
    # Path.exists raises OSError for a name that is too long.
    if not os.path.exists(name) and "://" not in name:  # noqa: PTH110
        if not HUB_ID.fullmatch(name) or FILE_NAME.search(name):
            raise UsageError(f"{where}: there is no such file or folder")
        what = f"{where}: there is no such file or folder, and it cannot be read from the Hub"
    with as_usage_error(what):
        yield


def refuse_pipe(path: Path, where: str) -> None:
    """Raise UsageError for a pipe and its like, which would be waited for."""
    is_pipe = False
    with suppress(OSError):  # of a name that is too long, which whoever opens it says
        is_pipe = path.exists() and not path.is_file() and not path.is_dir()
    if is_pipe:
        raise UsageError(f"{where} is not a file: write it into one first")


def is_read(path: str) -> bool:
    """Return whether a file is read, by its path below the folder that was named."""
    return not HIDDEN.search(path)


def select_read(paths: Sequence[str], where: str) -> list[str]:
    """Return the paths that are read, and print once how many are not."""
    if hidden := [path for path in paths if not is_read(path)]:
        _tell(f"{where}: {count(len(hidden), 'hidden file')} not read, such as {hidden[0]}")
    return [path for path in paths if is_read(path)]


@cache
def _tell(text: str) -> None:
    if is_main_rank():
        print(text, file=sys.stderr)
