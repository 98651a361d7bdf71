"""What the page says about one input: bars and pixels for a picture, drawings for a row of a table.

HTML, made without gradio.
"""

from collections.abc import Callable, Sequence
from html import escape
from textwrap import fill
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainkit.run_dir import curves
from trainkit.tools import page

FOR, AGAINST = torch.tensor([[213.0, 94, 0], [0, 114, 178]])  # orange, blue of curves.COLOURS
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
def describe(
    model: nn.Module, about: dict[str, Any], picture: torch.Tensor, doubt: str = ""
) -> list[str]:
    """HTML: the answer; and bars, what the network sees, and what speaks for the answer.

    doubt: what makes the picture unlike those of the training, if anything; it is then unsure.
    """
    classes, probabilities = about["classes"], model(picture[None, None])[0]
    answer = int(probabilities.argmax())
    sure = probabilities[answer].item()
    if not doubt and sure < about.get("calibration", {}).get("threshold", 0):
        doubt = f"{page.percent(sure)} is less than for 95 in 100 test pictures"
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
    said = f"<h2>{'unsure, perhaps ' * bool(doubt)}{escape(classes[answer])}</h2><p>{doubt}</p>"
    return [said, f'{bars}<div class="views">{"".join(views)}</div>']


def curve(
    outputs: Callable[[np.ndarray], np.ndarray],
    row: np.ndarray,
    feature: tuple[int, str],
    span: tuple[float, float],
    targets: Sequence[str],
) -> str:
    """HTML: each target along one feature, the others as in the row, which is a dot.

    outputs: rows of features to targets, (n, targets). feature: its number and name. span: the
    first and the last value that is drawn.
    """
    (number, name), html = feature, ""
    rows = np.tile(row, (121, 1))
    ends = [*span, row[number]]
    rows[:, number] = np.linspace(min(ends), max(ends), len(rows))
    values, here = outputs(rows), outputs(row[None])[0]
    for column, target in enumerate(targets[:MAX_DRAWN]):
        figure = curves.new_figure(4.4, 3.0)
        axes = figure.subplots()
        axes.plot(rows[:, number], values[:, column], color=curves.COLOURS[4])
        axes.plot(row[number], here[column], "o", color=curves.COLOURS[1], mec="white")
        axes.set(xlabel=fill(name, 40), ylabel=fill(target, 30))
        html += page.drawing(figure, f"{target} along {name}")
    return html
