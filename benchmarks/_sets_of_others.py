"""Sets of others whose samples are a vector and its class: see _works_with.py."""

import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainkit import InMemory

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset
from torch.utils.data import TensorDataset as Tensors


class OneByOne(Dataset):
    """Samples that are read one at a time, from columns that have an index."""

    def __init__(self, x: Any, y: Any):
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.as_tensor(self.x[index]), torch.as_tensor(self.y[index])


class Rows(Dataset):
    """Samples that are dicts of another set, as pairs."""

    def __init__(self, rows: Any, names: tuple[str, str] = ("x", "y")):
        self.rows, self.names = rows, names

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self.rows[index]
        x, y = (np.asarray(row[name]) for name in self.names)
        return torch.tensor(x, dtype=torch.float32), torch.tensor(int(y))


class Stream(IterableDataset):
    """Samples without an index."""

    def __iter__(self) -> Any:
        yield torch.zeros(8), torch.tensor(0)


def in_memory(x: torch.Tensor, y: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """What makes a set of torch, or of this project, by its kind."""
    half = len(x) // 2
    return {
        "InMemory": lambda: InMemory(x, y),
        "list": lambda: list(zip(x, y, strict=True)),
        "TensorDataset": lambda: Tensors(x, y),
        "Dataset": lambda: OneByOne(x, y),
        "Subset": lambda: Subset(OneByOne(x, y), range(len(x))),
        "ConcatDataset": lambda: ConcatDataset(
            [Tensors(x[:half], y[:half]), Tensors(x[half:], y[half:])]
        ),
        "StackDataset": lambda: StackDataset(x, y),
        "random_split": lambda: torch.utils.data.random_split(
            Tensors(x, y), [1.0], torch.Generator().manual_seed(0)
        )[0],
        "IterableDataset": Stream,
        "numpy_list": lambda: list(zip(x.numpy(), y.numpy(), strict=True)),
    }


def of_pictures(kind: str, x: torch.Tensor, y: torch.Tensor, folder: Path) -> Any:
    """Pictures of 4 x 4 pixels whose first 8 numbers are a sample."""
    from torchvision.datasets import FakeData, ImageFolder
    from torchvision.transforms import Compose, Lambda, ToTensor

    shrink = Compose([ToTensor(), Lambda(lambda picture: picture.flatten()[:8])])
    if kind == "torchvision.FakeData":
        return FakeData(len(x), (3, 4, 4), 3, shrink)
    from PIL import Image

    for number, (row, label) in enumerate(zip(x, y, strict=True)):
        (folder / str(int(label))).mkdir(parents=True, exist_ok=True)
        pixels = (row.sigmoid() * 255).to(torch.uint8).repeat(2).reshape(4, 4)
        Image.fromarray(pixels.numpy()).save(folder / str(int(label)) / f"{number}.png")
    return ImageFolder(folder, shrink)


def of_files(kind: str, x: np.ndarray, y: np.ndarray, folder: Path) -> Any:
    """Columns or rows in files of another package, written here at first."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "h5py":
        import h5py

        if not (folder / "rows.h5").exists():  # one that is open cannot be written again
            with h5py.File(folder / "rows.h5", "w") as file:
                file["x"], file["y"] = x, y
        opened = h5py.File(folder / "rows.h5")
        return OneByOne(opened["x"], opened["y"])
    if kind == "zarr":
        import zarr

        stored = zarr.open_group(folder / "rows.zarr", mode="w")
        stored.create_array("x", data=x, chunks=(7, 8))
        stored.create_array("y", data=y)
        return OneByOne(stored["x"], stored["y"][:])  # an Array of zarr has no len()
    if kind == "np.memmap":
        held = np.memmap(folder / "x.bin", np.float32, "w+", shape=x.shape)
        held[:] = x
        return OneByOne(held, y)
    if kind == "lmdb":
        return Lmdb(folder, x, y)
    if kind == "pyarrow.Table":
        import pyarrow

        table = pyarrow.table({"x": x.tolist(), "y": y})
        return Rows(ByFunction(len(table), lambda index: table.slice(index, 1).to_pylist()[0]))
    if kind == "polars.DataFrame":
        import polars

        frame = polars.DataFrame({"x": x.tolist(), "y": y})
        return Rows(ByFunction(len(frame), lambda index: frame.row(index, named=True)))
    if kind == "monai.CacheDataset":
        from monai.data import CacheDataset

        samples = [{"x": row, "y": label} for row, label in zip(x, y, strict=True)]
        return CacheDataset(samples, lambda row: row, progress=False)
    if kind == "torch_geometric":
        return Graphs(x, y)
    if kind.startswith("streaming.") or kind == "litdata":
        if not (folder / "index.json").exists():
            write_apart(kind, x, y, folder)
        return Rows(open_stream(kind, folder))
    return tars(kind, x, y, folder)


def write_apart(kind: str, x: np.ndarray, y: np.ndarray, folder: Path) -> None:
    """Write the files of a stream before the run: their writers wait for all ranks."""
    with tempfile.TemporaryDirectory() as given:
        np.savez(f"{given}/rows.npz", x=x, y=y)
        world = "RANK", "WORLD_SIZE", "MASTER", "TORCHELASTIC"
        alone = {name: v for name, v in os.environ.items() if not any(w in name for w in world)}
        command = [sys.executable, "-m", __name__, kind, f"{given}/rows.npz", folder]
        subprocess.run(command, env=alone, check=True)


def write_stream(kind: str, rows: Path, folder: Path) -> None:
    """Write the files of streaming or of litdata."""
    x, y = (np.load(rows)[name] for name in "xy")
    samples = [{"x": row, "y": int(label)} for row, label in zip(x, y, strict=True)]
    if kind == "litdata":
        from litdata.streaming.cache import Cache

        cache = Cache(str(folder), chunk_size=16)
        for number, sample in enumerate(samples):
            cache[number] = sample
        cache.done()
        cache.merge()
        return
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"x": "ndarray", "y": "int"}) as out:
        for sample in samples:
            out.write(sample)


def open_stream(kind: str, folder: Path) -> Any:
    """What reads these files: with an order and a share of its own, or by index (MDSReader)."""
    if kind == "litdata":
        import litdata

        return litdata.StreamingDataset(str(folder))
    if kind == "streaming.MDS":
        from streaming import StreamingDataset

        return StreamingDataset(local=str(folder), batch_size=1)
    import json

    from streaming.base.format import reader_from_json

    (shard,) = json.loads((folder / "index.json").read_text())["shards"]
    return reader_from_json(str(folder), None, shard)


def tars(kind: str, x: np.ndarray, y: np.ndarray, folder: Path) -> Any:
    """A tar file of samples: as a stream, or by index."""
    import webdataset

    path = folder / "rows.tar"
    with webdataset.TarWriter(str(path)) as out:
        for number, (row, label) in enumerate(zip(x, y, strict=True)):
            out.write({"__key__": str(number), "x.npy": row, "y.cls": int(label)})
    if kind == "webdataset":
        return webdataset.WebDataset(str(path), shardshuffle=False).decode()
    import wids

    shards = [{"url": str(path), "nsamples": len(x)}]
    return Rows(wids.ShardListDataset(shards, cache_dir=str(folder)), (".x.npy", ".y.cls"))


class ByFunction:
    """Rows of a table of others, as dicts, by a function of the index."""

    def __init__(self, num: int, row: Callable[[int], dict[str, Any]]):
        self.num, self.row = num, row

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.row(index)


class Lmdb(Dataset):
    """Rows of bytes in a database."""

    def __init__(self, folder: Path, x: np.ndarray, y: np.ndarray):
        import lmdb

        self.database = lmdb.open(str(folder / "rows.lmdb"))
        with self.database.begin(write=True) as writing:
            for number, (row, label) in enumerate(zip(x, y, strict=True)):
                held = io.BytesIO()
                np.savez(held, x=row, y=label)
                writing.put(str(number).encode(), held.getvalue())

    def __len__(self) -> int:
        return self.database.stat()["entries"]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        with self.database.begin() as reading:
            held = np.load(io.BytesIO(reading.get(str(index).encode())))
        return torch.from_numpy(held["x"]), torch.tensor(int(held["y"]))


class Graphs(Dataset):
    """Graphs of four nodes with two numbers each, read as a vector of eight."""

    def __init__(self, x: np.ndarray, y: np.ndarray):
        from torch_geometric.data import Data

        self.graphs = [
            Data(x=torch.from_numpy(row).reshape(4, 2), y=torch.tensor([int(label)]))
            for row, label in zip(x, y, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        graph = self.graphs[index]
        return graph.x.flatten(), graph.y[0]


def make_set(kind: str, x: torch.Tensor, y: torch.Tensor) -> Any:
    """A set of this kind, whose samples begin with an input and its class."""
    folder = Path(tempfile.gettempdir()) / f"set_of_{len(x)}"
    if kind.startswith("torchvision."):
        return of_pictures(kind, x, y, folder)
    if kind == "datasets.Dataset":
        import datasets

        rows = {"x": x.tolist(), "y": y.tolist()}
        return datasets.Dataset.from_dict(rows).with_format("torch")
    makers = in_memory(x, y)
    if kind in makers:
        return makers[kind]()
    return of_files(kind, x.numpy(), y.numpy(), folder)


if __name__ == "__main__":
    write_stream(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
