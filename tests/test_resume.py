"""A run that is stopped and resumed ends with the bytes of one that was not."""

import itertools
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import rows
from double import SAME
from faults import Nursery, digests
from test_checkpoint import reforge

LAST = 10  # steps of a run of the `arguments` fixture, five per epoch
PLACES = {"mid-epoch": 3, "end of an epoch": 5, "mid-epoch 2": 8, "last step": LAST}
SCHEDULES = ("onecycle", "cosine", "exponential", "exponential+cosine", "constant")


def finish(nursery: Nursery, script: str, *args: object, world: int = 1, **plan: Any) -> str:
    outcome = nursery.run(script, *args, world=world, **plan)
    assert outcome.codes == [0] * world, outcome.output
    assert f"{world} process{'es' * (world > 1)} on cpu" in outcome.output
    return outcome.output


def compare(
    nursery: Nursery, script: str, args: list[object], where: Path, world: int, places: list[int]
) -> None:
    """One undisturbed run that keeps every step; then a resume from each place in it."""
    args = [*args, *["--save-every", "1", "--keep", "99", "--run-dir"]]
    whole, copy = where / "whole", where / "copy"
    finish(nursery, script, *args, whole, world=world)
    for step in places:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        path = copy / "checkpoints" / f"step-{step:010d}"
        for states in path.glob("state/random_states_*"):  # nothing may rely on them
            shutil.copy(copy / "checkpoints" / "step-0000000001" / "state" / states.name, states)
        reforge(path)
        output = finish(nursery, script, *args, copy, "--resume", path, world=world)
        assert f"resuming from {path}" in output
        if step < LAST:
            assert (copy / "checkpoints" / f"abandoned-step-{LAST:010d}").is_dir()
        assert digests(copy) == digests(whole), (step, args)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_resume_is_exact_on_one_process(
    nursery: Nursery, arguments: dict, tmp_path: Path, accumulate: int
) -> None:
    args = [*arguments["train_mnist"], "--accumulate", accumulate, "--num-workers", accumulate // 2]
    compare(nursery, "train_mnist", args, tmp_path, 1, [3, 5, LAST])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "workers", "accumulate"), [*itertools.product((1, 2), (0, 2), (1, 3))]
)
def test_resume_grid(
    nursery: Nursery, arguments: dict, tmp_path: Path, world: int, workers: int, accumulate: int
) -> None:
    for script, args in arguments.items():
        more = f"--num-workers {workers} --accumulate {accumulate}".split()
        compare(nursery, script, [*args, *more], tmp_path / script, world, [*PLACES.values()])


@pytest.mark.slow
def test_resume_is_exact_with_batchnorm(nursery: Nursery, arguments: dict, tmp_path: Path) -> None:
    args = [*arguments["train_mnist"], *["--model", "normed", "--max-warp", "1"]]
    compare(nursery, "train_mnist", args, tmp_path, 1, [3, 5, LAST])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_resume_is_exact_under_every_schedule(
    nursery: Nursery, arguments: dict, tmp_path: Path, schedule: str
) -> None:
    for script, args in arguments.items():
        more = f"--schedule {schedule} --warmup 0.25 --optimizer sgd".split()
        compare(nursery, script, [*args, *more], tmp_path / script, 1, [3, 5])


def batches(run_dir: Path, world: int) -> list[list[int]]:
    """Per step: epoch, and the sample indices of all processes."""
    logs = [Path(f"{run_dir}.indices.{rank}").read_text().splitlines() for rank in range(world)]
    joined = []
    for parts in zip(*(map(json.loads, log) for log in logs), strict=True):
        joined.append([parts[0][0], *(index for part in parts for index in part[1:])])
    return joined


@pytest.mark.numeric
@pytest.mark.parametrize("worlds", [(1, 2), (2, 1)])
def test_another_number_of_processes_goes_on_with_the_same_samples(
    train_in_double: Callable, arguments: dict, tmp_path: Path, worlds: tuple[int, int]
) -> None:
    # A row every 3 steps: at step 4 there are sums that no row has yet.
    args = [*arguments["train_mnist"], *["--model", "compact", "--log-every", "3", "--run-dir"]]
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    plan = {"world": worlds[0], "indices": f"{whole}.indices"}
    train_in_double("train_mnist", *args, whole, "--keep", 9, **plan)
    shutil.copytree(whole, copy)
    path = copy / "checkpoints" / "step-0000000004"
    plan = {"world": worlds[1], "indices": f"{copy}.indices"}
    output = train_in_double("train_mnist", *args, copy, "--resume", path, **plan)
    assert f"num_processes was {worlds[0]} and is {worlds[1]}" in output
    assert "bits may differ from here" in output
    # Not only the same samples in each step: in the same order, each once in an epoch.
    before, after = batches(whole, worlds[0]), batches(copy, worlds[1])
    assert before[4:] == after and len(before) == LAST
    for epoch in (0, 1):
        samples = [index for number, *indices in before if number == epoch for index in indices]
        assert len(samples) == len({*samples}) == 300
    assert_same_rows(whole, copy)


@pytest.mark.numeric
def test_another_number_of_micro_batches_goes_on_with_the_same_samples(
    train_in_double: Callable, arguments: dict, tmp_path: Path
) -> None:
    args = [*arguments["train_mnist"], *["--model", "compact", "--save-every", "1", "--run-dir"]]
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    train_in_double("train_mnist", *args, whole, "--keep", 99)
    shutil.copytree(whole, copy)
    path = copy / "checkpoints" / "step-0000000003"
    output = train_in_double("train_mnist", *args, copy, *f"--resume {path} --accumulate 2".split())
    assert "micro_batches was 1 and is 2" in output
    assert_same_rows(whole, copy)


def assert_same_rows(whole: Path, copy: Path) -> None:
    for there, here in zip(rows(whole), rows(copy), strict=True):
        assert here == pytest.approx(there, rel=SAME)
        assert here.get("learning_rate") == there.get("learning_rate")


def test_a_signal_at_any_step_saves_that_step_and_loses_nothing(
    nursery: Nursery, arguments: dict, tmp_path: Path
) -> None:
    args = [*arguments["train_mnist"], "--run-dir"]
    finish(nursery, "train_mnist", *args, tmp_path / "whole")
    # After step 5 an epoch ends, and its evaluation is still to come.
    for step, number in ((3, signal.SIGINT), (5, signal.SIGUSR1)):
        run_dir = tmp_path / f"stopped-{step}"
        stop = {"signal": [step, number]}
        outcome = nursery.run("train_mnist", *args, run_dir, fault=stop)
        assert outcome.codes == [75], outcome.output
        assert f"stopped by {number.name} at step {step}, saved" in outcome.output
        finish(nursery, "train_mnist", *args, run_dir, "--resume", "auto")
        assert digests(run_dir) == digests(tmp_path / "whole")


def test_a_signal_to_one_of_two_processes_stops_both_at_the_same_step(
    nursery: Nursery, arguments: dict, tmp_path: Path
) -> None:
    args = [*arguments["train_mnist"], "--run-dir"]
    finish(nursery, "train_mnist", *args, tmp_path / "whole", world=2)
    stop = {"rank": 1, "signal": [2, signal.SIGTERM]}
    outcome = nursery.run("train_mnist", *args, tmp_path / "stopped", world=2, fault=stop)
    assert outcome.codes == [75, 75], outcome.output
    assert "stopped by a signal to another process at step 3, saved" in outcome.output
    finish(nursery, "train_mnist", *args, tmp_path / "stopped", "--resume", "auto", world=2)
    assert digests(tmp_path / "stopped") == digests(tmp_path / "whole")
