"""The programs that people come from and the script give the same losses, step for step."""

import json
from collections.abc import Callable
from pathlib import Path

import conftest
import pytest
import torch
from conftest import NUM_TRAIN, ROOT, rows
from double import IN_DOUBLE, SAME
from safetensors.torch import load_file, save_file

from trainkit.data.pictures import load_images
from trainkit.loaders import EpochBatches

PROGRAMS = Path(__file__).parent / "coming_from"
BATCH_SIZE, NUM_STEPS = 40, 25
SHARED = f"--model lenet --no-augment --label-smoothing 0 --batch-size {BATCH_SIZE} --epochs 1"
SHARED += " --log-every 1 --warmup 0 --drop-last"
ADAM = "--optimizer adam --learning-rate 0.002 --schedule exponential+cosine --gamma 0.9"
SGD = "--optimizer sgd --learning-rate 0.05 --schedule constant --momentum"
# What each program becomes: the flags under which the script does the same.
BECOMES = {
    "data_parallel": f"{SGD} 0.9",
    "spawn_ddp": f"{SGD} 0.9",
    "torchrun_amp": ADAM,
    "hand_all_reduce": f"{SGD} 0",
}
QUICK = ("data_parallel",)
START_PROCESSES = ("spawn_ddp", "torchrun_amp")


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
            words = ["--dataset", small_mnist, "--run-dir", done[flags]]
            train_in_double("train_mnist", *words, *SHARED.split(), *flags.split())
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
    program: str, data: Path, after: Callable[[str], Path], tmp_path: Path, fork_main: Callable
) -> None:
    losses_path, path = tmp_path / "losses.json", PROGRAMS / f"{program}.py"
    if program in START_PROCESSES:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        flags = torchrun * (program == "torchrun_amp")
        env = IN_DOUBLE | {"CUDA_VISIBLE_DEVICES": ""}
        done = conftest.run(path, data, losses_path, launcher_flags=flags, env=env)
    else:
        done = fork_main(str(path), data, losses_path, double=True)
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


def test_docs_name_every_program() -> None:
    text = (ROOT / "docs" / "coming_from.md").read_text()
    assert all(f"tests/coming_from/{program}.py" in text for program in BECOMES)
