"""fp16 with torch's own GradScaler, which works on a CPU too; only the scripts refuse it there."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import forget_accelerator, rows
from faults import digests
from loops import Still, changed
from loss_scale import SCALE, accelerator_in_fp16, scaled_float32

import trainkit.run.session
from trainkit.run.step import Step

LAST = 6


def checkpoint(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """What is saved about a step: its progress, scheduler and scaler."""
    folder = run_dir / "checkpoints" / f"step-{step:010d}"
    states = [folder / "state" / name for name in ("scheduler.bin", "scaler.pt")]
    progress = json.loads((folder / "trainer.json").read_text())["progress"]
    return [progress, *(torch.load(state, weights_only=True) for state in states)]


def test_a_step_that_overflows_is_skipped_and_a_resume_has_the_loss_scale(
    run_main, tiny_mnist, tmp_path, monkeypatch
):
    run_dir, steps = tmp_path / "run", []
    finish = Step.finish

    def finished(self):
        made = finish(self)
        steps.append((made, float(self.accelerator.scaler.get_scale())))
        return made

    monkeypatch.setattr(Step, "finish", finished)
    monkeypatch.setattr(trainkit.run.session, "Accelerator", accelerator_in_fp16)
    flags = f"--dataset {tiny_mnist} --model lenet --batch-size 8 --log-every 1 --save-every 2 "
    flags += f"--stop-after-steps {LAST} --keep 9 --run-dir {run_dir}"
    run_main("train_mnist", flags)
    whole, files, made = checkpoint(run_dir, LAST), digests(run_dir), [*steps]
    progress, scheduler, scaler = whole
    num_skipped = len(made) - LAST
    assert made[0] == (False, SCALE / 2) and num_skipped >= 1  # skipped, and halved
    assert any(later > sooner for (_, sooner), (_, later) in itertools.pairwise(made))
    assert progress["step"] == scheduler["last_epoch"] == LAST
    assert progress["num_skipped"] == num_skipped == progress["step_in_epoch"] - LAST
    assert scaler["scale"] == made[-1][1]
    logged = rows(run_dir, "steps")
    assert [row["step"] for row in logged] == [*range(1, LAST + 1)]
    assert all(math.isfinite(row["train_loss"]) for row in logged)

    progress, _, scaler = checkpoint(run_dir, 4)
    assert scaler["scale"] != SCALE and scaler["_growth_tracker"] > 0
    steps.clear()
    run_main("train_mnist", f"{flags} --resume {run_dir}/checkpoints/step-0000000004")
    assert steps == made[4 + progress["num_skipped"] :]
    assert checkpoint(run_dir, LAST) == whole and digests(run_dir) == files


def test_a_checkpoint_of_float32_goes_on_under_fp16(tmp_path, monkeypatch):
    run_dir, train = tmp_path / "run", changed()
    train(f"--run-dir {run_dir} --epochs 1")
    forget_accelerator()
    monkeypatch.setattr(trainkit.run.session, "Accelerator", accelerator_in_fp16)
    train(f"--run-dir {run_dir} --epochs 2 --resume latest")
    assert rows(run_dir, "epochs")[-1]["epoch"] == 2


def train_two(run_dir: Path, order: str, overflows: tuple[int, ...] = ()) -> list[float]:
    """Two models and optimizers that are clipped and stepped in this order; losses by step.

    In the batches of these numbers the gradients of both overflow.
    """

    def clip_and_step(run, optimizers, number):
        for word in order.split():
            each = optimizers[int(word[-1])]
            run.clip_and_check(each) if word[:-1] == "clip" else each.step()
        assert [each.step_was_skipped for each in optimizers] == [number in overflows] * 2

    edits = [
        (r"body\(run, next\(numbers\)\)", "number = next(numbers)"),
        (r"step_mean\(loss\)", "step_mean(loss * (1e38 if number in overflows else 1))"),
        (
            r"^( +)for part in \(\*optimizers, \*schedules\):",
            r"\1clip_and_step(run, optimizers, number)\n\1for part in schedules:",
        ),
        (r"losses.append.*", "losses += [] if number in overflows else [loss.mean().item()]"),
    ]
    names = {"overflows": overflows, "clip_and_step": clip_and_step, "Numbers": Still}
    flags = "--drop-last --epochs 7 --learning-rate 0.03 --clip-norm 0.1 --run-dir"
    return changed(*edits, **names)(f"{flags} {run_dir}")


def test_two_optimizers_under_a_growing_loss_scale_train_as_without_one(tmp_path, monkeypatch):
    """Every batch is the same, so that it does not matter which ones are skipped."""
    monkeypatch.setattr(torch, "randperm", lambda num, generator: torch.arange(num) % 8)
    order = "clip0 clip1 step0 step1"
    plain = train_two(tmp_path / "run", order)
    monkeypatch.setattr(trainkit.run.session, "Accelerator", scaled_float32)
    scaled = train_two(tmp_path / "run", order, overflows=(1, 6, 7, 14))
    assert len(scaled) == len(plain) - 4 > 30
    assert scaled == pytest.approx(plain[:-4], abs=1e-5)
