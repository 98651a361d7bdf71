"""Pictures of runs, drawn from the files in their folders and nothing else.

python -m trainkit.plots runs/mnist            redraws the pictures of one run
python -m trainkit.plots runs/a runs/b         compares several: their curves, and what differs
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open

from trainkit import startup
from trainkit.arguments import Parser
from trainkit.errors import UsageError, as_usage_error
from trainkit.history import read_rows

if TYPE_CHECKING:  # imported where it is used, because it takes a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PREDICTIONS = "predictions.safetensors"
NUM_MISTAKES = 24
MAX_CELLS = 32  # classes for which confusion.png has room for the numbers and every name
# Okabe and Ito's colours, which colour-blind people can tell apart; styles and markers do it in
# black and white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
MARKERS = "os^Dv*"


def worst_mistakes(
    prediction: torch.Tensor, target: torch.Tensor, probability: torch.Tensor
) -> torch.Tensor:
    """Indices of the wrong predictions with the highest probability, highest first."""
    wrong = (prediction != target).nonzero().flatten()
    order = probability[wrong].argsort(descending=True, stable=True)
    return wrong[order][:NUM_MISTAKES]


def confusion_matrix(
    prediction: torch.Tensor, target: torch.Tensor, num_classes: int
) -> torch.Tensor:
    """Counts, int64: rows are the truth, columns the prediction."""
    pairs = target * num_classes + prediction
    return pairs.bincount(minlength=num_classes**2).view(num_classes, num_classes)


def draw_run(run_dir: Path) -> list[Path]:
    """Draw every picture that the files of a run folder allow and return their paths."""
    figures = {"curves.png": draw_curves([run_dir])}
    path = run_dir / PREDICTIONS
    if path.exists():
        tensors, metadata = load_predictions(path)
        if "classes" in metadata:
            figures["confusion.png"] = draw_confusion(tensors, metadata["classes"])
            if "mistake_images" in tensors:
                figures["mistakes.png"] = draw_mistakes(tensors, metadata["classes"])
        else:
            figures["fit.png"] = draw_fit(tensors, metadata)
    for name, figure in figures.items():
        (run_dir / name).unlink(missing_ok=True)  # a link is replaced, not written through
        figure.savefig(run_dir / name)
    return [run_dir / name for name in figures]


def draw_curves(run_dirs: Sequence[Path]) -> "Figure":
    """Loss, accuracy (or error) and learning rate over steps, of one run or of several."""
    from matplotlib.ticker import LogLocator

    several = len(run_dirs) > 1
    logs = [read_rows(run_dir / "metrics.jsonl") for run_dir in run_dirs]
    score = "accuracy" if any("eval_accuracy" in row for row in logs[0]) else "rmse"
    figure = new_figure(8, 9)
    panels = loss, quality, rate = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.3))
    for number, (run_dir, rows) in enumerate(zip(run_dirs, logs, strict=True)):
        steps = [row for row in rows if "learning_rate" in row]
        epochs = [row for row in rows if "eval_loss" in row]
        name = f"{run_dir}: " if several else ""
        colour, style, marker = (kind[number % 6] for kind in (COLOURS, STYLES, MARKERS))
        train = {"color": colour, "linewidth": 1, "linestyle": style}
        held_out = {"color": colour, "linewidth": 2, "linestyle": style, "marker": marker}
        if not several:
            held_out |= {"color": COLOURS[1], "linestyle": STYLES[1]}
        few = {"marker": "."} if len(steps) < 3 else {}  # a line of one point cannot be seen
        loss.plot(*_points(steps, "train_loss"), **few, label=f"{name}training", **train)
        loss.plot(*_points(epochs, "eval_loss"), label=f"{name}evaluation", **held_out)
        if not several and any(f"train_{score}" in row for row in epochs):
            quality.plot(*_points(epochs, f"train_{score}"), marker=marker, markerfacecolor="white",
                         label="training, mean of the epoch", **train)  # fmt: skip
        quality.plot(*_points(epochs, f"eval_{score}"), label="evaluation", **held_out)
        rate.plot(*_points(steps, "learning_rate"), color=colour, linestyle=style, **few)
    if not several:
        timing = read_rows(run_dirs[0] / "timing.jsonl")
        resumed_at = sorted({row["resumed_at"] for row in timing if "resumed_at" in row})
        for axes, step in itertools.product(panels, resumed_at):
            axes.axvline(step, color="0.45", linestyle=":", zorder=0,
                         label="resumed" if step == resumed_at[0] else None)  # fmt: skip
    low, high = loss.dataLim.intervaly
    if 0 < 20 * low < high:
        loss.set_yscale("log")
        loss.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)),
                       major_formatter="{x:g}", minor_formatter="")  # fmt: skip
    loss.set_ylabel("loss")
    quality.set_ylabel({"accuracy": "accuracy (fraction)", "rmse": "root mean square error"}[score])
    rate.set(xlabel="optimizer steps", ylabel="learning rate")
    rate.set_ylim(bottom=0)
    if several:
        lines = loss.get_lines()  # one column of the legend for training, one for evaluation
        _legend_above(loss, ncols=2, handles=lines[::2] + lines[1::2])
    else:
        _legend_above(loss, ncols=3)
        _legend_above(quality, ncols=3)
    figure.align_ylabels()
    for axes in panels:
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
    return figure


def draw_confusion(tensors: dict[str, torch.Tensor], classes: Sequence[str]) -> "Figure":
    """Counts and row percentages; errors are shaded as strongly as they are frequent in a row.

    With more than MAX_CELLS classes only the shades and some of the names.
    """
    from matplotlib.colors import PowerNorm

    num = len(classes)
    matrix = confusion_matrix(tensors["prediction"], tensors["target"], num).numpy()
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    inches, font = (0.62, 8.0) if num <= 15 else (0.42, 6.2)  # of a cell
    side = min(num, MAX_CELLS) * inches + 1.8
    figure = new_figure(side, side)
    axes = figure.subplots()
    axes.imshow(shares, cmap="Greys", norm=PowerNorm(0.35, 0, 1))
    if num <= MAX_CELLS:
        for row, column in zip(*matrix.nonzero(), strict=True):
            share = shares[row, column]
            axes.text(column, row, f"{matrix[row, column]}\n{share:.{0 if share > 0.9995 else 1}%}",
                      ha="center", va="center", fontsize=font, linespacing=0.95,
                      color="white" if share > 0.08 else "black")  # fmt: skip
        lines = np.arange(num + 1) - 0.5
        axes.set_xticks(lines, minor=True)
        axes.set_yticks(lines, minor=True)
        axes.grid(which="minor", color="0.8", linewidth=0.5)
    ticks = range(0, num, -(-num // MAX_CELLS))
    names = [classes[tick] for tick in ticks]
    axes.set_xticks(ticks, names, rotation=90 if max(map(len, classes)) > 2 else 0)
    axes.set_yticks(ticks, names)
    axes.tick_params(which="both", length=0, top=True, labeltop=True, labelsize=font + 2)
    right = int(np.trace(matrix))
    axes.set_title(f"{right} of {matrix.sum()} right ({right / matrix.sum():.2%})", pad=10)
    axes.set(xlabel="predicted", ylabel="true")
    return figure


def draw_mistakes(tensors: dict[str, torch.Tensor], classes: Sequence[str]) -> "Figure":
    """The most confident errors: picture, predicted and true class, probability."""
    worst = worst_mistakes(tensors["prediction"], tensors["target"], tensors["probability"])
    images = tensors["mistake_images"].permute(0, 2, 3, 1).numpy()  # channels last
    num, columns = len(images), 6
    rows = max(1, -(-num // columns))
    font = 9 if max(map(len, classes)) < 6 else 7
    size = images.shape[1]
    width, height = 1.06 * size, 1.42 * size  # a picture, a gap and above it two lines of text
    figure = new_figure(9, 0.3 + 9 * rows * height / (columns * width))
    axes = figure.subplots()
    axes.set_axis_off()
    for number, index in enumerate(worst.tolist()):
        left, top = number % columns * width, number // columns * height
        axes.imshow(images[number].squeeze(), cmap="gray", vmin=0, vmax=255,
                    extent=(left, left + size, top + size, top))  # fmt: skip
        said, true = (classes[tensors[key][index]] for key in ("prediction", "target"))
        text = f"said {said}, {tensors['probability'][index]:.1%}\nis {true}"
        axes.text(left + size / 2, top - 0.03 * size, text, ha="center", va="bottom", fontsize=font)
    axes.set(xlim=(-0.5, columns * width), ylim=(rows * height - 0.42 * size, -0.42 * size))
    all_mistakes = int((tensors["prediction"] != tensors["target"]).sum())
    shown = f"the {num} most confident of " if num < all_mistakes else ""
    figure.suptitle(f"{shown}{all_mistakes} mistake{'s' * (all_mistakes != 1)}", fontsize=11)
    return figure


def draw_fit(tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> "Figure":
    """Predicted against true and the residuals, per target; the line itself for one feature."""
    from matplotlib.ticker import EngFormatter

    prediction, truth = (tensors[key].numpy() for key in ("prediction", "target"))
    targets = metadata.get("targets") or [f"target {i}" for i in range(truth.shape[1])]
    feature = tensors["feature"].flatten().numpy() if "feature" in tensors else None
    columns = 2 + (feature is not None)
    figure = new_figure(4.3 * columns, 4.2 * len(targets))
    grid = figure.subplots(len(targets), columns, squeeze=False)
    dots = {"s": 14, "facecolors": "none", "edgecolors": COLOURS[0], "linewidths": 0.8}
    for row, name in enumerate(targets):
        said, true = prediction[:, row], truth[:, row]
        against, residuals = grid[row][:2]
        against.scatter(true, said, **dots)
        ends = [min(true.min(), said.min()), max(true.max(), said.max())]
        against.plot(ends, ends, color="black", linewidth=1.2)
        against.set(xlabel=f"true {name}", ylabel=f"predicted {name}")
        against.set_title("on the line: exact", fontsize=10)
        residuals.scatter(said, said - true, **dots)
        residuals.axhline(0, color="black", linewidth=1.2)
        residuals.set(xlabel=f"predicted {name}", ylabel=f"predicted - true {name}")
        rmse = float(np.sqrt(np.mean((said - true) ** 2)))
        residuals.set_title(f"root mean square error {rmse:.4g}", fontsize=10)
        if feature is not None:
            line, order = grid[row][2], feature.argsort()
            line.scatter(feature, true, label="true", **dots)
            line.plot(feature[order], said[order], color=COLOURS[1], label="predicted")
            line.set(xlabel=metadata.get("feature", "feature"), ylabel=name)
            _legend_above(line, ncols=2)
    for axes in grid.flat:
        axes.locator_params(nbins=5)
        for axis in (axes.xaxis, axes.yaxis):
            if abs(axis.get_data_interval()).max() >= 1e4:  # wide numbers run into each other
                axis.set_major_formatter(EngFormatter(sep=""))  # 200k
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the pictures of one run folder, or the curves of several in one picture."""
    parser = Parser(prog="python -m trainkit.plots", description=__doc__.splitlines()[0])
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--output", type=Path, default=None,
                        help="of several runs; None: comparison.png beside the first")  # fmt: skip
    args = parser.parse_args(argv)
    from trainkit import compare  # here: it imports this module

    for run_dir in args.run_dirs:
        if not (run_dir / "metrics.jsonl").exists():
            raise UsageError(f"{run_dir} is not a run folder: it has no metrics.jsonl")
    if len(args.run_dirs) == 1 and args.output is not None:
        raise UsageError("--output is for several runs; those of one go into its folder")
    with as_usage_error(f"{' and '.join(map(str, args.run_dirs))} cannot be drawn"):
        if len(args.run_dirs) == 1:
            print(*draw_run(args.run_dirs[0]), sep="\n")
        else:
            output = args.output or args.run_dirs[0].parent / "comparison.png"
            draw_curves(args.run_dirs).savefig(output)
            print(compare.compare_runs(args.run_dirs), output, sep="\n")


def load_predictions(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and metadata of a predictions.safetensors. Raises UsageError."""
    with as_usage_error(f"{path} cannot be read"), safe_open(path, framework="pt") as file:
        metadata = json.loads((file.metadata() or {}).get("trainkit", "{}"))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        needed = ["prediction", "target", *["probability"] * ("mistake_images" in tensors)]
        if missing := [name for name in needed if name not in tensors]:
            raise UsageError(f"{path} holds no {' and no '.join(missing)}: remove it, or run again")
        return tensors, metadata


def new_figure(width: float, height: float) -> "Figure":
    """A figure of so many inches that no window and no global state knows of."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def _points(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    rows = [row for row in rows if name in row]
    return [row["step"] for row in rows], [row[name] for row in rows]


def _legend_above(axes: "Axes", **options: Any) -> None:
    """Outside the axes, where no line can run beneath it."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=9,
                borderaxespad=0.2, **options)  # fmt: skip


if __name__ == "__main__":
    startup.run(main)
