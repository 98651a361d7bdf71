"""Explain one prediction on the page: probabilities and pixels for a picture, curves for a row."""

from collections.abc import Sequence
from html import escape
from textwrap import fill
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from trainkit.pictures import border_of
from trainkit.plots import figures
from trainkit.plots.style import COLOURS, as_written, new_figure
from trainkit.text import write_number

FOR, AGAINST = torch.tensor([[213.0, 94, 0], [0, 114, 178]])  # orange, blue of style.COLOURS
MAX_SHARES = 10  # classes with a bar
MAX_DRAWN = 4  # targets, one below the other


def occlusion_map(predictor: Any, picture: torch.Tensor, answer: int) -> torch.Tensor:
    """Return how much each place of a picture supports the answer, (size, size), from -1 to 1.

    This is how much the log of the answer's probability falls if a square there gets the colour of
    the picture's border, divided by the largest change. picture: uint8 (channels, size, size).
    """
    size = picture.shape[-1]
    step = 2 if size < 64 else size // 8  # 28 pixels have 14 x 14 places, 224 have 8 x 8
    centres = torch.arange((step - 1) / 2, size, step)
    near = (torch.arange(size) - centres[:, None]).abs() <= 1.5 * step
    square = (near[:, None, :, None] & near[None, :, None, :]).view(-1, 1, size, size)
    colour = border_of(picture).median(1).values.view(-1, 1, 1)
    covered = torch.where(square, colour, picture)
    parts = [picture[None], *covered.split(32)]
    logs = torch.cat([predictor(part)[:, answer] for part in parts]).clamp(1e-9).log()
    loss = (logs[0] - logs[1:]).view(1, 1, len(centres), -1)
    loss = F.interpolate(loss, (size, size), mode="bilinear")[0, 0]
    return loss / loss.abs().max().clamp(1e-4)


def draw_shares(shares: dict[str, float]) -> str:
    """Return the largest probabilities as HTML: name, bar and number, in the answer's digits."""
    largest = sorted(shares.items(), key=lambda pair: -pair[1])[:MAX_SHARES]
    rows = [
        f'<span>{escape(name)}</span><meter value="{share:.6f}"></meter><span>{share:.2%}</span>'
        for name, share in largest
    ]
    return f'<div class="shares">{"".join(rows)}</div>'


def describe_answer(
    predictor: Any,
    picture: torch.Tensor,
    doubt: str = "",
    probabilities: torch.Tensor | None = None,
) -> tuple[str, str, list[tuple[np.ndarray, str]]]:
    """Return the answer and the probabilities as HTML, and two pictures with captions.

    Args:
        picture: uint8 (channels, size, size), or a smaller copy of it.
        doubt: what makes it unlike the training pictures, if anything; the answer is then unsure.
        probabilities: of an evaluated picture; None: ask the model.
    """
    classes = predictor.metadata["classes"]
    size = predictor.metadata["size"]
    whole = F.interpolate(picture[None].float(), (size, size)).byte()
    if probabilities is None:
        probabilities = predictor(whole)[0]
    number = int(probabilities.argmax())
    answer = classes[number]
    share = probabilities[number].item()
    if not doubt and share < predictor.calibration["threshold"]:
        doubt = f"{share:.2%} is less than for 95 in 100 test pictures"
    speaks = occlusion_map(predictor, whole[0], number)[..., None]
    ink = whole[0].float().mean(0)[..., None] * 0.7 * (1 - speaks.abs())
    overlay = ink + speaks.clamp(min=0) * FOR - speaks.clamp(max=0) * AGAINST
    views = [
        (figures.to_array(picture), "what the network sees"),
        (overlay.byte().numpy(), f"orange speaks for {answer}, blue against"),
    ]
    html = f"<h2>{escape(answer)}</h2>{share:.2%}"
    if doubt:
        html = f"<h2>unsure, perhaps {escape(answer)}</h2>{doubt}"
    shares = dict(zip(classes, probabilities.tolist(), strict=True))
    return html, draw_shares(shares), views


def draw_responses(
    points: np.ndarray, outputs: np.ndarray, name: str, targets: Sequence[str]
) -> Figure:
    """Draw each target along one column, whose own value a dot marks.

    points: values of the column, of which the first is its own. outputs: the targets at these
    points, (n, targets). name: of the column.
    """
    lines = outputs.T[:MAX_DRAWN]
    style = as_written()
    figure = new_figure(5, 3.2 * len(lines))
    grid = figure.subplots(len(lines), squeeze=False).flat
    for axes, target, line in zip(grid, targets, lines, strict=False):
        axes.plot(points[1:], line[1:], color=COLOURS[4])
        axes.plot(points[0], line[0], "o", color=COLOURS[1], mec="white")
        written = FuncFormatter(lambda value, _: write_number(value, 6))  # not as 1e6
        axes.yaxis.set_major_formatter(written)
        axes.xaxis.set_major_formatter(written)
        axes.set_xlabel(fill(name, 40), **style)
        axes.set_ylabel(fill(target, 30), **style)
    return figure
