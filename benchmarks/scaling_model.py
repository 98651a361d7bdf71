"""How fast would it be on more processes? A cost model whose constants are measured.

python -m benchmarks.scaling_model measure constants.json   constants of this machine, two minutes
python -m benchmarks.scaling_model check constants.json     1, 2 and 4 processes: model and clock
python -m benchmarks.scaling_model predict                  8 to 10,000 GPUs, from CLUSTER below

docs/scaling.md explains the model and the format of constants.json.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks._runs import MNIST, ROOT, figures, finish, start

ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # in each process
MODEL, BATCH_SIZE = "compact", 128
NUM_STEPS = 300


@dataclass(frozen=True)
class Workload:
    """What one optimizer step has to do.

    Attributes:
        num_parameters: all of them trained, in float32.
        flops_per_sample: forward and backward, one multiply-add counted as two.
        batch_per_gpu: samples per step and GPU.
        utilisation: fraction of the matrix-multiply rate that training reaches.
        step_overhead: seconds per step that do not depend on the batch (launching kernels).
    """

    num_parameters: float
    flops_per_sample: float
    batch_per_gpu: int
    utilisation: float
    step_overhead: float


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes. Bandwidths in bytes per second and GPU, times in seconds.

    Attributes:
        matmul_flops: as trainkit.doctor measures it, for the precision trained in.
        link_bandwidth, link_latency: inside a node.
        network_bandwidth, network_latency: between nodes.
        overlap: fraction of the backward pass behind which an all-reduce can hide.
        jitter: standard deviation of a GPU's step, as a fraction of its compute time.
        storage_bandwidth: of the one process that writes the checkpoint.
        gpu_hours_per_failure: over all causes.
        restart_seconds: from a failure to the next step, data and checkpoint loaded.
        bytes_per_gradient: 4 for float32, 2 with a bf16 compression hook.
    """

    gpus_per_node: int = 8
    matmul_flops: float = 7e14
    link_bandwidth: float = 3.5e11
    link_latency: float = 5e-6
    network_bandwidth: float = 4e10
    network_latency: float = 1e-5
    overlap: float = 0.6
    jitter: float = 0.02
    storage_bandwidth: float = 1e9
    gpu_hours_per_failure: float = 50_000
    restart_seconds: float = 300
    bytes_per_gradient: float = 4


# Counted by torch.utils.flop_counter for the models in train_mnist.py; for the transformer 6 per
# parameter and token (Kaplan et al. 2020, arXiv:2001.08361), 2,048 tokens per sample.
WORKLOADS = {
    "compact": Workload(215_194, 5.74e6, 1024, 0.05, 1.5e-3),
    "wide": Workload(25_775_882, 5.03e8, 256, 0.3, 2e-3),
    "1 billion": Workload(1e9, 6 * 1e9 * 2048, 8, 0.5, 5e-3),
}
CLUSTER = Cluster()
ADAM_BYTES_PER_PARAMETER = 12  # weight and two moments in float32


