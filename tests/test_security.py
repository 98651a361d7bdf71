"""No file that somebody else made executes anything, or is written, or deleted, outside its folder.

Also: tests/test_checkpoint.py (pickles in a checkpoint), test_predict.py (model files, the name of
the script), test_pictures.py (pictures), test_tables.py (formulas for a spreadsheet).
"""

import argparse
import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint
import test_pictures
import torch
from conftest import posix_only
from PIL import Image

import predict
import train_mnist
from datakit import pictures, tables
from modelkit import hub, photos, plots
from trainkit.errors import UsageError
from trainkit.folder import records, rundir
from trainkit.folder.manifest import seal, sha256_of, verify, write_manifest
from trainkit.folder.weights import read_weights, write_tensors
from trainkit.launch import startup

PRECIOUS = "what nobody may touch"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the others with a file in it, both unchanged when the test ends."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_text(PRECIOUS)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def untouched(outside: Path) -> bool:
    return names(outside) == ["file"] and (outside / "file").read_text() == PRECIOUS


def refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        call()
    assert len(str(raised.value).splitlines()) == 1 and len(str(raised.value)) < 500


@pytest.mark.parametrize(
    "name",
    ["../outside/file", "state/../../outside/file", "/etc/hostname", "state", "", "MANIFEST.json"],
)
def test_a_manifest_names_nothing_outside_its_folder(
    name: str, tmp_path: Path, outside: Path
) -> None:
    folder = tmp_path / "step-0000000001"
    (folder / "state").mkdir(parents=True)
    write_manifest(folder, 1)
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    del manifest["sha256"]
    known = {"bytes": len(PRECIOUS), "sha256": sha256_of(outside / "file")}
    (folder / "MANIFEST.json").write_bytes(seal(manifest | {"files": {name: known}}))
    assert verify(folder) == f"{name} is missing" and untouched(outside)


@posix_only  # links
@pytest.mark.parametrize("target", [".", "file", "nothing"])
def test_what_a_link_names_is_never_removed(target: str, tmp_path: Path, outside: Path) -> None:
    link = tmp_path / "run" / ".tmp-step"
    link.parent.mkdir()
    link.symlink_to(outside / target)
    rundir.remove_tree(link)
    assert untouched(outside) and not link.is_symlink()


@posix_only  # links
def test_rotation_and_resume_keep_to_the_run_folder(tmp_path: Path) -> None:
    run = test_checkpoint.Run(tmp_path / "run")
    run.train(2)
    steps, run.checkpoints.keep = run.checkpoints.directory, 2
    for path in [*steps.iterdir()]:
        path.rename(tmp_path / f"away-{path.name}")
        path.symlink_to(tmp_path / f"away-{path.name}")
    away = {
        name: content
        for name, content in test_checkpoint.contents(tmp_path).items()
        if "/away-" in name
    }
    run.train(2)  # both links are rotated out
    assert [name for name in names(steps) if not name.startswith(".tmp-")] == [
        "step-0000000003",
        "step-0000000004",
    ]
    assert len(away) == 12 and away.items() <= test_checkpoint.contents(tmp_path).items()


LINKS = {
    "metrics.jsonl": "file",
    "timing.jsonl": "file",
    "run.json": "file",
    "checkpoints": ".",
    "tensorboard": ".",
    "wandb": ".",
    ".tmp-run.json": "nothing",
}


@posix_only  # links
@pytest.mark.parametrize("name", LINKS)
def test_a_run_does_not_write_through_a_link_in_its_folder(
    name: str, tmp_path: Path, outside: Path, accelerator: Any
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).symlink_to(outside / LINKS[name])
    args = argparse.Namespace(run_dir=folder, resume="auto")
    refused(lambda: rundir.open_run(accelerator, args), f"run/{name} is a symbolic link")
    assert untouched(outside)


