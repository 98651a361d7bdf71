"""Read the files of a run folder: its description, its metrics and its predictions."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trainkit.errors import as_usage_error
from trainkit.store.jsons import from_exact_json
from trainkit.store.log import is_evaluation, read_rows

PREDICTIONS = "predictions.safetensors"

# The folder of predict.py, app.py and the scripts, if this kit is not installed elsewhere.
_home = Path(__file__).resolve().parents[2]
CLONE = _home if (_home / "train_mnist.py").is_file() else None


def page_command(config: Any, metadata: dict[str, Any]) -> str:
    """The command that shows a run in the browser, as it is typed in the current folder.

    It is empty for a run whose metadata say no "input". It names a script of somebody else.
    """
    if "input" not in metadata:
        return ""
    words = ["-m", "trainkit.app"] if CLONE is None else [_from_here(CLONE / "app.py")]
    words.append(str(config.run_dir))
    script = getattr(sys.modules.get(type(config).__module__), "__file__", None)  # or a notebook
    path = Path(script or "").resolve()
    if script and (CLONE is None or path.parent not in (CLONE, CLONE / "examples")):
        words += ["--script", _from_here(path)]
    return f"python {shlex.join(words)}"


def _from_here(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def read_run_json(run_dir: Path) -> dict[str, Any]:
    """run.json: arguments, versions, hardware. Raises UsageError."""
    path = run_dir / "run.json"
    with as_usage_error(f"{path} cannot be read"):
        return json.loads(path.read_text())


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """The evaluations in metrics.jsonl, so far. Raises UsageError."""
    return [row for row in read_rows(run_dir / "metrics.jsonl") if is_evaluation(row)]


def last_evaluation(run_dir: Path) -> dict[str, Any]:
    """The last evaluation in metrics.jsonl, empty if there was none. Raises UsageError."""
    return [{}, *read_evaluations(run_dir)][-1]


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
