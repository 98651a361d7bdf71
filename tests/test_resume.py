"""A run that is stopped and resumed ends with the bytes of one that was not."""

import itertools
import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from conftest import assert_same_numbers, refused
from faults import digests
from plain import quick
from saving import reforge

from trainkit.checkpoints.resume import read_same_run

LAST = 10  # steps of a run of the `arguments` fixture, five per epoch
SCRIPTS = ("train_mnist", "train_regression")
SCHEDULES = ("onecycle", "cosine", "linear", "exponential", "exponential+cosine", "constant")


FLAGS = ["", "--accumulate 3", "--num-workers 2", "--num-workers 2 --accumulate 3"]
FLAGS += [f"--schedule {each} --warmup 0.25 --optimizer sgd" for each in SCHEDULES]
FLAGS += ["--schedule constant --warmup 0.25 --decay 0.4 --min-learning-rate 1e-4"]
SLOW = [*itertools.product(SCRIPTS, (1, 2), FLAGS)]
SLOW += [("train_mnist", 1, "--model normed --max-warp 1")]


QUICK = ("train_mnist", 1, "--num-workers 1 --accumulate 3")


@pytest.mark.parametrize("script, world, flags", quick([QUICK, *SLOW], [QUICK]))
def test_resume_is_exact(fork_main, arguments, tmp_path, script, world, flags):
    """One undisturbed run that keeps every step; then a resume from some places in it."""
    args = [*arguments[script], *flags.split(), "--save-every", "1", "--keep", "99", "--run-dir"]
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    fork_main(script, *args, whole, world=world).finished()
    for step in (3, 5, LAST):  # in an epoch, at its end, after the last step
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        path = copy / "checkpoints" / f"step-{step:010d}"
        for states in path.glob("state/random_states_*"):  # nothing may rely on them
            shutil.copy(copy / "checkpoints" / "step-0000000001" / "state" / states.name, states)
        reforge(path)
        output = fork_main(script, *args, copy, "--resume", path, world=world).finished()
        assert f"resuming from {path}" in output
        if step < LAST:
            assert (copy / "checkpoints" / f"abandoned-step-{LAST:010d}").is_dir()
        assert digests(copy) == digests(whole), step


def samples(run_dir: Path, world: int) -> list[tuple[int, int]]:
    """Epoch and index of each sample that was trained on, in the order of the steps."""
    logs = [Path(f"{run_dir}.indices.{rank}").read_text().splitlines() for rank in range(world)]
    shares = (json.loads(share) for batch in zip(*logs, strict=True) for share in batch)
    return [(epoch, index) for epoch, *indices in shares for index in indices]


@pytest.mark.numeric
def test_other_numbers_of_processes_and_micro_batches_go_on_with_the_same_samples(
    fork_main, arguments, tmp_path
):
    before, after = 1, 2
    # A row every 3 steps: at step 4 there are sums that no row has yet.
    args = [*arguments["train_mnist"], "--model compact --log-every 3 --keep 9 --run-dir"]
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    fork_main(
        "train_mnist", *args, whole, world=before, indices=f"{whole}.indices", double=True
    ).finished()
    shutil.copytree(whole, copy)
    resume = f"--resume {copy}/checkpoints/step-0000000004 --accumulate 2"
    output = fork_main(
        "train_mnist", *args, copy, resume, world=after, indices=f"{copy}.indices", double=True
    ).finished()
    assert f"num_processes was {before} and is {after}" in output
    assert "micro_batches was 1 and is 2" in output
    # Not only the same samples in each step: in the same order, each once in an epoch.
    wanted = samples(whole, before)
    assert len({*wanted}) == len(wanted) == 2 * 300
    assert samples(copy, after) == wanted[4 * 60 :]
    assert_same_numbers(copy, whole)


def test_a_signal_to_one_process_saves_that_step_and_loses_nothing(
    nursery, fork_main, arguments, tmp_path
):
    world, words = 2, "a signal to another process at step 3"
    args = [*arguments["train_mnist"], "--run-dir"]
    fork_main("train_mnist", *args, tmp_path / "whole", world=world).finished()
    run_dir, fault = tmp_path / "stopped", {"rank": 1, "signal": [2, signal.SIGTERM]}
    outcome = nursery.run("train_mnist", *args, run_dir, world=world, fault=fault)
    assert outcome.codes == [75] * world, outcome.output
    assert f"stopped by {words}, saved" in outcome.output
    fork_main("train_mnist", *args, run_dir, "--resume", "auto", world=world).finished()
    assert digests(run_dir) == digests(tmp_path / "whole")


def write_trainer(folder, fingerprint, **more):
    progress = {"step": 1, "epoch": 0, "step_in_epoch": 1}
    trainer = {"fingerprint": fingerprint, "progress": progress} | more
    (folder / "trainer.json").write_text(json.dumps(trainer))


def test_a_flag_that_came_since_the_checkpoint_may_be_off_and_may_not_be_on(tmp_path):
    write_trainer(tmp_path, {"seed": 0, "data": "1"})
    off = {"seed": 0, "data": "1", "decay": 0.0, "missing_values": [], "metadata[fit]": "null"}
    assert read_same_run(tmp_path, off, 9)["progress"].step == 1
    for changed in ({"decay": 0.1}, {"metadata[fit]": '"crop"'}, {"seed": 1}):
        with refused(f"belongs to another run: {re.escape(next(iter(changed)))} is"):
            read_same_run(tmp_path, off | changed, 9)
    with refused("epochs is None there and 9 here: .* in another --run-dir with --start-from"):
        read_same_run(tmp_path, off | {"epochs": 9}, 9)
