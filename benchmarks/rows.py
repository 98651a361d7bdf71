"""Read rows of Parquet files over HTTP: samples per second, also of a plain read, and bytes sent.

    OMP_NUM_THREADS=1 python -m benchmarks.rows

A server in this process has 200 row groups of 1,000 rows of 1,025 tokens in 20 files. `plain`
opens one file after another with fsspec, reads its row groups in turn with pyarrow, and cuts them
into batches of 128: in one process, and in as many as `rows`, where each has its own files. `rows`
reads them in the order of ParquetRows through make_loaders, starting with an empty cache. Nothing
is trained. `sent` is the number of bytes that the server sent to all processes, divided by the
number of bytes in the files.
"""

import argparse
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from trainkit import make_loaders

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from aiohttp import web

from benchmarks._runs import Parser, execute, in_turn, launcher, spread, table
from benchmarks.growth import ARGS, BATCH_SIZE
from trainkit.numbers.loaders import batches_of
from trainkit.rows.parquet import ParquetRows

LENGTH = 1025
NAMES = ("plain", "rows, 0 workers", "rows, 2 workers")


def serve(folder: Path, middleware: Callable) -> str:
    """Serve a folder to this machine, through aiohttp's middleware; return the URL of its files."""
    app = web.Application(middlewares=[middleware])
    app.router.add_static("/", folder, show_index=True)
    place = socket.create_server(("127.0.0.1", 0))
    how = {"sock": place, "print": None, "handle_signals": False, "access_log": None}
    threading.Thread(target=web.run_app, args=[app], kwargs=how, daemon=True).start()
    return f"http://127.0.0.1:{place.getsockname()[1]}/*.parquet"


def plain(accelerator: Accelerator, url: str) -> Iterator[torch.Tensor]:
    files, _ = fsspec.url_to_fs(url)
    left = torch.empty(0, LENGTH, dtype=torch.int32)
    for path in sorted(files.glob(url))[accelerator.process_index :: accelerator.num_processes]:
        with files.open(path, cache_type="none") as file:
            parquet = pq.ParquetFile(file, pre_buffer=True)
            for number in range(parquet.num_row_groups):
                for chunk in parquet.read_row_group(number).column(0).chunks:
                    rows = torch.from_dlpack(chunk.flatten()).view(-1, LENGTH)
                    *batches, left = torch.cat((left, rows)).split(BATCH_SIZE)
                    yield from batches
    yield left


def read(url: str, name: str) -> None:
    """Print how many samples per second all processes read together."""
    config = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    batches = plain(accelerator, url)
    if name != "plain":
        ARGS.num_workers = int(name.split()[1])
        data = ParquetRows(url, "tokens")
        loaders = make_loaders(accelerator, data, data, ARGS, order=data.order(BATCH_SIZE, 0))
        loader = accelerator.prepare(loaders[0])
        batches_of(loader).is_read_by_run = True  # there is no Run here
        batches = (rows for (rows,) in loader)
    accelerator.wait_for_everyone()
    started_at = time.perf_counter()
    number = accelerator.reduce(torch.tensor(sum(map(len, batches))))
    accelerator.print("read", int(number) / (time.perf_counter() - started_at), flush=True)
    os._exit(0)


def main() -> None:
    parser = Parser(__doc__, rounds=1)
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        return read(*args.read)
    with tempfile.TemporaryDirectory() as directory:
        tokens = np.random.default_rng(0).integers(0, 50_000, (1000, LENGTH), dtype=np.int32)
        group = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(tokens.ravel(), LENGTH)})
        for number in range(20):
            path = Path(directory, f"{number:02}.parquet")
            pq.write_table(pa.concat_tables([group] * 10), path, row_group_size=1000)
        sent, size = [], 20 * path.stat().st_size

        @web.middleware
        async def count(request: web.Request, handler: Callable) -> web.StreamResponse:
            part = request.http_range
            sent.append((part.stop or 0) - (part.start or 0))
            return await handler(request)

        url = serve(path.parent, count)

        def rate(num: int, name: str) -> tuple[float, float]:
            sent.clear()
            with tempfile.TemporaryDirectory() as cache:
                words = ("-m", "benchmarks.rows", "--read", url, name)
                ended = execute(*words, launch=launcher(num), env={"HF_HOME": cache})
            return float(ended.said("read")), sum(sent) / size

        ways = {(num, name): partial(rate, num, name) for num in (1, 2) for name in NAMES}
        results = in_turn(ways, args.rounds)
    medians = {way: statistics.median(r for r, _ in found) for way, found in results.items()}
    rows = []
    for (num, name), found in results.items():
        over = (medians[num, name] / medians[n, "plain"] for n in (1, num))
        rows.append((num, name, spread([r for r, _ in found]), *over, max(p for _, p in found)))
    head = "processes | read by | samples per second | over plain in 1 process | in as many | sent"
    table(head, rows)


if __name__ == "__main__":
    main()
