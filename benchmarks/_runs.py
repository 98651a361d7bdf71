"""Runs of the two scripts, started as a person starts them, and what they measured themselves."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MNIST, REGRESSION = ROOT / "train_mnist.py", ROOT / "train_regression.py"


def start(
    *words: object, config: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.Popen:
    """Start `python WORDS...`, under the launcher if there is a YAML; its output is thrown away."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", config] if config else []
    return subprocess.Popen(
        [sys.executable, *map(str, (*launcher, *words))],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **(env or {})},
    )


def finish(process: subprocess.Popen) -> None:
    """Wait for what start() started."""
    if process.wait() != 0:
        raise SystemExit(f"{' '.join(process.args)} ended with {process.returncode}")


def figures(run_dir: Path) -> dict[str, Any]:
    """Of a finished run: seconds and samples of all its epochs, and its last evaluation."""
    timing, metrics = (
        [json.loads(line) for line in (run_dir / name).read_text().splitlines()]
        for name in ("timing.jsonl", "metrics.jsonl")
    )
    seconds, samples = (sum(row[n] for row in timing) for n in ("train_seconds", "train_samples"))
    return {
        "train_seconds": seconds,
        "samples": samples,
        "samples_per_second": samples / seconds,
        "metrics": metrics[-1],
    }


def one_run(
    *words: object, config: Path | None = None, env: dict[str, str] | None = None
) -> dict[str, Any]:
    """figures() of one run in a folder of its own, and its seconds from start to exit."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        cpu_before, started_at = _cpu_seconds(), time.perf_counter()
        finish(start(*words, "--run-dir", run_dir, config=config, env=env))
        return {
            "process_seconds": time.perf_counter() - started_at,
            "cpu_seconds": _cpu_seconds() - cpu_before,
            **figures(run_dir),
        }


def _cpu_seconds() -> float:
    """Of all processes that were started here and have ended."""
    import resource  # not on Windows, where the cost model alone can be used

    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
