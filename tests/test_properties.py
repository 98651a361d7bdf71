"""What must hold for whatever numbers, texts and folders there are; hypothesis looks for others."""

import math
import shutil
from functools import partial, reduce

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard
from conftest import posix_only
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from trainkit.config import TrainingConfig
from trainkit.numbers.loaders import EpochBatches
from trainkit.numbers.optim import make_scheduler
from trainkit.numbers.randoms import key
from trainkit.store.manifest import make_durable, verify, write_manifest

# The same examples in every run, so that a change that has nothing to do with them cannot fail.
FIXED = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=40,
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
    num_done=st.integers(0, 220),
)
def test_each_sample_comes_once_in_one_order_in_every_world_and_from_every_position(
    num_samples, num_processes, accumulate, share, drop_last, seed, num_done
):
    batch_size = share * num_processes * accumulate
    batches = EpochBatches(
        num_samples, batch_size, seed=seed, drop_last=drop_last, accumulate=accumulate
    )
    alone = EpochBatches(num_samples, 1, seed=seed).order(7)
    assert alone.sort().values.tolist() == [*range(num_samples)]
    assert seed is not None or alone.tolist() == [*range(num_samples)]
    wanted = alone[: num_samples // batch_size * batch_size if drop_last else num_samples]
    batches.set_position(7, num_done)
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


def finalize(z):
    """The finalizer of splitmix64, in whole numbers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> shift)) * factor % 2**64
    return z ^ (z >> 31)


def splitmix64(state):
    return finalize((state + 0x9E3779B97F4A7C15) % 2**64)


@FIXED
@given(st.lists(NUMBERS_63, max_size=6))
def test_a_key_is_splitmix64_of_its_numbers_one_after_another(numbers):
    assert splitmix64(1234567) == 6457827717110365317  # as published
    assert key(*numbers) == reduce(lambda z, n: splitmix64((z + n) % 2**64), numbers, 0) >> 1


def rates(schedule, epochs, steps_per_epoch, **flags) -> np.ndarray:
    """The learning rates of every step, and the ones after the last, of two groups of weights."""
    args = TrainingConfig(schedule=schedule, epochs=epochs, learning_rate=0.1, **flags)
    optimizer = two_groups()
    steps = epochs * steps_per_epoch - (schedule == "onecycle")
    return stepped(optimizer, steps, make_scheduler(optimizer, args, steps_per_epoch))


def two_groups():
    weights = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (0.01, 2.0)]
    return torch.optim.SGD(weights)


def stepped(optimizer, steps, *schedulers) -> np.ndarray:
    """The rates after each step."""
    values = [[group["lr"] for group in optimizer.param_groups]]
    for _ in range(steps):
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        values.append([group["lr"] for group in optimizer.param_groups])
    return np.array(values)


# torch multiplies step by step, which loses digits where a cosine is nearly 0.
same = partial(np.testing.assert_allclose, rtol=1e-7, atol=1e-12)
PLAIN = st.sampled_from(["constant", "exponential", "cosine", "exponential+cosine"])
EPOCHS, STEPS, PERCENT = st.integers(1, 10), st.integers(1, 5), st.integers(0, 99)


@FIXED
@given(PLAIN, EPOCHS, STEPS, st.floats(0.3, 1), st.none() | st.integers(1, 14))
def test_at_each_epoch_the_rates_are_those_of_pytorchs_schedulers_stepped_together(
    schedule, epochs, steps_per_epoch, gamma, cosine_epochs
):
    assume(schedule == "cosine" or (cosine_epochs or epochs) >= epochs)  # torch restarts the factor
    optimizer, schedulers = two_groups(), []
    if "exponential" in schedule:
        schedulers.append(lr_scheduler.ExponentialLR(optimizer, gamma))
    if "cosine" in schedule:
        schedulers.append(lr_scheduler.CosineAnnealingLR(optimizer, cosine_epochs or epochs))
    ours = rates(schedule, epochs, steps_per_epoch, gamma=gamma, cosine_epochs=cosine_epochs)
    same(ours[::steps_per_epoch], stepped(optimizer, epochs, *schedulers))


@FIXED
@given(EPOCHS, STEPS, PERCENT)
def test_at_each_step_the_rates_of_onecycle_are_pytorchs(epochs, steps_per_epoch, warmup):
    steps = epochs * steps_per_epoch
    ours = rates("onecycle", epochs, steps_per_epoch, warmup=warmup / 100)
    assert (np.isfinite(ours) & (ours >= 0)).all()
    assume(warmup * steps != 100)  # torch divides by 0
    optimizer = two_groups()
    onecycle = lr_scheduler.OneCycleLR(
        optimizer, [0.01, 2.0], steps, pct_start=warmup / 100, cycle_momentum=False
    )
    same(ours, stepped(optimizer, steps - 1, onecycle), rtol=1e-5, atol=1e-8)


@FIXED
@given(EPOCHS, STEPS, PERCENT, PERCENT)
def test_linear_and_decay_fall_by_a_line_that_ends_with_the_run(
    epochs, steps_per_epoch, warmup, decay
):
    """linear is transformers' schedule; --decay is that line in its share of the steps alone."""
    steps = epochs * steps_per_epoch
    plain, left = (
        rates("constant", epochs, steps_per_epoch, warmup=warmup / 100),
        steps - np.r_[: steps + 1],
    )
    start = math.ceil(warmup / 100 * steps)
    linear = rates("linear", epochs, steps_per_epoch, warmup=warmup / 100)
    if start < steps:
        same(linear[start:], plain[start] * left[start:, None] / (steps - start))
    same(linear[:start], plain[:start])
    num = math.ceil(decay / 100 * steps)
    decayed = rates("constant", epochs, steps_per_epoch, warmup=warmup / 100, decay=decay / 100)
    same(decayed, plain * np.minimum(1, left / num)[:, None] if num else plain)


@FIXED
@given(PLAIN, EPOCHS, STEPS, PERCENT)
def test_a_warmup_multiplies_by_a_line_up_to_1(schedule, epochs, steps_per_epoch, warmup):
    num = math.ceil(warmup / 100 * (epochs * steps_per_epoch))  # in this order, as it rounds
    plain = rates(schedule, epochs, steps_per_epoch)
    line = np.minimum(1, (np.arange(len(plain)) + 1) / max(num, 1))[:, None]
    same(rates(schedule, epochs, steps_per_epoch, warmup=warmup / 100), line * plain)


@posix_only  # links
def test_every_change_of_a_file_of_a_checkpoint_is_found(tmp_path):
    changes = {
        "a bit": lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1, *range(1, 7)])),
        "longer": lambda file: file.write_bytes(file.read_bytes() + b"0"),
        "gone": lambda file: file.unlink(),
        "a link": lambda file: file.rename(tmp_path / "x") and file.symlink_to(tmp_path / "x"),
    }
    for name in ("trainer.json", "state/model.safetensors", "state/optimizer.bin"):
        for change in changes.values():
            folder = tmp_path / "step-0000000012"
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "state").mkdir(parents=True)
            for file in ("trainer.json", "state/model.safetensors", "state/optimizer.bin"):
                (folder / file).write_bytes(bytes(range(7)))
            write_manifest(folder, make_durable(folder, 0))
            assert verify(folder) is None
            change(folder / name)
            said = verify(folder)
            assert said is not None and "\n" not in said
