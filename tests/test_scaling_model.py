"""The cost model: consistent with what it was given and with itself."""

from itertools import pairwise

import pytest

from benchmarks import scaling_model as model

CONSTANTS = {
    "format": 1,
    "num_cores": 2,
    "steps": [{"batch_size": 32, "seconds": 0.010}, {"batch_size": 128, "seconds": 0.034}],
    "slowdown_on_all_cores": 1.1,
    "distributed_overhead": 0.003,
    "all_reduce": [{"bytes": 2**12, "seconds": 0.0002}, {"bytes": 2**22, "seconds": 0.005}],
}


def test_the_cpu_model_gives_back_the_measured_step_and_adds_what_processes_cost() -> None:
    one, two, four = (model.cpu_step_seconds(CONSTANTS, n) for n in (1, 2, 4))
    assert one == pytest.approx(0.034)
    per_byte = (0.005 - 0.0002) / (2**22 - 2**12)
    reduce = 4 * 215_194 * per_byte + 2 * (0.0002 - 2**12 * per_byte)  # bytes, latency twice
    assert two == pytest.approx((0.002 + 64 * 0.00025) * 1.1 + reduce + 0.003)
    assert four > two  # they share two cores


def test_no_checkpoint_interval_keeps_more_work_than_the_computed_one() -> None:
    for save, mean_time_to_failure in ((12, 18_000), (60, 7200)):
        best = model.checkpoint_interval(save, mean_time_to_failure)
        kept = model.simulate(best, save, 60, mean_time_to_failure)
        for factor in (0.3, 3):
            assert model.simulate(best * factor, save, 60, mean_time_to_failure) < kept


def test_more_gpus_give_more_samples_at_a_smaller_useful_fraction() -> None:
    rows = model.predict(model.CLUSTER)
    assert len(rows) == 12
    for smaller, larger in pairwise(rows):
        if smaller["model"] == larger["model"]:
            assert smaller["samples/s"] < larger["samples/s"]
            assert 0 < larger["useful"] < smaller["useful"] < 1
