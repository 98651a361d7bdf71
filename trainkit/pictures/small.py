"""Choose other default hyperparameters for a small data set than for a large one."""

from typing import Any

from trainkit.config.command_line import flag

SMALL_SET = 10_000  # with fewer pictures, the values for a large set make too few steps


def fit_to_size(
    config: Any, num_train: int, large: dict[str, float], small: dict[str, float]
) -> dict[str, str]:
    """Set the values that are UNSET by the number of training pictures; return a line of the plan.

    With fewer than 10,000 pictures the values for a large set would give few steps, and leave out
    up to a batch in each epoch; instead there are more epochs, batches of 32, and the values of
    `small`. Values that the user typed stay. If the user chose --batch-size or --drop-last, no data
    set counts as small. The line of the plan is returned for a small set only.
    """
    is_small = num_train < SMALL_SET and config.batch_size is None and config.drop_last is None
    values = large
    if is_small:
        epochs = max(3, 16384 // max(1, num_train))
        values = large | {"batch_size": 32, "epochs": epochs, "drop_last": False} | small
    chosen = {name: value for name, value in values.items() if getattr(config, name) is None}
    vars(config).update(chosen)
    flags = [
        flag(name if value else f"no_{name}") + ("" if isinstance(value, bool) else f" {value:g}")
        for name, value in chosen.items()
    ]
    return {"small set": f"of {num_train} pictures: {' '.join(flags)}"} if is_small else {}
