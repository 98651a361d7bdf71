"""fp16 with torch's own GradScaler, which works on a CPU too; only the scripts refuse it there."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from conftest import rows

import trainkit.run

SCALE = 2.0**21  # gradients overflow at first
GROWTH_INTERVAL = 3  # steps after which the scale is doubled
LAST = 6


def accelerator_in_fp16(**options: Any) -> accelerate.Accelerator:
    """What Accelerator(mixed_precision="fp16") makes on a GPU."""
    accelerator = accelerate.Accelerator(**options)
    accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
    accelerator.scaler = torch.amp.GradScaler(
        "cpu", init_scale=SCALE, growth_interval=GROWTH_INTERVAL
    )
    return accelerator


def checkpoint(run_dir: Path, step: int) -> dict[str, Any]:
    """What is saved about a step: its progress, scheduler and scaler, and the bytes of files."""
    folder = run_dir / "checkpoints" / f"step-{step:010d}"
    files = [path for path in folder.glob("state/*") if not path.match("random_states_*")]
    files += [run_dir / "metrics.jsonl", run_dir / "model.safetensors"]
    return {
        "progress": json.loads((folder / "trainer.json").read_text())["progress"],
        "bytes": {path.name: path.read_bytes() for path in files},
        "scheduler": torch.load(folder / "state" / "scheduler.bin", weights_only=True),
        "scaler": torch.load(folder / "state" / "scaler.pt", weights_only=True),
    }


def test_a_step_that_overflows_is_skipped_and_a_resume_has_the_loss_scale(
    run_main: Any, tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, steps = tmp_path / "run", []
    step = AcceleratedOptimizer.step

    def watched(self: AcceleratedOptimizer, *args: Any) -> None:
        weights = [weight for group in self.param_groups for weight in group["params"]]
        assert weights[0].grad.dtype == torch.float32
        before = [weight.detach().clone() for weight in weights]
        step(self, *args)
        same = all(map(torch.equal, before, weights))
        assert same == self.step_was_skipped
        steps.append((not same, float(self.scaler.get_scale())))

    monkeypatch.setattr(AcceleratedOptimizer, "step", watched)
    monkeypatch.setattr(trainkit.run, "Accelerator", accelerator_in_fp16)
    flags = ["--dataset", tiny_mnist, "--model", "lenet", "--batch-size", 8, "--log-every", 1]
    flags += ["--save-every", 2, "--stop-after-steps", LAST, "--keep", 9, "--run-dir", run_dir]
    run_main("train_mnist", *flags)
    whole, made = checkpoint(run_dir, LAST), list(steps)
    num_skipped = len(made) - LAST
    assert made[0] == (False, SCALE / 2) and num_skipped >= 1  # skipped, and halved
    assert any(later > sooner for (_, sooner), (_, later) in itertools.pairwise(made))
    assert whole["progress"]["step"] == whole["scheduler"]["last_epoch"] == LAST
    assert whole["progress"]["num_skipped"] == num_skipped
    assert whole["progress"]["batch"] == LAST + num_skipped
    assert whole["scaler"]["scale"] == made[-1][1]
    logged = rows(run_dir, "steps")
    assert [row["step"] for row in logged] == [*range(1, LAST + 1)]
    assert all(math.isfinite(row["train_loss"]) for row in logged)

    middle = checkpoint(run_dir, 4)
    assert middle["scaler"]["scale"] != SCALE and middle["scaler"]["_growth_tracker"] > 0
    steps.clear()
    run_main("train_mnist", *flags, "--resume", run_dir / "checkpoints" / "step-0000000004")
    assert steps == made[4 + middle["progress"]["num_skipped"] :]
    assert checkpoint(run_dir, LAST)["bytes"] == whole["bytes"]
