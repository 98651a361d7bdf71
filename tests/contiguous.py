"""train_mnist.py with contiguous weights, which sharding needs: channels_last rounds otherwise."""

from collections.abc import Sequence

import train_mnist

CONTIGUOUS = {
    name: type(kind.__name__, (kind,), {"to": lambda self, *_, **__: self})
    for name, kind in train_mnist.MODELS.items()
}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train on the CPU, where nothing else is moved by model.to(...)."""
    train_mnist.MODELS |= CONTIGUOUS
    return train_mnist.main(argv)
