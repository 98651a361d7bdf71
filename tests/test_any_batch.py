"""Whatever a batch is made of, any number of processes and micro-batches train on it alike."""

import any_batch
import pytest
import torch
from conftest import assert_same_numbers, finish, rows
from double import SAME
from plain import plain_losses

from trainkit.loaders import EpochBatches

WORLDS = [(2, 1), (3, 1), (3, 2), (2, 5)]  # processes, --accumulate


@pytest.fixture(scope="module")
def alone(train_in_double, tmp_path_factory):
    """The folder of a run by one process, in one micro-batch."""
    folder = tmp_path_factory.mktemp("alone")
    train_in_double("any_batch", "--run-dir", folder)
    return folder


@pytest.mark.parametrize(("world", "accumulate"), WORLDS)
def test_batches_of_anything_give_the_numbers_of_one_process(
    alone, train_in_double, tmp_path, world, accumulate
):
    batch_size = 30 if 20 % (world * accumulate) else 20
    flags = ["--accumulate", accumulate, "--batch-size", batch_size]
    if batch_size != 20:
        train_in_double("any_batch", *flags[2:], "--run-dir", tmp_path / "alone")
        alone = tmp_path / "alone"
    train_in_double("any_batch", *flags, "--run-dir", tmp_path / "run", world=world)
    assert_same_numbers(alone, tmp_path / "run")


def test_a_sharded_run_gives_the_same_numbers(alone, nursery, tmp_path):
    env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    finish(nursery, "any_batch", "--run-dir", tmp_path, world=2, double=True, env=env)
    assert_same_numbers(alone, tmp_path)


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
