"""Look at what the function of run.evaluate or run.predict does with its first batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class Evaluating:
    """What the functions of run.evaluate and run.predict are told, and what they are told off for.

    Args:
        say: prints a note on the main process.

    Attributes:
        num_samples: of this process in the batch of an evaluation; None outside of one.
    """

    def __init__(self, device: torch.device, say: Callable[[str], object]):
        self.device = device
        self.say = say
        self.num_samples: int | None = None
        self.has_said = False

    @contextmanager
    def batch(
        self, call: str, models: Sequence[nn.Module], num_samples: int, is_first: bool
    ) -> Iterator[None]:
        """Call the function in the body.

        Raises RuntimeError if a model is in training mode afterwards. A function that draws random
        numbers may mean it, so of that there is one line.
        """
        self.num_samples = num_samples
        before = self._random_states() if is_first else []
        try:
            yield
        finally:
            self.num_samples = None
        if any(model.training for model in models):
            raise RuntimeError(
                f"{call}: its function called model.train(), so dropout and BatchNorm act as in "
                f"training: leave it out, because {call} puts the models into evaluation mode and "
                "back"
            )
        if is_first and not self.has_said:
            after = self._random_states()
            if not all(map(torch.equal, before, after)):
                self.has_said = True
                self.say(
                    f"note: the function of {call} draws random numbers, so its result depends on "
                    "how a batch is split: F.dropout(x) is always on, so use nn.Dropout, or "
                    "F.dropout(x, training=self.training); noise that is meant: keyed_normal(...)"
                )

    def _random_states(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self.device.type in ("cuda", "mps"):
            states.append(torch.get_device_module(self.device).get_rng_state())
        return states
