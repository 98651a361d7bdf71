"""Read the files of a run folder: its description, its metrics and its predictions."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trainkit.errors import as_usage_error
from trainkit.store.jsons import as_numbers, from_exact_json
from trainkit.store.log import is_evaluation

PREDICTIONS = "predictions.safetensors"


def read_run_json(run_dir: Path) -> dict[str, Any]:
    """run.json: arguments, versions, hardware. Raises UsageError."""
    path = run_dir / "run.json"
    with as_usage_error(f"{path} cannot be read"):
        return json.loads(path.read_text())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl or timing.jsonl, empty without the file. Raises UsageError."""
    with as_usage_error(f"{path} cannot be read"):
        if not path.exists():
            return []
        return [as_numbers(json.loads(line)) for line in path.read_text().splitlines()]


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """The evaluations in metrics.jsonl, so far. Raises UsageError."""
    return [row for row in read_rows(run_dir / "metrics.jsonl") if is_evaluation(row)]


def last_evaluation(run_dir: Path) -> dict[str, Any]:
    """The last evaluation in metrics.jsonl, empty if there was none. Raises UsageError."""
    return [{}, *read_evaluations(run_dir)][-1]


def follow(run_dir: Path, process: subprocess.Popen) -> Iterator[dict[str, Any]]:
    """Yield each evaluation of a run, the earlier ones first, until this process has ended.

    An evaluation that is repeated after a resume is yielded once. Raises UsageError.
    """
    num = 0
    is_over = False
    while not is_over:
        time.sleep(2)  # each turn reads the whole file, which grows
        is_over = process.poll() is not None
        evaluations = read_evaluations(run_dir)
        yield from evaluations[num:]
        num = max(num, len(evaluations))


def read_seconds(run_dir: Path) -> dict[str, float]:
    """Seconds of training and evaluation, empty without timing.jsonl. Raises UsageError."""
    rows = read_rows(run_dir / "timing.jsonl")
    names = ("train_seconds", "eval_seconds")
    return {name: sum(row.get(name, 0) for row in rows) for name in names if rows}


def load_predictions(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and metadata of predictions.safetensors, empty without it. Raises UsageError."""
    if not path.exists():
        return {}, {}
    with as_usage_error(f"{path} cannot be read"), safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors, read_metadata(path)


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the metadata of a safetensors file of a run. Raises UsageError."""
    with as_usage_error(f"{path} cannot be read"), safe_open(path, framework="pt") as file:
        return from_exact_json((file.metadata() or {}).get("trainkit", "{}"))
