"""Checkpoints: damage is found, nothing in a folder executes, and a refusal names its reason."""

import json
import math
import os
import pickle
import shutil
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import linux_only, refused
from saving import Run, reforge, step, write_hostile

from trainkit.checkpoints import commit, parts
from trainkit.checkpoints.contents import Contents, Frozen
from trainkit.checkpoints.save import Checkpoints
from trainkit.config import TrainingConfig
from trainkit.errors import RunFailure, UsageError
from trainkit.numbers.means import RunningMeans
from trainkit.numbers.orders import Progress
from trainkit.run.ema import EMA
from trainkit.store import records, weights
from trainkit.store.atomic import write_json
from trainkit.store.jsons import to_json
from trainkit.store.log import JsonlTracker
from trainkit.store.manifest import await_hashes, verify
from trainkit.store.records import read_rows


@pytest.fixture
def saved(tmp_path):
    """The run folder of a run that saved steps 1, 2 and 3."""
    Run(tmp_path / "run").train(3)
    return tmp_path / "run"


class Growing(torch.optim.lr_scheduler.ExponentialLR):
    """A schedule of somebody, whose state has one more number after each step."""

    def step(self):
        super().step()
        self.seen = [*getattr(self, "seen", ()), self.last_epoch]


def schedules(optimizers: list[torch.optim.Optimizer]) -> list:
    """A schedule of a kind for each, some with a state that JSON does not keep as it is."""
    of = torch.optim.lr_scheduler
    kinds = (
        lambda x: of.ExponentialLR(x, 0.5),
        lambda x: of.MultiStepLR(x, [2, 3, 3]),
        lambda x: of.SequentialLR(x, [of.LinearLR(x), of.MultiStepLR(x, [1, 2])], [1]),
        lambda x: of.OneCycleLR(x, 0.1, total_steps=9),
        lambda x: Growing(x, 0.5),
    )
    return [kinds[n % len(kinds)](optimizer) for n, optimizer in enumerate(optimizers)]


def test_of_twelve_models_each_gets_its_own_state_back_of_either_kind_of_checkpoint(
    accelerator, tmp_path, monkeypatch
):
    """Sorted by name model_10 comes before model_2, and all of these have the same shapes."""
    config = TrainingConfig(run_dir=tmp_path)
    models = [torch.nn.Linear(1, 1) for _ in range(12)]
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3 * (n + 1)) for n, m in enumerate(models)]
    rates = schedules(optimizers)
    accelerator.prepare(*models, *optimizers, *rates)
    ema, things = EMA(models, 0.5), [*models, *optimizers, *rates]
    (tmp_path / "checkpoints").mkdir()
    contents = Contents(accelerator, Frozen(models), ema.values)
    saved_parts = contents.parts()
    checkpoints = Checkpoints(
        accelerator, config, {}, JsonlTracker(tmp_path), RunningMeans(accelerator), contents
    )

    def train(number: int) -> str:
        for n, (model, *others) in enumerate(zip(models, optimizers, rates, strict=True)):
            model(torch.full((1, 1), n + 1.0)).square().sum().backward()
            for each in others:
                each.step()
        ema.update(number)
        return repr([ema.values, *(each.state_dict() for each in things)])

    with ema.trained_weights():
        before = train(1)
        checkpoints.save(Progress(step=1))
        checkpoints.commits.wait()
        parts.write_shards(accelerator, saved_parts, tmp_path)
        monkeypatch.setattr(pickle, "load", None)  # nothing of it is unpickled
        for load in (
            partial(parts.read_shards, saved_parts, tmp_path),
            lambda: (monkeypatch.undo(), checkpoints.resume("auto")),
            partial(parts.read_whole, saved_parts, step(tmp_path, 1) / "state"),
        ):
            assert train(2) != before
            load()
            assert repr([ema.values, *(each.state_dict() for each in things)]) == before


class Projector:
    """Of a class that torch.load(weights_only=True) does not know."""


def test_a_state_that_no_resume_could_load_is_refused_at_the_first_save(saved):
    run = Run(saved)
    run.optimizer.param_groups[0]["projector"] = Projector()
    with refused("the state of AdamW holds a test_checkpoint.Projector, which no resume"):
        run.train(1)


def test_a_checkpoint_of_other_optimizers_and_a_shortened_log_are_refused(saved):
    """accelerate.load_state would pass over what is left over."""
    state = step(saved, 3) / "state"
    (saved / "metrics.jsonl").write_text("")
    with refused("has 0 rows but the checkpoint expects"):
        Run(saved).checkpoints.resume("auto")
    shutil.copy(state / "optimizer.bin", state / "optimizer_1.bin")
    reforge(step(saved, 3))
    with refused(r"optimizer_1\.bin is in the checkpoint or in this run"):
        Run(saved).checkpoints.resume("latest")


