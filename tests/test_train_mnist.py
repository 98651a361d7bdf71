"""The loop of train_mnist.py is right, and what it leaves behind can be used."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, rows, run, saved
from double import SAME
from torch import nn

import train_mnist
from trainkit.config import parse
from trainkit.numbers.loaders import EpochBatches


@pytest.mark.numeric
def test_the_loop_is_plain_pytorch(tiny_mnist, tmp_path, fork_main, float64_default, monkeypatch):
    data = f"--dataset {tiny_mnist} --run-dir {tmp_path} --epochs 2 --batch-size 96"
    rates = "--learning-rate 0.05 --schedule cosine --min-learning-rate 0.01 --warmup 0.3"
    flags = f"{data} {rates} --optimizer sgd --clip-norm 0.56 --accumulate 3 --no-drop-last"
    flags += " --log-every 1 --ema 0.3"
    fork_main("train_mnist", flags, double=True).finished()
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(train_mnist, "pixel_centres", train_mnist.pixel_centres.__wrapped__)
    config = parse(train_mnist.Config, flags.split())
    images, labels = train_mnist.load_data(config)[0].tensors  # fits --max-shift and --max-turn
    torch.manual_seed(0)
    net = train_mnist.Compact(10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    order, losses, norms = EpochBatches(len(images), 96, seed=0), [], []
    parts = [(n, part) for n in range(2) for part in order.order(n).split(96)]
    average = {name: weight.clone() for name, weight in net.state_dict().items()}
    for step, (epoch, indices) in enumerate(parts, 1):
        moved = train_mnist.augment(images[indices], indices, epoch, config)
        logits = net((moved / 255 - 0.1307) / 0.3081)
        loss = F.cross_entropy(logits, labels[indices], label_smoothing=0.1)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.56))
        cosine = (1 + math.cos(math.pi * (step - 1) / len(parts))) / 2
        rate = min(1, step / math.ceil(0.3 * len(parts))) * (0.01 + 0.04 * cosine)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        for name, weight in net.state_dict().items():
            average[name] += (1 - min(0.3, (1 + step) / (10 + step))) * (weight - average[name])
        losses.append([F.cross_entropy(logits, labels[indices]).item(), loss.item()])
    assert min(norms) < 0.56 < max(norms), norms  # some steps are clipped
    for row, found in zip(rows(tmp_path, "steps"), losses, strict=True):
        assert [row["train_loss"], row["train_loss_smoothed"]] == pytest.approx(found, rel=SAME)
    for name, expected in (("raw", dict(net.state_dict())), ("model", average)):
        torch.testing.assert_close(saved(tmp_path, name)[0], expected, atol=SAME, rtol=0)


def test_a_run_leaves_its_metrics(small_mnist, tmp_path, run_main, capfd):
    data = f"--dataset {small_mnist} --run-dir {tmp_path}"
    metrics = run_main("train_mnist", data, "--epochs 3 --batch-size 64 --log-every 5")
    steps, epochs = rows(tmp_path, "steps"), rows(tmp_path, "epochs")
    assert [row["step"] for row in steps] == [*range(5, 46, 5)]  # 15 steps of 64 in 1009
    of_steps = {"learning_rate", "grad_norm"}
    assert {*steps[0]} == {"step", "epoch", "train_loss", "train_loss_smoothed"} | of_steps
    assert [(row["step"], row["epoch"]) for row in epochs] == [(15, 1), (30, 2), (45, 3)]
    for number, row in enumerate(epochs):  # of its own epoch alone
        losses = [step["train_loss"] for step in steps[3 * number :][:3]]
        assert row["train_loss"] == pytest.approx(sum(losses) / 3, rel=1e-9)
    kinds = {"train_accuracy", "eval_loss", "eval_accuracy", "eval_samples"}
    assert {*epochs[0]} == {*steps[0]} - of_steps | kinds
    assert metrics.items() == epochs[-1].items() - {("step", 45)}
    assert 0.75 < metrics["eval_accuracy"] < 1  # seen: 0.90
    assert "the last 49 of each shuffle are left out" in capfd.readouterr().out


def test_a_model_is_compiled_once_whatever_batches_and_evaluations_come(
    tiny_mnist, tmp_path, run_main, monkeypatch
):
    """And the augmentation once. Also if a resume begins with the short last batch of an epoch."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    counters = torch._dynamo.utils.counters["stats"]
    flags = (
        f"--dataset {tiny_mnist} --run-dir {tmp_path} --batch-size 144 --no-drop-last --epochs 2"
    )
    num_compiled = []
    for more in ("--stop-after-steps 2", "--resume auto"):  # of 3 steps in an epoch
        torch._dynamo.reset()  # as in a process of its own
        before = counters["unique_graphs"]
        run_main("train_mnist", flags, more)
        num_compiled.append(counters["unique_graphs"] - before)
    assert num_compiled == [2, 2]
    weights, metadata = saved(tmp_path)  # whose names are those of the model as it is written
    train_mnist.make_model(metadata).load_state_dict(weights)
    model = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    model(torch.ones(3, 2))
    assert counters["unique_graphs"] == before + 3  # nothing is forbidden afterwards


