"""Numbers depend on nothing that a resume does not compare, and what draws otherwise is named."""

import hashlib
import random
import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

from trainkit import rng

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import forget_accelerator
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from trainkit.checks.content import hash_fixed, held_in_memory, sample_parts, text_of
from trainkit.checks.data import check_data, random_collation, random_parts
from trainkit.config import MayChange, TrainingConfig
from trainkit.errors import UsageError
from trainkit.fingerprint import compare_sources
from trainkit.launch.nodes import loaded_sources
from trainkit.loaders import InMemory, WholeBatches, make_loaders
from trainkit.rng import Dropout, keyed_normal, keyed_uniform, seed_dropout
from trainkit.run import Run

CPU = torch.device("cpu")


def numbers_of(draw, num, *more, seed=0, epoch=0) -> torch.Tensor:
    return draw(seed, epoch, torch.arange(6000 // num), num, *more).flatten()


def test_two_uses_with_another_seed_epoch_num_or_stream_share_no_numbers():
    uses = [numbers_of(keyed_uniform, num) for num in (1, 2, 3, 4, 64, 784)]
    uses += [numbers_of(keyed_uniform, 3, stream) for stream in (0, 3, "3", "0", "None", "view")]
    uses += [numbers_of(keyed_uniform, 3, seed=1), numbers_of(keyed_uniform, 3, epoch=1)]
    normal = [numbers_of(keyed_normal, 3), numbers_of(keyed_normal, 3, "view")]
    uses += [(1 + torch.erf(values / 2**0.5)) / 2 for values in normal]
    for one, other in combinations(uses, 2):
        both = np.intersect1d(one.numpy(), other.numpy())
        assert len(both) < 15  # 2 by chance, as 24 bits have 2**24 values
    same = keyed_uniform(0, 0, torch.arange(4), 3, np.int64(3))
    assert torch.equal(same, keyed_uniform(0, 0, torch.arange(4), 3, 3))
    with pytest.raises(TypeError):
        keyed_uniform(0, 0, torch.arange(4), 3, 0.5)


@pytest.mark.parametrize("bits", [0, 2**24 - 1])
def test_the_first_and_last_numbers_lie_within_the_open_interval(bits, monkeypatch):
    monkeypatch.setattr(rng, "_bits", lambda *_: torch.tensor([bits]))
    uniform = keyed_uniform(0, 0, torch.arange(1), 1)
    assert 0 < uniform < 1 and torch.erfinv(2 * uniform - 1).isfinite()
    assert keyed_normal(0, 0, torch.arange(1), 1).abs().item() == pytest.approx(5.42, abs=0.01)


def test_keyed_normal_is_normal_and_the_same_in_whatever_batch():
    indices = torch.arange(50_000)
    values = keyed_normal(1, 2, indices, 4)
    for power, moment in enumerate((0, 1, 0, 3), 1):  # 6 standard errors of the fourth
        assert (values.double() ** power).mean().item() == pytest.approx(moment, abs=0.13)
    assert np.corrcoef(values.T) == pytest.approx(np.eye(4), abs=0.03)  # 6 standard errors
    assert torch.equal(keyed_normal(1, 2, indices[[7, 3]], 4), values[[7, 3]])


def test_dropout_has_a_mask_for_each_view_of_a_sample_in_whatever_process_it_is():
    layer, views = Dropout(0.3), 3

    def mask(first: int, num: int, num_samples: int | None = None) -> torch.Tensor:
        seed_dropout(
            [layer], CPU, first, 5, num_samples=num if num_samples is None else num_samples
        )
        return layer(torch.ones(views * num, 4, 5)).unflatten(0, (views, num)) != 0

    whole = mask(0, 10)
    assert torch.equal(torch.cat((mask(0, 7), mask(7, 3)), 1), whole)
    mask(10, 1, num_samples=0)  # the sample that stands in where there is none
    for one, other in combinations([*whole, *whole.unbind(1)], 2):
        assert one.shape != other.shape or (one != other).float().mean() > 0.2  # 0.42 expected
    seed_dropout([layer], CPU, 0, 5, num_samples=4)
    with pytest.raises(RuntimeError, match="got 6 rows for a batch of 4 samples"):
        layer(torch.ones(6, 2))


class Pairs(Dataset):
    """A number with noise from `draw`, and a label."""

    def __init__(self, draw, num=2000, changed=-1):
        self.draw, self.labels = draw, torch.arange(num) % 7
        self.labels[changed : changed + num // 100] += 1

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"x": index + self.draw(), "label": self.labels[index]}


class AtOnce(Pairs):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def seeded() -> float:
    return torch.rand(()).item() + np.random.rand() + random.random()


def own() -> float:
    return own.generator.normal()


own.generator = np.random.default_rng()


@pytest.fixture
def check(accelerator):
    config = TrainingConfig()
    return lambda train, held_out=None: check_data(accelerator, config, train, held_out or [0, 1])


def test_what_a_generator_of_its_own_draws_is_named_and_left_out_of_the_fingerprint(check):
    known, plan = check(Pairs(seeded))
    assert not plan and check(Pairs(seeded))[0] == known
    fingerprint, plan = check([0, 1], Pairs(own))
    (line,) = plan.values()
    assert list(plan) == ["random evaluation"]
    assert "['x'] of a sample of the evaluation set" in line and "torch.initial_seed()" in line
    own.generator = np.random.default_rng()
    assert check([0, 1], Pairs(own))[0] == fingerprint
    assert check([0, 1], Pairs(own, changed=500))[0] != fingerprint  # the labels are compared
    whole = Subset(Pairs(lambda: torch.tensor(own())), range(50))
    assert random_parts(whole) == {"['x']"}


def test_a_set_that_draws_for_several_samples_at_once_is_named(check):
    assert "__getitems__ draws for several samples" in check(AtOnce(seeded))[1]["random training"]
    assert not check(AtOnce(lambda: 0.0))[1]


def test_a_random_transform_of_a_dataset_does_not_depend_on_the_batch(check):
    def transform(rows):
        noise = torch.rand(len(rows["a"])).tolist()
        return {"a": [value + each for value, each in zip(rows["a"], noise, strict=True)]}

    rows = datasets.Dataset.from_dict({"a": list(range(400))}).with_transform(transform)
    batches = WholeBatches(rows, list, 3, torch.tensor(1))
    together = batches.make(torch.tensor([4, 2, 5]))
    assert together == [batches.make(torch.tensor([index]))[0] for index in (4, 2, 5)]
    known, plan = check(rows)
    assert not plan and known == check(rows)[0]
    other = rows.with_transform(lambda rows: {"a": [-value for value in rows["a"]]})
    assert check(other)[0] != known


def masked(samples):
    x = torch.tensor([sample["x"] for sample in samples])
    hidden = torch.rand(x.shape) < 0.3
    return {"x": torch.where(hidden, 0.0, x), "size": len(samples)}


def emptied(samples):
    return torch.tensor([sample.pop("x") for sample in samples])


def test_a_collate_fn_that_draws_is_named_and_the_seeds_go_on_as_before(accelerator):
    def line(dataset, collate_fn=None):
        accelerator.free_memory()
        make = make_loaders(accelerator, dataset, dataset, TrainingConfig(), collate_fn)
        accelerator.prepare(*make)
        torch.manual_seed(5)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        plan = random_collation(accelerator)
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
        return plan.get("collate_fn", "")

    assert "random numbers for ['x'] of a batch" in line(Pairs(lambda: 0.0), masked)
    for quiet in (emptied, None, list):
        assert not line(Pairs(seeded, 5), quiet)
    assert not line(Pairs(own), emptied)  # the set is named, not what makes batches of it
    assert not line(InMemory(torch.arange(5)), masked)  # not called


ROWS = [{"ids": list(range(n % 5)), "text": f"{n}" if n % 3 else None} for n in range(4000)]


def fingerprint(dataset) -> str:
    texts = held_in_memory(dataset)
    return hashlib.md5("".join(texts).encode()).hexdigest()


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


def test_what_lies_in_files_is_not_read_whole(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(9))
    assert held_in_memory(np.load(tmp_path / "a.npy", mmap_mode="r")) is None
    assert held_in_memory(Pairs(seeded)) is held_in_memory(Subset(Pairs(seeded), [0])) is None

    def pictures(cells):
        features = datasets.Features({"image": datasets.Image()})
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        return datasets.Dataset(
            pa.table({"image": pa.array(cells, kind)}).cast(features.arrow_schema)
        )

    assert held_in_memory(pictures([{"bytes": None, "path": "/a.png"}])) is None
    stored = [pictures([{"bytes": b"1", "path": path}]) for path in ("/a.png", "/b.png")]
    assert fingerprint(stored[0]) == fingerprint(stored[1])


class Graph:
    def __init__(self, edges):
        self.edges, self.owner = edges, self


def test_objects_are_compared_by_what_they_hold_and_not_by_where():
    one, same, other = (SimpleNamespace(x=torch.tensor(n), f=len, g=object()) for n in (1, 1, 2))
    assert text_of([one]) == text_of([same]) != text_of([other])
    assert text_of({"a": {3, 1}, "b": b"x"}) == text_of({"a": {1, 3}, "b": b"x"})
    assert "0x" not in text_of(Graph(torch.ones(2)))  # a circle
    assert sample_parts((1, "a")) == {"[0]": "1", "[1]": '"a"'} and sample_parts([1]) == {"": "[1]"}


def test_modules_and_files_are_known_by_their_content(tmp_path):
    half = nn.Linear(2, 2).bfloat16()
    copied = nn.Linear(2, 2).bfloat16()
    copied.load_state_dict(half.state_dict())
    assert hash_fixed("teacher", half) == hash_fixed("teacher", copied)
    copied.bias.data[1] += 1
    assert hash_fixed("teacher", half) != hash_fixed("teacher", copied)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("1")
    hashes = {hash_fixed("a", tmp_path), hash_fixed("a", tmp_path / "b")}
    (tmp_path / "a" / "b").write_text("1")
    assert len(hashes | {hash_fixed("a", str(tmp_path))}) == 3
    with pytest.raises(UsageError, match=r"fixed\['a'\] = .*missing', where no file is"):
        hash_fixed("a", tmp_path / "missing")


@dataclass
class Config(TrainingConfig):
    place: MayChange[str] = "here"


def teach(run_dir: Path, teacher: nn.Module, metadata: dict[str, str], **values: str) -> None:
    """A run of 2 steps that has a teacher, and goes on if it has begun before."""
    forget_accelerator()
    config = Config(
        run_dir=run_dir, epochs=1, batch_size=4, resume="auto", pictures=False, **values
    )
    with Run(config, "test") as run:
        data = InMemory(torch.arange(8.0).view(8, 1))
        loaders = make_loaders(run.accelerator, *run.load(lambda _: (data, data)), config)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        prepared = run.accelerator.prepare(model, optimizer, *loaders)
        run.begin(prepared[0], metadata, fixed={"teacher": teacher})
        train(run, *prepared)


def train(run, model, optimizer, train_loader, eval_loader) -> None:
    def losses(batch):
        return {"loss": model(batch[0]).square()[:, 0]}

    for _ in run.epochs():
        for batch in run.steps(train_loader):
            with run.accelerator.accumulate(model):
                run.accelerator.backward(run.step_mean(losses(batch)["loss"]))
                run.clip_and_check(optimizer)
                optimizer.step()
                optimizer.zero_grad()
            if run.end_step():
                run.save()
        run.end_epoch(run.evaluate(eval_loader, losses))
    run.finish()


def test_a_resume_with_another_teacher_or_other_metadata_is_refused_by_name(tmp_path):
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    teach(tmp_path, one, {"place": "a"})
    teach(tmp_path, one, {"place": "a"}, place="there")
    with pytest.raises(UsageError, match=r"belongs to another run: fixed\[teacher\] is"):
        teach(tmp_path, other, {"place": "a"})
    with pytest.raises(UsageError, match=r"belongs to another run: metadata\[place\] is"):
        teach(tmp_path, one, {"place": "b"})


def test_a_source_that_has_changed_is_named(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import beside_mine")
    (tmp_path / "beside_mine.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "mine.py")])
    __import__("beside_mine")
    before = loaded_sources()
    assert {"mine.py", "beside_mine.py", "trainkit/rng.py"} <= before.keys()
    assert not [*compare_sources(before, loaded_sources())]
    (tmp_path / "beside_mine.py").write_text("x = 2")
    (notice,) = compare_sources(before, loaded_sources())
    assert notice.startswith("beside_mine.py differs from what wrote this checkpoint")
    assert not [*compare_sources({}, before)]  # a checkpoint from before this was noted
