"""Order, augmentation and dropout are functions of (seed, epoch, sample, step) and nothing else."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard

from trainkit.checkpoint import Progress
from trainkit.order import NO_SAMPLE, EpochBatches, keyed_uniform, seed_dropout


@pytest.mark.parametrize("num_processes", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_each_sample_comes_once_per_epoch_at_any_number_of_processes(
    num_processes: int, accumulate: int, drop_last: bool
) -> None:
    batches = EpochBatches(101, 12, seed=5, drop_last=drop_last, accumulate=accumulate)
    shards = [
        list(BatchSamplerShard(batches, num_processes, rank, split_batches=True))
        for rank in range(num_processes)
    ]
    assert len({len(shard) for shard in shards}) == 1  # no process waits for another one's batch
    assert len(shards[0]) == len(batches)
    seen = torch.cat([torch.cat(parts) for parts in zip(*shards, strict=True)])
    seen = seen[seen != NO_SAMPLE]
    order = batches.order(0)[: 96 if drop_last else 101]
    assert torch.equal(seen, order)  # also in the order of one process
    assert len(seen.unique()) == len(seen)


def test_epochs_and_seeds_differ_and_repeat() -> None:
    batches = EpochBatches(50, 10, seed=1)
    assert torch.equal(batches.order(3), EpochBatches(50, 25, seed=1).order(3))
    assert not torch.equal(batches.order(3), batches.order(4))
    assert not torch.equal(batches.order(3), EpochBatches(50, 10, seed=2).order(3))
    assert torch.equal(EpochBatches(50, 10).order(3), torch.arange(50))


def test_a_position_is_the_rest_of_the_epoch() -> None:
    whole = EpochBatches(101, 12, seed=5)
    whole.set_position(2, 0)
    rest = EpochBatches(101, 12, seed=5)
    rest.set_position(2, 4 * 12)
    assert len(rest) == len(whole) - 4
    for a, b in zip(list(whole)[4:], rest, strict=True):
        assert torch.equal(a, b)


def test_keyed_uniform_depends_on_the_sample_and_not_on_its_batch() -> None:
    indices = torch.arange(20_000)
    u = keyed_uniform(7, 3, indices, 3)
    assert u.shape == (20_000, 3) and u.dtype == torch.float32
    assert u.min() >= 0 and u.max() < 1
    assert torch.equal(keyed_uniform(7, 3, indices[[5, 19_999]], 3), u[[5, 19_999]])
    for other in (keyed_uniform(8, 3, indices, 3), keyed_uniform(7, 4, indices, 3)):
        assert (other != u).float().mean() > 0.999
        assert abs(torch.corrcoef(torch.stack((other[:, 0], u[:, 0])))[0, 1]) < 0.03
    # 4 standard errors of the mean and of the variance of 20,000 uniform numbers
    assert (u.mean(0) - 1 / 2).abs().max() < 4 * 12**-0.5 / 20_000**0.5
    assert (u.var(0) - 1 / 12).abs().max() < 4 * 180**-0.5 / 20_000**0.5
    assert torch.corrcoef(u.T).fill_diagonal_(0).abs().max() < 4 / 20_000**0.5


def test_dropout_is_seeded_by_position_and_process() -> None:
    def mask(seed: int = 0, rank: int = 0, micro_batch: int = 0, **position: int) -> list[float]:
        accelerator = SimpleNamespace(
            step=micro_batch,
            gradient_accumulation_steps=4,
            process_index=rank,
            device=torch.device("cpu"),
        )
        seed_dropout(accelerator, seed, Progress(**position))
        return torch.rand(4).tolist()

    masks = [mask(), mask(seed=1), mask(rank=1), mask(micro_batch=1), mask(epoch=1), mask(batch=1)]
    assert len({tuple(m) for m in masks}) == len(masks)
    assert mask(epoch=2, batch=9, step=5) == mask(epoch=2, batch=9, step=4)
