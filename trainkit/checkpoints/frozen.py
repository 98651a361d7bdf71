"""Frozen weights: which of them the loop has changed, as a momentum teacher does."""

from collections.abc import Sequence

from torch import nn

from trainkit.checkpoints import sharded as shards
from trainkit.checkpoints.changes import Marks


class Frozen:
    """The frozen weights (requires_grad=False) of the models of a run.

    They are left out of checkpoints only while they are as at the start: what a loop moves, such as
    a teacher that follows the student, a resume must have.

    Attributes:
        moved: for each model the names of those that have changed since watch().
    """

    def __init__(self, models: Sequence[nn.Module]):
        self.models = models
        self.moved: list[set[str]] = [set() for _ in models]
        self.watch()

    def watch(self) -> None:
        """From here on a change counts. Call it when they are as every start makes them."""
        self.marks = [Marks(shards.frozen(model)) for model in self.models]

    def set_moved(self, moved: Sequence[Sequence[str]]) -> None:
        """Take over from a checkpoint which of them had changed, for each model."""
        self.moved = [set(names) for names in moved]

    def find_moved(self) -> list[set[str]]:
        """The names of those that this process has seen change, for each model."""
        return [marks.changed() for marks in self.marks]

    def state_of(self, model: nn.Module) -> shards.Tensors:
        """The state of a model without those frozen weights that are as at the start, by name."""
        number = next(n for n, one in enumerate(self.models) if one is model)
        return shards.state_of(model, self.moved[number])
