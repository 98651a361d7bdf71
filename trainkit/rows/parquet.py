"""Rows of Parquet files by index, from wherever fsspec reads: a folder, s3://, hf://, https://.

Nothing is converted, and no file is downloaded as a whole. A row group is fetched when its first
row is needed, or shortly before, and is kept as an Arrow file in a cache of limited size that all
processes of a machine share.
"""

import atexit
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import get_ident
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from aiohttp import ClientTimeout
from filelock import FileLock
from fsspec.utils import atomic_write, tokenize
from huggingface_hub.constants import HF_HOME
from torch.utils.data import Dataset, default_collate

from trainkit.errors import LoneFailure, UsageError
from trainkit.numbers.loaders import Order
from trainkit.numbers.randoms import key, mix, permute, scramble
from trainkit.reading.paths import refuse_pipe, select_read
from trainkit.reading.splits import find_splits
from trainkit.repairs.private_names import tree_map_only
from trainkit.store.places import Missing, find_secret, open_store, shown, trying
from trainkit.text import shorten

SPARED = 10  # seconds that a row group stays in the cache: another process may be about to map it
NUM_OPEN = 256  # row groups that a process keeps mapped
LANES, WINDOW = 8, 4
TIMEOUT = ClientTimeout(sock_connect=20, sock_read=20)  # seconds
fsspec.config.conf.setdefault("http", {"client_kwargs": {"timeout": TIMEOUT}})


def tried(read: Callable) -> Callable:
    """Make read(self, path, ...) try again if it fails, and raise LoneFailure when it gives up."""

    def again(self: Any, path: str, *args: Any) -> Any:
        return trying(f"{path} cannot be read", read, self, path, *args)

    return again


