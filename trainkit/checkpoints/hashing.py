"""Hash what data sets, samples and modules hold: the same content, the same text, on any machine.

Sets that are held in memory are hashed whole, of others a sample at a time.
"""

import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from trainkit.errors import UsageError
from trainkit.hashes import digest, digest_file
from trainkit.numbers.loaders import has_transform

AT_ONCE = 100  # samples of a list, or 100 times as many rows of a table
MAX_TABLE_BYTES = 2**32  # a larger datasets.Dataset is read from the disk, not held in memory
CODE = type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType
MEDIA = "struct<bytes: binary, path: string>"  # how datasets stores pictures and sounds


def text_of(value: Any) -> str:
    """Return JSON that differs for different values; tensors, arrays and bytes become hashes."""
    try:
        return json.dumps(value, default=_describe)
    # Keys that are tuples, a circle (RecursionError), a tensor of a kind that has no bytes.
    except (TypeError, ValueError, RuntimeError):
        return _without_addresses(value)


def _describe(value: Any) -> Any:
    """What json.dumps writes for a value that it does not know."""
    if isinstance(value, torch.Tensor) and value.is_nested:  # also a jagged one
        return [str(value.dtype), list(value.unbind())]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), [*value.shape], hash_tensor(value)]
    if isinstance(value, bytes | bytearray | memoryview):
        return digest(value)
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):  # also of PIL
        array = np.asarray(value)
        if array.dtype.hasobject:
            return array.tolist()
        data = np.ascontiguousarray(array).view(np.uint8).data
        return [str(array.dtype), [*array.shape], digest(data)]
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(map(text_of, value))
    if hasattr(value, "__dict__") and not isinstance(value, CODE):
        return [type(value).__name__, vars(value)]
    return _without_addresses(value)


def _without_addresses(value: Any) -> str:
    return re.sub(" at 0x[0-9a-fA-F]+", "", repr(value))


def hash_tensor(tensor: torch.Tensor) -> str:
    """Hash the bytes of a tensor, in its own dtype, at 12 GB a second.

    Every process must call this for a sharded one.
    """
    rows = getattr(tensor, "full_tensor", tensor.detach)().detach().cpu()
    rows = rows if rows.layout is torch.strided else rows.to_dense()
    return digest(rows.contiguous().flatten().view(torch.uint8).numpy())


def sample_parts(sample: Any) -> dict[str, str]:
    """The text of each entry of a sample or batch that is a dict or a tuple, else of all of it."""
    if isinstance(sample, Mapping):
        return {f"[{name!r}]": text_of(value) for name, value in sample.items()}
    if isinstance(sample, tuple):
        return {f"[{number}]": text_of(value) for number, value in enumerate(sample)}
    return {"": text_of(sample)}


def held_in_memory(dataset: Any) -> Iterator[str] | None:
    """Texts that cover all of a set which is held in memory; None for other sets.

    Such are lists, tuples, tensors, arrays, TensorDataset, datasets.Dataset up to 4 GiB without
    pictures or sounds, and what Subset, ConcatDataset and StackDataset make of them; not np.memmap.
    """
    if type(dataset) in (list, tuple):
        return _texts(dataset)
    if isinstance(dataset, torch.Tensor) or type(dataset) is np.ndarray:
        return iter([text_of(dataset)])
    if type(dataset) is TensorDataset:
        return iter([text_of(dataset.tensors)])
    if type(dataset).__module__.startswith("datasets.") and hasattr(dataset, "with_transform"):
        return _table_texts(dataset)
    if type(dataset) is Subset:
        return _joined([dataset.dataset], text_of([int(index) for index in dataset.indices]))
    if type(dataset) is ConcatDataset:
        return _joined(dataset.datasets, "")
    if type(dataset) is StackDataset:
        sets = dataset.datasets
        return _joined([*sets.values()] if isinstance(sets, dict) else sets, "")
    return None


def _texts(samples: Sequence) -> Iterator[str]:
    for start in range(0, len(samples), AT_ONCE):
        yield text_of(samples[start : start + AT_ONCE])


def _joined(sets: Sequence, first: str) -> Iterator[str] | None:
    texts = [held_in_memory(part) for part in sets]
    if any(part is None for part in texts) or any(map(has_transform, sets)):
        return None
    return (text for part in ([first], *texts) for text in (part or ()))


def _table_texts(dataset: Any) -> Iterator[str] | None:
    """Hash the rows and the order of a datasets.Dataset, however its files divide the rows."""
    import pyarrow as pa  # datasets has imported it

    names = dataset.format["columns"]
    table = dataset.data.table.select(names)
    if table.nbytes > MAX_TABLE_BYTES or MEDIA in str(table.schema):
        return None
    rows = dataset.with_format("arrow", columns=names)

    def texts() -> Iterator[str]:
        yield text_of([repr(dataset.features), dataset.format["type"], len(dataset)])
        for start in range(0, len(dataset), 100 * AT_ONCE):
            part = rows[start : start + 100 * AT_ONCE].combine_chunks()
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, part.schema) as writer:
                writer.write_table(part)
            yield digest(memoryview(sink.getvalue()))

    return texts()


def hash_fixed(name: str, value: Any) -> str:
    """Hash what a module holds, a file, or all files below a folder. Raises UsageError."""
    if isinstance(value, torch.nn.Module):
        return digest(text_of(value.state_dict()))
    path = Path(value)
    paths = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    if not paths:
        raise UsageError(
            f"run.begin(...) got fixed[{name!r}] = {str(path)!r}, where no file is: give a module, "
            "or the path of a file or folder that the experiment uses"
        )
    files = [[file.relative_to(path).as_posix(), digest_file(file)] for file in paths]
    return digest(text_of(files))
