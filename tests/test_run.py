"""What `Run` promises to whoever writes the loop, and to whoever ends it."""

import argparse
import ast
import inspect
import json
import math
import os
import random
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, forget_accelerator, linux_only, posix_only, rows
from faults import Nursery, digests
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainkit.draws import Dropout
from trainkit.errors import RunFailure, UsageError
from trainkit.launch.nodes import agree
from trainkit.means import RunningMeans, sum_and_count
from trainkit.optim import make_optimizer, make_scheduler
from trainkit.order import make_loaders
from trainkit.run import Run
from trainkit.step import Step
from trainkit.words import arguments

NUM_SAMPLES = 43  # a prime: batches of 8 leave 3 for the last


class Numbers(Dataset):
    """An ordinary map-style data set, with random noise as from torchvision's transforms."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.tensor([index / NUM_SAMPLES, 1.0])
        return {"x": x + 0.01 * torch.randn(2), "y": 3 * x[:1], "index": index}


def parse(*argv: object) -> argparse.Namespace:
    parser = arguments.Parser()
    arguments.add_training_arguments(parser)
    arguments.add_run_arguments(parser, "runs/test")
    parser.set_defaults(
        eval_batch_size=10, epochs=2, batch_size=8, log_every=1, pictures=False, learning_rate=0.01
    )
    return parser.parse_args([str(word) for word in argv])


def train(
    *argv: object,
    body: Callable[[Run, int], str | None] = lambda run, number: None,
    groups: Callable[[nn.Module], list] = lambda model: [{"params": model.parameters()}],
    make_first: Callable[[], nn.Module] = lambda: nn.Linear(2, 4),
) -> list[float]:
    """A small run with two models and two optimizers; `body` may disturb it. Losses by step."""
    args, losses, numbers = parse(*argv), [], count(1)
    with Run(args, "test", lambda args, num: arguments.refuse([])) as run:
        train_set, eval_set = run.load(lambda args: (Numbers(), Numbers()))
        train_loader, eval_loader = make_loaders(run.accelerator, train_set, eval_set, args)
        first, second = make_first(), nn.Linear(4, 1)
        optimizers = [
            make_optimizer(run.accelerator, groups(model), args) for model in (first, second)
        ]
        schedules = [make_scheduler(each, args, run.steps_per_epoch) for each in optimizers]
        first, second, *optimizers, train_loader, eval_loader, one, two = run.accelerator.prepare(
            first, second, *optimizers, train_loader, eval_loader, *schedules
        )
        run.begin((first, second), {"script": "test"})
        for _ in run.epochs():
            for batch in run.steps(train_loader):
                what = body(run, next(numbers))
                if what == "break":
                    break
                if what == "leave out":
                    continue
                with run.accelerator.accumulate(first, second):
                    loss = (second(first(batch["x"])) - batch["y"]).square()
                    run.accelerator.backward(run.step_mean(loss))
                    for optimizer in optimizers[: 0 if what == "unchecked" else 2]:
                        run.clip_and_check(optimizer)
                    for part in (*optimizers, one, two):
                        part.step()
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                losses.append(loss.sum().item())
                run.add(loss=loss)
                if what == "continue":
                    continue
            seen = torch.zeros(NUM_SAMPLES)
            for batch in eval_loader:
                seen[batch["index"]] += 1
            assert (seen == 1).all()
            run.end_epoch({"eval_loss": 0.0}, {"seen": seen})
        run.finish()
    return losses


@pytest.fixture(autouse=True)
def fresh() -> None:
    forget_accelerator()


def test_two_models_and_two_optimizers_are_saved_and_resumed_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    flags = ["--save-every", "2", "--schedule", "cosine", "--num-workers"]
    train("--run-dir", tmp_path / "whole", *flags, 0)

    def die(run: Run, number: int) -> None:
        if number == 10:
            raise KeyboardInterrupt

    forget_accelerator()
    with pytest.raises(KeyboardInterrupt):
        train("--run-dir", tmp_path / "killed", *flags, 0, body=die)
    assert not (tmp_path / "killed" / "DONE").exists()
    forget_accelerator()
    train("--run-dir", tmp_path / "killed", *flags, 2, "--resume", "latest")  # and with workers
    names = ["metrics.jsonl", "model.safetensors", "model_1.safetensors", "predictions.safetensors"]
    for name in names:
        killed, whole = (tmp_path / run / name for run in ("killed", "whole"))
        assert killed.read_bytes() == whole.read_bytes(), name
    assert list(load_file(tmp_path / "whole" / "model_1.safetensors")) == ["bias", "weight"]


def test_what_the_loop_draws_is_the_same_after_a_resume(tmp_path: Path) -> None:
    drawn: list[tuple[float, float]] = []

    def draw(run: Run, number: int) -> None:
        drawn.append((np.random.random(), random.random()))

    train("--run-dir", tmp_path / "whole", body=draw)
    whole = drawn.copy()
    assert len({*whole}) == len(whole) == 12
    for num in (5, 8):  # 5: one batch before the end of an epoch, where none is read ahead
        drawn.clear()
        for more in (["--stop-after-steps", num], ["--resume", "auto"]):
            forget_accelerator()
            train("--run-dir", tmp_path / f"{num}", *more, body=draw)
        assert drawn == whole


def test_a_dropout_layer_is_told_its_step_and_place_and_forgets_them_with_the_run(
    tmp_path: Path,
) -> None:
    layer, places = Dropout(0.5), []
    train(
        *f"--run-dir {tmp_path}/run --accumulate 2".split(),
        make_first=lambda: nn.Sequential(nn.Linear(2, 4), layer),
        body=lambda run, number: places.append(tuple(layer.place.tolist())),
    )
    # Per epoch 5 steps of 4 + 4 samples and one of 3; each step has a key of its own.
    assert [first for _, first in places] == [*([0, 4] * 5), 0] * 2
    keys = [key for key, first in places if first == 0]
    assert len({*keys}) == 12
    assert [key for key, first in places if first == 4] == keys[:5] + keys[6:11]
    assert layer.place is None


def test_the_first_weights_depend_on_the_seed_whatever_loading_drew(tmp_path: Path) -> None:
    weights = []
    for seed in (1, 2, 1):
        forget_accelerator()
        train(
            *f"--run-dir {tmp_path}/run --seed {seed} --stop-after-steps 1".split(),
            body=lambda run, number: weights.append(run.models[0].weight.clone()),
        )
    assert torch.equal(weights[0], weights[2]) and not torch.equal(weights[0], weights[1])


def test_continue_after_the_step_changes_nothing(tmp_path: Path) -> None:
    plain = train(*f"--run-dir {tmp_path}/a --accumulate 2".split())
    forget_accelerator()
    again = train(*f"--run-dir {tmp_path}/b --accumulate 2".split(), body=lambda *_: "continue")
    assert plain == again
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (
        tmp_path / "b/metrics.jsonl"
    ).read_bytes()


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("break", "run.end_epoch.* is out of order: what comes next is accelerator.backward"),
        ("leave out", "the next batch is .* what comes next is accelerator.backward"),
        ("unchecked", r"optimizer.step\(\) must come after run.clip_and_check"),
    ],
)
def test_a_body_that_would_lose_a_step_is_told_so(tmp_path: Path, what: str, sentence: str) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        train("--run-dir", tmp_path, body=lambda run, number: what if number == 3 else None)


@pytest.mark.parametrize("number", [3, 6])
def test_stop_ends_the_run_whole_and_a_resume_ends_too(tmp_path: Path, number: int) -> None:
    flags = f"--run-dir {tmp_path} --epochs 5 --save-every 100".split()
    losses = train(*flags, body=lambda run, n: run.stop() if n == number else None)
    assert len(losses) == number
    names = "DONE", "predictions.safetensors", "model.safetensors", "metrics.jsonl"
    before = [(tmp_path / name).read_bytes() for name in names]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{number:010d}"]
    for killed in ("DONE", "model.safetensors"):
        (tmp_path / killed).unlink()  # as if killed before it was written
    forget_accelerator()
    assert train(*flags, "--resume", "auto") == []
    assert before == [(tmp_path / name).read_bytes() for name in names]


# Which calls each stage of a run takes, beside those that every stage takes.
ALLOWED = {
    "entered": {"load"},
    "loaded": {"begin"},
    "between": {"epochs", "evaluate", "state"},
    "epoch": {"steps", "evaluate", "state"},
    "batch": {"step_mean", "add", "gather", "stop", "state"},
    "backward": {"step_mean", "clip_and_check", "add", "gather", "stop", "state"},
    "checked": {"step_mean", "clip_and_check", "next", "add", "gather", "stop", "state"},
    "trained": {"end_epoch", "evaluate", "stop", "state"},
    "over": {"state"},
}
CALLS = sorted({*set().union(*ALLOWED.values()), "finish"})


class Caller:
    """Calls the methods of a Run in any order, with what each of them takes."""

    def __init__(self, run: Run):
        self.run = run
        self.values = torch.ones(1, requires_grad=True)
        self.batches = (None for _ in ())
        next(self.batches, None)

    def load(self) -> None:
        self.run.load(lambda args: ([{"x": torch.ones(2)}] * 2, [{"x": torch.ones(2)}]))
        sets = self.run.train_set, self.run.eval_set
        loaders = make_loaders(self.run.accelerator, *sets, self.run.args)
        self.model = nn.Linear(2, 1)
        optimizer = make_optimizer(self.run.accelerator, self.model.parameters(), self.run.args)
        self.model, self.optimizer, self.train_loader, self.eval_loader = (
            self.run.accelerator.prepare(self.model, optimizer, *loaders)
        )

    def begin(self) -> None:
        self.run.begin(getattr(self, "model", nn.Linear(2, 1)), {})

    def epochs(self) -> None:
        if next(self.run.epochs(), None) is None:
            assert self.run.progress.ended or self.run.progress.epoch == 2

    def steps(self) -> None:
        batches = self.run.steps(getattr(self, "train_loader", None))
        next(batches)
        self.batches = batches

    def next(self) -> None:
        if self.run.stage == "checked":
            self.optimizer.step()
        next(self.batches, None)

    def step_mean(self) -> None:
        model = getattr(self, "model", nn.Linear(2, 1))
        with self.run.accelerator.accumulate(model):
            self.run.accelerator.backward(self.run.step_mean(model(torch.ones(1, 2))))

    def clip_and_check(self) -> None:
        self.run.clip_and_check(getattr(self, "optimizer", None))

    def add(self) -> None:
        self.run.add(loss=self.values)

    def gather(self) -> None:
        self.run.gather(self.values)

    def state(self) -> None:
        self.run.state["calls"] = 1

    def stop(self) -> None:
        self.run.stop()

    def evaluate(self) -> None:
        def judge(batch: dict) -> dict:
            return {"loss": batch["x"].sum(1)}

        self.run.evaluate(getattr(self, "eval_loader", None), judge)

    def end_epoch(self) -> None:
        self.run.end_epoch({"eval_loss": 0.0})

    def finish(self) -> None:
        self.run.finish()


STEP = ["step_mean", "clip_and_check", "next"]
RIGHT = ["load", "begin", "epochs", "steps", *STEP, *STEP, "end_epoch"]
RIGHT += [*RIGHT[2:], "finish"]


def call_in_any_order(folder: Path, first: int, calls: list[str]) -> None:
    forget_accelerator()
    args = parse(*f"--run-dir {folder}/run --batch-size 1 --epochs 2".split())
    expected = pytest.raises(RuntimeError, match="out of order")
    with ExitStack() as stack:
        run = Run(args, "test")
        for name in {*CALLS} - {"next"}:  # before the body
            with expected:
                getattr(Caller(run), name if name not in ("load", "begin") else "stop")()
        run.__enter__()
        stack.callback(run.resources.close)
        caller = Caller(run)
        for name in [*RIGHT[:first], *calls]:
            if name == "next" and inspect.getgeneratorstate(caller.batches) == inspect.GEN_CLOSED:
                continue  # a loop that has raised is over
            done = name == "finish" and run.stage == "between" and run._is_over()
            if done or name in ALLOWED[run.stage]:
                if name in ("step_mean", "steps") and run.stage in ("backward", "checked"):
                    continue  # a second loss is fine, but here it is the same
                getattr(caller, name)()
            else:
                with expected:
                    getattr(caller, name)()
        if run.stage != "over":
            with expected:
                run.__exit__(None, None, None)


@pytest.mark.parametrize("num", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_call_out_of_order_is_one_sentence_whatever_came_before(
    num: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    @settings(max_examples=num, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, len(RIGHT)), st.lists(st.sampled_from(CALLS), max_size=12))
    def check(first: int, calls: list[str]) -> None:
        call_in_any_order(tmp_path_factory.mktemp("run"), first, calls)

    check()


def test_a_body_that_forgets_to_finish_is_told_so(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"the end of `with Run.* what comes next is run\.load"),
        Run(parse("--run-dir", tmp_path), "test"),
    ):
        pass
    with pytest.raises(AttributeError):
        Run(parse(), "test").no_such_thing  # noqa: B018


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, RunFailure])
def test_whatever_ends_the_body_signals_and_folder_are_given_back(
    tmp_path: Path, error: type
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def fail(run: Run, number: int) -> None:
        assert signal.getsignal(signal.SIGTERM) != before[1]
        raise error("stop")

    with pytest.raises(error):
        train("--run-dir", tmp_path, body=fail)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    forget_accelerator()
    train("--run-dir", tmp_path)  # the lock is free
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@linux_only  # os.kill would end this process on Windows, and a Mac has no sigtimedwait
def test_a_second_interrupt_in_the_body_ends_it_at_once(tmp_path: Path) -> None:
    def interrupt(run: Run, number: int) -> None:
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)  # the first only asks
            assert run.signals.signal_name == "SIGINT"
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 0.1)
            pytest.fail("the second did not end the body")

    with pytest.raises(KeyboardInterrupt):
        train(*f"--run-dir {tmp_path} --save-every 1".split(), body=interrupt)
    newest = max((tmp_path / "checkpoints").iterdir()).name
    assert newest == "step-0000000002"  # the step in the body was not saved


@pytest.mark.parametrize("schedule", arguments.SCHEDULES)
def test_every_schedule_keeps_the_ratio_of_two_rates_and_the_plan_names_both(
    tmp_path: Path, schedule: str, capfd: pytest.CaptureFixture
) -> None:
    ratios = []

    def look(run: Run, number: int) -> None:
        rates = [group["lr"] for group in run.optimizers[0].param_groups]
        ratios.append(rates[1] / rates[0] if rates[0] else 10)

    train(
        *f"--run-dir {tmp_path} --schedule {schedule} --warmup 0.2".split(),
        body=look,
        groups=lambda model: [
            {"params": [model.weight], "lr": 0.001},
            {"params": [model.bias], "lr": 0.01},
        ],
    )
    assert ratios == pytest.approx([10] * 12)
    assert "learning rate 0.001 and 0.01 at its peak" in capfd.readouterr().out


def test_state_that_only_a_pickle_could_hold_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    load = Run.load

    def loading(self: Run, load_data: Callable) -> tuple:
        self.accelerator.register_for_checkpointing(torch.optim.SGD([torch.zeros(1)], lr=1))
        return load(self, load_data)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UsageError, match="buffer"):
        patch.setattr(Run, "load", loading)
        train("--run-dir", tmp_path)


def test_a_picture_that_cannot_be_drawn_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    def fail(run_dir: Path) -> None:
        assert (run_dir / "DONE").exists()
        raise ModuleNotFoundError("No module named 'matplotlib'")

    monkeypatch.setattr("trainkit.folder.curves.draw_curves", fail)
    train("--run-dir", tmp_path, "--pictures")
    assert "the pictures were not drawn: ModuleNotFoundError: No module" in capfd.readouterr().out


def test_a_long_epoch_says_where_it_is_off_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("trainkit.reporter.QUIET_SECONDS", -1.0)
    train(*f"--run-dir {tmp_path} --epochs 1".split())
    assert "epoch 1: 16 of 43 samples, train_loss " in capfd.readouterr().out


@pytest.mark.parametrize("world", [2, 3])
def test_a_resume_adds_gradients_in_the_same_order_at_any_number_of_processes(
    nursery: Nursery, arguments: dict, tmp_path: Path, world: int
) -> None:
    args = [
        *arguments["train_mnist"],
        *["--epochs", "1", "--save-every", "1", "--keep", "9", "--run-dir"],
    ]
    whole = nursery.run("train_mnist", *args, tmp_path / "run", world=world)
    assert whole.codes == [0] * world, whole.output
    before, first = digests(tmp_path / "run"), tmp_path / "run" / "checkpoints" / "step-0000000002"
    again = nursery.run("train_mnist", *args, tmp_path / "run", "--resume", first, world=world)
    assert again.codes == [0] * world, again.output
    assert digests(tmp_path / "run") == before


NOISY = ["--learning-rate", "5", "--schedule", "constant", "--num-samples", "130", "--epochs", "6"]


def test_the_best_checkpoint_is_kept_beside_the_newest_and_after_a_kill(
    nursery: Nursery, tmp_path: Path
) -> None:
    flags = [*NOISY, *["--keep-best", "eval_loss", "--no-pictures", "--run-dir"]]
    for world in (1, 2):
        whole, killed = tmp_path / f"whole{world}", tmp_path / f"killed{world}"
        assert nursery.run("train_regression", *flags, whole, world=world).codes == [0] * world
        epochs = rows(whole, "epochs")
        best = min(epochs, key=lambda row: row["eval_loss"])
        assert best != epochs[-1], "the last epoch is the best: this shows nothing"
        names = {path.name for path in (whole / "checkpoints").iterdir()}
        assert f"step-{best['step']:010d}" in names and len(names) <= 3
        saved = load_file(
            whole / "checkpoints" / f"step-{best['step']:010d}/state/model.safetensors"
        )
        kept = load_file(whole / "best.safetensors")
        assert all(torch.equal(saved[name], kept[name]) for name in saved)
        fault = {"save": 3, "event": 5, "how": "kill"}
        nursery.run("train_regression", *flags, killed, world=world, fault=fault)
        assert not (killed / "DONE").exists()
        again = nursery.run("train_regression", *flags, killed, "--resume", "auto", world=world)
        assert again.codes == [0] * world, again.output
        for name in ("best.safetensors", "metrics.jsonl", "model.safetensors"):
            assert (killed / name).read_bytes() == (whole / name).read_bytes(), name


def test_the_best_weights_are_those_that_the_last_sentence_names(
    tmp_path: Path, run_main: Callable, capfd: pytest.CaptureFixture
) -> None:
    flags = [*NOISY, *f"--keep-best eval_loss --keep 99 --run-dir {tmp_path}".split()]
    run_main("train_regression", *flags)
    losses = [row["eval_loss"] for row in rows(tmp_path, "epochs")]
    best = min(range(1, len(losses)), key=losses.__getitem__)
    assert losses[best] < losses[0], "the first epoch is the best: this shows nothing"
    first = min((tmp_path / "checkpoints").glob("step-*"))
    capfd.readouterr()
    more = ["--stop-after-steps", int(first.name[5:]) + 1, "--resume", first]
    run_main("train_regression", *flags, *more)
    said = capfd.readouterr().out
    assert f"was best at step {int(first.name[5:])}" in said, said
    assert f"{first.name} has those weights" in said
    assert (tmp_path / "abandoned-best.safetensors").exists()
    shutil.move(first, tmp_path / "elsewhere")
    run_main("train_regression", *flags, *more[:-1], "auto")
    assert "no file any more has those weights" in capfd.readouterr().out
    shutil.move(tmp_path / "elsewhere", first)
    (tmp_path / "best.safetensors").write_text("damaged")
    run_main("train_regression", *flags, *more[:-1], "auto")
    assert f"{first.name} has those weights" in capfd.readouterr().out
    # Without the flag nothing is compared, and the best checkpoint stays.
    flags = [*NOISY, *f"--keep 2 --run-dir {tmp_path}".split()]
    run_main("train_regression", *flags, "--resume", "auto")
    assert "has those weights" not in capfd.readouterr().out
    assert first.exists()


def test_a_table_in_other_units_is_another_run(tmp_path: Path, run_main: Callable) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a,y\n" + "".join(f"{i},{i * i}\n" for i in range(40)))
    flags = f"--data {table} --target y --run-dir {tmp_path}/run".split()
    run_main("train_regression", *flags, "--stop-after-steps", 1)
    table.write_text("a,y\n" + "".join(f"{i},{1000 * i * i}\n" for i in range(40)))
    with pytest.raises(UsageError, match=r"belongs to another run: about\[baseline\]"):
        run_main("train_regression", *flags, "--resume", "auto")


def test_every_model_is_handed_to_begin(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="needs every model"),
        Run(parse("--run-dir", tmp_path), "test") as run,
    ):
        run.load(lambda args: ([1], [1]))
        one, _ = run.accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1))
        run.begin(one, {})


def test_a_metric_that_is_not_a_number_is_never_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    scores = iter([math.nan, math.inf, 0.5, -math.inf])
    end = Run.end_epoch
    monkeypatch.setattr(
        Run,
        "end_epoch",
        lambda run, metrics, seen: end(run, metrics | {"eval_score": next(scores)}, seen),
    )
    train(*f"--run-dir {tmp_path} --epochs 4 --keep-best eval_score".split())
    last = max((tmp_path / "checkpoints").glob("step-*")) / "trainer.json"
    progress = json.loads(last.read_text())["progress"]
    assert progress["best"] == 0.5 and progress["best_step"] == 3 * progress["step"] // 4
    assert "never a finite number" not in capfd.readouterr().out
    scores = iter([math.nan])
    forget_accelerator()
    train(*f"--run-dir {tmp_path}/nan --epochs 1 --keep-best eval_score".split())
    said = capfd.readouterr().out
    assert "eval_score was never a finite number: nothing was kept for it" in said


def test_a_mean_of_nothing_is_refused(tmp_path: Path) -> None:
    def count_nothing(run: Run, number: int) -> None:
        run.add(of_none=torch.ones(3), where=torch.zeros(3, dtype=torch.bool))

    with pytest.raises(RuntimeError, match="of_none: no value was counted since the epoch began"):
        train("--run-dir", tmp_path, body=count_nothing)


def test_an_average_is_saved_beside_weights_that_are_channels_last(
    tmp_path: Path, tiny_mnist: Path, run_main: Callable
) -> None:
    flags = f"--dataset {tiny_mnist} --run-dir {tmp_path} --ema 0.9 --save-every 1".split()
    run_main("train_mnist", *flags, "--stop-after-steps", 2)
    average, raw = (load_file(tmp_path / f"{name}.safetensors") for name in ("model", "raw"))
    assert average.keys() == raw.keys()
    assert not any(torch.equal(average[name], raw[name]) for name in raw)


def test_what_could_not_be_resumed_or_counted_is_told_so(tmp_path: Path) -> None:
    stray = torch.optim.SGD([torch.zeros(1)], lr=1)
    with pytest.raises(RuntimeError, match=r"got a SGD that accelerator\.prepare did not return"):
        train("--run-dir", tmp_path / "a", body=lambda run, number: check(run, stray))
    forget_accelerator()
    shared = nn.Linear(2, 4)

    def twice(model: nn.Module) -> list:
        return [{"params": [*model.parameters()]}, {"params": [*shared.parameters()]}]

    with pytest.raises(RuntimeError, match="2 of the weights are in two optimizers"):
        train("--run-dir", tmp_path / "b", groups=twice)
    forget_accelerator()
    with (
        pytest.raises(UsageError, match="there are 0 samples to train on and 1 to evaluate on"),
        Run(parse("--run-dir", tmp_path / "c"), "test") as run,
    ):
        run.load(lambda args: ([], [1]))


class Extra(nn.Linear):
    """A layer as quantisation has them: what it remembers is no tensor."""

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": 1.0}


class Expanded(nn.Linear):
    """A layer with a buffer whose rows are one: safetensors loads nothing into it."""

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.register_buffer("scale", torch.ones(2).expand(2, 2))


def plain(
    *argv: object,
    optimised: Callable[[nn.Module], list] = lambda model: [*model.parameters()],
    schedule: bool = False,
    accumulating: bool = True,
    change: Callable[[Run, nn.Module, int], Any] = lambda run, model, epoch: None,
    about: dict[str, Any] | None = None,
    judge: Callable[[torch.Tensor], torch.Tensor] = lambda losses: losses,
    leave_out: str = "",
    remember: bool = False,
    after: Callable[[Any], Any] = lambda scheduler: None,
    report: Callable[[dict], dict] = lambda metrics: metrics,
    predictions: Any = None,
    first: type[nn.Module] = nn.Linear,
) -> None:
    """A run of one model by the loop of the docs, in which a test changes one part."""
    forget_accelerator()
    args = parse(*argv)
    with Run(args, "test") as run:
        sets = run.load(lambda args: (Numbers(), Numbers()))
        loaders = make_loaders(run.accelerator, *sets, args)
        model = nn.Sequential(first(2, 2), nn.Linear(2, 1))
        optimizer = make_optimizer(run.accelerator, optimised(model), args)
        scheduler = make_scheduler(optimizer, args, run.steps_per_epoch) if schedule else None
        model, *loaders = run.accelerator.prepare(model, *loaders)
        if leave_out != "prepare":
            optimizer = run.accelerator.prepare(optimizer)
        if leave_out != "prepare the schedule" and schedule:
            scheduler = run.accelerator.prepare(scheduler)
        if leave_out == "make_loaders":
            run.accelerator.prepare(DataLoader(Numbers(), batch_size=5))
        run.begin(model, about or {})
        for epoch in run.epochs():
            for batch in run.steps(loaders[0]):
                with run.accelerator.accumulate(model) if accumulating else ExitStack():
                    losses = (model(batch["x"]) - batch["y"]).square()
                    run.accelerator.backward(run.step_mean(losses))
                    if leave_out == "backward":
                        optimizer.zero_grad()
                    if leave_out == "the order":
                        optimizer.step()
                    run.clip_and_check(optimizer)
                    if leave_out != "step":
                        optimizer.step()
                    optimizer.zero_grad()
                run.add(loss=losses)
            change(run, model, epoch)
            name = "samples" if leave_out == "names of Run" else "loss"
            metrics = run.evaluate(
                loaders[leave_out != "the evaluation loader"],
                lambda batch, name=name: {name: judge((model(batch["x"]) - batch["y"]).square())},
            )
            run.end_epoch(report(metrics), predictions, about)
            after(scheduler)
            if remember:
                run.state["epoch"] = epoch
        run.finish()


@pytest.mark.parametrize(
    ("flags", "options", "sentence"),
    [
        ([], {"optimised": lambda model: [*model.parameters(), *nn.Linear(3, 3).parameters()]},
         "2 of the optimizers' weights are in no model that accelerator.prepare was given"),
        ([], {"schedule": True, "leave_out": "prepare the schedule"},
         "a learning rate schedule was not given to accelerator.prepare"),
        ([], {"schedule": True, "after": lambda scheduler: scheduler.scheduler.step()},
         r"after run.end_epoch\(...\), whose checkpoint does not know it"),
        ([], {"remember": True}, r"or run.state changed, after run.end_epoch\(...\)"),
        ([], {"leave_out": "prepare"}, "accelerator.prepare was given no optimizer"),
        ([], {"leave_out": "make_loaders"}, r"a loader that make_loaders\(...\) did not make"),
        ([], {"leave_out": "step"}, r"optimizer.step\(\) is missing after run.clip_and_check"),
        ([], {"leave_out": "the order"}, r"optimizer.step\(\) must come after run.clip"),
        ([], {"leave_out": "backward"}, r"clip_and_check\(...\) found no gradient"),
        ([], {"change": lambda run, model, epoch: model.eval()}, "call model.train.. before run"),
        (["--accumulate", 2], {"accumulating": False}, "accelerator.accumulate"),
        ([], {"change": lambda run, model, epoch: model[0].requires_grad_(False)},
         "other weights require gradients .*--start-from"),
        ([], {"judge": lambda losses: losses.mean().reshape(1)}, "got .* rows of loss for .* samp"),
        ([], {"change": lambda run, model, epoch: run.state.update({"seen": {epoch: 1}})},
         "run.state holds 'seen': {0: 1}, which JSON does not give back: use texts as keys"),
        ([], {"change": lambda run, model, epoch: run.state.update(x=(1, 2))}, "run.state holds"),
        ([], {"leave_out": "the evaluation loader"}, "is not the evaluation loader"),
        ([], {"report": lambda metrics: {"auc": 1.0}}, "got auc: eval_loss must be among them"),
        ([], {"report": lambda metrics: metrics | {"train_loss": 1.0}}, "and not train_loss"),
        ([], {"report": lambda metrics: metrics | {"auc": torch.ones(3)}}, "a metric is a number"),
        ([], {"report": lambda metrics: metrics | {3: 1.0}}, "a metric is a number, and has"),
        ([], {"first": Extra}, "0._extra_state of a model is no tensor with memory of its own"),
        ([], {"first": Expanded}, "0.scale of a model .* clone what expand returns"),
        ([], {"leave_out": "names of Run"}, r"run.evaluate\(...\) counts samples itself"),
        ([], {"about": {"classes": {"a", "b"}}}, "the `about` of run.begin.* holds 'classes'"),
    ],
)  # fmt: skip
def test_a_loop_that_forgets_something_is_told_so(
    tmp_path: Path, flags: list[object], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        plain("--run-dir", tmp_path, *flags, **options)


@pytest.mark.parametrize(
    "wrong", [["a", "b"], [[1], [2, 3]], torch.ones(2, dtype=torch.complex128)]
)
def test_predictions_that_cannot_be_written_are_known_in_the_first_epoch(
    tmp_path: Path, wrong: Any
) -> None:
    epochs: list[int] = []
    with pytest.raises(UsageError, match=r"run.end_epoch\(...\) got predictions, or about, that"):
        plain(
            "--run-dir",
            tmp_path,
            change=lambda run, model, epoch: epochs.append(epoch),
            predictions={"wrong": wrong},
        )
    assert epochs == [0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_of_16_bits_are_added_up_in_float32(dtype: torch.dtype) -> None:
    values = torch.full((300,), 1000.0, dtype=dtype)
    assert sum_and_count("run.add(...)", values, None)[0] == 300_000
    assert sum_and_count("run.add(...)", values, values > 0)[0] == 300_000
    step = SimpleNamespace(
        num_samples=300, num_before=0, losses=[], num_counted=None, check_rows=lambda *_: None,
        args=SimpleNamespace(accumulate=1), accelerator=SimpleNamespace(num_processes=1),
    )  # fmt: skip
    assert Step.mean(step, values.requires_grad_(), None) == 1000


def test_an_optimizer_may_call_the_step_of_the_class_that_it_extends(tmp_path: Path) -> None:
    class Mine(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            super().step(closure)

    def check_order(optimizer: torch.optim.Optimizer) -> None:
        run_step = SimpleNamespace(clipped={optimizer}, stepped=set())
        optimizer.register_step_pre_hook(partial(Step.check_order, run_step))
        optimizer.step()
        assert run_step.stepped == {optimizer}

    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    for kind in (torch.optim.AdamW, Mine):
        check_order(kind([weight], fused=False))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loop_that_forgets_nothing_trains(tmp_path: Path, accumulate: int) -> None:
    plain(*f"--run-dir {tmp_path} --accumulate {accumulate}".split())
    assert (tmp_path / "DONE").exists()


def check(run: Run, optimizer: torch.optim.Optimizer) -> None:
    with run.accelerator.accumulate(*run.models):
        run.step_mean(torch.ones(run.step.num_rows, requires_grad=True))
        run.clip_and_check(optimizer)


@pytest.mark.parametrize(
    ("mine", "theirs", "sentence"),
    [
        ({"eval_auc": 0.612}, {"eval_auc": 0.61}, None),
        ({"eval_auc": 0.7}, {"eval_auc": 0.61}, "0.7 on process 0 and 0.61 on process 1"),
        ({"eval_auc": 0.6}, {"eval_auc": None}, "got eval_auc: None: a metric is a number"),
        ({"step": 1.0}, {"step": 1.0}, "a metric is a number, and has another name than step"),
    ],
)
def test_all_processes_refuse_metrics_that_differ_or_are_no_numbers(
    accelerator: Any, monkeypatch: pytest.MonkeyPatch, mine: dict, theirs: dict, sentence: str
) -> None:
    monkeypatch.setattr("trainkit.launch.nodes.gather_object", lambda of_this: [*of_this, theirs])
    with pytest.raises(RuntimeError, match=sentence) if sentence else ExitStack():
        assert agree(accelerator, mine) == mine


@pytest.mark.parametrize("theirs", [["loss_b"], []])
def test_processes_that_add_other_names_are_told_so(
    theirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.means.gather_object", lambda mine: [*mine, theirs])
    means = RunningMeans(SimpleNamespace(device=torch.device("cpu"), num_processes=2))
    means.add("loss", torch.ones(()), 1)
    with pytest.raises(RuntimeError, match=r"got loss on one process and (loss_b|nothing)"):
        means.flush("train")


def test_a_stop_has_its_exit_code_also_where_nobody_reads_its_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(run: Run, text: str) -> None:
        if text.startswith("stopped by"):
            raise BrokenPipeError

    def stop(run: Run, number: int) -> None:
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Run, "print", say)
    with pytest.raises(SystemExit) as left:
        train("--run-dir", tmp_path, body=stop)
    assert left.value.code == 75


@posix_only
@pytest.mark.parametrize("more", ["", "--epochs 1", "--ema 0.9"])
def test_a_signal_in_an_evaluation_is_heard_and_a_resume_evaluates_again(
    tmp_path: Path, more: str
) -> None:
    num_batches = count(1)

    def interrupted(losses: torch.Tensor) -> torch.Tensor:
        if next(num_batches) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return losses

    flags = f"--run-dir {tmp_path}/killed {more}".split()
    with pytest.raises(SystemExit) as left:
        plain(*flags, judge=interrupted)
    assert left.value.code == 75 and next(num_batches) == 3, "it was not heard at once"
    plain(*flags, "--resume", "auto")
    plain("--run-dir", tmp_path / "whole", *more.split())
    for name in ("metrics.jsonl", "model.safetensors"):
        killed, whole = (tmp_path / run / name for run in ("killed", "whole"))
        assert killed.read_bytes() == whole.read_bytes(), name


def test_best_is_found_anew_for_another_metric_and_after_a_part_without(
    tmp_path: Path, run_main: Callable, capfd: pytest.CaptureFixture
) -> None:
    flags = f"--num-samples 64 --schedule constant --run-dir {tmp_path} --epochs 4 --resume auto"
    loss, r2 = ["--keep-best", "eval_loss"], ["--keep-best", "eval_r2", "--patience", "1"]
    for number, more in enumerate((loss, [], loss, r2), 1):
        run_main("train_regression", *flags.split(), *more, "--stop-after-steps", 2 * number)
    said = capfd.readouterr().out
    for before, now in (("eval_loss", None), ("eval_loss", "eval_r2")):
        assert f"--keep-best was {before} and is {now}: what is best is found anew" in said
    assert rows(tmp_path)[-1]["epoch"] == 4  # eval_r2 rose, so nothing ended early


def test_an_unknown_metric_to_keep_is_named(tmp_path: Path, run_main: Callable) -> None:
    with pytest.raises(UsageError, match="--keep-best accuracy: there are only epoch, train_loss"):
        run_main(
            "train_regression", *NOISY, *f"--keep-best accuracy --run-dir {tmp_path}/r".split()
        )


def test_a_run_starts_from_given_weights_by_name_and_says_what_matched(
    nursery: Nursery, tmp_path: Path
) -> None:
    flags = ["--model", "mlp", "--hidden", "8", "--no-pictures", "--run-dir"]
    first = nursery.run("train_regression", *NOISY, *flags, tmp_path / "first")
    weights = tmp_path / "first" / "model.safetensors"
    more = [*NOISY, *flags, tmp_path / "more", *f"--num-targets 2 --start-from {weights}".split()]
    for world in (1, 2):
        outcome = nursery.run("train_regression", *more, "--epochs", 1, world=world)
        assert first.codes + outcome.codes == [0] * (world + 1), outcome.output
        matched = "2 of 4 tensors matched; left as initialised: 2.weight, 2.bias; not used: 2."
        assert outcome.output.count(matched) == 1, outcome.output
    again = nursery.run(
        "train_regression",
        *NOISY,
        *flags,
        tmp_path / "same",
        *f"--start-from {weights} --learning-rate 1e-30".split(),
    )
    assert again.codes == [0], again.output
    before, after = load_file(weights), load_file(tmp_path / "same" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    other = tmp_path / "first" / "predictions.safetensors"
    shapes = {"0.weight": (8, 10), "0.bias": (8,)}
    whole = {key: torch.ones(size, dtype=torch.int64) for key, size in shapes.items()}
    save_file(whole, tmp_path / "whole")
    for path, sentence in (
        (tmp_path / "none", "cannot be read"),
        (tmp_path / "whole", "0.weight torch.int64 (8, 10)"),
        (other, "none of its 4"),
    ):
        bad = nursery.run("train_regression", *flags, tmp_path / "bad", "--start-from", path)
        assert bad.codes == [2] and sentence in bad.output, bad.output
        assert not (tmp_path / "bad").exists()


SCRIPTS = sorted(ROOT.glob("train_*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_stays_on_one_page(path: Path) -> None:
    text = path.read_text()
    main = next(n for n in ast.parse(text).body if getattr(n, "name", "") == "main")
    stored = (n for n in ast.walk(main) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    calls = (n for n in ast.walk(main) if isinstance(n, ast.Call))
    assert len(text.splitlines()) <= 330
    assert main.end_lineno - main.lineno + 1 <= 50
    assert len({name.id for name in stored}) <= 22
    assert len({ast.unparse(call.func) for call in calls}) <= 40


def test_nothing_outside_startup_changes_the_process() -> None:
    for path in [*ROOT.glob("*.py"), *(ROOT / "trainkit").glob("*.py")]:
        text = path.read_text()
        assert "isort:" not in text  # no import whose order matters
        for node in ast.parse(text).body:  # at import, nothing is called but to make a value
            call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            stores = getattr(node, "targets", [])
            changes = any(isinstance(target, ast.Attribute | ast.Subscript) for target in stores)
            assert not call and not changes, (path, node.lineno)
