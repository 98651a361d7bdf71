"""Pictures of runs, drawn from the files of their folders and from nothing else.

python -m trainkit.plots runs/mnist            redraws the pictures of one run
python -m trainkit.plots runs/a runs/b         lays the curves of several over each other
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from trainkit import arguments, launch
from trainkit.rundir import write_durably

if TYPE_CHECKING:  # imported where it is used: it takes a second that a run's start need not pay
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PREDICTIONS = "predictions.safetensors"
PICTURES = ("curves.png", "confusion.png", "mistakes.png", "fit.png")
NUM_MISTAKES = 24
LOSSES = ("train_loss", "eval_loss")
# Okabe and Ito's colours, told apart by the colour-blind; styles and markers tell them apart in
# black and white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
MARKERS = "os^Dv*"


def save_predictions(
    accelerator: Accelerator, run_dir: Path, tensors: dict[str, torch.Tensor], **metadata: Any
) -> None:
    """Write predictions.safetensors, from which the pictures are drawn.

    Every process must call this; the main process writes. Raises RunFailure on all if it cannot.

    A classifier gives "prediction" and "target" (int64, one per sample), "probability" (float32, of
    the prediction) and metadata `classes`; a regression gives "prediction" and "target" (float32,
    samples x targets), if it has one feature "feature" as well, and metadata `targets`.
    """
    path = run_dir / PREDICTIONS
    with launch.failing_together(accelerator, f"{path} cannot be written", launch.RunFailure):
        if accelerator.is_main_process:
            tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            write_durably(path, save(tensors, metadata={"trainkit": json.dumps(metadata)}))


def worst_mistakes(
    prediction: torch.Tensor, target: torch.Tensor, probability: torch.Tensor
) -> torch.Tensor:
    """Indices of the wrong predictions that were held most probable, most probable first."""
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
        tensors, metadata = _load(path)
        if "classes" in metadata:
            figures["confusion.png"] = draw_confusion(tensors, metadata["classes"])
            if "mistake_images" in tensors:
                figures["mistakes.png"] = draw_mistakes(tensors, metadata["classes"])
        else:
            figures["fit.png"] = draw_fit(tensors, metadata)
    return [_write(figure, run_dir / name) for name, figure in figures.items()]


def draw_curves(run_dirs: Sequence[Path]) -> "Figure":
    """Loss, accuracy (or error) and learning rate over steps, of one run or of several."""
    several = len(run_dirs) > 1
    logs = [_rows(run_dir) for run_dir in run_dirs]
    score = "accuracy" if any("eval_accuracy" in row for row in logs[0]) else "rmse"
    figure, (loss, quality, rate) = _subplots(
        3, 1, figsize=(8, 9), sharex=True, height_ratios=(3, 3, 1.3)
    )
    for number, (run_dir, rows) in enumerate(zip(run_dirs, logs, strict=True)):
        steps = [row for row in rows if "learning_rate" in row]
        epochs = [row for row in rows if "eval_loss" in row]
        name = f"{run_dir}: " if several else ""
        colour, style, marker = (kind[number % 6] for kind in (COLOURS, STYLES, MARKERS))
        train = {"color": colour, "linewidth": 1, "linestyle": style}
        held_out = {"color": colour, "linewidth": 2, "linestyle": style, "marker": marker}
        if not several:
            held_out |= {"color": COLOURS[1], "linestyle": STYLES[1]}
        few = {"marker": "."} if len(steps) < 3 else {}  # a line of one point is not seen
        loss.plot(*_points(steps, "train_loss"), **few, label=f"{name}training", **train)
        loss.plot(*_points(epochs, "eval_loss"), label=f"{name}evaluation", **held_out)
        if not several and any(f"train_{score}" in row for row in epochs):
            quality.plot(*_points(epochs, f"train_{score}"), marker=marker, markerfacecolor="white",
                         label="training, mean of the epoch", **train)  # fmt: skip
        quality.plot(*_points(epochs, f"eval_{score}"), label="evaluation", **held_out)
        rate.plot(*_points(steps, "learning_rate"), color=colour, linestyle=style, **few)
        for count, step in enumerate([] if several else _resumed_steps(run_dir)):
            for axes in (loss, quality, rate):
                axes.axvline(step, color="0.45", linestyle=":", linewidth=1.5, zorder=0,
                             label=None if count else "resumed")  # fmt: skip
    values = [row[kind] for rows in logs for row in rows for kind in LOSSES if kind in row]
    if values and min(values) > 0 and max(values) > 20 * min(values):
        loss.set_yscale("log")
        _plain_log_ticks(loss)
    loss.set_ylabel("loss")
    quality.set_ylabel({"accuracy": "accuracy (fraction)", "rmse": "root mean square error"}[score])
    rate.set_ylabel("learning rate")
    rate.set_xlabel("optimizer steps")
    rate.set_ylim(bottom=0)
    if several:
        lines = loss.get_lines()  # one column of the legend for training, one for evaluation
        _legend_above(loss, ncols=2, handles=lines[::2] + lines[1::2])
    else:
        _legend_above(loss, ncols=3)
        _legend_above(quality, ncols=3)
    figure.align_ylabels()
    for axes in (loss, quality, rate):
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
    return figure


def draw_confusion(tensors: dict[str, torch.Tensor], classes: Sequence[str]) -> "Figure":
    """Counts and row percentages; errors are shaded as strongly as they are frequent in a row."""
    from matplotlib.colors import PowerNorm

    num = len(classes)
    matrix = confusion_matrix(tensors["prediction"], tensors["target"], num).numpy()
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    cell = 0.62 if num <= 15 else 0.42  # inches
    font = 8.0 if num <= 15 else 6.2
    side = num * cell + 1.8
    figure, axes = _subplots(figsize=(side, side))
    axes.imshow(shares, cmap="Greys", norm=PowerNorm(0.35, 0, 1))
    for row, column in zip(*matrix.nonzero(), strict=True):
        percent = 100 * shares[row, column]
        axes.text(column, row, f"{matrix[row, column]}\n{percent:.{0 if percent > 99.95 else 1}f}%",
                  ha="center", va="center", fontsize=font, linespacing=0.95,
                  color="white" if shares[row, column] > 0.08 else "black")  # fmt: skip
    long = max(map(len, classes)) > 2
    axes.set_xticks(range(num), classes, rotation=90 if long else 0)
    axes.set_yticks(range(num), classes)
    axes.tick_params(length=0, top=True, labeltop=True, labelsize=font + 2)
    axes.set_xticks(np.arange(num + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(num + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="0.8", linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    right = int(np.trace(matrix))
    axes.set_title(f"{right} of {matrix.sum()} right ({right / matrix.sum():.2%})", pad=10)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    return figure


def draw_mistakes(tensors: dict[str, torch.Tensor], classes: Sequence[str]) -> "Figure":
    """The most confident errors: picture, predicted and true class, probability."""
    worst = worst_mistakes(tensors["prediction"], tensors["target"], tensors["probability"])
    images = tensors["mistake_images"].permute(0, 2, 3, 1).numpy()  # channels last
    num, columns = len(images), 6
    longest = max(map(len, classes))
    rows = max(1, -(-num // columns))
    size = images.shape[1]
    step = size * 1.42  # a picture and room for two lines of text
    figure, axes = _subplots(figsize=(9, 0.3 + 9 * rows * 1.42 / (columns * 1.06)))
    axes.set_axis_off()
    for number, index in enumerate(worst.tolist()):
        left, top = number % columns * size * 1.06, number // columns * step
        axes.imshow(images[number].squeeze(), cmap="gray", vmin=0, vmax=255,
                    extent=(left, left + size, top + size, top))  # fmt: skip
        said, true = (classes[tensors[key][index]] for key in ("prediction", "target"))
        probability = tensors["probability"][index].item()
        axes.text(left + size / 2, top - 0.03 * size, f"said {said}, {probability:.1%}\nis {true}",
                  ha="center", va="bottom", fontsize=9 if longest < 6 else 7)  # fmt: skip
    axes.set(xlim=(-0.5, columns * size * 1.06), ylim=(rows * step - 0.42 * size, -0.42 * size))
    all_mistakes = int((tensors["prediction"] != tensors["target"]).sum())
    shown = f"the {num} most confident of " if num < all_mistakes else ""
    figure.suptitle(f"{shown}{all_mistakes} mistake{'s' * (all_mistakes != 1)}", fontsize=11)
    return figure


def draw_fit(tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> "Figure":
    """Predicted against true and the residuals, per target; the line itself for one feature."""
    prediction, truth = (tensors[key].numpy() for key in ("prediction", "target"))
    targets = metadata.get("targets") or [f"target {i}" for i in range(truth.shape[1])]
    feature = tensors["feature"].flatten().numpy() if "feature" in tensors else None
    columns = 2 + (feature is not None)
    figure, grid = _subplots(
        len(targets), columns, figsize=(4.3 * columns, 4.2 * len(targets)), squeeze=False
    )
    dots = {"s": 14, "facecolors": "none", "edgecolors": COLOURS[0], "linewidths": 0.8}
    for axes in grid.flat:
        _thousands(axes)
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
            order = feature.argsort()
            grid[row][2].scatter(feature, true, label="true", **dots)
            grid[row][2].plot(feature[order], said[order], color=COLOURS[1], label="predicted")
            grid[row][2].set(xlabel=metadata.get("feature", "feature"), ylabel=name)
            _legend_above(grid[row][2], ncols=2)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the pictures of one run folder, or the curves of several in one picture."""
    parser = arguments.Parser(prog="python -m trainkit.plots", description=__doc__.splitlines()[0])
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--output", type=Path, default=None,
                        help="of several runs; None: comparison.png beside the first")  # fmt: skip
    args: argparse.Namespace = parser.parse_args(argv)
    for run_dir in args.run_dirs:
        if not (run_dir / "metrics.jsonl").exists():
            raise launch.UsageError(f"{run_dir} is not a run folder: it has no metrics.jsonl")
    if len(args.run_dirs) == 1:
        if args.output is not None:
            raise launch.UsageError("--output is for several runs; one keeps its own pictures")
        paths = draw_run(args.run_dirs[0])
    else:
        output = args.output or args.run_dirs[0].parent / "comparison.png"
        paths = [_write(draw_curves(args.run_dirs), output)]
    for path in paths:
        print(path)


