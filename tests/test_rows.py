"""Rows of Parquet files by index, over HTTP: the order, what is fetched, faults, and a resume."""

import functools
import http.server
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import faults
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from datakit import rows
from datakit.rows import ParquetRows, shown
from trainkit.errors import LoneFailure, UsageError
from trainkit.folder.records import read_rows

SIZES = (500, 500, 137)  # rows of the files, in row groups of 50
NUM = sum(SIZES)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files with ranges; `plan(number, range)` says how the request with this number breaks."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path, part = Path(self.translate_path(self.path)), self.headers.get("Range")
        fault = self.server.plan(next(self.server.numbers), part)
        if path.is_dir() and not fault:
            return getattr(super(), f"do_{self.command}")()
        if fault == "slow":
            time.sleep(0.3)
        if fault == "503" or not path.exists():
            return self.send_error(503 if fault else 404)
        content, status = path.read_bytes(), 200
        tag = f'"{hash(content)}"'
        if part:
            first, last = part.removeprefix("bytes=").split("-")
            self.server.ranges[path.name, int(first)] += 1
            content, status = content[int(first) : int(last) + 1], 206
        self.send_response(status)
        self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: len(content) // 2] if fault == "drop" else content)
        self.close_connection = fault == "drop"

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


def write_file(path: Path, first: int, size: int) -> None:
    ids = np.arange(first, first + size)
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids % 256, 5)), 5)
    pq.write_table(pa.table({"tokens": tokens, "id": ids}), path, row_group_size=50)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.setattr(rows, "HF_HOME", tmp_path / "cache")
    monkeypatch.setattr(rows, "WAITS", (0, 0, 0.1))
    folder = tmp_path / "data"
    folder.mkdir()
    for number, first in enumerate((0, 500, 1000)):
        write_file(folder / f"{number}.parquet", first, SIZES[number])
    handler = functools.partial(Handler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        running.plan, running.numbers = lambda number, part: "", itertools.count()
        running.ranges, running.folder = Counter(), folder
        running.url = f"http://127.0.0.1:{running.server_port}/data/*.parquet"
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.mark.parametrize("batch_size", [1, 12, 96, 2000])
def test_the_order_has_each_row_once_and_is_the_same_in_parts(
    server: SimpleNamespace, batch_size: int
) -> None:
    order = ParquetRows(str(server.folder), "id").order(batch_size, 3)
    everything = order(1)
    assert everything.sort().values.tolist() == [*range(NUM)]
    parts = [order(1, n, min(n + 100, NUM)) for n in range(0, NUM, 100)]
    assert torch.equal(torch.cat(parts), everything)
    assert not torch.equal(order(2), everything)


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 0), (4, 0), (1, 2), (2, 2), (4, 2)])
def test_all_worlds_see_the_same_and_fetch_each_row_group_once(
    server: SimpleNamespace, world: int, workers: int
) -> None:
    data, share = ParquetRows(server.url, "id", "tokens"), 12 // world
    batches = [*data.order(12, 0)(0).split(12)]
    server.ranges.clear()
    loaders = [
        iter(DataLoader(data, batch_sampler=parts, num_workers=workers, collate_fn=list))
        for rank in range(world)
        for parts in [[b[rank * share :][:share].tolist() for b in batches]]
    ]
    for batch, *parts in zip(batches, *loaders, strict=True):
        samples = [sample for part in parts for sample in part]
        assert [int(number) for number, _ in samples] == batch.tolist()
        assert all(tokens.tolist() == [number % 256] * 5 for number, tokens in samples)
    assert len(server.ranges) == len(data.groups) == 23
    assert sum(server.ranges.values()) <= 1.1 * 23


@pytest.mark.parametrize("fault", ["503", "drop", "slow", "gone", "other"])
@pytest.mark.parametrize("place", range(6))
def test_a_fault_ends_right_or_with_its_sentence(
    server: SimpleNamespace, fault: str, place: int
) -> None:
    file = server.folder / "1.parquet"

    def plan(number: int, _: object) -> str:
        if fault in ("gone", "other"):
            if number == 25 + 5 * place:
                file.unlink() if fault == "gone" else write_file(file, 9000, SIZES[1])
            return ""
        return fault if number % (2 + place) == 0 else ""

    server.plan = plan
    try:
        data = ParquetRows(server.url, "id")
        order = data.order(96, 0)(0).tolist()
        assert [int(data[n][0]) for n in order] == order
    except LoneFailure as problem:
        assert fault != "slow"
        assert "parquet cannot be read: " in str(problem) or "parquet has changed" in str(problem)


@pytest.mark.parametrize("fault", ["503", "drop"])
def test_a_server_that_is_gone_is_a_sentence(server: SimpleNamespace, fault: str) -> None:
    data = ParquetRows(server.url, "id")
    server.plan = lambda number, part: fault
    with pytest.raises(LoneFailure, match=r"data/0\.parquet cannot be read: "):
        data[60]
    with pytest.raises(LoneFailure, match=r"\*\.parquet cannot be read: "):
        ParquetRows(server.url, "id")


@pytest.fixture
def gpt(tmp_path: Path) -> Iterator[Callable]:
    """gpt(name, url, ...): train on these rows in a run folder of this name."""
    words = "--epochs 1 --layers 1 --width 32 --batch-size 24 --eval-every 20 --save-every 4"
    with faults.Nursery() as nursery:

        def run(name: str, url: str, *more: object, **plan: object) -> faults.Outcome:
            folder = ("--run-dir", tmp_path / name, "--num-workers", 2)
            plan = {"env": {"HF_HOME": str(tmp_path / "cache")}, **plan}
            return nursery.run(
                "examples/gpt.py", "--data", url, url, *words.split(), *folder, *more, **plan
            )

        yield run


