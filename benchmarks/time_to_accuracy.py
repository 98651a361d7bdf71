"""Accuracy and seconds of whole runs over several seeds: always the last epoch, never the best.

    python -m benchmarks.time_to_accuracy --seeds 10
    python -m benchmarks.time_to_accuracy --seeds 10 @recipes/fast
    python -m benchmarks.time_to_accuracy --seeds 5 --config CONFIG.yaml @recipes/best

Everything that is not a flag of this program goes to train_mnist.py. `train` is the sum of the
epochs' seconds from first batch to last, `process` is from start to exit: imports, decoding (cached
after a first run, which is not counted), evaluation and checkpoints included.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.timing import training_time

ROOT = Path(__file__).parent.parent


def one_run(arguments: list[str], config: Path | None, seed: int) -> dict[str, float]:
    """Start train_mnist.py as a person does; return accuracy and seconds."""
    start = [sys.executable]
    if config is not None:
        start += ["-m", "accelerate.commands.launch", "--config_file", str(config)]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        started_at = time.perf_counter()
        subprocess.run(
            [*start, ROOT / "train_mnist.py", *arguments, "--seed", str(seed),
             "--run-dir", run_dir],
            check=True, stdout=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        process_seconds = time.perf_counter() - started_at
        last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
        train_seconds, _ = training_time(run_dir)
    return {
        "seed": seed,
        "accuracy": last["eval_accuracy"],
        "train_seconds": train_seconds,
        "process_seconds": process_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=None, help="YAML; None: plain python")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "time_to_accuracy.json")
    args, arguments = parser.parse_known_args()
    one_run([*arguments, "--stop-after-steps", "1"], args.config, 0)  # fills the caches
    runs = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        runs.append(one_run(arguments, args.config, seed))
        print("seed {seed}: {accuracy:.2%}, train {train_seconds:.1f} s, process "
              "{process_seconds:.1f} s".format(**runs[-1]), flush=True)  # fmt: skip
    summary = {}
    for name in ("accuracy", "train_seconds", "process_seconds"):
        values = [run[name] for run in runs]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        summary[name] = {"mean": statistics.mean(values), "stdev": spread}
    print(f"{' '.join(arguments) or 'default'}: n {len(runs)}")
    for name, scale, unit in (("accuracy", 100, "%"), ("train_seconds", 1, "s"),
                              ("process_seconds", 1, "s")):  # fmt: skip
        mean, stdev = summary[name]["mean"] * scale, summary[name]["stdev"] * scale
        print(f"  {name:15} {mean:.3f} +- {stdev:.3f} {unit}")
    args.json.write_text(
        json.dumps({"arguments": arguments, "config": str(args.config), "summary": summary,
                    "runs": runs}, indent=1) + "\n"
    )  # fmt: skip


if __name__ == "__main__":
    main()
