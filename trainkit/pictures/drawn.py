"""Draw what a network sees before it is trained: RUN_DIR/input.png."""

from collections.abc import Callable, Sized
from typing import TYPE_CHECKING

import torch

from trainkit.text import first_sentence

if TYPE_CHECKING:  # predict.py uses this room without the loop
    from trainkit.run.run import Run

NUM_DRAWN = 16  # pictures of each side


def spread(dataset: Sized) -> torch.Tensor:
    """Return NUM_DRAWN numbers of samples from all parts of a set, int64; all of a smaller one."""
    number = min(NUM_DRAWN, len(dataset))
    return torch.arange(number) * len(dataset) // max(1, number)


def draw_input(
    run: "Run",
    sides: Callable[[], dict[str, tuple[torch.Tensor, torch.Tensor]]],
    classes: list[str],
) -> None:
    """Draw what the network sees into RUN_DIR/input.png, before training, and say so.

    Call this after run.begin(). If it cannot be drawn, a line says why and the run goes on.

    Args:
        sides: returns, by title, pictures as they go in, with values 0 to 255 (n, channels, size,
            size), and their classes, int64.
    """
    if not (run.config.pictures and run.accelerator.is_main_process):
        return
    try:
        from trainkit.plots.figures import draw_seen  # here: matplotlib takes long

        picture = draw_seen(run.config.run_dir, sides(), classes)
        if not run.config.dry_run:  # which leaves nothing
            run.print(f"as the network sees them: {picture}")
    except Exception as problem:  # no matplotlib, no memory, no disk
        run.print(f"input.png was not drawn: {first_sentence(problem)}")