def test_stop_after_steps_ends_as_if_done_and_a_later_run_moves_it_aside(
    tiny_mnist, tmp_path, run_main
):
    flags = f"--dataset {tiny_mnist} --run-dir {tmp_path}/run --batch-size 64 --save-every 2"
    flags += " --epochs 3 --stop-after-steps 6"
    assert run_main("train_mnist", flags)["eval_samples"] == 101
    log = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(SystemExit) as ended:
        run_main("train_mnist", flags, "--seed 1 --target eval_accuracy:0.99")
    assert ended.value.code == 3 and (tmp_path / "run" / "DONE").exists()
    assert (tmp_path / "run.1" / "metrics.jsonl").read_bytes() == log
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() != log


def move(
    images: torch.Tensor, indices: torch.Tensor, epoch: int = 2, **most: float
) -> torch.Tensor:
    """The pictures after an augmentation by at most so many degrees and pixels."""
    amounts = {"max_turn": 0.0, "max_shift": 0.0, "max_warp": 0.0} | most
    return train_mnist.augment(
        images, indices, epoch, SimpleNamespace(seed=3, augment=True, **amounts)
    )


def test_augmentation_moves_a_picture_by_seed_epoch_and_index_alone():
    most = {"max_turn": 10.0, "max_shift": 2.0, "max_warp": 1.0}
    images = torch.zeros(4, 1, 28, 28, dtype=torch.uint8)
    images[:, :, 10:18, 10:18] = 200
    indices = torch.tensor([5, 900, 17, 5])
    moved = move(images, indices, **most)
    assert torch.equal(moved[0], moved[3]) and not torch.equal(moved[0], moved[1])
    assert not torch.equal(move(images, indices, epoch=3, **most), moved)
    torch.testing.assert_close(move(images, indices), images.float(), atol=1e-2, rtol=0)
    shifted = move(images, indices, max_shift=2.0)
    assert shifted.sum((1, 2, 3)) == pytest.approx([8 * 8 * 200] * 4, rel=1e-3)  # nothing is lost


# Runs a script, where a connection is refused, and names what it imported.
WATCHED = """
import atexit, runpy, socket, sys
def refuse(self, address):
    raise AssertionError(f"a connection to {address}")
socket.socket.connect = socket.socket.connect_ex = refuse
sys.argv = sys.argv[1:]
tools = {"torch._dynamo", "torch._inductor", "sympy", "matplotlib", "torchvision"}
atexit.register(lambda: print("imported:", tools & {*sys.modules}))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_no_run_needs_the_network_or_a_tool_that_it_does_not_use(tiny_mnist, tmp_path):
    flags = f"--dataset {tiny_mnist} --run-dir {tmp_path}/run --stop-after-steps 2 --no-pictures"
    result = run("-c", WATCHED, ROOT / "train_mnist.py", flags, env={"HF_HUB_OFFLINE": "0"})
    assert "imported: set()" in result.stdout, result.stdout
    assert (tmp_path / "run" / "DONE").exists()


@pytest.mark.slow
def test_the_default_run_reaches_what_the_readme_says(tmp_path):
    threads = {"OMP_NUM_THREADS": "2"}
    run("train_mnist.py", "--run-dir", tmp_path / "run", env=threads, timeout=900)
    (*_, last) = rows(tmp_path / "run", "epochs")
    assert 0.993 <= last["eval_accuracy"] < 0.998 and last["eval_samples"] == 10_000