@linux_only  # /proc says which file was synced
def test_all_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A crash of the machine keeps what was synced: a kill cannot show that."""
    run, events = Run(tmp_path), []
    fsync, rename = os.fsync, os.rename

    def syncing(handle: int):
        events.append(Path(f"/proc/self/fd/{handle}").readlink())
        fsync(handle)

    def renaming(source: Path, target: Path):
        events.append("rename")
        monkeypatch.undo()
        folders = [source, *(p for p in source.rglob("*") if p.is_dir())]
        assert {*events} >= {*source.rglob("*"), *folders, run.tracker.path}
        monkeypatch.setattr(os, "fsync", syncing)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "rename", renaming)
    run.train(1)
    assert events[-2:] == ["rename", tmp_path / "checkpoints"]


def test_a_damaged_checkpoint_is_refused_by_path_and_passed_over_by_auto_unless_all_are(saved):
    """Which damages are found: tests/test_properties.py."""
    os.truncate(step(saved, 3) / "state" / "model.safetensors", 100)
    run = Run(saved)
    message = run.refuses(step(saved, 3))
    assert "no checkpoint is complete" in message and "step-0000000003" in message
    assert run.checkpoints.resume("auto") == Progress(step=2, step_in_epoch=2)
    assert (saved / "checkpoints" / "abandoned-step-0000000003").is_dir()
    for number in (1, 2):
        (step(saved, number) / "trainer.json").unlink()
    for wanted in ("auto", "latest"):  # and nothing starts anew
        assert run.refuses(wanted).count("trainer.json is missing") == 2


def test_a_file_that_load_state_would_open_must_be_in_the_manifest(saved):
    (step(saved, 3) / "state" / "optimizer_1.bin").write_bytes(b"x")
    assert "state/optimizer_1.bin does not belong there" in Run(saved).refuses(step(saved, 3))


OTHER_NAMES = (
    "custom_checkpoint_0.pkl",
    "pytorch_model.bin",
    "scaler.pt",
    "shard-00001-model-00001-of-00001.safetensors",
    "registered.bin",
    "rest.bin",
)


@pytest.mark.parametrize("kind", ["zip", "raw"])
def test_no_file_of_a_checkpoint_is_executed(saved, tmp_path, kind, monkeypatch):
    """Not even without the guard of the whole process: tests/test_startup.py."""
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)
    mark, keep, state = tmp_path / "executed", saved.with_name("keep"), step(saved, 3) / "state"
    shutil.copytree(saved, keep)
    names = [path.name for path in sorted(state.iterdir())]
    for name in [*names, *OTHER_NAMES, "../trainer.json", "../MANIFEST.json"]:
        shutil.rmtree(saved)
        shutil.copytree(keep, saved)
        write_hostile(state / name, kind, mark)
        if name == "pytorch_model.bin":
            (state / "model.safetensors").unlink()
        if name != "../MANIFEST.json":
            reforge(step(saved, 3))
        # No run reads random states; some read a scaler, or shards.
        unread = name.startswith(("random_states", "scaler", "shard"))
        with ExitStack() if unread else pytest.raises(UsageError):
            Run(saved).checkpoints.resume(str(step(saved, 3)))
        assert not mark.exists(), name


def test_a_forged_moment_is_not_given_to_a_kernel_that_reads_beyond_it(saved):
    path = step(saved, 3) / "state" / "optimizer.bin"
    state = torch.load(path, weights_only=True)
    state["state"][0]["exp_avg"] = torch.zeros(9)
    torch.save(state, path)
    reforge(step(saved, 3))
    run = Run(saved)
    run.optimizer.param_groups[0]["fused"] = True
    with refused(r"exp_avg .* is \(9,\), but its weight is \(7, 50\)"):
        run.checkpoints.resume(str(step(saved, 3)))


@pytest.mark.parametrize("text", ["[]", "{"])
def test_a_forged_manifest_or_position_that_is_no_object_ends_in_one_sentence(saved, text):
    (step(saved, 3) / "trainer.json").write_text(text)
    reforge(step(saved, 3))
    assert "trainer.json cannot be used" in Run(saved).refuses("auto")
    (step(saved, 3) / "MANIFEST.json").write_text(text)
    assert "MANIFEST.json" in Run(saved).refuses(step(saved, 3))


def test_a_path_is_taken_or_refused(saved, tmp_path):
    run, folder = Run(saved), saved / "checkpoints"
    assert "it has no MANIFEST.json" in run.refuses(step(saved, 7))
    shutil.copytree(saved, tmp_path / "other")
    assert "is not in" in run.refuses(step(tmp_path / "other", 2))
    assert run.checkpoints.resume(str(step(saved, 1))) == Progress(step=1, step_in_epoch=1)
    abandoned = [folder / f"abandoned-step-000000000{number}" for number in (2, 3)]
    assert sorted(folder.iterdir()) == [*abandoned, step(saved, 1)]
    assert len(read_rows(run.tracker.path)) == 1
    run.progress.step = 1
    run.train(1)
    assert verify(step(saved, 2)) is None
    shutil.rmtree(saved)
    assert "there is no checkpoint" in Run(saved).refuses("latest")
    assert Run(saved).checkpoints.resume("auto") == Progress()


@pytest.mark.parametrize("number", [0, 1])
def test_auto_goes_on_where_a_resume_by_path_was_killed(saved, monkeypatch, number):
    renamed, rename = [], os.rename

    def die(*paths: Path):
        if len(renamed) == number:
            raise KeyboardInterrupt
        renamed.append(paths)
        rename(*paths)

    monkeypatch.setattr("trainkit.store.atomic.os.rename", die)
    with pytest.raises(KeyboardInterrupt):
        Run(saved).checkpoints.resume(str(step(saved, 1)))
    monkeypatch.undo()
    assert Run(saved).checkpoints.resume("auto").step == 3 - number


def test_a_save_returns_before_its_thread_and_has_the_log_and_sums_of_its_step(saved, monkeypatch):
    run, go_on = Run(saved), threading.Event()
    run.progress = run.checkpoints.resume("latest")
    num_rows, sums = run.tracker.num_rows, json.dumps(run.means.state())
    run.progress.step += 1
    run.checkpoints.commits.thread.submit(go_on.wait, 60)
    run.checkpoints.save(run.progress)
    with monkeypatch.context() as training:
        training.setattr(run.checkpoints, "save", lambda progress: None)
        training.setattr(run.checkpoints.commits, "wait", lambda: None)
        run.train(3)
        run.means.flush("train")
    assert not step(saved, 4).exists()  # a resume would take step 3
    go_on.set()
    run.checkpoints.commits.wait()
    trainer = json.loads((step(saved, 4) / "trainer.json").read_text())
    assert (trainer["progress"]["step"], trainer["rows"]) == (4, num_rows)
    assert trainer["sums"] == json.loads(sums)
    (row,) = [row for row in read_rows(saved / "timing.jsonl") if row.get("saved", "")[-1:] == "4"]
    assert 0 < row["blocked_seconds"] < row["save_seconds"]


def test_a_run_that_ends_before_its_last_save_has_failed_says_so(saved, monkeypatch, capfd):
    """In a run that goes on it ends the next step or save: tests/test_faults.py."""
    run = Run(saved)
    run.progress = run.checkpoints.resume("latest")
    with monkeypatch.context() as broken:
        broken.delattr(os, "fsync")
        run.checkpoints.save(Progress(step=4))
        run.checkpoints.commits.close()
    assert "step-0000000004 failed, the older checkpoints are untouched" in capfd.readouterr().out
    assert not step(saved, 4).exists()


def test_a_second_ctrl_c_while_a_save_is_waited_for_lets_the_thread_go(saved, monkeypatch):
    """It would wait for the files of another process, and the interpreter for it."""
    commits = Run(saved).checkpoints.commits
    commits.jobs = [commits.thread.submit(await_hashes, saved, 1, commits.leaving)]

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(commit, "wait_together", interrupt)
    try:
        (job,) = commits.jobs
        with pytest.raises(KeyboardInterrupt):
            commits.wait()
        assert isinstance(job.exception(10), RunFailure)
    finally:
        commits.leaving.set()


def strictly(text: str) -> Any:
    def no_json(name: str):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=no_json)


def test_what_json_lacks_is_written_as_null_and_inf_and_comes_back(tmp_path):
    run = Run(tmp_path)
    run.checkpoints.fingerprint |= strictly(to_json({"clip_norm": math.inf, "x": math.nan}))
    run.checkpoints.state.values |= {"best": -math.inf, "worst": [math.nan], "name": "inf"}
    run.progress.metrics = {"eval_loss": math.nan}
    run.train(1)
    run.tracker.log({"eval_loss": math.nan, "eval_top": math.inf}, step=1)
    write_json(tmp_path / "run.json", {"clip_norm": math.inf})
    weights.write_tensors(tmp_path / "m.safetensors", {"a": torch.ones(1)}, {"max": math.inf})
    fingerprint = json.loads((step(tmp_path, 1) / "trainer.json").read_text())["fingerprint"]
    assert (fingerprint["clip_norm"], fingerprint["x"]) == ("inf", None)
    assert strictly((tmp_path / "run.json").read_text()) == {"clip_norm": "inf"}
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert strictly(last) == {"step": 1, "eval_loss": None, "eval_top": "inf"}
    row = records.last_evaluation(tmp_path)
    assert math.isnan(row["eval_loss"]) and row["eval_top"] == math.inf
    assert records.read_metadata(tmp_path / "m.safetensors") == {"max": math.inf}
    again = Run(tmp_path)
    again.checkpoints.fingerprint = run.checkpoints.fingerprint
    assert repr(again.checkpoints.resume("auto")) == repr(run.progress)
