"""Explain one prediction on the page: probabilities and pixels for a picture, curves for a row."""

from collections.abc import Callable, Sequence
from html import escape
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainkit.tools import curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOR, AGAINST = torch.tensor([[213.0, 94, 0], [0, 114, 178]])  # orange, blue of curves.COLOURS
MAX_DRAWN = 4  # targets, one below the other


@torch.inference_mode()
def occlusion_map(model: nn.Module, picture: torch.Tensor, answer: int) -> torch.Tensor:
    """Return how much each place of a picture supports the answer, (size, size), from -1 to 1.

    This is how much the log of the answer's probability falls if 6 x 6 pixels there are blackened,
    divided by the largest change.
    """
    size, places = len(picture), torch.arange(0.5, len(picture), 2)
    near = (torch.arange(size) - places[:, None]).abs() <= 3
    window = near[:, None, :, None] & near[None, :, None, :]
    covered = picture.masked_fill(window.view(-1, 1, size, size), 0)
    logs = torch.cat([model(part)[:, answer] for part in covered.split(64)]).clamp(1e-9).log()
    loss = model(picture[None, None])[0, answer].clamp(1e-9).log() - logs
    loss = F.interpolate(loss.view(1, 1, len(places), -1), (size, size), mode="bilinear")[0, 0]
    return loss / loss.abs().max().clamp(1e-4)


@torch.inference_mode()
def describe(
    predictor: Any, picture: torch.Tensor, doubt: str = ""
) -> tuple[str, dict[str, float], list[tuple[np.ndarray, str]]]:
    """Return the answer as HTML, the probabilities, and two pictures with captions.

    picture: uint8 (size, size). doubt: what makes it unlike the training pictures, if anything;
    the answer is then called unsure.
    """
    classes, probabilities = predictor.metadata["classes"], predictor(picture[None, None])[0]
    number = int(probabilities.argmax())
    answer, share = classes[number], probabilities[number].item()
    if not doubt and share < predictor.calibration["threshold"]:
        doubt = f"{share:.2%} is less than for 95 in 100 test pictures"
    speaks = occlusion_map(predictor, picture, number)[..., None]
    ink = picture[..., None] * 0.7 * (1 - speaks.abs())
    overlay = ink + speaks.clamp(min=0) * FOR - speaks.clamp(max=0) * AGAINST
    views = [
        (picture.numpy(), "what the network sees"),
        (overlay.byte().numpy(), f"orange speaks for {answer}, blue against"),
    ]
    said = f"<h2>{'unsure, perhaps ' * bool(doubt)}{escape(answer)}</h2>{doubt or f'{share:.2%}'}"
    return said, dict(zip(classes, probabilities.tolist(), strict=True)), views


def draw_curves(
    outputs: Callable[[np.ndarray], np.ndarray],
    row: np.ndarray,
    feature: tuple[int, str],
    span: tuple[float, float],
    targets: Sequence[str],
) -> "Figure":
    """Draw each target along one feature, the other features as in the row; a dot marks the row.

    outputs: maps rows of features to targets, (n, targets). feature: its number and name. span: the
    first and the last value that is drawn.
    """
    number, name = feature
    rows = np.tile(row, (121, 1))
    rows[:, number] = np.linspace(*span, len(rows))
    values, here = outputs(rows), outputs(row[None])[0]
    num_drawn = min(len(targets), MAX_DRAWN)
    figure = curves.new_figure(5, 3.2 * num_drawn)
    grid = figure.subplots(num_drawn, squeeze=False)[:, 0]
    for axes, target, line, dot in zip(grid, targets, values.T, here, strict=False):
        axes.plot(rows[:, number], line, color=curves.COLOURS[4])
        axes.plot(row[number], dot, "o", color=curves.COLOURS[1], mec="white")
        axes.set(xlabel=fill(name, 40), ylabel=fill(target, 30))
    return figure
