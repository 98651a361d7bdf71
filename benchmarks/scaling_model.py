"""Predict speed on 8 to 10,000 GPUs with a cost model; the constants of the cluster are flags.

    python -m benchmarks.scaling_model
    python -m benchmarks.scaling_model --matmul-flops 4e14 --bytes-per-gradient 2
    python -m benchmarks.scaling_model --gathers 2

docs/scaling.md explains the model. Bandwidths are in bytes per second per GPU, times in seconds.
"""

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from benchmarks._runs import table


@dataclass(frozen=True)
class Workload:
    """The work of one optimizer step.

    Attributes:
        num_parameters: all are trained, in float32.
        flops_per_sample: forward and backward, one multiply-add counted as two.
        batch_per_gpu: samples per step on each GPU.
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
    """GPUs in nodes.

    Attributes:
        matmul_flops: as measured in the precision of the training.
        link_bandwidth, link_latency: inside a node.
        network_bandwidth, network_latency: between nodes.
        overlap: fraction of the backward pass that can overlap with an all-reduce; of the whole
            step if weights are sharded.
        jitter: standard deviation of a GPU's step, as a fraction of its compute time.
        storage_bandwidth: of the one process that writes the checkpoint.
        gpu_hours_per_failure: mean over failures of all causes.
        restart_seconds: from a failure to the next step, including loading data and checkpoint.
        bytes_per_gradient: 4 for float32, 2 with a bf16 compression hook.
        gathers: how often sharded weights are gathered in a step: 2 under FSDP2, 1 with
            fsdp_reshard_after_forward: false, 0 under DDP.
        bytes_per_weight: bytes of a weight when it is gathered.
    """

    gpus_per_node: float = 8
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
    gathers: float = 0
    bytes_per_weight: float = 2


# Counted by torch.utils.flop_counter for the models in train_mnist.py; for the transformer 6 per
# parameter and token (Kaplan et al. 2020, arXiv:2001.08361), 2,048 tokens per sample.
WORKLOADS = {
    "compact": Workload(215_194, 5.74e6, 1024, 0.05, 1.5e-3),
    "wide": Workload(25_775_882, 5.03e8, 256, 0.3, 2e-3),
    "1 billion": Workload(1e9, 6 * 1e9 * 2048, 8, 0.5, 5e-3),
}
ADAM_BYTES_PER_PARAMETER = 12  # weight and two moments in float32


def all_reduce_seconds(cluster: Cluster, num_gpus: int, num_bytes: float) -> float:
    """Return seconds of a sum over all GPUs: in each node, between nodes by ring or tree, and back.

    A ring moves 2 (n - 1) / n of the bytes over each link in 2 (n - 1) hops; a tree moves them all
    twice in 2 log2(n) hops. The faster one is taken, as NCCL does.
    """
    local = min(num_gpus, cluster.gpus_per_node)
    num_nodes = math.ceil(num_gpus / local)
    hops = 2 * (local - 1)
    seconds = hops * cluster.link_latency + hops / local * num_bytes / cluster.link_bandwidth
    share = num_bytes / local / cluster.network_bandwidth  # each GPU sends its part of the sum
    hops = 2 * (num_nodes - 1)
    ring = hops * cluster.network_latency + hops / num_nodes * share
    tree = 2 * math.ceil(math.log2(num_nodes)) * cluster.network_latency + 2 * share
    return seconds + min(ring, tree)


def step_seconds(cluster: Cluster, work: Workload, num_gpus: int) -> tuple[float, float]:
    """Return the seconds of one step on num_gpus GPUs, and of the same step on a single GPU."""
    flops = work.batch_per_gpu * work.flops_per_sample
    compute = work.step_overhead + flops / (cluster.matmul_flops * work.utilisation)
    # All wait for the slowest, whose time is the expected maximum of n normal deviates.
    slowest = compute * (1 + cluster.jitter * math.sqrt(2 * math.log(num_gpus)))
    talk = all_reduce_seconds(cluster, num_gpus, cluster.bytes_per_gradient * work.num_parameters)
    hidden = cluster.overlap * compute * 2 / 3  # the backward pass is two thirds
    if cluster.gathers:
        # An all-reduce is a reduce-scatter and an all-gather, which take equally long.
        num_bytes = cluster.bytes_per_weight * work.num_parameters
        talk = (talk + cluster.gathers * all_reduce_seconds(cluster, num_gpus, num_bytes)) / 2
        hidden = cluster.overlap * compute
    return slowest + max(0.0, talk - hidden), compute


def checkpoint_interval(save: float, mean_time_to_failure: float) -> float:
    """Return the best seconds of work between checkpoints of `save` seconds (Daly 2006, eq. 37).

    Its first term is Young's (1974) square root of 2 x save x mean_time_to_failure.
    """
    if save >= 2 * mean_time_to_failure:
        return mean_time_to_failure
    ratio = save / (2 * mean_time_to_failure)
    young = math.sqrt(2 * save * mean_time_to_failure)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def simulate(interval: float, save: float, restart: float, mean_time_to_failure: float) -> float:
    """Return the fraction of the time spent on work that is not lost, over 2,000 failures.

    Failures happen at any moment, also during a save or a restart, and the work since the last
    checkpoint is lost.
    """
    generator = random.Random(0)
    kept, total = 0.0, 0.0
    for _ in range(2000):
        until_failure = generator.expovariate(1 / mean_time_to_failure)
        total += until_failure
        kept += interval * max(0, math.floor((until_failure - restart) / (interval + save)))
    return kept / total


def predict(cluster: Cluster) -> list[dict[str, Any]]:
    """Return one row for each workload and number of GPUs."""
    rows = []
    for name, work in WORKLOADS.items():
        for num_gpus in (8, 64, 1024, 10_000):
            seconds, alone = step_seconds(cluster, work, num_gpus)
            save = 0.1 + ADAM_BYTES_PER_PARAMETER * work.num_parameters / cluster.storage_bandwidth
            mean_time_to_failure = cluster.gpu_hours_per_failure * 3600 / num_gpus
            interval = checkpoint_interval(save, mean_time_to_failure)
            kept = simulate(interval, save, cluster.restart_seconds, mean_time_to_failure)
            rows.append(
                {
                    "model": name,
                    "GPUs": num_gpus,
                    "batch": work.batch_per_gpu * num_gpus,
                    "step ms": 1000 * seconds,
                    "samples/s": work.batch_per_gpu * num_gpus / seconds * kept,
                    "step efficiency": alone / seconds,
                    "checkpoint every min": interval / 60,
                    "kept": kept,
                    "useful": alone / seconds * kept,
                }
            )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in fields(Cluster):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=float, default=field.default)
    rows = predict(Cluster(**vars(parser.parse_args(argv))))
    table(" | ".join(rows[0]), (row.values() for row in rows))


if __name__ == "__main__":
    main()
