"""Numbers depend on nothing that a resume does not compare, and what draws otherwise is named."""

import copy
import itertools
import random
import sys

from trainkit import keyed_normal, keyed_uniform

import datasets
import numpy as np
import pytest
import torch
from conftest import refused
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from trainkit.checkpoints.hashing import hash_fixed, held_in_memory
from trainkit.config import TrainingConfig
from trainkit.launch.nodes import hash_sources
from trainkit.numbers import randoms
from trainkit.numbers.loaders import EpochBatches
from trainkit.run.data import check_data


def test_two_uses_with_another_seed_epoch_num_or_stream_share_no_numbers():
    def numbers(*more, draw=keyed_uniform, num=3, seed=0, epoch=0):
        return draw(seed, epoch, torch.arange(6000 // num), num, *more).flatten()

    uses = [numbers(num=num) for num in (1, 2, 3, 4, 64, 784)]
    uses += [numbers(stream) for stream in (0, 3, "3", "0", "None", "view")]
    uses += [numbers(seed=1), numbers(epoch=1)]
    normal = [numbers(draw=keyed_normal), numbers("view", draw=keyed_normal)]
    uses += [(1 + torch.erf(values / 2**0.5)) / 2 for values in normal]
    assert all(len(use.unique()) > len(use) - 15 for use in uses)
    for one, other in itertools.combinations(uses, 2):
        assert len(np.intersect1d(one, other)) < 15  # 2 by chance, as 24 bits have 2**24 values
    assert torch.equal(numbers(np.int64(3)), numbers(3))
    with pytest.raises(TypeError):
        numbers(0.5)


def test_keyed_normal_is_normal_and_the_same_in_whatever_batch():
    indices = torch.arange(50_000)
    values = keyed_normal(1, 2, indices, 4)
    for power, moment in enumerate((0, 1, 0, 3), 1):  # 6 standard errors of the fourth
        assert (values.double() ** power).mean().item() == pytest.approx(moment, abs=0.13)
    assert np.corrcoef(values.T) == pytest.approx(np.eye(4), abs=0.03)  # 6 standard errors
    assert torch.equal(keyed_normal(1, 2, indices[[7, 3]], 4), values[[7, 3]])


def batches_of_epoch(num_processes=1, num=1000, size=40):
    """The indices that a process has in each batch, which are slices of an order."""
    batches = EpochBatches(num, size, seed=3)
    slots = size // num_processes
    for batch in batches:
        yield batch[slots * (num_processes - 1) : slots * num_processes].values


@pytest.mark.parametrize("draw", [keyed_uniform, keyed_normal])
@pytest.mark.parametrize("num_processes", [1, 2, 8])
def test_numbers_drawn_for_many_batches_at_once_are_those_of_each_batch(
    num_processes, draw, monkeypatch
):
    calls = []
    bits = randoms._bits
    monkeypatch.setattr(randoms, "_bits", lambda *given: calls.append(given) or bits(*given))
    for epoch in range(2):
        for indices in batches_of_epoch(num_processes):
            for stream in (None, "view"):
                drawn = draw(1, epoch, indices, 3, stream)
                assert torch.equal(drawn, draw(1, epoch, indices.clone(), 3, stream))
                drawn.zero_()  # a script may change what it gets
    of_batches = [given for given in calls if len(given[1]) <= 40 // num_processes]
    assert len(calls) - len(of_batches) == 4  # two streams and two epochs
    assert len(of_batches) == 100  # of the copies


class Pairs(Dataset):
    """A number with noise from `draw`, and a label."""

    def __init__(self, draw, num=2000, changed=-1):
        self.draw, self.labels = draw, torch.arange(num) % 7
        self.labels[changed : changed + num // 100] += 1

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"x": index + self.draw(), "label": self.labels[index]}


def seeded() -> float:
    return torch.rand(()).item() + np.random.rand() + random.random()


def own() -> float:
    return own.generator.normal()


own.generator = np.random.default_rng()


@pytest.fixture
def check(accelerator):
    config = TrainingConfig()
    return lambda train, held_out=None: check_data(accelerator, config, train, held_out or [0, 1])


def test_what_a_generator_of_its_own_draws_is_left_out_of_the_fingerprint(check):
    assert check(Pairs(seeded)) == check(Pairs(seeded)) != check(Pairs(lambda: 0.0))
    fingerprint = check([0, 1], Pairs(own))
    own.generator = np.random.default_rng()
    assert check([0, 1], Pairs(own)) == fingerprint
    assert check([0, 1], Pairs(own, changed=280)) != fingerprint  # the labels are compared
    assert check(Subset(Pairs(lambda: torch.tensor(own())), range(50)))


ROWS = [{"ids": list(range(n % 5)), "text": f"{n}" if n % 3 else None} for n in range(4000)]


def fingerprint(dataset) -> str:
    return "".join(held_in_memory(dataset))


def test_a_set_in_memory_is_compared_whole():
    tensors = [(torch.full((3,), n), n) for n in range(3000)]
    changed = [*tensors[:1234], (torch.tensor([1234, 1234, 0]), 1234), *tensors[1235:]]
    other = [*ROWS[:1999], {"ids": [7], "text": "x"}, *ROWS[2000:]]
    table = datasets.Dataset.from_list
    parts = datasets.concatenate_datasets([table(ROWS[:77]), table(ROWS[77:])])
    assert fingerprint(parts) == fingerprint(table(ROWS)) == fingerprint(parts.select(range(4000)))
    order = [1, 0, *range(2, 4000)]
    sets = [
        *(tensors, changed, ROWS, other, table(ROWS), table(other), parts.select(order)),
        *(np.arange(9), np.arange(9.0), torch.arange(9), torch.arange(9).bfloat16()),
        *(Subset(tensors, order), ConcatDataset([tensors, changed])),
    ]
    assert len({*map(fingerprint, sets)}) == len(sets)


def test_modules_and_files_are_known_by_their_content(tmp_path):
    half = nn.Linear(2, 2).bfloat16()
    copied = copy.deepcopy(half)
    assert hash_fixed("teacher", half) == hash_fixed("teacher", copied)
    copied.bias.data[1] += 1
    assert hash_fixed("teacher", half) != hash_fixed("teacher", copied)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("1")
    hashes = {hash_fixed("a", tmp_path), hash_fixed("a", tmp_path / "b")}
    (tmp_path / "a" / "b").write_text("1")
    assert len(hashes | {hash_fixed("a", str(tmp_path))}) == 3
    with refused(r"fixed\['a'\] = .*missing', where no file is"):
        hash_fixed("a", tmp_path / "missing")


def test_the_sources_of_a_run_are_the_script_what_lies_beside_it_and_the_kit(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import beside_mine")
    (tmp_path / "beside_mine.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "mine.py")])
    __import__("beside_mine")
    before = hash_sources()
    assert {"mine.py", "beside_mine.py", "trainkit/numbers/randoms.py"} <= before.keys()
    (tmp_path / "beside_mine.py").write_text("x = 2")
    assert {name for name, _ in before.items() ^ hash_sources().items()} == {"beside_mine.py"}
