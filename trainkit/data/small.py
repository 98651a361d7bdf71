"""The size of a run on few pictures: other defaults than those for a large set."""

import argparse
from collections.abc import Sequence

SMALL = 10_000  # with fewer pictures, the defaults for a large set make too few steps


def parse_sizes(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, **sizes: float
) -> argparse.Namespace:
    """The flags. `sizes` are defaults; args.given names those of them that were typed."""
    parser.set_defaults(**sizes)
    args = parser.parse_args(argv)
    typed = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(sizes))))
    args.given = [name for name in sizes if typed[name] is not None]
    args.not_the_experiment.append("given")
    return args


def fit_to_small_set(args: argparse.Namespace, num_train: int, **more: float) -> dict[str, str]:
    """Change the sizes that were not typed for few pictures; a line of the plan, or none.

    The defaults for a large set would make a few steps, and leave out up to a batch in each epoch.
    With a --batch-size or --drop-last of the user's own nothing is changed.
    more: values of other flags for few pictures.
    """
    if num_train >= SMALL or {"batch_size", "drop_last"} & {*args.given}:
        return {}
    values = {"batch_size": 32, "epochs": max(3, 16384 // max(1, num_train)), **more}
    values = {name: value for name, value in values.items() if name not in args.given}
    vars(args).update(values, drop_last=False)
    flags = [f"--{name.replace('_', '-')} {value:g}" for name, value in values.items()]
    return {"small set": f"of {num_train} pictures: {' '.join(flags)} --no-drop-last"}
