"""An order for make_loaders that mixes two sources: nine of ten samples are of the first.

In a script:

    train_set = ConcatDataset([first, second])
    order = mixture((len(first), len(second)), config.seed)
    loaders = make_loaders(accelerator, train_set, eval_set, config, order=order)
"""

from collections.abc import Callable

from trainkit import key, permute

import torch


def mixture(sizes: tuple[int, int], seed: int) -> Callable[[int, int, int], torch.Tensor]:
    """Return order(epoch, start, stop): the samples at these positions of an epoch, int64.

    Of every ten consecutive samples nine come from the first source. A source that is used up
    starts again in another order. The order depends on the position alone, so the proportions are
    exact with any number of processes, and after a resume.
    """

    def order(epoch: int, start: int, stop: int) -> torch.Tensor:
        position = torch.arange(start, stop) + epoch * sum(sizes)
        source = (position % 10 == 9).long()
        nth = torch.where(source == 1, position // 10, position - position // 10)
        index = torch.empty_like(position)
        for which in (0, 1):
            turns = nth // sizes[which]
            for turn in turns[source == which].unique().tolist():
                here = (source == which) & (turns == turn)
                number = key("mixture", seed, which, turn)
                index[here] = permute(nth[here] % sizes[which], sizes[which], number)
        return index + source * sizes[0]

    return order
