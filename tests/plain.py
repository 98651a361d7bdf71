"""What tests share that compare runs with a loop of plain PyTorch."""

import pytest
from conftest import rows


def quick(ways, chosen) -> list:
    """The ways, of which those that are not chosen are slow."""
    return [pytest.param(*way, marks=[pytest.mark.slow] * (way not in chosen)) for way in ways]


def logged_losses(run_dir) -> list[float]:
    """The loss of each step of a run that logs every step."""
    return [row["train_loss"] for row in rows(run_dir, "steps")]


def plain_losses(order, optimizer, epochs, loss_of) -> list[float]:
    """Train on the batches of an EpochBatches; return the loss of each step.

    loss_of: takes sample indices, an int64 tensor.
    """
    losses = []
    for epoch in epochs:
        order.set_position(epoch, 0)
        for batch in order:
            loss = loss_of(batch.values)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses
