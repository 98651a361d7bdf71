"""--profile: the numbers stay, the trace opens, and the sentence names what limits a step."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DynamoBackend
from conftest import ROOT
from loops import changed
from loss_scale import scaled_float32

import trainkit.run.session
from trainkit.run import profile

SMALL = ["--num-samples", 250, "--epochs", 4, "--batch-size", 10, "--no-pictures"]


@pytest.mark.parametrize(
    ("world", "more", "num"),
    [
        (2, [], 4),
        (1, ["--accumulate", 2, "--num-workers", 1], 4),
        (1, ["--batch-size", 50], 3),  # an epoch ends before all steps are profiled
    ],
    ids=["2 processes", "accumulate and workers", "short epochs"],
)
def test_a_profile_changes_no_number_and_leaves_a_trace(world, more, num, tmp_path, fork_main):
    out = {}
    for name, flags in {"with": ["--profile", 4], "without": []}.items():
        words = [*SMALL, *more, *flags, "--run-dir", tmp_path / name]
        done = fork_main("train_regression.py", *words, world=world)
        assert done.codes == [0] * world, done.output
        out[name] = done.output
    for file in ("metrics.jsonl", "model.safetensors"):
        assert (tmp_path / "with" / file).read_bytes() == (tmp_path / "without" / file).read_bytes()
    assert f"profile      of {num} steps; " in out["with"]
    assert "limited by   " in out["with"]
    events = json.loads((tmp_path / "with" / "trace.json").read_text())["traceEvents"]
    waits = [event for event in events if event.get("name") == "waiting for data"]
    assert len(waits) == num * (2 if "--accumulate" in more else 1)
    assert not (tmp_path / "without" / "trace.json").exists()


def test_a_run_too_short_for_a_profile_says_so(tmp_path, fork_main):
    flags = ["--stop-after-steps", 1, "--profile", 4, "--run-dir", tmp_path / "a"]
    done = fork_main("train_regression.py", *SMALL, *flags)
    assert done.codes == [0], done.output
    assert "--profile 4: the run has too few steps left, 1" in done.output


def test_a_dry_run_is_not_too_short_for_a_profile(fork_main):
    done = fork_main("train_regression.py", *SMALL, "--dry-run", "--profile", 4)
    assert done.codes == [0] and "--profile" not in done.output, done.output


SLOW_SAVES = """
import time
import train_regression
from trainkit.checkpoints.save import Checkpoints

save = Checkpoints.save

def slow(*args):
    time.sleep(0.6)
    save(*args)

def main(argv):
    Checkpoints.save = slow
    train_regression.main(argv)
"""


def test_a_save_is_no_part_of_a_step(tmp_path, fork_main):
    flags = "--save-every 1 --stop-after-steps 6 --profile 2"
    done = fork_main(SLOW_SAVES, *SMALL, flags, "--run-dir", tmp_path / "a")
    assert done.codes == [0], done.output
    milliseconds = re.search(r"^a step +([\d.e+]+) ms", done.output, re.MULTILINE)[1]
    assert float(milliseconds) < 500, done.output
    assert "profile      of 1 step; the times of a step are of 2 steps" in done.output


def test_a_profile_of_steps_that_fp16_skipped_says_so(accelerator, tmp_path):
    said = []
    config = SimpleNamespace(profile=1, run_dir=tmp_path)
    profiled = profile.Profile(accelerator, config, 3, said.append)
    for _ in zip(range(2), profiled.read([1, 2]), strict=True):  # one to warm up, one timed
        profiled.end_step()
    for _ in profiled.read([3]):  # skipped: there is no end_step
        pass
    profiled.end()
    profiled.close()
    assert ["--profile 1: fp16 skipped" in line for line in said] == [True]
    assert not (tmp_path / "trace.json").exists()


def test_a_step_that_fp16_skips_is_no_part_of_another(tmp_path, monkeypatch, capfd):
    """Of eleven steps three warm up, one is timed, and the fifth is profiled."""
    monkeypatch.setattr(trainkit.run.session, "Accelerator", scaled_float32)
    launches = []
    for skipped, said in (
        ((), "profile      of 1 step; "),
        ((5,), "profile      of 2 steps, of which fp16 skipped 1; "),
        (range(5, 12), "--profile 1: fp16 skipped the step that was to be profiled: "),
    ):
        train = changed(
            (r"body\(run, next\(numbers\)\)", "number = next(numbers)"),
            (r"step_mean\(loss\)", "step_mean(loss * (1e38 if number in skipped else 1))"),
            skipped=skipped,
        )
        train("--profile 1 --epochs 1 --batch-size 4 --run-dir", tmp_path / str(len(skipped)))
        output = capfd.readouterr().out
        assert said in output
        launches += re.findall(r"^launches +(\d+) ", output, re.MULTILINE)
    assert int(launches[1]) <= int(launches[0])  # a step that is skipped has no optimizer
    assert len(launches) == 2


# Shares of a step, device, processes, precision, --accumulate, --num-workers; what helps.
LIMITS = {
    "the data, on a CPU": ({"waiting for data": 0.4}, "cpu", 1, "no", 1, 0, "--num-workers 4"),
    "the data, on a card": ({"waiting for data": 0.4}, "cuda", 1, "no", 1, 3, "--num-workers 6"),
    "the operations": ({"operations": 0.7}, "cpu", 1, "no", 1, 0, "a GPU"),
    "Python": ({"Python": 0.7}, "cpu", 1, "no", 1, 0, "--batch-size above 128"),
    "Python, accumulated": ({"Python": 0.7}, "cpu", 1, "no", 4, 0, "--accumulate 1, not 4"),
    "other programs": ({"idle": 0.7}, "cpu", 1, "no", 1, 0, "other programs"),
    "other processes": ({"idle": 0.7}, "cpu", 2, "no", 1, 0, "cores of its own"),
    "launches": ({"idle (the device)": 0.7}, "cuda", 1, "bf16", 1, 0, "compile.yaml launches"),
    "launches, accumulated": (
        {"idle (the device)": 0.7},
        "cuda",
        1,
        "bf16",
        2,
        0,
        "--accumulate 1,",
    ),
    "the card, in float32": ({"idle (the device)": 0.1}, "cuda", 1, "no", 1, 0, "1gpu_bf16.yaml"),
    "the card": ({"idle (the device)": 0.1}, "cuda", 1, "bf16", 1, 0, "hardly ever waits"),
}


@pytest.mark.parametrize(
    ("shares", "device", "world", "precision", "accumulate", "workers", "said"),
    LIMITS.values(),
    ids=LIMITS,
)
def test_the_last_sentence_says_what_limits_and_what_helps(
    shares, device, world, precision, accumulate, workers, said
):
    config = SimpleNamespace(
        profile=2, num_workers=workers, accumulate=accumulate, batch_size=128, run_dir=None
    )
    accelerator = SimpleNamespace(
        is_main_process=True,
        device=torch.device(device),
        num_processes=world,
        mixed_precision=precision,
        state=SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO)),
    )
    names = ("waiting for data", "operations", "Python", "idle", "idle (the device)")
    parts = dict.fromkeys(names, 0.0) | shares
    limit = profile.Profile(accelerator, config, 100, print)._limit(parts, 90)
    assert said in limit
    for word in limit.replace(",", " ").replace(")", " ").replace("(", " ").split():
        if word.endswith(".yaml"):
            assert (ROOT / word).exists()


def test_plans_of_attention_for_many_lengths_are_named_as_the_limit(accelerator, monkeypatch):
    """As on an H100, where 9 % of a step of preference.py were the device's."""
    config = SimpleNamespace(profile=2, num_workers=0, accumulate=1, batch_size=16, run_dir=None)
    made = profile.Profile(accelerator, config, 100, print)
    monkeypatch.setattr(accelerator.state, "device", torch.device("cuda"))
    shares = {"waiting for data": 0.01, "idle (the device)": 0.9}
    assert "each of 9 shapes: torch.backends.cuda.enable_" in made._limit(shares, 1864, 9)
    assert "launches 1864 kernels" in made._limit(shares, 1864, 1)
    assert "the device, in float32" in made._limit(shares | {"idle (the device)": 0.1}, 1864, 9)


def test_the_time_of_a_device_counts_overlapping_kernels_once():
    def event(start, end, device=torch.autograd.DeviceType.CUDA):
        return SimpleNamespace(device_type=device, time_range=SimpleNamespace(start=start, end=end))

    cpu = event(0, 100, torch.autograd.DeviceType.CPU)
    events = [cpu, event(20, 30), event(0, 10), event(5, 12), event(6, 8)]
    assert profile.busy_microseconds(events) == 22


def test_graphs_of_kernels_are_launches_of_a_card_too():
    counts = {"cudaLaunchKernel": 5, "cudaGraphLaunch": 2, "aten::add": 9, "cuLaunchKernelEx": 1}
    rows = [SimpleNamespace(key=key, count=count) for key, count in counts.items()]
    assert profile.num_launched(rows) == 8


def test_a_launch_is_an_operation_that_does_more_than_describe_memory():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        numbers = torch.ones(4, 6)  # empty, and fill_
        torch.nn.functional.linear(numbers.t().reshape(4, 6), torch.ones(2, 6))
        (numbers + 1).to(torch.float32).contiguous()  # add, which converts the 1; nothing to copy
        torch.nn.functional.cross_entropy(numbers, torch.zeros(4).long(), reduction="sum")
    # ones twice, the copy of reshape, mm; add; zeros, to int64, _log_softmax, nll_loss_forward
    assert profile.num_launches(profiler.events()) == 9
