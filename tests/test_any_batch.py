"""Whatever a batch is made of, any number of processes and micro-batches train on it alike."""

import signal

import any_batch
import pytest
import torch
from conftest import assert_same_bytes, assert_same_numbers, finish, rows
from double import SAME
from plain import plain_losses

from trainkit.loaders import EpochBatches

# Processes, --accumulate, --batch-size. The last of 61 samples is alone in its batch, or, with 24,
# in the second micro-batch of the last step.
WORLDS = [(2, 1, 20), (3, 1, 30), (3, 2, 24), (2, 5, 20)]


@pytest.fixture(scope="module")
def alone(train_in_double, tmp_path_factory):
    """The folder of a run by one process, in one micro-batch."""
    folder = tmp_path_factory.mktemp("alone")
    train_in_double("any_batch", "--run-dir", folder)
    return folder


@pytest.mark.parametrize(("world", "accumulate", "batch_size"), WORLDS)
def test_batches_of_anything_give_the_numbers_of_one_process(
    alone, train_in_double, tmp_path, world, accumulate, batch_size
):
    flags = ["--batch-size", batch_size, "--run-dir"]
    if batch_size != 20:
        train_in_double("any_batch", *flags, alone := tmp_path / "alone")
    many = [*flags, tmp_path / "run", "--accumulate", accumulate]
    train_in_double("any_batch", *many, world=world)
    assert_same_numbers(alone, tmp_path / "run")


def test_a_sharded_run_gives_the_same_numbers(alone, nursery, tmp_path):
    env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    finish(nursery, "any_batch", "--run-dir", tmp_path, world=2, double=True, env=env)
    assert_same_numbers(alone, tmp_path)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_kill_of_a_run_with_several_means_and_a_teacher_changes_no_byte(
    nursery, tmp_path, accumulate
):
    flags = ["--accumulate", accumulate, "--save-every", "1", "--resume", "auto", "--run-dir"]
    finish(nursery, "any_batch", *flags, tmp_path / "whole", world=2)
    fault = {"signal": [5, signal.SIGKILL]}
    killed = nursery.run("any_batch", *flags, tmp_path / "run", world=2, fault=fault)
    assert 0 not in killed.codes, killed.output
    again = finish(nursery, "any_batch", *flags, tmp_path / "run", world=2)
    assert "resuming from" in again
    assert_same_bytes(tmp_path / "whole", tmp_path / "run")


def test_sizes_that_differ_between_processes_are_refused(nursery, tmp_path):
    """The values have two columns on the first process, and three on the second."""
    flags = ["--batch-size", "10", "--epochs", "1", "--no-pictures", "--run-dir", tmp_path]
    outcome = nursery.run("any_batch", *flags, world=2, env={"RAGGED": "1"})
    assert outcome.codes == [1, 1]
    assert "other sizes differ between processes" in outcome.output
    assert "mask=" in outcome.output


@pytest.mark.usefixtures("float64_default")
def test_several_means_are_each_divided_by_what_its_own_mask_or_weights_select(alone):
    torch.manual_seed(0)
    model = any_batch.Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)

    means: list[list[float]] = []

    def loss_of(indices):
        batch = any_batch.collate([any_batch.make_sample(n) for n in indices.tolist()])
        values = any_batch.compute_losses(model, batch)
        weights = values["weights"]["loss_size"]
        size = (weights * values["loss_size"]).sum() / weights.sum()
        of_step = values["loss"][values["mask"]["loss"]].mean(), size, values["loss_plain"].mean()
        means.append([mean.item() for mean in of_step])
        return sum(of_step)

    plain_losses(EpochBatches(any_batch.NUM_TRAIN, 20, seed=0), optimizer, range(2), loss_of)
    names = "train_loss", "train_loss_size", "train_loss_plain"
    for row, step in zip(rows(alone, "steps"), means, strict=True):
        assert [row[name] for name in names] == pytest.approx(step, rel=SAME)
