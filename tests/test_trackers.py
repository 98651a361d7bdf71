"""After a SIGKILL and a resume every tracker holds the rows of metrics.jsonl, each once."""

import importlib
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, kill_all, rows, run, start

from trainkit.errors import UsageError

FLAGS = (
    "--model",
    "lenet",
    "--batch-size",
    48,
    "--epochs",
    2,
    "--log-every",
    2,
    "--pictures",
    "--save-every",
    15,
)
PICTURES = {"steps/curves", "steps/confusion", "steps/mistakes"}


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

    flags = (
        "train_mnist",
        "--dataset",
        small_mnist,
        "--run-dir",
        run_dir,
        "--tracker",
        tracker,
        *FLAGS,
    )
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


def read_tensorboard(run_dir: Path) -> Any:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    reader = event_accumulator.EventAccumulator(
        str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "images": 0}
    )
    return reader.Reload()


def assert_tensorboard_is_the_history(run_dir: Path) -> None:
    reader = read_tensorboard(run_dir)
    expected = expected_points(run_dir)
    assert set(reader.Tags()["scalars"]) == set(expected)
    for name, points in expected.items():
        found = [(event.step, event.value) for event in reader.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in points], name
        assert [v for _, v in found] == pytest.approx([v for _, v in points], rel=1e-6), name


def test_tensorboard_forgets_the_rows_that_a_resume_makes_again(
    tmp_path: Path, small_mnist: Path, run_main: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    killed_and_resumed("tensorboard", tmp_path / "run", small_mnist, run_main, monkeypatch)
    assert_tensorboard_is_the_history(tmp_path / "run")
    # A run that is over, started once more, draws its pictures again: they too are there once.
    run_main(
        "train_mnist",
        "--dataset",
        small_mnist,
        "--run-dir",
        tmp_path / "run",
        "--tracker",
        "tensorboard",
        *FLAGS,
        "--resume",
        "auto",
    )
    assert_tensorboard_is_the_history(tmp_path / "run")


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
    names, run_ids = set(), set()
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
            for name in items.keys() - PICTURES:
                if "/" in name:
                    point = (int(items["_step"]), float(items[name]))
                    found.setdefault(name, []).append(point)
        elif record.WhichOneof("record_type") == "run":
            run_ids.add(record.run.run_id)
            names |= {item.key for item in record.run.config.update}
        elif record.WhichOneof("record_type") == "config":
            names |= {item.key for item in record.config.update}
    assert found == expected_points(tmp_path / "run")
    assert run_ids == {(tmp_path / "run" / "tracker_id").read_text()}
    assert names >= {"learning_rate", "batch_size"} | PICTURES


def test_trackio_holds_each_row_once(
    tmp_path: Path, small_mnist: Path, run_main: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    killed_and_resumed("trackio", tmp_path / "run", small_mnist, run_main, monkeypatch)
    assert_trackio_is_the_history(tmp_path / "run", SQLiteStorage)


def assert_trackio_is_the_history(run_dir: Path, storage: Any) -> None:
    name = (run_dir / "tracker_id").read_text()
    assert storage.get_runs("mnist") == [name]
    found: dict[str, list[tuple[int, float]]] = {}
    for entry in storage.get_logs("mnist", name):
        for key, value in entry.items():
            if "/" in key:
                found.setdefault(key, []).append((entry["step"], value))
    assert found == expected_points(run_dir)
    assert "learning_rate" in storage.get_run_config("mnist", name)


@pytest.mark.slow
def test_trackio_continues_its_curve_after_two_sigkills(tmp_path: Path, small_mnist: Path) -> None:
    pytest.importorskip("trackio")
    run_dir, there = tmp_path / "run", {"TRACKIO_DIR": str(tmp_path / "trackio")}
    flags = (
        "--dataset",
        small_mnist,
        "--run-dir",
        run_dir,
        "--tracker",
        "trackio",
        *FLAGS,
        "--epochs",
        4,
        "--resume",
        "auto",
    )
    for step in (15, 45):
        started = start("train_mnist.py", *flags, env=there)
        saved = run_dir / "checkpoints" / f"step-{step:010d}"
        while not (saved.exists() and rows(run_dir)[-1]["step"] > step + 2):
            assert started.poll() is None, started.communicate()
        kill_all(started)
        started.communicate()
    last = run("train_mnist.py", *flags, env=there)
    assert last.returncode == 0, last.stderr
    assert "step-0000000045" in last.stdout and "token" not in last.stdout + last.stderr
    assert last.stdout.count("Run finished") <= 1
    assert [row["step"] for row in rows(run_dir, "steps")] == list(range(2, 85, 2))
    code = """import sys; sys.path.insert(0, "tests")
from pathlib import Path
from test_trackers import assert_trackio_is_the_history
from trackio.sqlite_storage import SQLiteStorage
assert_trackio_is_the_history(Path(sys.argv[1]), SQLiteStorage)"""
    subprocess.run(
        [sys.executable, "-c", code, run_dir], cwd=ROOT, env={**os.environ, **there}, check=True
    )


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
