"""Order, augmentation and dropout are functions of (seed, epoch, sample, step) and nothing else."""

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

from trainkit.order import EpochBatches, WholeBatches, keyed_uniform, seed_dropout


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
    seen = torch.cat([part.values for parts in zip(*shards, strict=True) for part in parts])
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
        assert torch.equal(a.values, b.values)


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
    def mask(*position: int) -> tuple[float, ...]:
        seed_dropout(torch.device("cpu"), *position)
        return tuple(torch.rand(4).tolist())

    places = [(0, 0, 0, 0, 0), *(tuple(int(i == j) for j in range(5)) for i in range(5))]
    assert len({mask(*place) for place in places}) == len(places)
    assert mask(3, 2, 9, 0, 1) == mask(3, 2, 9, 0, 1)


@pytest.mark.parametrize("num_processes", [2, 3, 4])
@pytest.mark.parametrize("num_left", range(1, 13))
def test_a_short_batch_is_dealt_out_in_order_and_leaves_few_processes_empty(
    num_processes: int, num_left: int
) -> None:
    batches = EpochBatches(12 + num_left, 12)
    shares = [
        [*BatchSamplerShard(batches, num_processes, rank, split_batches=True)][-1]
        for rank in range(num_processes)
    ]
    assert {len(share) for share in shares} == {12 // num_processes}  # all look full to Accelerate
    assert torch.equal(torch.cat([share.values for share in shares]), torch.arange(num_left) + 12)
    sizes = [len(share.values) for share in shares]
    assert sizes[0] == max(sizes) and (min(sizes) > 0 or num_left < num_processes)


class Noisy(Dataset):
    """A sample: a random number and the sample's index."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[float, int]:
        return torch.rand(()).item(), index


@pytest.mark.parametrize(
    "dataset",
    [Noisy(), Subset(Noisy(), range(6)), ConcatDataset([Noisy(), Noisy()]), StackDataset(Noisy())],
    ids=lambda dataset: type(dataset).__name__,
)
def test_a_random_transform_does_not_depend_on_the_batch(dataset: Dataset) -> None:
    batches = WholeBatches(dataset, list, 3, torch.tensor(1))
    together = batches.make(torch.tensor([4, 2, 5]))
    alone = [batches.make(torch.tensor([index]))[0] for index in (4, 2, 5)]
    assert together == alone