def test_a_killed_run_goes_on_with_equal_bytes_but_not_with_other_files(
    server: SimpleNamespace, tmp_path: Path, gpt: Callable
) -> None:
    assert gpt("whole", server.url).returncode == 0
    fault = {"save": 4, "event": 3, "how": "kill"}
    assert gpt("broken", server.url, fault=fault).returncode == -9
    ended = gpt("broken", server.url, "--resume", "auto")
    assert ended.returncode == 0, ended.output
    assert faults.digests(tmp_path / "broken") == faults.digests(tmp_path / "whole")
    last, new = (server.folder / f"{number}.parquet" for number in (2, 3))
    for path, make in (
        (last, lambda: write_file(last, 2000, SIZES[2])),
        (last, last.unlink),
        (new, lambda: write_file(new, 2000, 50)),
    ):
        write_file(last, 1000, SIZES[2])
        make()
        refused = gpt("broken", server.url, "--resume", "auto")
        assert refused.returncode == 2 and f"/data/{path.name} is " in refused.stderr


@pytest.mark.slow
def test_a_run_moves_from_2_to_1_to_4_processes(
    server: SimpleNamespace, tmp_path: Path, gpt: Callable
) -> None:
    assert gpt("whole", server.url).returncode == 0
    fault = {"save": 3, "event": 3, "how": "kill"}
    for world, plan in ((2, {"fault": fault}), (1, {"fault": fault}), (4, {})):
        ended = gpt("moved", server.url, "--resume", "auto", world=world, **plan)
        assert len(ended.codes) == world and (ended.returncode == 0) == (not plan), ended.output
    whole, moved = (read_rows(tmp_path / name / "metrics.jsonl") for name in ("whole", "moved"))
    assert [row["step"] for row in moved] == [row["step"] for row in whole]
    for ours, theirs in zip(moved, whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)  # another sample: 1e-3


def test_what_breaks_in_mid_run_is_said_at_once(
    server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ParquetRows(server.url, "id")
    monkeypatch.setattr(rows, "WAITS", ["nothing may be tried again"])
    (server.folder / "1.parquet").unlink()
    with pytest.raises(LoneFailure, match=r"1\.parquet cannot be read: .*404"):
        data[600]
    write_file(server.folder / "2.parquet", 2000, SIZES[2])
    with pytest.raises(LoneFailure, match=r"2\.parquet has changed since"):
        data[1000]
    with_null = pa.table({"id": pa.array([[1, 2], [3, None]])})
    pq.write_table(with_null, server.folder / "0.parquet")
    with pytest.raises(LoneFailure, match=r"0\.parquet has nulls in its row group 0"):
        ParquetRows(str(server.folder / "0.parquet"), "id")[0]


def test_columns_keep_their_kind_and_the_cache_its_size(server: SimpleNamespace) -> None:
    floats = pa.array([0, 1, 2], pa.float32())
    columns = {"float": floats, "list": [[1], [], [2, 3]], "text": ["a", "b", "c"]}
    pq.write_table(pa.table(columns), server.folder.parent / "kinds.parquet")
    data = ParquetRows(str(server.folder.parent / "kinds.parquet"), *columns)
    number, numbers, text = data[2]
    assert number.dtype == torch.float32 and (numbers.tolist(), text) == ([2, 3], "c")
    number.fill_(7)  # of a copy
    assert data[2][0] == 2
    small = ParquetRows(str(server.folder), "id", cache_bytes=1)
    assert [int(small[n][0]) for n in range(NUM)] == [*range(NUM)]
    for file in small.folder.glob("*.arrow"):
        os.utime(file, (0, 0))  # nobody has needed it for long
    assert len(ParquetRows(str(server.folder), "tokens", cache_bytes=1)[0][0]) == 5
    assert len([*small.folder.glob("*.arrow")]) <= 5


def test_rows_come_from_s3(server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    s3 = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    s3.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*s3.get_host_and_port()))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    store = fsspec.filesystem("s3")
    store.mkdir("bucket")
    store.put(str(server.folder) + "/", "bucket/data/", recursive=True)
    data = ParquetRows("s3://bucket/data", "id", "tokens")
    assert [int(data[n][0]) for n in (0, 700, NUM - 1)] == [0, 700, NUM - 1]
    write_file(server.folder / "1.parquet", 7000, SIZES[1])
    store.put(str(server.folder / "1.parquet"), "bucket/data/1.parquet")
    with pytest.raises(LoneFailure, match=r"1\.parquet has changed since"):
        data[510]
    with pytest.raises(LoneFailure, match="no such file"):
        ParquetRows("s3://bucket/nothing", "id")
    s3.stop()


def test_what_cannot_be_read_is_a_sentence(server: SimpleNamespace) -> None:
    for pattern, column, sentence in (
        (str(server.folder / "*.csv"), "id", "no such file"),
        (str(server.folder), "label", r"0\.parquet: label must be among its columns"),
        ("https://me:secret@host/a.parquet", "id", "https://host/a.parquet: a password"),
    ):
        with pytest.raises((UsageError, LoneFailure), match=sentence) as caught:
            ParquetRows(pattern, column)
        assert "secret" not in str(caught.value)
    data = ParquetRows(str(server.folder), "id")
    os.truncate(server.folder / "0.parquet", 3000)
    with pytest.raises(LoneFailure, match=r"0\.parquet cannot be read"):
        data[60]
    assert shown("403 https://u:p@h/a?sig=1, no") == "403 https://h/a no"
