"""--dry-run tries a step and a batch of the evaluation, and leaves everything as it was."""

import pytest
from conftest import assert_num_processes, contents

FLAGS = "--num-samples 75 --no-pictures --log-every 1 --run-dir runs/a"
SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    "world, env, flags",
    [
        (1, {}, "--mirror mirror --mirror-must --tracker tensorboard"),
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


def test_a_dry_run_beside_an_earlier_run_changes_nothing(fork_main, tmp_path):
    first = fork_main("train_regression.py", FLAGS, "--epochs 1", cwd=tmp_path)
    assert first.returncode == 0, first.output
    before = contents(tmp_path)
    flags = f"{FLAGS} --epochs 2 --dry-run --resume auto"
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
