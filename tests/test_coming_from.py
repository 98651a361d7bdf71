"""The programs that people come from and the script give the same losses, step for step."""

import json

import pytest
import torch
from conftest import NUM_TRAIN, ROOT, rows
from double import SAME
from safetensors.torch import load_file, save_file

from trainkit.config import parse
from trainkit.numbers.loaders import EpochBatches
from trainkit.pictures import GreyConfig, load_grey

BATCH_SIZE, NUM_STEPS = 40, 25
SHARED = f"--model lenet --no-augment --label-smoothing 0 --batch-size {BATCH_SIZE} --epochs 1"
SHARED += " --log-every 1 --warmup 0 --drop-last"
# How many processes each program has, and the flags under which the script does the same.
BECOMES = {
    "data_parallel": (1, "--optimizer sgd --learning-rate 0.05 --schedule constant"),
    "torchrun_amp": (
        2,
        "--optimizer adam --learning-rate 0.002 --schedule exponential+cosine --gamma 0.9",
    ),
    "hand_all_reduce": (1, "--optimizer sgd --learning-rate 0.05 --schedule constant --momentum 0"),
}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "program", ["data_parallel", *(pytest.param(p, marks=slow) for p in [*BECOMES][1:])]
)
def test_the_program_and_the_script_give_the_same_losses_and_weights(
    program, small_mnist, tmp_path, fork_main
):
    images, labels = load_grey(parse(GreyConfig, ["--dataset", str(small_mnist)]), 28)[0].tensors
    epoch = EpochBatches(NUM_TRAIN, BATCH_SIZE, seed=0, drop_last=True)
    data, losses_path = tmp_path / "data.safetensors", tmp_path / "losses.json"
    save_file(
        {"images": images, "labels": labels, "batches": torch.stack([b.values for b in epoch])},
        data,
    )
    path, (world, flags) = ROOT / "tests" / "coming_from" / f"{program}.py", BECOMES[program]
    done = fork_main(str(path), data, losses_path, double=True, world=world)
    assert done.codes == [0] * world, done.output
    words = ["--dataset", small_mnist, "--run-dir", tmp_path / "run"]
    fork_main("train_mnist", *words, *SHARED.split(), *flags.split(), double=True).finished()
    before = json.loads(losses_path.read_text())
    losses = [row["train_loss"] for row in rows(tmp_path / "run", "steps")]
    assert len(before) == len(losses) == NUM_STEPS
    assert losses[-1] < losses[0] - 0.05  # it learns: equal losses are not equal for lack of change
    assert losses == pytest.approx(before, rel=SAME)
    old = torch.load(f"{losses_path}.pt")
    new = load_file(tmp_path / "run" / "model.safetensors")
    torch.testing.assert_close(dict(old), new, rtol=0, atol=SAME)  # no "module." in the names


def test_docs_name_every_program():
    text = (ROOT / "docs" / "coming_from.md").read_text()
    assert all(f"tests/coming_from/{program}.py" in text for program in BECOMES)
