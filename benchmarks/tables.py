"""Scores of examples/table.py beside those of scikit-learn.

    OMP_NUM_THREADS=1 python -m benchmarks.tables FILE:TARGET ... [--rounds 5]

All have the same columns as numbers, the same split and the same rows to evaluate on: RidgeCV and
HistGradientBoostingRegressor (eval_r2), or LogisticRegression and HistGradientBoostingClassifier
(accuracy in percent), with their defaults. A round is a split. It needs scikit-learn.
"""

import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from trainkit import startup

import numpy as np
from accelerate.state import AcceleratorState, GradientState

from benchmarks._runs import Parser
from examples import table
from trainkit.config import parse
from trainkit.errors import as_usage_error


def make_peers(is_class: bool) -> dict[str, Any]:
    """Return models of scikit-learn, which is asked for by name where it is missing."""
    with as_usage_error("this needs `pip install scikit-learn`"):
        from sklearn import ensemble, linear_model
    if is_class:
        return {
            "logistic": linear_model.LogisticRegression(max_iter=2000),
            "boosting": ensemble.HistGradientBoostingClassifier(random_state=0),
        }
    return {
        "ridge": linear_model.RidgeCV(np.logspace(-2, 5, 15)),
        "boosting": ensemble.HistGradientBoostingRegressor(random_state=0),
    }


def compare(flags: list[str]) -> tuple[bool, dict[str, float]]:
    """Return whether it is a class, and the score of each on one split, sizes and CPU seconds."""
    made = table.load_data(parse(table.Config, flags))
    features, targets, _ = (tensor.numpy() for tensor in made.train.tensors)
    inputs, truth = (tensor.numpy() for tensor in made.evaluated.tensors[:2])
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        metrics = table.main(flags)
    row = {"rows": len(features) + len(inputs), "features": features.shape[1]}
    is_class = "eval_accuracy" in metrics
    row["seconds"] = time.process_time() - start
    row["ours"] = 100 * metrics["eval_accuracy"] if is_class else metrics["eval_r2"]
    for name, peer in make_peers(is_class).items():
        model = peer.fit(features, targets.ravel())
        row[name] = (100 if is_class else 1) * model.score(inputs, truth.ravel())
    return is_class, row


def main() -> None:
    """Print a row for each table, and medians and means of the numbers and of the classes."""
    parser = Parser(__doc__, 1)
    parser.add_argument("tables", nargs="+", metavar="FILE:TARGET")
    args = parser.parse_args()
    scores: dict[str, list[dict[str, float]]] = {"numbers": [], "classes": []}
    for named in args.tables:
        data, _, target = named.rpartition(":")
        rows = []
        for number in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                flags = ["--data", data, "--target", target, "--data-seed", str(number)]
                flags += ["--run-dir", f"{folder}/run", "--no-pictures", "--save-every", "1000000"]
                is_class, row = compare(flags)
            rows.append(row)
        mean = {name: statistics.mean(row[name] for row in rows) for name in rows[0]}
        scores["classes" if is_class else "numbers"].append(mean)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in mean.items())
        print(f"{Path(data).name:28}{shown}", flush=True)
    for kind, means in scores.items():
        for name in [*means[0]][3:] if means else ():
            values = [mean[name] for mean in means]
            median, average = statistics.median(values), statistics.mean(values)
            print(f"{kind} ({len(values)}): {name} median {median:.4g}, mean {average:.4g}")


if __name__ == "__main__":
    startup.run(main)
