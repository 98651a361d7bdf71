"""Draw what a network sees before it is trained: RUN_DIR/input.png."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from trainkit.numbers.loaders import InMemory
from trainkit.pictures.files import cut_centre
from trainkit.text import first_sentence

if TYPE_CHECKING:  # predict.py uses this room without the loop
    from trainkit.run.run import Run

NUM_DRAWN = 16  # pictures of each side


def draw_input(
    run: "Run",
    train_set: Dataset,
    eval_set: Dataset,
    metadata: dict[str, Any],
    augment: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Draw what the network sees into RUN_DIR/input.png; call this after run.begin().

    Args:
        train_set, eval_set: those of load_grey or load_photos.
        metadata: has "classes" and "size".
        augment: returns pictures to train on as they go in, given them and their indices.
    """
    if not (run.config.pictures and run.accelerator.is_main_process):
        return
    try:
        from trainkit.plots.figures import draw_seen  # here: matplotlib takes long

        sides = {}
        for title, dataset in ("to train on", train_set), ("to evaluate on", eval_set):
            images, labels, indices = pick_some(dataset)
            seen = augment(images, indices) if dataset is train_set else images
            sides[title] = cut_centre(seen, metadata["size"]), labels
        picture = draw_seen(run.config.run_dir, sides, metadata["classes"])
        run.print(f"as the network sees them: {picture}")
    except Exception as problem:  # no matplotlib, no memory, no disk
        run.print(f"input.png was not drawn: {first_sentence(problem)}")


def pick_some(dataset: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return NUM_DRAWN pictures from all parts of a set, their classes and their indices."""
    number = min(NUM_DRAWN, len(dataset))
    indices = torch.arange(number) * len(dataset) // max(1, number)
    return dataset.__getitems__(indices) if isinstance(dataset, InMemory) else dataset.pick(indices)
