"""Draw what a run measured over its steps, from its metrics.jsonl and timing.jsonl alone."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainkit.config import metric_and_direction
from trainkit.plots.style import COLOURS, as_written, new_figure
from trainkit.store.log import is_evaluation
from trainkit.store.records import read_rows, read_run_json

LABELS = {"accuracy": "accuracy (fraction)", "rmse": "root mean square error"}
LABELS["learning_rate"] = "learning rate"


def draw_curves(run_dir: Path) -> Figure:
    """Draw the loss, the metric of --keep-best, the accuracy or error, and the learning rate."""
    rows = read_rows(run_dir / "metrics.jsonl")
    arguments = read_run_json(run_dir)["arguments"] if (run_dir / "run.json").exists() else {}
    best, _ = metric_and_direction(arguments.get("keep_best") or "")
    measured = {name.removeprefix("eval_") for row in rows for name in row if name[:5] == "eval_"}
    usual = [name for name in ("accuracy", "rmse") if name in measured][:1]
    scores = [name for name in (best.removeprefix("eval_"), *usual) if name in measured - {"loss"}]
    heights = {"loss": 3.0} | dict.fromkeys(scores, 3.0) | {"learning_rate": 1.3}
    figure = new_figure(8, 1.7 + sum(heights.values()))
    grid = figure.subplots(len(heights), sharex=True, height_ratios=[*heights.values()])
    style = as_written()
    timing = read_rows(run_dir / "timing.jsonl")
    resumes = [row["resumed_at"] for row in timing if "resumed_at" in row]
    for axes, name in zip(grid, heights, strict=True):
        # An evaluation has a train_loss too, the mean of its epoch; only those of steps are drawn.
        steps = [row for row in rows if name != "loss" or not is_evaluation(row)]
        mean = "" if name == "loss" else ", mean of the epoch"
        draw_line(axes, steps, f"train_{name}", f"training{mean}", COLOURS[0], ".")
        draw_line(axes, rows, f"eval_{name}", "evaluation", COLOURS[1], "o", linewidth=2.5)
        draw_line(axes, rows, name, "", COLOURS[0], ".")
        for number, step in enumerate(resumes):
            label = "_" if number else "resumed"  # one line of the legend
            axes.axvline(step, color="0.45", linestyle=":", zorder=0, label=label)
        axes.set_ylabel(LABELS.get(name, name), **style)
        axes.grid(color="0.9")
        if axes is not grid[-1]:
            above: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
            axes.legend(ncols=3, frameon=False, fontsize=9, **above)
    low, high = grid[0].dataLim.intervaly
    if 0 < 4 * low < high:
        grid[0].set_yscale("log")
    grid[-1].set(xlabel="optimizer steps", xlim=(0, None), ylim=(0, None))
    return figure


def draw_line(
    axes: Axes, rows: list, name: str, label: str, color: str, marker: str, **style: Any
) -> None:
    """Draw the values of a name over the steps of the rows that have it, if any do."""
    points = [(row["step"], row[name]) for row in rows if name in row]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, color=color, marker=marker, **style)
