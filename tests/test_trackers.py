"""After a SIGKILL and a resume every tracker holds the rows of metrics.jsonl, each once."""

import importlib
import os
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from conftest import refused, rows

from trainkit.run.run import Run

FLAGS = "--model lenet --batch-size 48 --epochs 2 --log-every 2 --save-every 5 --tracker"
Points = dict[str, list[tuple[int, float]]]  # curves: name to (step, value)


class Killed(Exception):
    """Stands in for a SIGKILL inside this process: nothing is closed, nothing is flushed."""


@pytest.fixture
def killed_and_resumed(tmp_path, tiny_mnist, run_main, monkeypatch):
    """A run whose tracker has seen more steps than its checkpoint when it ends abruptly.

    Its folder after a resume, and the rows of its metrics.jsonl as curves.
    """
    run_dir = tmp_path / "run"
    mean = Run.step_mean

    def mean_or_die(self: Run, losses: Any):
        if self.progress.step == 9:
            raise Killed
        return mean(self, losses)

    def call(tracker: str) -> tuple[Path, Points]:
        flags = f"--dataset {tiny_mnist} --run-dir {run_dir} {FLAGS} {tracker}"
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Run, "step_mean", mean_or_die)
            run_main("train_mnist", flags)
        # What these two keep beside the training loop ends with the process that was killed.
        if tracker != "tensorboard":
            importlib.import_module(tracker).finish()
        assert rows(run_dir)[-1]["step"] == 8  # logged, and then lost by the resume from step 5
        run_main("train_mnist", f"{flags} --resume latest")
        assert [row["step"] for row in rows(run_dir, "steps")] == [*range(2, 13, 2)]
        points = defaultdict(list)
        for row in rows(run_dir):
            group = "epochs" if "eval_loss" in row else "steps"
            for name in row.keys() - {"step"}:
                points[f"{group}/{name}"].append((row["step"], row[name]))
        return run_dir, points

    return call


def test_tensorboard_forgets_the_rows_that_a_resume_makes_again(killed_and_resumed):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_dir, expected = killed_and_resumed("tensorboard")
    folder = str(run_dir / "tensorboard")
    reader = events.EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
    assert set(reader.Tags()["scalars"]) == set(expected)
    for name, points in expected.items():
        found = [(event.step, event.value) for event in reader.Scalars(name)]
        assert np.array(found) == pytest.approx(np.array(points), rel=1e-6), name


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    content, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack("<HB", content[position + 4 : position + 7])
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def test_the_newest_offline_folder_of_wandb_holds_the_whole_curve(killed_and_resumed, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.delenv("WANDB_MODE", raising=False)
    run_dir, expected = killed_and_resumed("wandb")
    # finish() does not wait for the last bytes; the end of a process, which this stands for, does.
    importlib.import_module("wandb").teardown()
    found = defaultdict(list)
    newest = max(run_dir.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime)
    for data in wandb_records(newest):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {(*x.nested_key, x.key)[0]: x.value_json for x in record.history.item}
        for name in items:
            if "/" in name:
                found[name].append((int(items["_step"]), float(items[name])))
    assert found == expected


def test_the_newest_run_of_trackio_holds_each_row_once(tmp_path, killed_and_resumed, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    _, expected = killed_and_resumed("trackio")
    assert SQLiteStorage.get_runs("mnist") == ["run", "run"]  # one for each start
    found = defaultdict(list)
    for entry in SQLiteStorage.get_logs("mnist", "run"):  # the newest
        for name in entry:
            if "/" in name:
                found[name].append((entry["step"], entry[name]))
    assert found == expected
    assert "learning_rate" in SQLiteStorage.get_run_config("mnist", "run")


def test_a_missing_tracker_is_asked_for_by_name(run_main, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for tracker in ("tensorboard", "trackio", "wandb"):
        with refused(f"pip install {tracker}"):
            run_main("train_mnist", "--run-dir", tmp_path / "run", "--tracker", tracker)
    assert not (tmp_path / "run").exists()


@pytest.fixture(autouse=True)
def no_network():
    """W&B and trackio stay on this machine."""
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "DO_NOT_TRACK": "1"}
    with mock.patch.dict(os.environ, offline):  # afterwards all of it is as it was
        yield