def _load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get("trainkit", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as problem:
        raise launch.UsageError(f"{path} cannot be read: {problem}") from problem


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError as problem:
        raise launch.UsageError(f"{path} cannot be read: {problem}") from problem


def _resumed_steps(run_dir: Path) -> list[int]:
    path = run_dir / "timing.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return sorted({row["resumed_at"] for row in rows if "resumed_at" in row})


def _points(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    rows = [row for row in rows if name in row]
    return [row["step"] for row in rows], [row[name] for row in rows]


def _subplots(*shape: int, **options: Any) -> tuple["Figure", Any]:
    """A figure that no window and no global state knows of."""
    from matplotlib.figure import Figure

    size = options.pop("figsize")
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    return figure, figure.subplots(*shape, **options)


def _plain_log_ticks(axes: "Axes") -> None:
    """0.05 and not 5 x 10^-2, and labels between the decades where there are few of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def _thousands(axes: "Axes") -> None:
    """Five ticks or so, and 200k for 200000, so that wide numbers do not run into each other."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(
            FuncFormatter(lambda x, _: f"{x:g}" if abs(x) < 1e4 else f"{x / 1000:,.10g}k")
        )


def _legend_above(axes: "Axes", **options: Any) -> None:
    """Outside the axes, where no line can run beneath it."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=9,
                borderaxespad=0.2, **options)  # fmt: skip


def _write(figure: "Figure", path: Path) -> Path:
    figure.savefig(path, metadata={"Software": None})
    return path


if __name__ == "__main__":
    launch.run(main)
