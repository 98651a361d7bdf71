"""Random numbers of many batches drawn at once, because the samples that come next are known.

Of numbers that depend on the sample alone it does not matter when they are drawn. A step then
starts one operation on a GPU in place of 18, and the numbers are the same bits.
"""

from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from trainkit.repairs.names import version_of

NUM_AT_ONCE = 2**16  # numbers
MOST_ORDERS = 4  # the newest that loaders have computed; older ones are read no more
MOST_USES = 16  # of random numbers for the samples of an order


class Drawn(NamedTuple):
    """The place of the samples that were asked for, and the numbers from there on, if drawn."""

    place: int
    numbers: torch.Tensor | None = None


class KnownOrder:
    """Indices of samples in the order in which batches have them, and what was drawn for them."""

    def __init__(self, indices: torch.Tensor):
        self.indices = indices
        self.version = version_of(indices)
        self.drawn: dict[Hashable, Drawn] = {}

    def holds(self, indices: torch.Tensor) -> bool:
        """Are these a piece of this order, which nobody has changed?"""
        return (
            indices.untyped_storage().data_ptr() == self.indices.untyped_storage().data_ptr()
            and indices.dtype == self.indices.dtype
            and indices.stride() == (1,)
            and version_of(indices) == self.version
            and 0 <= self.place_of(indices) <= len(self.indices) - len(indices)
        )

    def place_of(self, indices: torch.Tensor) -> int:
        """Where in this order they begin, if they share its memory."""
        return indices.storage_offset() - self.indices.storage_offset()

    def note(self, use: Hashable, drawn: Drawn) -> None:
        self.drawn[use] = drawn
        if len(self.drawn) > MOST_USES:
            del self.drawn[next(iter(self.drawn))]


_known: deque[KnownOrder] = deque(maxlen=MOST_ORDERS)


def remember_order(indices: torch.Tensor) -> None:
    """Let numbers be drawn ahead for batches whose indices are slices of these, int64."""
    _known.append(KnownOrder(indices))


def draw(
    use: Hashable, indices: torch.Tensor, num: int, make: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return make(indices), which is drawn ahead from the second batch on that has this use.

    Args:
        use: what else the numbers depend on.
        num: of numbers for each sample.
        make: returns a row for each of the indices, which depends on this index alone.
    """
    if torch.compiler.is_compiling():
        return make(indices)
    order = next((order for order in reversed(_known) if order.holds(indices)), None)
    if order is None:
        return make(indices)
    place = order.place_of(indices)
    last = order.drawn.get(use)
    if last is None or place < last.place:  # perhaps nothing follows
        order.note(use, Drawn(place))
        return make(indices)
    start, numbers = last
    if numbers is None or place + len(indices) > start + len(numbers):
        num_rows = max(len(indices), NUM_AT_ONCE // max(1, num))
        start, numbers = place, make(order.indices[place : place + num_rows])
        order.note(use, Drawn(start, numbers))
    # A copy, which a script may change.
    return numbers[place - start :][: len(indices)].clone()
