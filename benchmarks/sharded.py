"""Measure what sharding costs and saves: a GPT under 2cpu.yaml and 2cpu_fsdp.yaml, in turn.

    python -m benchmarks.sharded
    python -m benchmarks.sharded --layers 14 --width 768 --steps 4 --rounds 1

Prints the samples per second of examples/gpt.py, which has slightly more than 12 x layers x
width**2 parameters, and the size of a checkpoint, from the plan of the run.
"""

import statistics
from functools import partial

from benchmarks._runs import ROOT, Parser, in_turn, one_run, spread, table


def main() -> None:
    parser = Parser(__doc__, rounds=5)
    for flag, default in (("--layers", 12), ("--width", 256), ("--steps", 30)):
        parser.add_argument(flag, type=int, default=default)
    args = parser.parse_args()
    flags = f"--layers {args.layers} --width {args.width} --stop-after-steps {args.steps} "
    flags += f"--eval-every {args.steps} --num-bytes {2000 * args.steps} --no-pictures"
    run = partial(one_run, ROOT / "examples" / "gpt.py", *flags.split())
    ways = {
        name: partial(run, launch=["--config_file", f"{ROOT}/accelerate_configs/{name}.yaml"])
        for name in ("2cpu", "2cpu_fsdp")
    }
    runs = in_turn(ways, args.rounds)
    rates = {name: [run.samples_per_second for run in found] for name, found in runs.items()}
    unsharded = statistics.median(rates["2cpu"])
    rows = []
    for name, values in rates.items():
        share = statistics.median(values) / unsharded
        saved = runs[name][0].said("checkpoint").strip().partition(" each")[0]  # of the plan
        rows.append((name, spread(values), share, saved))
    table("YAML | samples/s | over DDP | a checkpoint", rows)


if __name__ == "__main__":
    main()
