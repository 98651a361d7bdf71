"""Order, augmentation and dropout are functions of (seed, epoch, sample, step) and nothing else."""

from types import SimpleNamespace

from trainkit import Dropout

import datasets
import pytest
import torch
from made_tables import add_noise
from torch.utils.data import Dataset, StackDataset, Subset

from trainkit.numbers import loaders
from trainkit.numbers.loaders import EpochBatches, InMemory, WholeBatches
from trainkit.numbers.orders import weighted
from trainkit.numbers.randoms import release_dropout, seed_dropout


def test_orders_of_epochs_and_seeds_are_as_random_as_all_permutations():
    """Means over 1,000 orders of 1,000 numbers, within 4.5 standard errors."""
    num, size = 1000, 100
    orders = torch.stack(
        [EpochBatches(num, size, seed=n % 10).order(n // 10, 0, num) for n in range(num)]
    )
    assert (orders.sort(1).values == torch.arange(num)).all() and len(orders.unique(dim=0)) == num
    in_batch = (orders[:, :size] < size).sum(1).double()  # of a tenth of the numbers
    spread = size * 0.1 * 0.9 * (num - size) / (num - 1)  # hypergeometric
    found = [
        (orders[:, 0].double(), (num - 1) / 2, (num**2 - 1) / 12),
        (in_batch, size / 10, spread),
        ((in_batch - size / 10) ** 2, spread, 2 * spread**2),
    ]
    for lag in (1, 2, 128):  # neighbours that are so far apart afterwards: nearly Poisson
        near = (orders[:, lag:] - orders[:, :-lag]).abs() == 1
        found.append((near.sum(1).double(), 2 * (num - lag) / num, 2 * (num - lag) / num))
    for values, mean, variance in found:
        assert abs(values.mean() - mean) < 4.5 * (variance / num) ** 0.5


@pytest.mark.parametrize("num", [99, 119, 120])
def test_an_order_is_computed_for_many_batches_at_once(num, monkeypatch):
    monkeypatch.setattr(loaders, "NUM_COMPUTED", 36)
    batches = EpochBatches(num, 12, seed=0)
    asked, order = [], batches.order
    batches.order = lambda *place: asked.append(place) or order(*place)
    seen = [batch.values for batch in batches]
    for values, span in zip(seen, batches.spans(), strict=True):
        assert torch.equal(values, order(0, span.start, span.stop))
    assert torch.equal(torch.cat(seen), order(0, 0, num)) and len(asked) <= 4


CPU = torch.device("cpu")


def test_dropout_draws_the_same_masks_however_a_step_is_split_and_others_for_each_view():
    layers = [Dropout(0.3), Dropout(0.3)]

    def masks(sizes, *position):
        """Of each layer and view, and of each sample."""
        parts, first = [], 0
        for num in sizes:
            seed_dropout(layers, CPU, first, *position, num_samples=num)
            ones = torch.ones(2 * max(num, 1), 5, 7).bfloat16()  # of none there is a stand-in
            parts += [torch.cat([layer(ones).unflatten(0, (2, -1)) for layer in layers])[:, :num]]
            first += num
        return torch.cat(parts, 1)

    whole = masks([600], 1, 2, 3)
    for sizes in ([300, 300], [100, 0, 500]):
        assert torch.equal(masks(sizes, 1, 2, 3), whole)
    # Another layer, view, sample, seed, epoch or step: another mask; 42 % of two masks differ.
    others = [masks([600], *place) for place in ((0, 2, 3), (1, 0, 3), (1, 2, 0))]
    for other in (whole.roll(1, 0), whole.roll(2, 0), whole.roll(1, 1), *others):
        assert (other != whole).float().mean() == pytest.approx(0.42, abs=0.01)
    kept = whole[whole != 0]
    assert len(kept) / whole.numel() == pytest.approx(0.7, abs=0.01)  # 7 standard errors
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 0.7))


def test_dropout_outside_of_training_is_that_of_torch_and_a_wrong_call_is_refused():
    layer, ones = Dropout(0.3), torch.ones(6, 5)
    seed_dropout([layer], CPU, 0, 5, num_samples=4)
    for sentence in ("got 6 rows for a batch of 4 samples", "twice for a batch"):
        with pytest.raises(RuntimeError, match=sentence):
            layer(ones)
    assert torch.equal(layer.eval()(ones), ones)
    release_dropout([layer.train()])
    drawn = []
    for one in (layer, torch.nn.Dropout(0.3)):
        torch.manual_seed(0)
        drawn.append(one(ones))
    assert torch.equal(*drawn)
    everything = Dropout(1.0)
    seed_dropout([everything], CPU, 0, 1, num_samples=6)
    assert not everything(ones).any()


class Noisy(Dataset):
    """A sample: a random number and the sample's index."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.rand(()).item(), index


class Augmented(InMemory):
    __getitem__ = Noisy.__getitem__


ARGS = SimpleNamespace(
    batch_size=4, eval_batch_size=4, accumulate=1, num_workers=1, seed=0, drop_last=False, timeout=9
)


ROWS = datasets.Dataset.from_dict({"a": [*range(6)]}).with_transform(add_noise)
SETS = [Augmented(torch.arange(6)), Subset(Noisy(), range(6)), StackDataset(Noisy()), ROWS]


@pytest.mark.parametrize("dataset", SETS, ids=lambda dataset: type(dataset).__name__)
def test_a_random_transform_does_not_depend_on_the_batch(dataset):
    batches = WholeBatches(dataset, list, 3, torch.tensor(1))
    together = batches.make(torch.tensor([4, 2, 5]))
    assert together == [batches.make(torch.tensor([index]))[0] for index in (4, 2, 5)]


def test_samples_are_drawn_by_their_weights():
    weights = torch.arange(43) % 4
    drawn = weighted(weights, 43, 0)(0, 0, 10_000).bincount(minlength=43)
    assert drawn / 10_000 == pytest.approx(weights / weights.sum(), abs=0.007)
    assert not drawn[weights == 0].any()
