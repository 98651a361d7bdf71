"""The size of a run on a few pictures, and on many."""

from typing import Any

from trainkit.cli.parse import flag

SMALL = 10_000  # with fewer pictures, the sizes for a large set make too few steps


def fit_to_size(
    config: Any, num_train: int, large: dict[str, float], small: dict[str, float] | None = None
) -> dict[str, str]:
    """Choose the values that are UNSET by the number of training pictures; a line of the plan.

    On less than 10,000 the values for a large set would make a few steps, and leave out up to a
    batch in each epoch: there are more epochs, with batches of 32, and what `small` says. What was
    typed stays; with a --batch-size or --drop-last of the user's own, nothing is small. Returns a
    line for the plan of a small set, else none.
    """
    own = any(getattr(config, name) is not None for name in ("batch_size", "drop_last"))
    is_small, values = num_train < SMALL and not own, large
    if is_small:
        epochs = max(3, 16384 // max(1, num_train))
        values = large | {"batch_size": 32, "epochs": epochs, "drop_last": False} | (small or {})
    chosen = {name: value for name, value in values.items() if getattr(config, name) is None}
    vars(config).update(chosen)
    flags = [
        flag(name if value else f"no_{name}") + ("" if isinstance(value, bool) else f" {value:g}")
        for name, value in chosen.items()
    ]
    return {"small set": f"of {num_train} pictures: {' '.join(flags)}"} if is_small else {}
