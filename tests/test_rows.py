"""Rows of Parquet files by index, over HTTP: the order, what is fetched, faults, and a resume."""

import asyncio
import itertools
import json
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import faults
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from aiohttp import web
from fsspec.implementations.http import HTTPFileSystem
from plain import quick

from benchmarks.rows import serve
from examples import gpt
from trainkit.config import parse
from trainkit.errors import LoneFailure
from trainkit.rows import parquet as rows
from trainkit.rows.parquet import ParquetRows
from trainkit.store import places as stores

SIZES = (500, 500, 137)  # rows of the files, in row groups of 50
NUM = sum(SIZES)


def write_file(path, first, size):
    ids = np.arange(first, first + size)
    tokens = pa.array(np.stack((ids // 256, *[ids % 256] * 4), 1).ravel())
    tokens = pa.FixedSizeListArray.from_arrays(tokens, 5)
    pq.write_table(pa.table({"tokens": tokens, "id": ids}), path, row_group_size=50)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A web server of data/; `plan(number)` says how the request with this number breaks."""
    monkeypatch.setattr(rows, "HF_HOME", tmp_path / "cache")
    monkeypatch.setattr(stores, "WAITS", (0, 0, 0.1))
    folder = tmp_path / "data"
    folder.mkdir()
    for number, first in enumerate((0, 500, 1000)):
        write_file(folder / f"{number}.parquet", first, SIZES[number])
    running = SimpleNamespace(plan=lambda number: "", numbers=itertools.count(), ranges=Counter())

    @web.middleware
    async def answer(request, handler):
        fault = running.plan(next(running.numbers))
        if fault == "slow":
            await asyncio.sleep(0.3)
        if fault == "503":
            raise web.HTTPServiceUnavailable
        if fault == "drop":
            half = web.StreamResponse(status=206, headers={"Content-Length": "1000"})
            if request.http_range.stop:
                await half.prepare(request)
                await half.write(b"x" * 500)
            request.transport.abort()
            return half
        if request.http_range.stop:
            running.ranges[request.path, request.http_range.start] += 1
        return await handler(request)

    running.folder, running.url = folder, serve(tmp_path, answer).replace("*", "data/*")
    return running


@pytest.mark.parametrize("batch_size", [1, 96, 2000])
def test_the_order_has_each_row_once_and_is_the_same_in_parts(server, batch_size):
    order = ParquetRows(str(server.folder), "id").order(batch_size, 3)
    everything = order(1)
    assert everything.sort().values.tolist() == [*range(NUM)]
    parts = [order(1, n, min(n + 100, NUM)) for n in range(0, NUM, 100)]
    assert torch.equal(torch.cat(parts), everything)
    first, other = ({*(x[:50] // 50).tolist()} for x in (everything, order(2)))
    assert first != other  # row groups


@pytest.fixture
def train(server, tmp_path, nursery):
    """train(name, url, ...): a run in this folder, each step with its samples, ends with `code`."""
    words = "--epochs 2 --layers 1 --width 32 --batch-size 24 --save-every 12"
    order = ParquetRows(str(server.folder), "id").order(24, 0)
    batches = [batch.tolist() for epoch in range(2) for batch in order(epoch).split(24)]

    def run(name, url, *more, world=1, code=0, **plan) -> faults.Outcome:
        logs = [Path(f"{tmp_path}/ids.{rank}") for rank in range(world)]
        for log in logs:
            log.write_text("")
        first = max(faults.newest(tmp_path / name), 0)
        env = {**os.environ, "HF_HOME": f"{tmp_path}/cache", "IDS": f"{tmp_path}/ids"}
        flags = ["--data", url, "--eval-data", url, *words.split()]
        flags += ["--run-dir", tmp_path / name, *more]
        outcome = nursery.run("gpt_ids.py", *flags, world=world, env=env, **plan)
        assert code in (None, outcome.returncode), outcome.output
        assert len(outcome.codes) == world and None not in outcome.codes, outcome.output
        parts = zip(*(map(json.loads, log.read_text().splitlines()) for log in logs), strict=False)
        seen = [list(itertools.chain(*part)) for part in parts]
        last = first + len(seen)
        assert seen == batches[first:last] and (outcome.returncode or last == len(batches))
        return outcome

    return run


@pytest.mark.parametrize("world, workers", quick(itertools.product((1, 2, 4), (0, 2)), [(2, 2)]))
def test_all_worlds_see_the_same_and_fetch_each_row_group_once(server, train, world, workers):
    ParquetRows(server.url, "tokens")  # keeps the footers
    server.ranges.clear()
    train("run", server.url, "--num-workers", workers, world=world)
    assert len(server.ranges) == 23
    assert sum(server.ranges.values()) <= 1.1 * 23


def test_a_killed_run_goes_on_with_equal_bytes_but_not_with_other_files(server, tmp_path, train):
    train("whole", server.url)
    kill = {"save": 4, "event": 3, "how": "kill"}
    train("broken", server.url, "--num-workers", 2, fault=kill, code=-9)
    train("broken", server.url, "--resume", "auto")
    assert faults.digests(tmp_path / "broken") == faults.digests(tmp_path / "whole")
    last = server.folder / "2.parquet"
    write_file(last, 2000, SIZES[2])
    refused = train("broken", server.url, "--resume", "auto", code=2)
    assert f"/data/{last.name} is " in refused.stderr


def test_what_breaks_in_mid_run_is_said_at_once(server, monkeypatch):
    data = ParquetRows(server.url, "id")
    assert not HTTPFileSystem._cache, "a loader worker would wait a second to close what is there"
    monkeypatch.setattr(stores, "WAITS", ["nothing may be tried again"])
    (server.folder / "1.parquet").unlink()
    with pytest.raises(LoneFailure, match=r"1\.parquet cannot be read: .*404"):
        data[600]
    with_null = pa.table({"id": pa.array([[1, 2], [3, None]])})
    file = server.folder / "0.parquet"
    pq.write_table(with_null, file)
    with pytest.raises(LoneFailure, match=r"0\.parquet has nulls in its row group 0"):
        ParquetRows(str(file), "id")[0]


def read_tokens(folder, *flags):
    return gpt.load_data(parse(gpt.Config, ["--data", str(folder), *map(str, flags)]))


def test_files_called_test_are_evaluated_and_not_trained_on(tmp_path):
    for name in ("train-0", "train-1", "test-0", "notes"):
        table = pa.table({"tokens": [[len(name), 1, 2]] * 40})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    *sets, plan = read_tokens(tmp_path)
    assert [*map(len, sets)] == [80, 40]
    folder = f"/{tmp_path.name}"
    said = f"{folder}/test-0.parquet: 40 rows; not read: {folder}/notes.parquet"
    assert plan["evaluated on"] == said
    plan = read_tokens(tmp_path, "--eval-data", tmp_path / "train-1.parquet")[-1]
    said = f"train-1.parquet: 40 rows; not read: {folder}/notes.parquet, {folder}/test-0.parquet"
    assert plan["evaluated on"].endswith(said)
    assert "train-1.parquet are also trained on" in plan["twice"]
