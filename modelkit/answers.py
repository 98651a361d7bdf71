"""What the page says about one input: bars and pixels for a picture, drawings for a row of a table.

HTML, made without gradio.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from modelkit import page
from trainkit import plots

FOR, AGAINST = torch.tensor([[213.0, 94, 0], [0, 114, 178]])  # orange and blue of trainkit.plots
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
    return loss / loss.abs().max().clamp(0.01)


@torch.inference_mode()
def describe(model: nn.Module, classes: list[str], picture: torch.Tensor, note: str) -> list[str]:
    """HTML: the answer with bars in the order of the classes; what is seen, and what speaks."""
    probabilities = model(picture[None, None])[0]
    answer = int(probabilities.argmax())
    speaks = evidence(model, picture, answer)[..., None]
    ink = picture[..., None] * 0.7 * (1 - speaks.abs())
    overlay = ink + speaks.clamp(min=0) * FOR - speaks.clamp(max=0) * AGAINST
    said = f"<h2>{escape(classes[answer])} <small>{escape(note)}</small></h2>"
    views = {
        "what the network sees": picture.numpy(),
        f"orange speaks for {classes[answer]}, blue against": overlay.byte().numpy(),
    }
    return [said + page.bars(classes, probabilities.tolist()), page.views(views)]


def landscape(
    outputs: Callable[[pd.DataFrame], np.ndarray],
    row: pd.DataFrame,
    ranges: Mapping[str, Sequence[float]],
    along: Sequence[str],
    targets: Sequence[str],
) -> str:
    """HTML: each target as a curve along one feature or a surface over two; a dot is the row.

    outputs: rows of a table to targets, (n, targets). ranges: first and last value drawn.
    """
    targets = targets[:MAX_DRAWN]
    x, *y = (np.linspace(ranges[name][0], ranges[name][1], 121 if len(along) == 1 else 41)
             for name in along)  # fmt: skip
    places = np.meshgrid(x, *y)
    many = row.loc[[0] * places[0].size].reset_index(drop=True)
    many = many.assign(**{name: place.ravel() for name, place in zip(along, places, strict=True)})
    values, here = outputs(many), outputs(row)
    figure = plots.new_figure(4.4, (3.4 if y else 2.8) * len(targets))
    grid = figure.subplots(len(targets), 1, squeeze=False)
    for number, (axes, name) in enumerate(zip(grid.flat, targets, strict=True)):
        if y:
            drawn = axes.contourf(*places, values[:, number].reshape(places[0].shape), 12)
            figure.colorbar(drawn, ax=axes, label=name)
            axes.plot(row[along[0]], row[along[1]], "o", color=plots.COLOURS[1], mec="white")
        else:
            axes.plot(x, values[:, number], color=plots.COLOURS[4])
            axes.plot(row[along[0]], here[:, number], "o", color=plots.COLOURS[1])
        axes.set(xlabel=along[0], ylabel=along[1] if y else name)
    return page.drawing(figure, f"the prediction along {' and '.join(along)}")
