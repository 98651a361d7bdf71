"""Draw what a run measured over its steps, from its metrics.jsonl and timing.jsonl alone."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.run_dir.records import read_rows

if TYPE_CHECKING:  # imported where it is used, because it takes a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCORES = {"accuracy": "accuracy (fraction)", "rmse": "root mean square error"}
# Okabe and Ito's, which colour-blind people can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")


def draw_run(run_dir: Path) -> list[Path]:
    """Draw curves.png into a run folder and return its path, in a list."""
    return [save(draw_curves(run_dir), run_dir / "curves.png")]


def draw_curves(run_dir: Path) -> "Figure":
    """Draw the loss, the accuracy or error if there is one, and the learning rate of a run."""
    rows = read_rows(run_dir / "metrics.jsonl")
    measured = {name for row in rows for name in row}
    score = next((name for name in SCORES if f"eval_{name}" in measured), None)
    heights = {"loss": 3, "rate": 1.3} if score is None else {"loss": 3, score: 3, "rate": 1.3}
    figure = new_figure(8, 1.7 + sum(heights.values()))
    panels = figure.subplot_mosaic(
        [[name] for name in heights], sharex=True, height_ratios=list(heights.values())
    )
    train = {"color": COLOURS[0], "marker": "."}
    held_out = {"color": COLOURS[1], "linewidth": 2.5, "marker": "o"}
    for panel, metric, label, style in (
        ("loss", "train_loss", "training", train),
        ("loss", "eval_loss", "evaluation", held_out),
        (score, f"train_{score}", "training, mean of the epoch", train),
        (score, f"eval_{score}", "evaluation", held_out),
        ("rate", "learning_rate", "", train),
    ):
        # An evaluation has a train_loss too, the mean of its epoch; only those of steps are drawn.
        without = "eval_loss" if metric == "train_loss" else None
        points = [
            (row["step"], row[metric]) for row in rows if metric in row and without not in row
        ]
        if panel in panels and points:
            panels[panel].plot(*zip(*points, strict=True), label=label, **style)
    timing = read_rows(run_dir / "timing.jsonl")
    resumes = [row["resumed_at"] for row in timing if "resumed_at" in row]
    for name, axes in panels.items():
        for number, step in enumerate(resumes):
            label = "_" if number else "resumed"  # one line of the legend
            axes.axvline(step, color="0.45", linestyle=":", zorder=0, label=label)
        if name != "rate":
            legend_above(axes, ncols=3)
        axes.set_ylabel({"loss": "loss", "rate": "learning rate"}.get(name) or SCORES[name])
        axes.grid(color="0.9")
    low, high = panels["loss"].dataLim.intervaly
    if 0 < 4 * low < high:
        panels["loss"].set_yscale("log")
    panels["rate"].set(xlabel="optimizer steps", xlim=(0, None), ylim=(0, None))
    return figure


def save(figure: "Figure", path: Path) -> Path:
    """Write a picture and return its path."""
    figure.savefig(path)
    return path


def new_figure(width: float, height: float) -> "Figure":
    """Make a figure, in inches, that has no window and is not in matplotlib's global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def legend_above(axes: "Axes", **options: Any) -> None:
    """Put the legend above the axes, where it cannot cover a line."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        frameon=False,
        fontsize=9,
        borderaxespad=0.2,
        **options,
    )
