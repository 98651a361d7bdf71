"""After a SIGKILL and a resume every tracker holds the rows of metrics.jsonl, each once."""

import importlib
import os
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from accelerate.tracking import GeneralTracker
from conftest import refused, rows
from loops import changed

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
        # What it keeps beside the training loop ends with the process that was killed.
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


class Own(GeneralTracker):
    name, requires_logging_directory, tracker = "own", False, None

    def __init__(self):
        super().__init__()
        self.seen = []

    def store_init_configuration(self, values: dict[str, Any]):
        self.seen.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any):
        self.seen.append((step, values))


@pytest.mark.parametrize("home", ["trackers", "log_with"])
def test_a_tracker_of_ones_own_is_sent_each_row_once_after_a_resume(tmp_path, home):
    def kill(run: Run, number: int):
        if number == 9:
            raise Killed

    train = changed((r"^( +)run.begin", rf"\1run.accelerator.{home}.append(own)\n\1run.begin"))
    flags = "--save-every", 5, "--run-dir", tmp_path / "run", "--resume", "auto"
    with pytest.raises(Killed):
        train.__globals__["own"] = killed = Own()
        train(*flags, body=kill)
    train.__globals__["own"] = own = Own()
    train(*flags)
    assert killed.seen[-1][0] == 8 and own.seen[0]["epochs"] == "2"
    groups = {True: "epochs", False: "steps"}
    expected = [
        (row.pop("step"), {f"{groups['eval_loss' in row]}/{name}": row[name] for name in row})
        for row in rows(tmp_path / "run")
    ]
    assert own.seen[1:] == expected


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
