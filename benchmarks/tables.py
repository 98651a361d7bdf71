"""Scores of train_regression.py and examples/table_classes.py beside those of scikit-learn.

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

import train_regression
from benchmarks._runs import Parser
from examples import table_classes
from trainkit.config import parse
from trainkit.errors import UsageError, as_usage_error


def make_peers(kind: str) -> dict[str, Any]:
    """Return models of scikit-learn, which is asked for by name where it is missing."""
    with as_usage_error("this needs `pip install scikit-learn`"):
        from sklearn import ensemble, linear_model
    if kind == "numbers":
        return {
            "ridge": linear_model.RidgeCV(np.logspace(-2, 5, 15)),
            "boosting": ensemble.HistGradientBoostingRegressor(random_state=0),
        }
    return {
        "logistic": linear_model.LogisticRegression(max_iter=2000),
        "boosting": ensemble.HistGradientBoostingClassifier(random_state=0),
    }


def compare(script: Any, flags: list[str], kind: str) -> dict[str, float]:
    """Return the score of the script and of each peer on one split, sizes and CPU seconds."""
    made = script.load_data(parse(script.Config, flags))
    features, targets, _ = (tensor.numpy() for tensor in made.train.tensors)
    inputs, truth = (tensor.numpy() for tensor in made.evaluated.tensors[:2])
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        metrics = script.main(flags)
    row = {"rows": len(features) + len(inputs), "features": features.shape[1]}
    is_class = "eval_accuracy" in metrics
    row["seconds"] = time.process_time() - start
    row["ours"] = 100 * metrics["eval_accuracy"] if is_class else metrics["eval_r2"]
    for name, peer in make_peers(kind).items():
        model = peer.fit(features, targets.ravel())
        row[name] = (100 if is_class else 1) * model.score(inputs, truth.ravel())
    return row


def main() -> None:
    """Print a row for each table, the medians of the numbers and the means of the classes."""
    parser = Parser(__doc__, 1)
    parser.add_argument("tables", nargs="+", metavar="FILE:TARGET")
    args = parser.parse_args()
    scores: dict[str, list[dict[str, float]]] = {"numbers": [], "classes": []}
    for table in args.tables:
        data, _, target = table.rpartition(":")
        rows = []
        for number in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                flags = ["--data", data, "--target", target, "--data-seed", str(number)]
                flags += ["--run-dir", f"{folder}/run", "--no-pictures", "--save-every", "1000000"]
                try:
                    row = compare(train_regression, flags, kind := "numbers")
                except UsageError as problem:
                    if "table_classes.py" not in str(problem):
                        raise
                    row = compare(table_classes, flags, kind := "classes")
            rows.append(row)
        mean = {name: statistics.mean(row[name] for row in rows) for name in rows[0]}
        scores[kind].append(mean)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in mean.items())
        print(f"{Path(data).name:28}{shown}", flush=True)
    for kind, means in scores.items():
        for name in [*means[0]][3:] if means else ():
            values = [mean[name] for mean in means]
            median, average = statistics.median(values), statistics.mean(values)
            print(f"{kind} ({len(values)}): {name} median {median:.4g}, mean {average:.4g}")


if __name__ == "__main__":
    startup.run(main)
