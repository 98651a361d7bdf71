"""No file that somebody else made executes anything, or is written, or deleted, outside its folder.

Also: tests/test_checkpoint.py (pickles in a checkpoint), test_predict.py (model files, the name of
the script), test_pictures.py (pictures), test_tables.py (formulas for a spreadsheet).
"""

import json
import pickle
import re
from pathlib import Path

from trainkit import predict

import pytest
import torch
from conftest import posix_only, refused
from made_pictures import dataset, parquet
from PIL import Image
from saving import write_hostile

import train_mnist
from trainkit.hashes import digest_file
from trainkit.launch import startup
from trainkit.pictures import load_unlabelled, read_photo
from trainkit.reading import frames
from trainkit.store import atomic as files
from trainkit.store import records
from trainkit.store.manifest import FORMAT, verify
from trainkit.store.weights import read_weights, write_tensors
from trainkit.tools import plots

PRECIOUS = "what nobody may touch"


@pytest.fixture
def outside(tmp_path):
    """A folder beside the others with a file in it, both unchanged when the test ends."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_text(PRECIOUS)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def untouched(outside: Path) -> bool:
    return names(outside) == ["file"] and (outside / "file").read_text() == PRECIOUS


@pytest.mark.parametrize("name", ["../outside/file", "/etc/hostname", "state"])
def test_a_manifest_names_nothing_outside_its_folder(name, tmp_path, outside):
    folder = tmp_path / "step-0000000001"
    (folder / "state").mkdir(parents=True)
    known = {"bytes": len(PRECIOUS), "xxh3_128": digest_file(outside / "file")}
    manifest = {"format": FORMAT, "files": {name: known}}
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    assert verify(folder) == f"{name} is missing" and untouched(outside)


@posix_only  # links
def test_what_a_link_names_is_neither_removed_nor_written(tmp_path, outside):
    folder = tmp_path / "run"
    folder.mkdir()
    for name, target in ((".tmp-step", "."), ("a.json", "file"), (".tmp-b.json", "file")):
        (folder / name).symlink_to(outside / target)
    files.remove_tree(folder / ".tmp-step")
    for name in ("a.json", "b.json"):
        files.write_durably(folder / name, b"ours")
        assert (folder / name).read_bytes() == b"ours"
    assert untouched(outside)


# What a reader of foreign files is given, and the reader.
READERS = {
    "weights.safetensors": lambda path: read_weights(path, torch.nn.Linear(1, 1)),
    "pytorch_model.bin": lambda path: read_weights(path, torch.nn.Linear(1, 1)),
    "predictions.safetensors": records.load_predictions,
    "metrics.jsonl": lambda path: plots.main([str(path.parent)]),
    "picture.png": lambda path: read_photo(path, 28, {}),
    **{f"table.{kind}": lambda path: frames.read_table(str(path), str(path))
       for kind in ("parquet", "json", "csv.gz")},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["zip", "raw"])
@pytest.mark.parametrize("name", READERS)
def test_a_pickle_under_any_name_is_not_executed(name, kind, tmp_path):
    path, mark = tmp_path / name, tmp_path / "executed"
    write_hostile(path, kind, mark)
    with refused(re.escape(str(path))):
        READERS[name](path)
    assert not mark.exists()
    if kind == "raw":
        pickle.loads(path.read_bytes())
        assert mark.exists()  # it does work


def test_a_script_in_a_folder_of_data_is_not_executed(tmp_path):
    folder, mark = tmp_path / "data", tmp_path / "executed"
    parquet(folder, dataset())
    for name in ("dataset.py", "__init__.py", "data.py"):  # the last is what datasets once ran
        assert len(load_unlabelled(str(folder), 28, None)[0]) == 60
        (folder / name).write_text(f"open({str(mark)!r}, 'w')")
    with refused("scripts are no longer supp"):
        load_unlabelled(str(folder), 28, None)
    with refused("is not a table"):
        frames.read_table(str(folder / "data.py"), "--data x")
    assert not mark.exists()


@pytest.fixture
def run_dir(tmp_path):
    """A run folder whose classes are named by somebody who means harm."""
    metadata = {
        "script": "train_mnist",
        "input": "picture",
        "model": "lenet",
        "size": 28,
        "mean": 0.1,
        "std": 0.3,
        "classes": ["../../x", "\x1b]0;title\x07\x1b[2J", "=1+1\r", "\u202egnp", "<script>"],
        "pictures": {"shape": [28, 28], "border": [0, 0], "read_as": ""},
    }
    folder = tmp_path / "run"
    folder.mkdir()
    weights = train_mnist.make_model(metadata).state_dict()
    write_tensors(folder / "model.safetensors", weights, metadata)
    return folder


@posix_only  # such names of files
def test_names_do_not_steer_the_terminal(run_dir, tmp_path, capsys, monkeypatch):
    path = tmp_path / "\x1b[31m.png"
    monkeypatch.setattr(startup, "leave", lambda code: None)  # it ends a process with children
    for _ in range(2):
        Image.effect_noise((28, 28), 100).save(path)
        predict.main([str(run_dir), str(path)])
    startup._end(f"error: {path}", 1, loud=True)
    said = capsys.readouterr()
    assert said.out.count("\n") == 2 and "\\x1b[31m.png: " in said.out
    assert said.err == f"error: {tmp_path}/\\x1b[31m.png\n"
    assert not {"\x1b", "\x07", "\r", "\u202e"} & {*said.out, *said.err}
    assert names(tmp_path) == ["\x1b[31m.png", "run"]
