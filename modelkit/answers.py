"""What the page says about one input: bars and pixels for a picture, drawings for a row of a table.

HTML, made without gradio.
"""

from collections.abc import Callable, Sequence
from html import escape
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from modelkit import page
from trainkit import curves

FOR, AGAINST = torch.tensor([[213.0, 94, 0], [0, 114, 178]])  # orange and blue of trainkit.curves
MAX_DRAWN = 4  # targets, one below the other


@torch.inference_mode()
def evidence(model: nn.Module, picture: torch.Tensor, answer: int) -> torch.Tensor:
    """How much each place of a picture speaks for the answer, (size, size), from -1 to 1.

    By occlusion: what the log of its probability loses if 6 x 6 pixels there are blackened.
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
def describe(model: nn.Module, about: dict[str, Any], picture: torch.Tensor) -> list[str]:
    """HTML: the answer; and bars, what the network sees, and what speaks for the answer."""
    classes, probabilities = about["classes"], model(picture[None, None])[0]
    answer = int(probabilities.argmax())
    unsure = bool(probabilities[answer] < about.get("calibration", {}).get("threshold", 0))
    speaks = evidence(model, picture, answer)[..., None]
    ink = picture[..., None] * 0.7 * (1 - speaks.abs())
    overlay = ink + speaks.clamp(min=0) * FOR - speaks.clamp(max=0) * AGAINST
    views = (
        f"<figure>{page.picture(pixels)}<figcaption>{caption}</figcaption></figure>"
        for pixels, caption in (
            (picture, "what the network sees"),
            (overlay.byte(), f"orange speaks for {escape(classes[answer])}, blue against"),
        )
    )
    bars = page.bars(classes, probabilities.tolist())
    said = f"<h2>{'unsure: ' * unsure}{escape(classes[answer])}</h2>"
    return [said, f'{bars}<div class="views">{"".join(views)}</div>']


def landscape(
    outputs: Callable[[np.ndarray], np.ndarray],
    row: np.ndarray,
    ranges: dict[str, tuple[float, float]],
    features: Sequence[str],
    targets: Sequence[str],
) -> str:
    """HTML: each target as a curve along one feature or a surface over two; a dot is the row.

    outputs: rows of features to targets, (n, targets). ranges: the features to draw along, with the
    first and the last value.
    """
    numbers = [features.index(name) for name in ranges]
    axis = [
        np.linspace(low, high, 121 if len(ranges) == 1 else 41) for low, high in ranges.values()
    ]
    rows = np.tile(row, (len(axis[0]) ** len(axis), 1))
    rows[:, numbers] = [*product(*axis)]
    values, here = outputs(rows), outputs(row[None])[0]
    html = ""
    for number, target in enumerate(targets[:MAX_DRAWN]):
        figure = curves.new_figure(4.4, 3.0)
        axes = figure.subplots()
        if len(axis) == 2:
            drawn = axes.contourf(*axis, values[:, number].reshape(41, 41).T, 12)
            figure.colorbar(drawn, label=target)
        else:
            axes.plot(*axis, values[:, number], color=curves.COLOURS[4])
        # Along two features the target is the colour, not an axis.
        (xlabel, x), (ylabel, y) = [
            *zip(ranges, row[numbers], strict=True),
            (target, here[number]),
        ][:2]
        axes.plot(x, y, "o", color=curves.COLOURS[1], mec="white")
        axes.set(xlabel=xlabel, ylabel=ylabel)
        html += page.drawing(figure, f"{target} along {' and '.join(ranges)}")
    return html
