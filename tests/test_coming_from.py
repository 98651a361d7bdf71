"""The programs that people come from and the script give the same losses, step for step."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import NUM_TRAIN, ROOT, rows
from double import IN_DOUBLE, SAME
from safetensors.torch import load_file, save_file

from datakit.pictures import load_images
from trainkit.order import EpochBatches

PROGRAMS = Path(__file__).parent / "coming_from"
BATCH_SIZE, NUM_STEPS = 40, 25
SHARED = (
    "--model",
    "lenet",
    "--no-augment",
    "--label-smoothing",
    0,
    "--batch-size",
    BATCH_SIZE,
    "--epochs",
    1,
    "--log-every",
    1,
    "--warmup",
    0,
    "--drop-last",
)
SGD = ("--optimizer", "sgd", "--learning-rate", 0.05, "--momentum", 0.9, "--schedule", "constant")
# What each program becomes: the flags under which the script does the same.
BECOMES = {
    "single_device": SGD,
    "data_parallel": SGD,
    "spawn_ddp": SGD,
    "fabric": SGD,
    "torchrun_amp": (
        "--optimizer",
        "adam",
        "--learning-rate",
        0.002,
        "--schedule",
        "exponential+cosine",
        "--gamma",
        0.9,
    ),
    "hand_all_reduce": (
        "--optimizer",
        "sgd",
        "--learning-rate",
        0.05,
        "--momentum",
        0,
        "--schedule",
        "constant",
    ),
}
QUICK = ("single_device",)  # the others start processes or packages of their own


@pytest.fixture(scope="module")
def after(
    small_mnist: Path, tmp_path_factory: pytest.TempPathFactory, train_in_double: Callable
) -> Callable[[str], Path]:
    """The script's run folder for a program; each set of flags is run once, in float64."""
    folder, done = tmp_path_factory.mktemp("after"), {}

    def run_dir(program: str) -> Path:
        flags = BECOMES[program]
        if flags not in done:
            done[flags] = folder / program
            train_in_double(
                "train_mnist", "--dataset", small_mnist, "--run-dir", done[flags], *SHARED, *flags
            )
        return done[flags]

    return run_dir


@pytest.fixture(scope="module")
def data(small_mnist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, labels, the indices of each batch in the script's order, and first weights."""
    import train_mnist

    images, labels = load_images(str(small_mnist), "train", 28)[0].tensors
    epoch = EpochBatches(NUM_TRAIN, BATCH_SIZE, seed=0, drop_last=True)
    batches = torch.stack([batch.values for batch in epoch])
    assert batches.shape == (NUM_STEPS, BATCH_SIZE)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    params = [param.detach().contiguous() for param in train_mnist.LeNet(10).parameters()]
    torch.set_default_dtype(torch.float32)
    tensors = {"images": images, "labels": labels, "batches": batches}
    tensors |= {f"params.{number}": param for number, param in enumerate(params)}
    path = tmp_path_factory.mktemp("before") / "data.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, marks=[pytest.mark.slow] * (program not in QUICK))
        for program in BECOMES
    ],
)
def test_the_program_and_the_script_give_the_same_losses(
    program: str, data: Path, after: Callable[[str], Path], tmp_path: Path
) -> None:
    if program == "fabric":
        pytest.importorskip("lightning_fabric")
    losses_path = tmp_path / "losses.json"
    start = [sys.executable]
    if program == "torchrun_amp":
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*start, str(PROGRAMS / f"{program}.py"), str(data), str(losses_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **IN_DOUBLE, "CUDA_VISIBLE_DEVICES": ""},
    )
    # On a loaded machine a spawned process was seen to abort after its last line, when all results
    # are written: a communication thread outlives the interpreter.
    aborted = program == "spawn_ddp" and "terminated with signal SIGABRT" in done.stderr
    assert done.returncode == 0 or aborted, done.stderr
    assert losses_path.exists(), done.stderr
    before = json.loads(losses_path.read_text())
    run_dir = after(program)
    losses = [row["train_loss"] for row in rows(run_dir, "steps")]
    assert len(before) == len(losses) == NUM_STEPS >= 20
    assert losses[-1] < losses[0] - 0.05  # it learns: equal losses are not equal for lack of change
    assert losses == pytest.approx(before, rel=SAME)
    weights = Path(f"{losses_path}.pt")
    if weights.exists():
        old, new = torch.load(weights), load_file(run_dir / "model.safetensors")
        assert old.keys() == new.keys()  # no "module." in front
        for name in old:
            assert torch.allclose(old[name], new[name], rtol=0, atol=SAME), name


def test_docs_name_every_program_and_only_flags_that_exist() -> None:
    import train_mnist

    text = (ROOT / "docs" / "coming_from.md").read_text()
    for program in BECOMES:
        assert f"tests/coming_from/{program}.py" in text
    for block in re.findall(r"```\n?(?:sh|bash)\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.split("#")[0].split()
            if "train_mnist.py" in words:
                flags = words[words.index("train_mnist.py") + 1 :]
                train_mnist.parse_args(flags)
            for word in words:
                if word.endswith(".yaml"):
                    assert (ROOT / word).is_file(), word
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / "docs" / path).exists(), path