class LaneOrder:
    """The rows of Parquet files in an order that is a pure function of (seed, epoch, position).

    The shuffled row groups form a line, which is split into lanes of equal length. Each lane fills
    its own slots in every batch, so that a process reads only what its slots need. Within a lane
    the rows of about WINDOW row groups are mixed at a time. The end of the line comes last.

    sizes: the number of rows of each row group, int64.
    """

    def __init__(self, sizes: torch.Tensor, batch_size: int, seed: int):
        self.sizes = sizes
        self.batch_size = batch_size
        self.seed = seed
        self.ends = sizes.cumsum(0)
        self.num_rows = int(self.ends[-1])
        self.num_lanes = math.gcd(batch_size, LANES)
        self.share = batch_size // self.num_lanes  # slots of a lane in each batch
        self.lane = self.num_rows // batch_size * self.share  # rows of a lane
        self.window = WINDOW * self.num_rows // len(sizes)  # rows that are mixed at a time

    def groups(self, epoch: int) -> torch.Tensor:
        """Return the numbers of all row groups in the shuffled order of an epoch, "the line"."""
        num = len(self.sizes)
        return permute(torch.arange(num), num, key("order", self.seed, epoch))

    def __call__(self, epoch: int, start: int, stop: int) -> torch.Tensor:
        """Return the rows at the positions start <= position < stop of an epoch, int64."""
        positions = torch.arange(start, stop)
        line = self.groups(epoch)
        batch = positions // self.batch_size
        slot = positions % self.batch_size
        in_lane = positions < self.lane * self.num_lanes  # else at the end of the line
        first = torch.where(in_lane, slot // self.share, self.num_lanes) * self.lane
        last = torch.where(in_lane, first + self.lane, self.num_rows)
        spot = torch.where(in_lane, first + batch * self.share + slot % self.share, positions)
        window = spot // self.window * self.window
        begin = torch.maximum(window, first)
        end = torch.minimum(window + self.window, last)
        number = mix(begin + key("window", self.seed, epoch))
        mixed = begin + scramble(spot - begin, end - begin, number)  # a position in the line
        ends = self.sizes[line].cumsum(0)
        nth = torch.searchsorted(ends, mixed, right=True)
        return self.ends[line[nth]] - ends[nth] + mixed


class ParquetRows(Dataset):
    """A sample is a tuple of these columns: tensors of numbers and of lists, else Python objects.

    Lists that all have one length make batches; for other lists see collate_fn of make_loaders.

    Args:
        pattern: a file, a folder or a glob, as fsspec takes them; $NAME is replaced by the
            environment variable of that name, which is where credentials belong.
        parts: splits, as splits.find_splits names them: the files of the first that is there are
            read; none: all files.
        cache_bytes: roughly how much of the local disk row groups may take at most.

    Attributes:
        unread: files that are in other parts, by the names of fingerprint().

    Raises UsageError for a password or signature in the pattern, which would be saved with the run,
    if there is no such file, and for files without these columns; LoneFailure for files that cannot
    be read.
    """

    def __init__(
        self, pattern: str, *columns: str, parts: Sequence[str] = (), cache_bytes: int = 2**34
    ):
        if problem := find_secret(pattern):
            raise UsageError(problem)
        refuse_pipe(Path(pattern), pattern)
        self.pattern = pattern
        self.columns = columns
        self.cache_bytes = cache_bytes
        self.folder = Path(HF_HOME, "rows")
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            paths = self._choose(self._find(pattern), parts)
        except Missing as problem:
            raise UsageError(str(problem)) from None
        pool, _ = opened(self, os.getpid())
        self.footers = dict(zip(paths, pool.map(self._footer, paths), strict=True))
        self.groups = []
        sizes = []
        schema = None
        for path, (version, kept) in self.footers.items():
            footer = pq.read_metadata(kept)
            has = pq.read_schema(kept)
            types = [has.field(x).type if has.names.count(x) == 1 else None for x in columns]
            schema = schema or types
            if types != schema or None in types:
                held = shorten([f"{column.name} ({column.type})" for column in has], 30)
                raise UsageError(
                    f"{shown(path)}: {', '.join(columns)} must be among its columns, once and "
                    f"of one type in all files: it has {held}"
                )
            for within in range(footer.num_row_groups):
                self.groups.append((path, version, kept, within))
                sizes.append(footer.row_group(within).num_rows)
        self.sizes = torch.tensor(sizes)
        self.ends = self.sizes.cumsum(0)
        # For each row group the one to fetch ahead after it; shared with the loader workers.
        self.after = torch.arange(len(sizes)).roll(-1).share_memory_()

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> tuple:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple]:
        columns = self._columns(torch.tensor(indices))
        # Callers may write to a sample, but nobody may write to the mapped file.
        return tree_map_only(torch.Tensor, torch.clone, [*zip(*columns, strict=True)])

    def make_batch(self, indices: torch.Tensor) -> list:
        """Return what default_collate makes of these samples, without copying each one first."""
        return [*map(default_collate, self._columns(indices))]

    def _columns(self, indices: torch.Tensor) -> Iterator[tuple]:
        """Yield these samples' values of each column: mapped tensors, or Python objects."""
        groups = torch.searchsorted(self.ends, indices, right=True)
        numbers = groups.tolist()
        rows = (indices - self.ends[groups]).tolist()
        held = self._request(groups)
        parts = {number: held[number].get() for number in {*numbers}}
        for _ in range(WINDOW):  # only now, or the first batch would wait for these as well
            groups = self.after[groups]
            self._request(groups)
        while len(held) > NUM_OPEN:
            del held[next(iter(held))]
        for column in zip(*map(parts.get, numbers), strict=True):
            values = [part[row] for part, row in zip(column, rows, strict=True)]
            if not isinstance(values[0], torch.Tensor):
                values = [value.as_py() for value in values]
            yield tuple(values)

    def _request(self, groups: torch.Tensor) -> dict:
        """Begin to read the row groups that are not held, and return all results by number."""
        pool, held = opened(self, os.getpid())
        for group in groups.tolist():
            if group not in held:
                held[group] = pool.apply_async(self._read, self.groups[group])
        return held

    def order(self, batch_size: int, seed: int) -> Order:
        """Return an order for make_loaders that fetches each row group about once in an epoch."""
        rows_of = LaneOrder(self.sizes, batch_size, seed)

        def order(epoch: int, start: int = 0, stop: int = len(self)) -> torch.Tensor:
            line = rows_of.groups(epoch)
            self.after[line] = line.roll(-1)  # what to fetch ahead: no number depends on it
            return rows_of(epoch, start, stop)

        return order

    def fingerprint(self) -> dict[str, str]:
        """Return for each file, by its name, a version string that changes when the file does."""
        return {shown(path[self.start :]): version for path, (version, _) in self.footers.items()}

    def _files(self) -> tuple[fsspec.AbstractFileSystem, str]:
        return files_of(self.pattern, os.getpid(), get_ident())

    def _choose(self, paths: list[str], parts: Sequence[str]) -> list[str]:
        """Return the files of the first of these parts that is there. Raises UsageError."""
        if not parts:
            self.unread = []
            return paths
        names = {path[self.start :].split("/", 2)[-1]: path for path in paths}
        found = find_splits([*names])
        split = next((part for part in parts if part in found), "")
        if not split:
            raise UsageError(
                f"{shown(self.pattern)}: no file is called {' or '.join(parts)}, such as "
                f"{parts[0]}-00000.parquet: name the rows to evaluate on with --eval-data"
            )
        others = [names[name] for part in found if part != split for name in found[part]]
        self.unread = [shown(path[self.start :]) for path in others]
        return [names[name] for name in found[split]]

    @tried
    def _find(self, _: str) -> list[str]:
        files, path = self._files()
        root = re.split("[*?[]", path)[0]
        entries = files.glob(path, detail=True)
        if "*" not in path and files.isdir(path):
            root = f"{path.rstrip('/')}/"
            entries = {path: {"type": "directory"}}
        names = []
        for name, info in entries.items():
            inside = files.find(name) if info["type"] == "directory" else [name]
            names += [path for path in inside if path == name or path.endswith(".parquet")]
        self.start = len(root.rsplit("/", 2)[0])
        if names := select_read([name[len(root) :] for name in names], shown(self.pattern)):
            return sorted({root + name for name in names})
        # The calls above take a failed request for a missing file. The next one raises what it was.
        files.invalidate_cache()
        if "*" in path:
            files.ls(root.rpartition("/")[0], detail=False)
        else:
            files.info(path)
        if files.glob(path):
            raise OSError("a request for the names of the files failed")
        raise FileNotFoundError("there is no such file")

    @tried
    def _footer(self, path: str) -> tuple[str, Path]:
        """Return the file's version string, and the path of a local copy of its footer."""
        files, _ = self._files()
        files.invalidate_cache()  # it may have changed meanwhile
        info = files.info(path)
        tag = info.get("ETag") or tokenize(files.tail(path, 2**16))
        version = f"{info['size']} bytes, {tag}"
        kept = self.folder / tokenize(shown(path), version, info.get("mtime"))
        if not kept.exists():
            with files.open(path) as file, atomic_write(str(kept)) as to:
                pq.read_metadata(file).write_metadata_file(to)
        return version, kept

    @tried
    def _read(self, path: str, version: str, kept: Path, within: int) -> list:
        """Return a row group's columns, mapped from the cache; the first caller puts them there."""
        local = f"{kept}-{within}-{tokenize(self.columns)}.arrow"
        with FileLock(f"{local}.lock"):
            if not Path(local).exists():
                if self._footer(path)[0] != version:
                    raise LoneFailure(
                        f"{shown(path)} has changed since this run opened it: start a new run"
                    )
                with self._files()[0].open(  # with the size, or fsspec would ask the server for it
                    path, cache_type="none", size=int(version.split()[0])
                ) as file:
                    parquet = pq.ParquetFile(file, metadata=pq.read_metadata(kept), pre_buffer=True)
                    table = parquet.read_row_group(within, self.columns).combine_chunks()
                with atomic_write(local) as to, pa.ipc.new_file(to, table.schema) as file:
                    file.write_table(table)
                if within % 16 == 0:
                    self._make_room()
            os.utime(local)
            with pa.memory_map(local) as file:
                columns = pa.ipc.open_file(file).get_batch(0).select(self.columns).columns
        if any(x.null_count or getattr(x, "values", x).null_count for x in columns):
            raise LoneFailure(
                f"{shown(path)} has nulls in its row group {within}: write it without"
            )
        return [*map(tensor, columns)]

    def _make_room(self) -> None:
        """Delete the least recently used row groups if the cache has become too large."""
        with suppress(OSError):  # another process deleted it, or has it open (Windows)
            left = self.cache_bytes
            for path in sorted(self.folder.glob("*.arrow*"), key=os.path.getmtime, reverse=True):
                left -= path.stat().st_size
                if left < 0 and path.stat().st_mtime < time.time() - SPARED:
                    path.unlink()


def tensor(column: pa.Array) -> Any:
    """Return numbers, or lists of them, so that each row is a tensor; other columns unchanged."""
    with suppress(pa.ArrowException):  # texts
        if not pa.types.is_nested(column.type):
            return torch.from_dlpack(column)
        if len(pc.list_value_length(column).unique()) == 1:
            return torch.from_dlpack(column.flatten()).view(len(column), -1)
        return [torch.from_dlpack(row.values) for row in column]
    return column


@cache
def files_of(pattern: str, process: int, thread: int) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return fsspec's file system for a thread of this process; do not use it after a fork."""
    return open_store(pattern)


@cache
def opened(rows: ParquetRows, process: int) -> tuple[ThreadPool, dict]:
    """Return the threads that fetch for `rows`, and their results: neither survives a fork."""
    held: dict = {}
    with suppress(AttributeError):  # Windows does not fork
        # A child that is forked while Arrow's threads read may hang, in Python before 3.11.10:
        # https://github.com/python/cpython/issues/112275
        os.register_at_fork(before=lambda: [result.wait() for result in held.values()])
    pool = ThreadPool(16)
    atexit.register(pool.terminate)  # else it may print a traceback below the error of a run
    return pool, held
