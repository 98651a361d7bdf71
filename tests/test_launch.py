"""The world you asked for is the world you get, or one sentence says what is missing."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from conftest import CONFIGS, NUM_TEST, ROOT, assert_num_processes, rows, run
from double import SAME

from trainkit import world
from trainkit.errors import UsageError

# What README promises for 1 process and 2cpu.yaml.
LOSS_TOLERANCE, ACCURACY_TOLERANCE = 1e-5, 0.0005
NUM_GPUS = torch.cuda.device_count()


def error_lines(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("error: ")]


# Where all GPUs are missing, one YAML of each kind says so as well as ten.
KINDS = {"1cpu_bf16", "2cpu", "1gpu_bf16_compile", "4gpu_by_id_fp16"}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in KINDS and NUM_GPUS == 0))
        for name in sorted(path.stem for path in CONFIGS.glob("*.yaml"))
        if "node" not in name
    ],
)
def test_every_yaml_makes_the_world_it_promises_or_names_what_is_missing(config: str) -> None:
    wanted = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())
    # The launcher reads the whole YAML; of the GPUs that are missing anyway, two are asked for.
    fewer = ["--num_processes", "2"] if wanted["num_processes"] > max(2, NUM_GPUS) else []
    result = run("tests/probe.py", config=config, launcher_flags=fewer)
    wanted["num_processes"] = 2 if fewer else wanted["num_processes"]
    if wanted["use_cpu"] or wanted["num_processes"] <= NUM_GPUS:
        assert result.returncode == 0, result.stderr
        world = json.loads(result.stdout.splitlines()[-1])
        assert world["num_processes"] == wanted["num_processes"]
        assert world["mixed_precision"] == wanted["mixed_precision"]
        assert (world["device"] == "cpu") == wanted["use_cpu"]
    else:
        assert len(error_lines(result.stderr)) == 1, result.stderr
        assert f"{wanted['num_processes']} GPU" in error_lines(result.stderr)[0]
        assert "exit status 2" in result.stderr or "exitcode  : 2" in result.stderr
        assert "UsageError" not in result.stderr  # no traceback of ours


def test_every_yaml_explains_each_key_and_is_named_after_its_world() -> None:
    for path in CONFIGS.glob("*.yaml"):
        text, config = path.read_text(), yaml.safe_load(path.read_text())
        assert f"accelerate_configs/{path.name}" in text, path
        for line in text.splitlines():
            if line.startswith(("distributed_type", "num_processes", "mixed_precision", "gpu_ids")):
                assert "#" in line, f"{path.name}: {line} is not explained"
        if "node" not in path.stem:
            assert path.stem.startswith(str(config["num_processes"])), path
            assert ("bf16" in path.stem) == (config["mixed_precision"] == "bf16"), path
            assert ("fp16" in path.stem) == (config["mixed_precision"] == "fp16"), path


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"distributed_type": "MULTI_CPU"}, "only this one was started"),
        ({"distributed_type": "NO", "num_processes": 4}, "only this one was started"),
        ({"mixed_precision": "fp16"}, "fp16 needs a GPU"),
    ],
)
def test_a_yaml_that_accelerate_would_quietly_run_otherwise_is_refused(
    change: dict, sentence: str, tmp_path: Path
) -> None:
    config = yaml.safe_load((CONFIGS / "2cpu.yaml").read_text()) | change
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(config))
    result = run("tests/probe.py", config=path)
    assert result.returncode != 0
    assert len(error_lines(result.stderr)) == 1, result.stderr
    assert sentence in error_lines(result.stderr)[0]


def test_a_main_process_that_starts_late_still_says_what_is_wrong(tmp_path: Path) -> None:
    config = yaml.safe_load((CONFIGS / "2cpu.yaml").read_text()) | {"mixed_precision": "fp16"}
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(config))
    program = tmp_path / "late.py"
    program.write_text("import os, runpy, sys, time\n"
                       "time.sleep(8 if os.environ['RANK'] == '0' else 0)\n"
                       "runpy.run_path(sys.argv[1], run_name='__main__')\n")  # fmt: skip
    result = run(program, ROOT / "tests" / "probe.py", config=tmp_path / "wrong.yaml")
    assert result.returncode != 0
    assert len(error_lines(result.stderr)) == 1, result.stderr


@pytest.mark.parametrize(
    ("environment", "num_gpus", "sentence"),
    [
        ({"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "4"}, 2, "which has 2 GPUs"),
        ({"WORLD_SIZE": "2"}, 0, "no launcher"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, 0, "unset it"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, 0, "sees none here"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_USE_CPU": "true"}, 0, "fp16 needs"),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, 1, "only this one"),
    ],
)
def test_check_launch_refuses(
    environment: dict, num_gpus: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_gpus)
    with pytest.raises(UsageError, match=sentence):
        world.check_launch()


@pytest.mark.parametrize(
    ("environment", "num_gpus"),
    [
        ({}, 0),
        ({}, 8),
        ({"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "4"}, 4),
        ({"WORLD_SIZE": "16", "RANK": "9", "LOCAL_WORLD_SIZE": "8"}, 8),
        ({"WORLD_SIZE": "2", "RANK": "0", "CUDA_VISIBLE_DEVICES": "-1,-1"}, 0),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, 1),
        ({"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "true"}, 0),
    ],
)
def test_check_launch_lets_a_good_launch_pass(
    environment: dict, num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_gpus)
    world.check_launch()


def test_wrong_arguments_are_all_told_once_and_end_with_2(
    small_mnist: Path, tmp_path: Path
) -> None:
    wrong = ["--seed", 2**32, "--epochs", 0, "--batch-size", 7, "--learning-rate", -1, "--keep", 1]
    common = ["--dataset", small_mnist, "--run-dir", tmp_path / "run"]
    result = run("train_mnist.py", *common, *wrong, config="2cpu")
    assert result.returncode != 0
    (line,) = error_lines(result.stderr)
    for flag in (
        "--seed 4294967296",
        "--epochs 0",
        "--batch-size 7",
        "2 processes",
        "--learning-rate -1.0",
        "--keep 1",
    ):
        assert flag in line
    assert "exitcode  : 2" in result.stderr
    assert not (tmp_path / "run").exists()
    result = run("train_mnist.py", "--epoch", 3)
    assert result.returncode == 2 and result.stdout == ""
    assert error_lines(result.stderr) == result.stderr.splitlines()


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("model", "accumulate"),
    [
        ("compact", 1),
        ("compact", 3),
        pytest.param("lenet", 1, marks=pytest.mark.slow),
        pytest.param("lenet", 3, marks=pytest.mark.slow),
    ],
)
def test_one_two_and_three_processes_give_the_same_numbers(
    model: str, accumulate: int, small_mnist: Path, tmp_path: Path, train_in_double: Callable
) -> None:
    # 1009 = 9 x 108 + 37: with --no-drop-last one process ends each epoch with an empty batch.
    arguments = ["--dataset", small_mnist, "--model", model, "--batch-size", 108, "--epochs", 2,
                 "--log-every", 1, "--no-drop-last", "--eval-batch-size", 108]  # fmt: skip
    train_in_double("train_mnist", *arguments, "--run-dir", tmp_path / "1")
    one = rows(tmp_path / "1")
    assert len(one) == 2 * 10 + 2 and one[-1]["eval_samples"] == NUM_TEST
    for num_processes in (2, 3):
        run_dir = tmp_path / str(num_processes)
        train_in_double("train_mnist", *arguments, "--run-dir", run_dir, "--accumulate", accumulate,
                        world=num_processes)  # fmt: skip
        for row, same in zip(one, rows(run_dir), strict=True):
            assert same == pytest.approx(row, rel=SAME)
            # Also of the evaluation, not one picture is judged differently.
            assert same.get("eval_accuracy") == row.get("eval_accuracy")
            assert same.get("learning_rate") == row.get("learning_rate")


@pytest.mark.numeric
def test_2cpu_gives_the_first_losses_of_one_process(
    small_mnist: Path, tmp_path: Path, run_main: Callable
) -> None:
    """As people start it, in float32: over so few steps rounding is not yet amplified."""
    arguments = ["--dataset", small_mnist, "--log-every", 1, "--stop-after-steps", 5]
    result = run("train_mnist.py", *arguments, "--run-dir", tmp_path / "two", config="2cpu")
    assert result.returncode == 0, result.stderr
    assert_num_processes(result.stdout, 2)
    run_main("train_mnist", *arguments, "--run-dir", tmp_path / "one")
    one, two = (rows(tmp_path / name) for name in ("one", "two"))
    for row, same in zip(one, two, strict=True):
        assert same["train_loss"] == pytest.approx(row["train_loss"], abs=LOSS_TOLERANCE)
        assert same.get("learning_rate") == row.get("learning_rate")
    assert one[-1]["eval_accuracy"] == pytest.approx(
        two[-1]["eval_accuracy"], abs=ACCURACY_TOLERANCE
    )


def test_a_process_that_waits_too_long_for_the_others_ends_in_one_sentence() -> None:
    """gloo waits in C, five times its timeout, and lets no signal through."""
    code = (
        "import time; from datetime import timedelta; from trainkit.world import deadline\n"
        "with deadline(timedelta(seconds=-4.9)): pass\n"
        "time.sleep(0.5)\n"
        "with deadline(timedelta(seconds=-4.9)): time.sleep(30)"
    )
    waiting = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=25
    )
    assert waiting.returncode == 1
    assert waiting.stderr.startswith("error: process 0 did not meet the other processes within")
    assert len(waiting.stderr.splitlines()) == 1