def all_reduce_seconds(cluster: Cluster, num_gpus: int, num_bytes: float) -> float:
    """A sum over all GPUs: inside each node, then between nodes by ring or tree, and back.

    A ring moves 2 (n - 1) / n of the bytes over each link in 2 (n - 1) hops; a tree moves them all
    twice in 2 log2(n) hops. The faster one is taken, as NCCL does.
    """
    local = min(num_gpus, cluster.gpus_per_node)
    num_nodes = -(-num_gpus // cluster.gpus_per_node)
    hops = 2 * (local - 1)
    seconds = hops * cluster.link_latency + hops / local * num_bytes / cluster.link_bandwidth
    if num_nodes > 1:
        share = num_bytes / local / cluster.network_bandwidth  # each GPU sends its part of the sum
        hops = 2 * (num_nodes - 1)
        ring = hops * cluster.network_latency + hops / num_nodes * share
        tree = 2 * math.ceil(math.log2(num_nodes)) * cluster.network_latency + 2 * share
        seconds += min(ring, tree)
    return seconds


def step_seconds(cluster: Cluster, work: Workload, num_gpus: int) -> tuple[float, float]:
    """Seconds of one step on num_gpus, and of the same step on a GPU of its own."""
    flops = work.batch_per_gpu * work.flops_per_sample
    compute = work.step_overhead + flops / (cluster.matmul_flops * work.utilisation)
    # All wait for the slowest: the expected maximum of n normal deviates.
    slowest = compute * (1 + cluster.jitter * math.sqrt(2 * math.log(num_gpus)))
    reduce = all_reduce_seconds(cluster, num_gpus, cluster.bytes_per_gradient * work.num_parameters)
    hidden = cluster.overlap * compute * 2 / 3  # the backward pass is two thirds
    return slowest + max(0.0, reduce - hidden), compute


def checkpoint_interval(save: float, mean_time_to_failure: float) -> float:
    """Seconds of work between checkpoints that cost `save` seconds each (Daly 2006, eq. 37).

    Its first term is Young's (1974) square root of 2 x save x mean_time_to_failure.
    """
    if save >= 2 * mean_time_to_failure:
        return mean_time_to_failure
    ratio = save / (2 * mean_time_to_failure)
    young = math.sqrt(2 * save * mean_time_to_failure)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def simulate(
    interval: float, save: float, restart: float, mean_time_to_failure: float, seed: int = 0
) -> float:
    """Fraction of the time that goes into work which is kept, over 2,000 failures.

    Failures come at any moment, also while saving and restarting; what was done since the last
    checkpoint is lost.
    """
    generator = random.Random(seed)
    kept, total = 0.0, 0.0
    for _ in range(2000):
        until_failure = generator.expovariate(1 / mean_time_to_failure)
        total += until_failure
        num_saved = max(0, math.floor((until_failure - restart) / (interval + save)))
        kept += num_saved * interval
    return kept / total


def predict(cluster: Cluster) -> list[dict[str, Any]]:
    """One row for each workload and number of GPUs."""
    rows = []
    for name, work in WORKLOADS.items():
        for num_gpus in (8, 64, 1024, 10_000):
            seconds, alone = step_seconds(cluster, work, num_gpus)
            save = 0.1 + ADAM_BYTES_PER_PARAMETER * work.num_parameters / cluster.storage_bandwidth
            mean_time_to_failure = cluster.gpu_hours_per_failure * 3600 / num_gpus
            interval = checkpoint_interval(save, mean_time_to_failure)
            up = simulate(interval, save, cluster.restart_seconds, mean_time_to_failure)
            rows.append({
                "model": name, "GPUs": num_gpus, "batch": work.batch_per_gpu * num_gpus,
                "step ms": seconds * 1e3, "samples/s": work.batch_per_gpu * num_gpus / seconds * up,
                "step efficiency": alone / seconds, "checkpoint every min": interval / 60,
                "kept": up, "useful": alone / seconds * up,
            })  # fmt: skip
    return rows


def cpu_step_seconds(
    constants: dict[str, Any], num_processes: int, batch_size: int = BATCH_SIZE
) -> float:
    """Seconds of a step of `compact` on CPU processes of the measured machine."""
    fixed, per_sample = fit_step(constants)
    cores = constants["num_cores"]
    # Neighbours share caches and memory; beyond one process per core they share cores as well.
    slowdown = constants["slowdown_on_all_cores"] if num_processes > 1 else 1.0
    slowdown *= max(1.0, num_processes / cores)
    compute = (fixed + per_sample * batch_size / num_processes) * slowdown
    if num_processes == 1:
        return compute
    latency, bandwidth = fit_all_reduce(constants)
    hops = 2 * (num_processes - 1)
    num_bytes = 4 * WORKLOADS[MODEL].num_parameters
    # Two sums in each step: the gradients, and the flag by which all stop at the same step.
    reduce = 2 * hops * latency + hops / num_processes * num_bytes / bandwidth
    # gloo runs on the same cores as the processes.
    reduce *= max(1.0, num_processes / cores)
    return compute + reduce + constants["distributed_overhead"]


def fit_step(constants: dict[str, Any]) -> tuple[float, float]:
    """Seconds per step, whatever its batch, and per sample: a line through two measurements."""
    (small, large) = sorted(constants["steps"], key=lambda entry: entry["batch_size"])
    per_sample = (large["seconds"] - small["seconds"]) / (large["batch_size"] - small["batch_size"])
    return small["seconds"] - per_sample * small["batch_size"], per_sample


def fit_all_reduce(constants: dict[str, Any]) -> tuple[float, float]:
    """Latency in seconds per hop and bandwidth in bytes per second, from two processes."""
    entries = {entry["bytes"]: entry["seconds"] for entry in constants["all_reduce"]}
    small, large = 4 * 2**10, 4 * 2**20  # the gradients of `compact` lie between the two
    bandwidth = (large - small) / (entries[large] - entries[small])
    return (entries[small] - small / bandwidth) / 2, bandwidth  # two processes: two hops


def measure(path: Path) -> None:
    """Write the constants of this machine to `path`. Nothing else may run meanwhile."""
    num_cores = os.cpu_count() or 1
    steps = [{"batch_size": size, "seconds": train([1], size)[0]} for size in (32, 128)]
    constants = {"format": 1, "model": MODEL, "num_cores": num_cores, "threads_per_process": 1,
                 "steps": steps, "distributed_overhead": 0.0}  # fmt: skip
    fixed, per_sample = fit_step(constants)
    together = train([1] * num_cores, 64)
    alone = fixed + 64 * per_sample
    constants["slowdown_on_all_cores"] = sum(together) / len(together) / alone
    doctor = [sys.executable, *launch(2), "-m", "trainkit.doctor", "--json", "--run-dir"]
    doctor.append(tempfile.mkdtemp())
    options = {"cwd": ROOT, "env": os.environ | ONE_THREAD, "stdout": subprocess.PIPE}
    reports = [
        json.loads(subprocess.run(doctor, check=False, **options).stdout)
        for _ in range(3)  # a small sum takes several times as long if a process wakes late
    ]
    constants["all_reduce"] = [
        min(entries, key=lambda entry: entry["seconds"])
        for entries in zip(*(report["all_reduce"] for report in reports), strict=True)
    ]
    # What DistributedDataParallel and waiting for each other add, from half the batch that is
    # predicted.
    half = BATCH_SIZE // 2
    extra = train([2], half)[0] - cpu_step_seconds(constants, 2, half)
    constants["distributed_overhead"] = max(0.0, extra)
    path.write_text(json.dumps(constants, indent=1) + "\n")
    print(f"wrote {path}")


def train(num_processes: list[int], batch_size: int) -> list[float]:
    """Seconds per step of runs started at the same time, each with so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        dirs = [Path(folder) / str(number) for number in range(len(num_processes))]
        flags = ("--model", MODEL, "--no-augment", "--batch-size", batch_size,
                 "--stop-after-steps", NUM_STEPS, "--no-pictures")  # fmt: skip
        runs = [
            start(*(launch(number) if number > 1 else ()), MNIST, *flags, "--run-dir", directory,
                  env=ONE_THREAD)
            for directory, number in zip(dirs, num_processes, strict=True)
        ]  # fmt: skip
        for run in runs:
            finish(run)
        return [batch_size / figures(directory)["samples_per_second"] for directory in dirs]


def launch(num_processes: int) -> list[str]:
    config = str(ROOT / "accelerate_configs" / "2cpu.yaml")
    return ["-m", "accelerate.commands.launch", "--config_file", config,
            "--num_processes", str(num_processes)]  # fmt: skip


def check(constants: dict[str, Any], measured_path: Path | None) -> None:
    """Print predicted and measured images/s of 1, 2 and 4 processes."""
    measured = {}
    if measured_path is not None:
        scaling = json.loads(measured_path.read_text())
        if (scaling["model"], scaling["batch_size"]) != (MODEL, BATCH_SIZE):
            raise SystemExit(f"{measured_path} is not of {MODEL} with batches of {BATCH_SIZE}")
        measured = {row["num_processes"]: row["images_per_second"] for row in scaling["rows"]}
    print("| processes | predicted images/s | measured images/s | error |")
    print("| --- | --- | --- | --- |")
    for number in (1, 2, 4):
        predicted = BATCH_SIZE / cpu_step_seconds(constants, number)
        if number not in measured:
            measured[number] = BATCH_SIZE / min(train([number], BATCH_SIZE)[0] for _ in range(2))
        error = predicted / measured[number] - 1
        print(f"| {number} | {predicted:,.0f} | {measured[number]:,.0f} | {error:+.0%} |")


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + " --- |" * len(rows[0]))
    for row in rows:
        cells = []
        for name, value in row.items():
            if name in ("step efficiency", "kept", "useful"):
                cells.append(f"{value:.1%}")
            elif isinstance(value, float):
                cells.append(f"{value:,.0f}" if value >= 100 else f"{value:.3g}")
            else:
                cells.append(f"{value:,}" if isinstance(value, int) else value)
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("measure", "check", "predict"))
    parser.add_argument("constants", type=Path, nargs="?", default=Path("constants.json"))
    parser.add_argument("--measured", type=Path, default=None,
                        help="check: what `python -m benchmarks.scaling --json` wrote")  # fmt: skip
    parser.add_argument("--matmul-flops", type=float, default=CLUSTER.matmul_flops,
                        help="of one GPU, as the doctor measures it")  # fmt: skip
    parser.add_argument("--bytes-per-gradient", type=float, default=CLUSTER.bytes_per_gradient,
                        help="2 with a bf16 compression hook")  # fmt: skip
    args = parser.parse_args()
    if args.action == "measure":
        measure(args.constants)
    elif args.action == "check":
        check(json.loads(args.constants.read_text()), args.measured)
    else:
        print_table(predict(replace(CLUSTER, matmul_flops=args.matmul_flops,
                                    bytes_per_gradient=args.bytes_per_gradient)))  # fmt: skip


if __name__ == "__main__":
    main()
