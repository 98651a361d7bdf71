"""Measure the memory of a large sharded model, from its first weight to the folder it leaves.

    python -m benchmarks.billion --parameters 2e7
    python -m benchmarks.billion --parameters 1e9     needs 20 GB of memory and 40 GB of disk
    python -m benchmarks.billion --processes 4 --copies 2     as 4cpu_hsdp.yaml does

CPU processes, 2 by default, train a new Llama with SHARDED_STATE_DICT: once to the end, and once
until the save of its third step, when all are killed; then it is resumed by as many and by one.
Prints the highest resident memory of each phase over the process's share, which is 16 bytes for
each of its parameters: weights, gradients and two moments of AdamW. Then the bytes that a process
sends in a step, counted call by call, beside a formula: with P parameters and n processes to a copy
12 P (n - 1) / n within it (weights twice, gradients once), and 8 P (c - 1) / (c n) between c
copies. Layers that are not gathered again make it a little less.
"""

import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open

from benchmarks._runs import ROOT, Parser, execute, table

SHARDED = ["--fsdp_state_dict_type", "SHARDED_STATE_DICT"]
SHARDED += ["--fsdp_transformer_layer_cls_to_wrap", "Linear"]  # gathers one matrix at a time
SAVED = "memory {} saves"  # a line of _llama.py


def launch_of(processes: int, copies: int) -> list[object]:
    """What follows `accelerate launch`."""
    config = ROOT / "accelerate_configs" / ("4cpu_hsdp.yaml" if copies > 1 else "2cpu_fsdp.yaml")
    words = ["--config_file", config, "--num_processes", processes, *SHARDED]
    sizes = {"replicate": copies, "shard": processes // copies} if copies > 1 else {}
    for axis, size in sizes.items():
        words += [f"--parallelism_config_dp_{axis}_size", size]
    return words


def shape(parameters: float) -> list[str]:
    """Flags of _llama.py for about this number of parameters, half as wide for an eighth."""
    width = max(128, round(24 * (parameters / 1e9) ** (1 / 3)) * 64)
    return [f"--width={width}", f"--layers={round(parameters / (10.5 * width**2)) or 1}"]


class Memory:
    """Bytes by process and phase, from the lines of _llama.py."""

    def __init__(self, shards: int) -> None:
        self.rows: list[tuple] = []
        self.parameters = 0
        self.shards = shards
        self.sent: dict[str, int] = {}  # bytes of a process in a step, by the axis of the mesh

    def run(self, name: str, launch: list[object], *flags: str, until: Sequence[str] = ()) -> None:
        """Run _llama.py, to its end or until all of these lines have come."""
        ended = execute(ROOT / "benchmarks" / "_llama.py", *flags, launch=launch, until=until)
        print(f"{name}: {ended.seconds:.0f} s", file=sys.stderr)
        share = self.shards if launch else 1
        peaks: dict[tuple, int] = {}
        for _, line in ended.lines:
            if found := re.search(r"([\d,]+) parameters", line):
                self.parameters = int(found[1].replace(",", ""))
            if found := re.match(r"sent (\w+) (\d+)\n", line):
                self.sent[found[1]] = int(found[2])
            if found := re.match(r"memory (\d) (.+) (\d+) \d+ \d+\n", line):
                key = found[2], int(found[1])
                peaks[key] = max(peaks.get(key, 0), int(found[3]))
        for phase in dict.fromkeys(phase for phase, _ in peaks):
            values = [peaks[key] for key in sorted(peaks) if key[0] == phase]
            ratio = max(values) * share / (16 * self.parameters)
            said = ", ".join(f"{value / 1e9:.3f}" for value in values)
            self.rows.append((name, phase, said, f"{ratio:.3f}"))


def digest(run_dir: Path) -> list[str]:
    """SHA-256 of what must be equal."""
    found = []
    for name in ("metrics.jsonl", "model.safetensors"):
        with open(run_dir / name, "rb") as file:
            found.append(hashlib.file_digest(file, "sha256").hexdigest())
    return found


def num_loaded(run_dir: Path) -> int:
    """Load RUN_DIR/pretrained by from_pretrained; the number of weights equal to those written."""
    from transformers import AutoModelForCausalLM

    loaded, equal = AutoModelForCausalLM.from_pretrained(run_dir / "pretrained").state_dict(), 0
    with safe_open(run_dir / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            equal += bool((file.get_tensor(name) == loaded[name]).all())
    return equal


def main() -> None:
    parser = Parser(__doc__, rounds=1)
    parser.add_argument("--parameters", type=float, default=2e7)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--copies", type=int, default=1)
    args = parser.parse_args()
    num, shards = args.processes, args.processes // args.copies
    launch = launch_of(num, args.copies)
    flags = [*shape(args.parameters), "--save-every=3", "--stop-after-steps=4", "--keep=2"]
    flags += ["--log-every=1", "--no-pictures", "--resume=auto", "--timeout=1200"]
    flags += [f"--batch-size={num}"]
    memory = Memory(shards)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        whole, run, one = (Path(name, each) for each in ("whole", "run", "one"))
        memory.run(f"{num} processes", launch, *flags, f"--run-dir={whole}")
        expected, num_equal = digest(whole), num_loaded(whole)
        shutil.rmtree(whole)
        until = [SAVED.format(rank) for rank in range(num)]
        memory.run("killed", launch, *flags, f"--run-dir={run}", until=until)
        shutil.copytree(run, one, copy_function=os.link)
        memory.run(f"resumed by {num}", launch, *flags, f"--run-dir={run}")
        same = digest(run) == expected
        shutil.rmtree(run)
        try:
            memory.run("resumed by 1", [], *flags, f"--run-dir={one}")
        except RuntimeError as problem:
            print(f"resumed by 1: {problem}")
    size = memory.parameters
    print(f"{size:,} parameters; a share of {shards}: {16 * size / shards / 1e9:.3f} GB")
    print(f"killed, resumed by {num} processes: {'equal bytes' if same else 'OTHER BYTES'}")
    print(f"{num_equal} tensors of pretrained/ are those of model.safetensors")
    table("run | phase | highest GB, by process | over its share", memory.rows)
    within, between = 12 * (shards - 1) / shards, 8 * (1 - 1 / args.copies) / shards
    for axis, sent in sorted(memory.sent.items()):
        formula = size * (between if axis == "dp_replicate" else within) / 1e6
        print(f"sent by a process in a step, {axis}: {sent / 1e6:.3f} MB, formula {formula:.3f}")


if __name__ == "__main__":
    main()