@posix_only  # links
def test_a_file_is_replaced_where_a_link_was(tmp_path: Path, outside: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("a.json", ".tmp-a.json", "curves.png", "fit.png"):
        (folder / name).symlink_to(outside / "file")
    rundir.write_durably(folder / "a.json", b"ours")
    (folder / "metrics.jsonl").write_text('{"step": 1, "train_loss": 1.0, "learning_rate": 1.0}\n')
    plots.draw_run(folder)
    assert untouched(outside)
    assert (folder / "a.json").read_bytes() == b"ours"
    assert Image.open(folder / "curves.png").size[0] > 500


# What a reader of foreign files is given, and the reader.
READERS: dict[str, Callable[[Path], object]] = {
    "weights.safetensors": lambda path: read_weights(path, torch.nn.Linear(1, 1)),
    "pytorch_model.bin": lambda path: read_weights(path, torch.nn.Linear(1, 1)),
    "predictions.safetensors": records.load_predictions,
    "metrics.jsonl": lambda path: plots.main([str(path.parent)]),
    "picture.png": lambda path: photos.read_picture(path, 28, {}),
    **{f"table.{kind}": lambda path: tables.read_table(str(path), str(path))
       for kind in ("parquet", "json", "csv.gz")},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["zip", "raw"])
@pytest.mark.parametrize("name", READERS)
def test_a_pickle_under_any_name_is_not_executed(name: str, kind: str, tmp_path: Path) -> None:
    path, mark = tmp_path / name, tmp_path / "executed"
    test_checkpoint.write_hostile(path, kind, mark)
    refused(lambda: READERS[name](path), re.escape(str(path)))
    assert not mark.exists()
    if kind == "raw":
        pickle.loads(path.read_bytes())
        assert mark.exists()  # it does work


def test_a_script_in_a_folder_of_data_is_not_executed(tmp_path: Path) -> None:
    folder, mark = tmp_path / "data", tmp_path / "executed"
    test_pictures.parquet(folder, test_pictures.dataset())
    for name in ("dataset.py", "__init__.py", "data.py"):  # the last is what datasets once ran
        assert len(pictures.load_images(str(folder), "train", 28)[0]) == 60
        (folder / name).write_text(f"open({str(mark)!r}, 'w')")
    refused(lambda: pictures.load_images(str(folder), "train", 28), "scripts are no longer supp")
    refused(lambda: tables.read_table(str(folder / "data.py"), "--data x"), "is not a table")
    assert not mark.exists()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder whose classes are named by somebody who means harm."""
    about = {
        "script": "train_mnist",
        "model": "lenet",
        "size": 28,
        "mean": 0.1,
        "std": 0.3,
        "classes": ["../../x", "\x1b]0;title\x07\x1b[2J", "=1+1\r", "\u202egnp", "<script>"],
        "pictures": {"shape": [28, 28], "border": [0, 0], "frame": None, "read_as": ""},
    }
    folder = tmp_path / "run"
    folder.mkdir()
    weights = train_mnist.Predictor(about).model.state_dict()
    write_tensors(folder / "model.safetensors", weights, about)
    return folder


@posix_only  # such names of files
def test_names_do_not_steer_the_terminal(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "\x1b[31m.png"
    for _ in range(2):
        Image.effect_noise((28, 28), 100).save(path)
        predict.main([str(run_dir), str(path)])
    with pytest.raises(SystemExit):
        startup._end(f"error: {path}", 1, loud=True)
    said = capsys.readouterr()
    assert said.out.count("\n") == 2 and "\\x1b[31m.png: " in said.out
    assert said.err == f"error: {tmp_path}/\\x1b[31m.png\n"
    assert not {"\x1b", "\x07", "\r", "\u202e"} & {*said.out, *said.err}
    assert names(tmp_path) == ["\x1b[31m.png", "run"]


@posix_only  # links
@pytest.mark.parametrize("name", ["hub", "hub/model.safetensors", "hub/trainkit/order.py"])
def test_an_export_does_not_write_through_a_link(name: str, run_dir: Path, outside: Path) -> None:
    (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
    (run_dir / name).symlink_to(outside if name == "hub" else outside / "file")
    refused(lambda: predict.main([str(run_dir), "--export", "hub"]), f"{name} is a symbolic link")
    assert untouched(outside)


def test_the_page_asks_no_network_for_the_data_that_a_run_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"dataset": "someone/pictures", "label": None}
    (tmp_path / "run.json").write_text(json.dumps({"arguments": arguments}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval_loss": 1.0, "eval_samples": 9}\n')
    monkeypatch.setattr(hub, "load_images", lambda *args: pytest.fail(f"asked for {args[0]}"))
    about = {"size": 28, "classes": ["a", "b"], "pictures": {}}
    assert hub.describe_run(tmp_path, about)["examples"] == {}


# Tensors of predictions.safetensors, and what is saved about them, that no picture can be made of.
LACKING = [
    ({"prediction": [1]}, {"classes": ["a", "b"]}),
    ({"prediction": [7], "target": [9]}, {"classes": ["a", "b"]}),
    ({"prediction": [1], "target": [1]}, {"classes": 5}),
]


@pytest.mark.parametrize(("tensors", "about"), LACKING)
def test_predictions_that_lack_something_are_one_sentence(
    tensors: dict, about: Any, tmp_path: Path
) -> None:
    tensors = {name: torch.tensor(values) for name, values in tensors.items()}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train_loss": 1.0}\n')
    write_tensors(tmp_path / records.PREDICTIONS, tensors, about)
    refused(lambda: plots.main([str(tmp_path)]), "cannot be drawn")
    assert not [*tmp_path.glob("*.png")]


@pytest.mark.parametrize("row", ["{}", "[]", "1", '{"step": "x", "train_loss": [1]}'])
def test_a_log_that_lacks_something_is_one_sentence(row: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"eval_loss": 1}}\n{row}\n')
    refused(lambda: plots.main([str(tmp_path)]), re.escape(str(tmp_path)))
    shutil.copytree(tmp_path, tmp_path / "other")
    refused(lambda: plots.main([str(tmp_path), str(tmp_path / "other")]), re.escape(str(tmp_path)))
