"""What must hold for whatever numbers, texts and folders there are; hypothesis looks for others."""

import argparse
import json
import math
import os
import shutil
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from conftest import posix_only
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from datakit import tables
from trainkit.draws import key, keyed_uniform
from trainkit.folder.manifest import verify, write_manifest
from trainkit.optim import make_scheduler
from trainkit.order import EpochBatches

# The same examples in every run, so that a change that has nothing to do with them cannot fail.
FIXED = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NUMBERS_63 = st.integers(0, 2**63 - 1)


@FIXED
@given(
    num_samples=st.integers(1, 200),
    num_processes=st.integers(1, 5),
    accumulate=st.integers(1, 3),
    share=st.integers(1, 7),
    drop_last=st.booleans(),
    seed=st.none() | st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 1000),
    num_done=st.integers(0, 220),
)
def test_each_sample_comes_once_in_one_order_in_every_world_and_from_every_position(
    num_samples: int,
    num_processes: int,
    accumulate: int,
    share: int,
    drop_last: bool,
    seed: int | None,
    epoch: int,
    num_done: int,
) -> None:
    batch_size = share * num_processes * accumulate
    batches = EpochBatches(
        num_samples, batch_size, seed=seed, drop_last=drop_last, accumulate=accumulate
    )
    alone = EpochBatches(num_samples, 1, seed=seed).order(epoch)
    assert alone.sort().values.tolist() == [*range(num_samples)]
    assert seed is not None or alone.tolist() == [*range(num_samples)]
    wanted = alone[: num_samples // batch_size * batch_size if drop_last else num_samples]
    batches.set_position(epoch, num_done)
    # What Accelerate gives each process.
    shards = [
        [*BatchSamplerShard(batches, num_processes, rank, split_batches=True)]
        for rank in range(num_processes)
    ]
    # No process waits for another one's batch, and to Accelerate all look full.
    assert {len(shard) for shard in shards} == {len(batches)}
    assert {len(part) for shard in shards for part in shard} <= {share}
    together = [*zip(*shards, strict=True)]
    seen = [index for parts in together for part in parts for index in part.values.tolist()]
    assert seen == wanted[num_done:].tolist()
    for parts in together:
        sizes = [len(part.values) for part in parts]
        assert sizes[0] == max(sizes) and (min(sizes) > 0 or sum(sizes) < num_processes)


def finalize(z: int) -> int:
    """The finalizer of splitmix64, in whole numbers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> shift)) * factor % 2**64
    return z ^ (z >> 31)


def splitmix64(state: int) -> int:
    return finalize((state + 0x9E3779B97F4A7C15) % 2**64)


def test_the_reference_is_splitmix64() -> None:
    states = [(1234567 + n * 0x9E3779B97F4A7C15) % 2**64 for n in range(3)]
    assert [*map(splitmix64, states)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@FIXED
@given(st.lists(NUMBERS_63, max_size=6))
def test_a_key_is_splitmix64_of_its_numbers_one_after_another(numbers: list[int]) -> None:
    assert key(*numbers) == reduce(lambda z, n: splitmix64((z + n) % 2**64), numbers, 0) >> 1


@FIXED
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.randoms(),
    st.lists(st.integers(0, 2**48), min_size=1, max_size=20),
)
def test_keyed_uniform_is_splitmix64_of_sample_and_column_in_whatever_batch(
    seed: int, epoch: int, num: int, random: object, indices: list[int]
) -> None:
    first = key(seed, epoch)
    rows = {
        index: [
            (finalize((index * num + column + first) % 2**64) >> 40) / 2**24
            for column in range(num)
        ]
        for index in indices
    }
    random.shuffle(indices)
    given_ = keyed_uniform(seed, epoch, torch.tensor(indices), num)
    assert given_.dtype == torch.float32 and given_.shape == (len(indices), num)
    assert given_.tolist() == [rows[index] for index in indices]
    assert ((given_ >= 0) & (given_ < 1)).all()


def rates(schedule: str, epochs: int, steps_per_epoch: int, **flags: float) -> list[list[float]]:
    """The learning rates of every step, and the ones after the last, of two groups of weights."""
    defaults = {"gamma": 0.9, "cosine_epochs": None, "warmup": 0.0, "min_learning_rate": 0.0}
    defaults |= {"learning_rate": 0.1, "batch_size": 1, "scale_lr": None}
    args = argparse.Namespace(schedule=schedule, epochs=epochs, **(defaults | flags))
    optimizer = two_groups()
    return stepped(
        optimizer,
        epochs * steps_per_epoch - (schedule == "onecycle"),
        make_scheduler(optimizer, args, steps_per_epoch),
    )


def two_groups() -> torch.optim.Optimizer:
    weights = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (0.01, 2.0)]
    return torch.optim.SGD(weights)


def stepped(
    optimizer: torch.optim.Optimizer, steps: int, *schedulers: lr_scheduler.LRScheduler
) -> list[list[float]]:
    values = [[group["lr"] for group in optimizer.param_groups]]
    for _ in range(steps):
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        values.append([group["lr"] for group in optimizer.param_groups])
    return values


def same(ours: list[list[float]], theirs: list[list[float]]) -> None:
    # torch multiplies step by step, which loses digits where a cosine is nearly 0.
    assert np.array(ours) == pytest.approx(np.array(theirs), rel=1e-7, abs=1e-12)


@FIXED
@given(
    st.sampled_from(["constant", "exponential", "cosine", "exponential+cosine"]),
    st.integers(1, 12),
    st.integers(1, 4),
    st.floats(0.3, 1),
    st.none() | st.integers(1, 14),
)
def test_at_each_epoch_the_rates_are_those_of_pytorchs_schedulers_stepped_together(
    schedule: str, epochs: int, steps_per_epoch: int, gamma: float, cosine_epochs: int | None
) -> None:
    optimizer, schedulers = two_groups(), []
    if "exponential" in schedule:
        schedulers.append(lr_scheduler.ExponentialLR(optimizer, gamma))
    if "cosine" in schedule:
        schedulers.append(lr_scheduler.CosineAnnealingLR(optimizer, cosine_epochs or epochs))
    ours = rates(schedule, epochs, steps_per_epoch, gamma=gamma, cosine_epochs=cosine_epochs)
    assert len(ours) == epochs * steps_per_epoch + 1
    same(ours[::steps_per_epoch], stepped(optimizer, epochs, *schedulers))


@FIXED
@given(st.integers(1, 10), st.integers(1, 5), st.integers(0, 99))
def test_within_an_epoch_cosine_and_onecycle_are_pytorchs(
    epochs: int, steps_per_epoch: int, warmup: int
) -> None:
    optimizer, steps = two_groups(), epochs * steps_per_epoch
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, steps)
    same(rates("cosine", epochs, steps_per_epoch), stepped(optimizer, steps, cosine))
    assume(warmup * steps != 100)  # torch divides by 0
    ours = rates("onecycle", epochs, steps_per_epoch, warmup=warmup / 100)
    optimizer = two_groups()
    onecycle = lr_scheduler.OneCycleLR(
        optimizer, [0.01, 2.0], steps, pct_start=warmup / 100, cycle_momentum=False
    )
    theirs = stepped(optimizer, steps - 1, onecycle)
    assert np.array(ours) == pytest.approx(np.array(theirs), rel=1e-5, abs=1e-8)


@FIXED
@given(
    st.sampled_from(["constant", "exponential", "cosine", "exponential+cosine"]),
    st.integers(1, 10),
    st.integers(1, 6),
    st.integers(0, 99),
)
def test_a_warmup_multiplies_by_a_line_up_to_1(
    schedule: str, epochs: int, steps_per_epoch: int, warmup: int
) -> None:
    num = math.ceil(warmup / 100 * epochs * steps_per_epoch)
    ours = rates(schedule, epochs, steps_per_epoch, warmup=warmup / 100)
    plain = rates(schedule, epochs, steps_per_epoch)
    line = np.minimum(1, (np.arange(len(plain)) + 1) / max(num, 1))[:, None]
    same(ours, line * np.array(plain))


@pytest.mark.parametrize(("epochs", "warmup"), [(4, 0.25), (2, 0.5), (1, 0.0), (1, 0.9)])
@pytest.mark.parametrize("schedule", ["onecycle", "cosine", "exponential+cosine", "constant"])
def test_no_run_is_too_short_for_a_schedule(schedule: str, epochs: int, warmup: float) -> None:
    values = np.array(rates(schedule, epochs, 1, warmup=warmup))
    assert (np.isfinite(values) & (values >= 0) & (values <= [0.0101, 2.02])).all()


# No "": an empty cell is a missing value. No "NA": pandas reads that as one.
TEXTS = st.text("abzÄß 019,;|\t'\"=.-", min_size=1, max_size=6).map("{}x".format)
COLUMN = st.sampled_from(["text", "number"])


@FIXED
@given(st.data(), st.lists(COLUMN, min_size=2, max_size=4), st.integers(2, 12))
def test_a_table_is_written_read_encoded_and_decoded_to_itself(
    tmp_path: Path, data: st.DataObject, kinds: list[str], size: int
) -> None:
    numbers = st.floats(-1e38, 1e38)
    table = pd.DataFrame(
        {
            f"{kind} {i}": data.draw(
                st.lists(TEXTS if kind == "text" else numbers, min_size=size, max_size=size)
            )
            for i, kind in enumerate(kinds)
        }
    )
    separator = data.draw(st.sampled_from(",;\t|"))
    encoding = data.draw(st.sampled_from(["utf-8", "utf-8-sig", "latin-1", "utf-16"]))
    # Each row twice: a text that is in one row alone is no category.
    table = pd.concat([table, table], ignore_index=True)
    path = tmp_path / "table.csv"
    path.write_bytes(table.to_csv(index=False, sep=separator).encode(encoding))
    known = None if encoding.startswith("utf-8") else encoding
    read = tables.read_table(str(path), "here", encoding=known)  # the separator is recognised
    texts = [name for name in table if "text" in name]
    args = SimpleNamespace(features=[*table], categorical=texts, missing="refuse")
    rows = np.arange(len(read))
    learned = [tables.learn_column(read[name], rows, args) for name in read]
    columns = [column for column in learned if isinstance(column, tables.Column)]
    varying = [name for name in table if table[name].nunique() > 1]
    assert [column.name for column in columns if column] == varying
    saved = json.loads(json.dumps([vars(column) for column in columns if column]))
    columns = [tables.Column(**column) for column in saved]
    assume(columns)
    encoded, problems = tables.encode(read, columns)
    assert not problems
    assert encoded.dtype == np.float64
    for column in columns:
        block, encoded = np.split(encoded, [len(column.feature_names())], axis=1)
        if column.categories is None:
            assert block[:, 0].tolist() == table[column.name].tolist()
        else:
            assert (block.sum(1) == 1).all()
            said = [column.categories[place] for place in block.argmax(1)]
            assert said == table[column.name].tolist()
    assert encoded.shape == (2 * size, 0)


NAMES = ("trainer.json", "state/model.safetensors", "state/optimizer.bin", "state/scheduler.bin")


def tmp_of(file: Path) -> Path:
    """The folder that the checkpoint is in."""
    return next(folder.parent for folder in file.parents if folder.name.startswith("step-"))


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place // 8 % len(content)] ^= 1 << place % 8
    file.write_bytes(content)


def link(file: Path, place: int) -> None:
    folder = file.parent if place % 2 and file.parent.name == "state" else file
    kept = tmp_of(file) / "kept"
    folder.rename(kept)
    folder.symlink_to(kept)


CHANGES: dict[str, Callable[[Path, int], object]] = {
    "a bit": flip,
    "cut": lambda file, place: os.truncate(file, place % file.stat().st_size),
    "longer": lambda file, place: file.write_bytes(file.read_bytes() + bytes([place % 256])),
    "gone": lambda file, place: file.unlink(),
    "another name": lambda file, place: file.rename(f"{file}{place}"),
    "moved": lambda file, place: file.rename(file.parents[1] / f"model_{place}.safetensors"),
    "beside another": lambda file, place: shutil.copy(file, f"{file}.{place}"),
    "linked": link,
    "a link beside": lambda file, place: (file.parent / f"more{place}").symlink_to("/"),
    "a folder": lambda file, place: (file.unlink(), file.mkdir()),
    "a pipe": lambda file, place: (file.unlink(), os.mkfifo(file)),
    "another step": lambda file, place: file,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "step-0000000012"
    (folder / "state").mkdir(parents=True)
    for number, name in enumerate(NAMES):
        (folder / name).write_bytes(bytes(range(7 + number)))
    write_manifest(folder, 12)
    return folder


@posix_only  # links and pipes
@settings(FIXED, max_examples=120)
@given(
    st.sampled_from([*NAMES, "MANIFEST.json"]),
    st.sampled_from(sorted(CHANGES)),
    st.integers(0, 2**13),
)
def test_every_single_change_of_a_checkpoint_is_found(
    whole: Path, tmp_path: Path, name: str, change: str, place: int
) -> None:
    folder = tmp_path / ("step-0000000013" if change == "another step" else whole.name)
    shutil.copytree(whole, folder)
    try:
        assert change == "another step" or verify(folder) is None
        CHANGES[change](folder / name, place)
        said = verify(folder)
        assert said is not None and "\n" not in said
    finally:
        shutil.rmtree(folder)
        for kept in tmp_path.iterdir():
            shutil.rmtree(kept) if kept.is_dir() else kept.unlink()
