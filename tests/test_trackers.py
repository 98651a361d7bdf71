"""After a SIGKILL and a resume every tracker holds the rows of metrics.jsonl, each once."""

import importlib
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import rows

from trainkit.errors import UsageError

FLAGS = "--model lenet --batch-size 48 --epochs 2 --log-every 2 --save-every 15"


def expected_points(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """What the rows of metrics.jsonl are as curves: name to (step, value)."""
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows(run_dir):
        group = "epochs" if "eval_loss" in row else "steps"
        for name, value in row.items():
            if name != "step":
                points.setdefault(f"{group}/{name}", []).append((row["step"], value))
    return points


class Killed(Exception):
    """Stands in for a SIGKILL inside this process: nothing is closed, nothing is flushed."""


def killed_and_resumed(
    tracker: str, run_dir: Path, small_mnist: Path, run_main: Callable, monkeypatch: Any
) -> None:
    """A run whose tracker has seen more steps than its checkpoint when it ends abruptly."""
    from trainkit.run import Run

    flags = ("train_mnist", "--dataset", small_mnist, "--run-dir", run_dir, "--tracker", tracker)
    flags += tuple(FLAGS.split())
    clip = Run.clip_and_check

    def clip_or_die(self: Run, optimizer: Any) -> None:
        if self.progress.step == 25:
            raise Killed
        clip(self, optimizer)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "clip_and_check", clip_or_die)
        with pytest.raises(Killed):
            run_main(*flags)
    # What these two keep beside the training loop ends with the process that was killed.
    if tracker != "tensorboard":
        importlib.import_module(tracker).finish()
    assert rows(run_dir)[-1]["step"] == 24  # logged, and then lost by the resume from step 15
    run_main(*flags, "--resume", "latest")
    steps = [row["step"] for row in rows(run_dir, "steps")]
    assert steps == list(range(2, 43, 2))


def test_tensorboard_forgets_the_rows_that_a_resume_makes_again(
    tmp_path: Path, small_mnist: Path, run_main: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    killed_and_resumed("tensorboard", tmp_path / "run", small_mnist, run_main, monkeypatch)
    folder = str(tmp_path / "run" / "tensorboard")
    reader = events.EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
    expected = expected_points(tmp_path / "run")
    assert set(reader.Tags()["scalars"]) == set(expected)
    for name, points in expected.items():
        found = [(event.step, event.value) for event in reader.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in points], name
        assert [v for _, v in found] == pytest.approx([v for _, v in points], rel=1e-6), name


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


def test_the_newest_offline_folder_of_wandb_holds_the_whole_curve(
    tmp_path: Path, small_mnist: Path, run_main: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.delenv("WANDB_MODE", raising=False)
    killed_and_resumed("wandb", tmp_path / "run", small_mnist, run_main, monkeypatch)
    # finish() does not wait for the last bytes; the end of a process, which this stands for, does.
    importlib.import_module("wandb").teardown()
    files = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    found: dict[str, list[tuple[int, float]]] = {}
    names = set()
    newest = max(files, key=os.path.getmtime)
    for data in wandb_records(newest):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {
                item.nested_key[0] if item.nested_key else item.key: item.value_json
                for item in record.history.item
            }
            names |= items.keys()
            for name in items:
                if "/" in name:
                    point = (int(items["_step"]), float(items[name]))
                    found.setdefault(name, []).append(point)
        elif record.WhichOneof("record_type") == "run":
            names |= {item.key for item in record.run.config.update}
        elif record.WhichOneof("record_type") == "config":
            names |= {item.key for item in record.config.update}
    assert found == expected_points(tmp_path / "run")
    assert names >= {"learning_rate", "batch_size"}


def test_the_newest_run_of_trackio_holds_each_row_once(
    tmp_path: Path, small_mnist: Path, run_main: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    killed_and_resumed("trackio", tmp_path / "run", small_mnist, run_main, monkeypatch)
    assert SQLiteStorage.get_runs("mnist") == ["run", "run"]  # one for each start
    found: dict[str, list[tuple[int, float]]] = {}
    for entry in SQLiteStorage.get_logs("mnist", "run"):  # the newest
        for key, value in entry.items():
            if "/" in key:
                found.setdefault(key, []).append((entry["step"], value))
    assert found == expected_points(tmp_path / "run")
    assert "learning_rate" in SQLiteStorage.get_run_config("mnist", "run")


def test_a_missing_tracker_is_asked_for_by_name(
    run_main: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for tracker in ("tensorboard", "trackio", "wandb"):
        with pytest.raises(UsageError, match=f"pip install {tracker}"):
            run_main("train_mnist", "--run-dir", tmp_path / "run", "--tracker", tracker)
    assert not (tmp_path / "run").exists()


@pytest.fixture(autouse=True)
def no_network() -> Iterator[None]:
    """W&B and trackio stay on this machine."""
    before = dict(os.environ)
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "DO_NOT_TRACK": "1"}
    yield
    os.environ.clear()
    os.environ.update(before)
