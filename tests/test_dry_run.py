"""--dry-run tries a step and a batch of the evaluation, and leaves everything as it was."""

import pytest
from conftest import assert_num_processes, contents

FLAGS = "--num-samples 75 --no-pictures --log-every 1 --run-dir runs/a"
SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    "world, env, flags",
    [
        (1, {}, "--mirror mirror --mirror-must --tracker tensorboard"),
        (2, {}, "--accumulate 2"),
        (2, SHARDED, "--resume auto"),
    ],
)
def test_a_dry_run_leaves_nothing(fork_main, tmp_path, world, env, flags):
    env = {**env, "TMPDIR": str(tmp_path)}
    plan = {"world": world, "env": env, "cwd": tmp_path}
    done = fork_main("train_regression.py", f"{FLAGS} --dry-run {flags}", **plan)
    assert done.codes == [0] * world and not done.stderr, done.output
    assert_num_processes(done.stdout, world)
    assert "updates     60 = 30 epochs x 2 steps" in done.stdout
    assert done.stdout.count("dry run: a step and a batch of the evaluation were tried") == 1
    assert [*tmp_path.iterdir()] == []


def test_a_dry_run_names_no_picture_that_it_leaves_behind(fork_main, tiny_mnist, tmp_path):
    flags = ["--dataset", tiny_mnist, "--dry-run", "--pictures"]
    done = fork_main("train_mnist", *flags, cwd=tmp_path)
    assert done.returncode == 0 and "input.png" not in done.output, done.output


def test_a_dry_run_beside_an_earlier_run_changes_nothing(fork_main, tmp_path):
    first = fork_main("train_regression.py", FLAGS, "--epochs 1", cwd=tmp_path)
    assert first.returncode == 0, first.output
    before = contents(tmp_path)
    for resume in ("", "--resume auto"):
        flags = f"{FLAGS} --epochs 2 --dry-run {resume}"
        done = fork_main("train_regression.py", flags, cwd=tmp_path)
        assert done.returncode == 0 and "dry run: " in done.stdout, done.output
    assert contents(tmp_path) == before


def test_a_dry_run_fails_as_the_run_would(fork_main, tmp_path):
    flags = f"{FLAGS} --dry-run --learning-rate 1e38 --model mlp"
    done = fork_main("train_regression.py", flags, cwd=tmp_path, env={"TMPDIR": str(tmp_path)})
    assert "the weights are not finite after step 1" in done.error(1)
    flags = "--run-dir runs/a --dry-run --data none.csv --target y"
    done = fork_main("examples/table.py", flags, cwd=tmp_path)
    assert "none.csv" in done.error(2)
    assert [*tmp_path.iterdir()] == []


def test_a_script_that_evaluates_by_itself_ends_with_its_evaluation(fork_main, tmp_path):
    script = """
import torch
from pathlib import Path
from trainkit import InMemory, Run, make_loaders, make_optimizer, make_scheduler
from trainkit.config import TrainingConfig, parse

def load(config):
    x = torch.ones(10, 2)
    return InMemory(x), InMemory(x)

def main(argv=None):
    config = parse(TrainingConfig, argv)
    with Run(config, "own") as run:
        sets = run.load(load)
        loaders = make_loaders(run.accelerator, *sets, config)
        model = torch.nn.Linear(2, 1)
        optimizer = make_optimizer(run.accelerator, model.parameters(), config)
        schedule = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, schedule = run.accelerator.prepare(
            model, optimizer, loaders[0], schedule)
        run.begin(model, {})
        for _ in run.epochs():
            for x, _ in run.steps(train_loader):
                with run.accelerator.accumulate(model):
                    losses = model(x)[:, 0] ** 2
                    run.accelerator.backward(run.step_mean(losses))
                    optimizer.step(), schedule.step(), optimizer.zero_grad()
                run.add(loss=losses)
                if run.end_step():
                    run.save()
            run.end_epoch({"eval_own": 1.0})
            (Path("written")).touch()
        run.finish()
"""
    done = fork_main(script, "--dry-run", "--batch-size", 4, cwd=tmp_path)
    assert done.returncode == 0 and "a step and an evaluation were tried" in done.stdout, (
        done.output
    )
    assert [*tmp_path.iterdir()] == []
