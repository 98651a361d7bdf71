"""Draw what a run folder holds: curves, confusion, mistakes, fit; and what a network sees."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import torch
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from trainkit.plots import curves
from trainkit.plots.style import COLOURS, as_written, cut, new_figure
from trainkit.store.records import PREDICTIONS, load_predictions
from trainkit.text import count

NUM_MISTAKES = 24
MAX_NAME = 24  # letters of a class beside confusion.png
MAX_CELLS = 32  # classes up to which confusion.png has room for all numbers and names
INPUT_COLUMNS = 8  # of input.png


def to_array(picture: torch.Tensor) -> np.ndarray:
    """Return a picture, uint8 (channels, size, size), as (size, size) or (size, size, 3)."""
    return picture.permute(1, 2, 0).squeeze(2).numpy()


def saved_pictures(tensors: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the pictures of predictions.safetensors by their numbers among the evaluated ones."""
    images = tensors.get("image", torch.zeros(0))
    return dict(zip(tensors.get("shown", torch.arange(len(images))).tolist(), images, strict=True))


def worst_mistakes(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and probabilities of the most confident wrong predictions, highest first.

    Only those are returned of which there is a picture.
    """
    shown = torch.tensor([*saved_pictures(tensors)])
    wrong = shown[tensors["prediction"][shown] != tensors["target"][shown]]
    probability = tensors["logits"][wrong].softmax(1).amax(1)
    worst = probability.argsort(descending=True, stable=True)[:NUM_MISTAKES]
    return wrong[worst], probability[worst]


def confusion_matrix(
    prediction: torch.Tensor, target: torch.Tensor, num_classes: int
) -> torch.Tensor:
    """Return counts, int64: rows are the truth, columns the prediction."""
    pairs = target * num_classes + prediction
    return pairs.bincount(minlength=num_classes**2).view(num_classes, num_classes)


def draw_run(run_dir: Path) -> list[Path]:
    """Draw every plot for which a run folder has the files, and return the paths."""
    figures: dict[str, Callable[[], Figure]] = {"curves.png": lambda: curves.draw_curves(run_dir)}
    tensors, metadata = load_predictions(run_dir / PREDICTIONS)
    is_usual = {"prediction", "target"} <= tensors.keys()  # else a script has saved others
    if is_usual and "classes" in metadata:
        figures["confusion.png"] = lambda: draw_confusion(tensors, metadata["classes"])
        if "image" in tensors:
            figures["mistakes.png"] = lambda: draw_mistakes(tensors, metadata["classes"])
    elif is_usual and tensors["target"].ndim == 2:
        figures["fit.png"] = lambda: draw_fit(tensors, metadata)
    for name, draw in figures.items():
        draw().savefig(run_dir / name)
    return [run_dir / name for name in figures]


def draw_seen(
    run_dir: Path, sides: dict[str, tuple[torch.Tensor, torch.Tensor]], classes: Sequence[str]
) -> Path:
    """Draw pictures as a network gets them, with their classes, into RUN_DIR/input.png.

    sides: under its title, pictures with values 0 to 255 (n, channels, size, size), and their
    classes, int64. Returns the path.
    """
    style = as_written()
    sizes = [pictures.shape for pictures, _ in sides.values()]
    num_rows = [math.ceil(number / INPUT_COLUMNS) for number, *_ in sizes]
    figure = new_figure(11, 1.65 * sum(num_rows) + 0.4 * len(sides))
    grid = figure.subplots(len(sides), squeeze=False, height_ratios=num_rows).flat
    for axes, (title, (pictures, labels)), rows in zip(grid, sides.items(), num_rows, strict=True):
        _, channels, _, size = pictures.shape
        step = size + max(2, size // 12)
        above = max(3, size // 5)  # above is room for the class
        height, width = rows * (size + above), INPUT_COLUMNS * step
        canvas = np.full((height, width, 3), 255, np.uint8)
        for number, picture in enumerate(pictures.clamp(0, 255).round().byte()):
            row, column = divmod(number, INPUT_COLUMNS)
            top, left = row * (size + above) + above, column * step
            shown = picture.expand(3, -1, -1) if channels == 1 else picture
            canvas[top : top + size, left : left + size] = shown.permute(1, 2, 0).numpy()
            name = cut(classes[int(labels[number])], MAX_NAME)
            axes.text(left, top - above * 0.2, name, fontsize=7, **style)
        axes.imshow(canvas, interpolation="nearest")
        axes.set_title(title, loc="left", fontsize=10, **style)
        axes.set_axis_off()
    path = run_dir / "input.png"
    figure.savefig(path)
    return path


def draw_confusion(tensors: dict[str, torch.Tensor], classes: Sequence[str]) -> Figure:
    """Draw counts and row percentages; the more frequent in its row, the darker a cell.

    With more than MAX_CELLS classes there are only the shades and some of the names.
    """
    num = len(classes)
    matrix = confusion_matrix(tensors["prediction"], tensors["target"], num).numpy()
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    inches, font = (0.62, 8.0) if num <= 15 else (0.42, 6.2)  # of a cell
    style = as_written()
    classes = [cut(name, MAX_NAME) for name in classes]
    longest = max(map(len, classes))
    side = min(num, MAX_CELLS) * inches + 1.8 + 0.09 * longest
    figure = new_figure(side, side)
    axes = figure.subplots()
    axes.imshow(shares, cmap="Greys", norm=PowerNorm(0.35, 0, 1))
    for row, column in np.argwhere(matrix) if num <= MAX_CELLS else ():
        share = shares[row, column]
        shown = "100%" if share == 1 else f"{min(share, 0.999):.1%}"  # 99.97 % is not 100 %
        axes.text(
            column,
            row,
            f"{matrix[row, column]}\n{shown}",
            color="white" if share > 0.08 else "black",
            ha="center",
            va="center",
            fontsize=font,
            linespacing=0.95,
        )
    ticks = range(0, num, -(-num // MAX_CELLS))
    names = [classes[tick] for tick in ticks]
    axes.set_xticks(ticks, names, rotation=90 if longest > 2 else 0, **style)
    axes.set_yticks(ticks, names, **style)
    axes.tick_params(length=0, top=True, labeltop=True, labelsize=font + 2)
    right = int(np.trace(matrix))
    axes.set_title(f"{right} of {matrix.sum()} right ({right / matrix.sum():.2%})", pad=10)
    axes.set(xlabel="predicted", ylabel="true")
    return figure


def draw_mistakes(tensors: dict[str, torch.Tensor], classes: Sequence[str]) -> Figure:
    """Draw the most confident errors: picture, predicted and true class, probability."""
    style = as_written()
    pictures = saved_pictures(tensors)
    worst, probability = worst_mistakes(tensors)
    rows = max(1, math.ceil(len(worst) / 6))
    figure = new_figure(9, 0.4 + 2.2 * rows)
    for axes in figure.subplots(rows, 6, squeeze=False).flat:
        axes.set_axis_off()
    for axes, index, share in zip(figure.axes, worst.tolist(), probability, strict=False):
        axes.imshow(to_array(pictures[index]), cmap="gray", vmin=0, vmax=255)
        predicted, true = (classes[tensors[key][index]] for key in ("prediction", "target"))
        lines = f"predicted {predicted}, {share:.2%}", f"true {true}"
        # A title is not wider than its picture.
        axes.set_title("\n".join(fill(line, 23) for line in lines), fontsize=7.5, **style)
    all_mistakes = int((tensors["prediction"] != tensors["target"]).sum())
    shown = f"the {len(worst)} most confident of " if len(worst) < all_mistakes else ""
    figure.suptitle(f"{shown}{count(all_mistakes, 'mistake')}", fontsize=11)
    return figure


def draw_fit(tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> Figure:
    """Draw predicted against true values, and residuals, for each target."""
    prediction, truth = (tensors[key].numpy() for key in ("prediction", "target"))
    targets = metadata.get("targets") or [f"target {i}" for i in range(truth.shape[1])]
    style = as_written()
    figure = new_figure(8.6, 4.2 * len(targets))
    grid = figure.subplots(len(targets), 2, squeeze=False)
    dots = {"s": 14, "facecolors": "none", "edgecolors": COLOURS[0], "linewidths": 0.8}
    for (against, residuals), name, predicted, true in zip(
        grid, targets, prediction.T, truth.T, strict=True
    ):
        against.scatter(true, predicted, **dots)
        against.axline((true.mean(), true.mean()), slope=1, color="black", linewidth=1.2)
        against.set_xlabel(f"true {name}", **style)
        against.set_ylabel(f"predicted {name}", **style)
        against.set_title("on the line: exact")
        residuals.scatter(predicted, predicted - true, **dots)
        residuals.axhline(0, color="black", linewidth=1.2)
        residuals.set_xlabel(f"predicted {name}", **style)
        residuals.set_ylabel(f"predicted - true {name}", **style)
        rmse = np.sqrt(np.mean((predicted - true) ** 2))
        residuals.set_title(f"root mean square error {rmse:.4g}")
    for axes in figure.axes:
        axes.locator_params(nbins=4)
    return figure
