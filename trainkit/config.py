"""The flags that every run has, and one message that names all that is wrong with them."""

import argparse
import csv
import io
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from trainkit.cli.directions import metric_and_direction
from trainkit.errors import UsageError

OPTIMIZERS = ("adamw", "adam", "sgd")
SCHEDULES = ("onecycle", "cosine", "exponential", "exponential+cosine", "constant")
TRACKERS = ("tensorboard", "trackio", "wandb")

TrainingConfig = argparse.Namespace

Rule = tuple[Callable[[Any], bool], str]
Flags = Sequence[tuple[str, Any, Any, Rule | None, str]]
AT_LEAST_0 = (lambda value: 0 <= value < math.inf, "a number of at least 0")
AT_LEAST_1 = (lambda value: 1 <= value < 2**31, "at least 1 and below 2**31")
AT_LEAST_2 = (lambda value: value >= 2, "at least 2")
POSITIVE = (lambda value: 0 < value < math.inf, "a number above 0")
UP_TO_1 = (lambda value: 0 < value <= 1, "above 0 and at most 1")
POSITIVE_OR_INF = (lambda value: value > 0, "above 0")
DECAY = (lambda value: 0 < value < 1, "above 0 and below 1")
FRACTION = (lambda value: 0 <= value < 1, "at least 0 and below 1")
METRIC = (
    lambda value: bool(metric_and_direction(value)[1]),
    "followed by :min or :max: the name does not say whether a smaller or a larger value is better",
)
SEED = (lambda value: 0 <= value < 2**32, "at least 0 and below 2**32")

# Flag, type or choices, default, what a value must be, help.
EXPERIMENT_FLAGS = (
    ("--epochs", int, 10, AT_LEAST_1, "passes over the training data"),
    ("--batch-size", int, 128, AT_LEAST_1,
     "samples per optimizer step, over all processes and micro-batches"),
    ("--learning-rate", float, 1e-3, POSITIVE, "peak learning rate; None: by optimizer"),
    ("--optimizer", OPTIMIZERS, "adamw", None, "fused, except under fp16"),
    ("--momentum", float, 0.9, AT_LEAST_0, "of --optimizer sgd"),
    ("--weight-decay", float, 0.0, AT_LEAST_0, "decoupled for adamw, else an L2 penalty"),
    ("--schedule", SCHEDULES, "constant", None, "learning rate of each step"),
    ("--warmup", float, 0.0, FRACTION,
     "fraction of all steps in which the learning rate rises to its peak"),
    ("--min-learning-rate", float, 0.0, AT_LEAST_0,
     "lowest learning rate of the onecycle and cosine schedules"),
    ("--gamma", float, 0.9, UP_TO_1, "decay per epoch of the exponential schedules"),
    ("--cosine-epochs", float, None, POSITIVE,
     "half a period of the cosine, in epochs; None: the whole run"),
    ("--scale-lr", int, None, AT_LEAST_1,
     "a reference batch size: multiply the learning rate by --batch-size / this"),
    ("--clip-norm", float, math.inf, POSITIVE_OR_INF, "largest norm of the gradient; inf: any"),
    ("--ema", float, None, DECAY,
     "evaluate and write a moving average of the weights, with this decay per step"),
    ("--drop-last", bool, False, None, "leave out the last short batch of each epoch"),
    ("--seed", int, 0, SEED, "of weights, order, augmentation and dropout"),
)  # fmt: skip
# The same, of flags that may differ when a run is resumed: they change no number of a step.
RUN_FLAGS = (
    ("--run-dir", Path, None, None,
     "folder of this run; an earlier run in it is moved aside, never deleted"),
    ("--resume", str, None, None,
     "auto: continue from the newest whole checkpoint if there is one; latest: fail if there is "
     "none; a path: from exactly this one; None: start a new run"),
    ("--save-every", int, None, AT_LEAST_1, "steps between checkpoints; None: each epoch"),
    ("--keep", int, 2, AT_LEAST_2, "checkpoints to keep, at least 2"),
    ("--keep-best", str, None, METRIC,
     "a metric, such as eval_accuracy: also keep the checkpoint where it is best, and its weights "
     "as best.safetensors; NAME:min or NAME:max where the name does not say which is better"),
    ("--patience", int, None, AT_LEAST_1,
     "end the run after this many evaluations in a row that are not the best by --keep-best"),
    ("--start-from", Path, None, None,
     "begin with the weights in this safetensors file, by name; with --resume a checkpoint wins"),
    ("--stop-after-steps", int, None, AT_LEAST_1,
     "end the run after this many optimizer steps as if it were done"),
    ("--pictures", bool, True, None, "draw curves and results into the run folder at the end"),
    ("--log-every", int, None, AT_LEAST_1,
     "steps between rows of metrics.jsonl; None: 50, or fewer for at least 50 rows in a run"),
    ("--eval-every", int, None, AT_LEAST_1,
     "steps between evaluations, besides those at an epoch's end"),
    ("--eval-batch-size", int, 1024, AT_LEAST_1, "in evaluations; changes nothing but rounding"),
    ("--accumulate", int, 1, AT_LEAST_1,
     "micro-batches per optimizer step: less memory, the same numbers"),
    ("--tracker", TRACKERS, None, None, "log there as well"),
    ("--num-workers", int, 0, AT_LEAST_0,
     "loader processes per training process"),
    ("--timeout", int, 300, AT_LEAST_1,
     "seconds after which a process that does not answer counts as lost"),
)  # fmt: skip
# The flags that people use, which --help shows before all others.
USED_MOST = (
    "--dataset --data --target --model --epochs --batch-size --learning-rate --run-dir --resume"
)


class Help(argparse.HelpFormatter):
    """--help in fewer lines: the usage names no flag, and a default of None is said in words."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        names = [action.metavar or action.dest for action in actions if not action.option_strings]
        super().add_usage(" ".join(["%(prog)s", *names, "[flags]"]), actions, groups, prefix)

    def _get_help_string(self, action: argparse.Action) -> str:
        words, _, default = (action.help or "").partition("None: ")
        if action.default not in (None, [], argparse.SUPPRESS):
            default = "%(default)s"
        return words.rstrip("; ") + f" (default: {default})" * bool(default)


class Parser(argparse.ArgumentParser):
    """ArgumentParser that prints once per run, not once per process, and reads flags from @FILE.

    A line of such a file is read as a shell would: several flags, quotes, # for comments. Of the
    description, a script's docstring (None under python -OO), --help shows the first line.
    """

    suggest_on_error = True  # of a mistyped choice, from Python 3.14 on

    def __init__(self, description: str | None = None, **kwargs: Any):
        super().__init__(
            description=(description or "").partition("\n")[0],
            formatter_class=Help,
            allow_abbrev=False,
            fromfile_prefix_chars="@",
            **kwargs,
        )
        self.used_most = self.add_argument_group("used most")

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return shlex.split(arg_line, comments=True)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {Path(sys.argv[0]).name} --help)")


def names(text: str) -> list[str]:
    """Split `a,b` into names; one that contains a comma is quoted: `"a, b",c`."""
    lines = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    return [name.strip() for line in lines for name in line if name.strip()]


def whole_numbers(text: str) -> list[int]:
    """Split `1,2` into whole numbers."""
    return [int(name) for name in names(text)]


def add_training_arguments(parser: Parser) -> None:
    """Add the flags that decide the numbers of a run, whatever its model and data."""
    add_flags(parser, "training", EXPERIMENT_FLAGS)


def add_run_arguments(parser: Parser, run_dir: str, not_the_experiment: Sequence[str] = ()) -> None:
    """Add the flags that say where a run is written and how it is logged, stopped and resumed.

    `not_the_experiment` names the script's own flags that may differ between the nodes of a run and
    when it is resumed, such as the place of the data, whose content is compared instead.
    """
    add_flags(parser, "run", RUN_FLAGS)
    parser.set_defaults(run_dir=Path(run_dir), not_the_experiment=list(not_the_experiment))


def add_flags(parser: Parser, title: str, flags: Flags) -> None:
    """Add a group of flags from a table like those above."""
    group = parser.add_argument_group(title)
    for flag, kind, default, _, text in flags:
        how: dict[str, Any] = {"type": kind, "metavar": flag.rpartition("-")[2].upper()}
        if isinstance(kind, tuple | dict):
            how = {"choices": kind}
        elif kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        place = parser.used_most if flag in USED_MOST.split() else group
        place.add_argument(flag, default=default, help=text, **how)


def find_problems(args: argparse.Namespace, num_processes: int, flags: Flags = ()) -> list[str]:
    """What is wrong with the shared flags and with these of the script; one phrase each."""
    problems: list[str] = []
    for flag, _, _, rule, _ in (*EXPERIMENT_FLAGS, *RUN_FLAGS, *flags):
        value = getattr(args, _variable(flag))
        if rule is not None and value is not None and not rule[0](value):
            problems.append(f"{flag} {value} must be {rule[1]}")
    if args.min_learning_rate > 0 and args.schedule not in ("onecycle", "cosine"):
        problems.append("--min-learning-rate is for --schedule onecycle and cosine")
    elif 0 < peak_learning_rate(args) <= args.min_learning_rate:
        problems.append(
            f"--min-learning-rate must be below the peak of {peak_learning_rate(args):g}, which is "
            "--learning-rate after --scale-lr"
        )
    if args.patience and not args.keep_best:
        problems.append("--patience needs --keep-best METRIC: what is to become better?")
    if args.accumulate > 1 and os.environ.get("ACCELERATE_DYNAMO_MODE") == "reduce-overhead":
        problems.append(
            f"--accumulate {args.accumulate} would add up gradients where the CUDA graphs of "
            "dynamo_mode reduce-overhead write the next ones: use --accumulate 1, or dynamo_mode: "
            "default in the YAML"
        )
    parts = num_processes * args.accumulate
    if args.batch_size >= 1 and args.accumulate >= 1 and args.batch_size % parts:
        problems.append(
            f"--batch-size {args.batch_size} must be a multiple of {num_processes} processes x "
            f"--accumulate {args.accumulate} = {parts}"
        )
    return problems


def peak_learning_rate(args: argparse.Namespace) -> float:
    """--learning-rate after the linear scaling rule (Goyal et al. 2017, arXiv:1706.02677)."""
    return (args.learning_rate or 0) * (args.batch_size / args.scale_lr if args.scale_lr else 1.0)


def check_shared(args: argparse.Namespace, num_processes: int) -> None:
    """Raise UsageError for what is wrong with the shared flags."""
    refuse(find_problems(args, num_processes))


def check_size(args: argparse.Namespace, num_train: int, num_eval: int) -> None:
    """Raise UsageError if there are no samples, or no step for them."""
    if num_train < 1 or num_eval < 1:
        raise UsageError(f"there are {num_train} samples to train on and {num_eval} to evaluate on")
    if args.drop_last and args.batch_size > num_train:
        raise UsageError(
            f"--batch-size {args.batch_size} is larger than the {num_train} training samples: "
            "with --drop-last no step would be left"
        )


def refuse(problems: Sequence[str]) -> None:
    """Raise one UsageError that names all problems, if there are any."""
    if problems:
        raise UsageError("; ".join(problems))


def experiment(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that decide the numbers, for the fingerprint of a checkpoint."""
    assert vars(args).keys() >= set(args.not_the_experiment), "not_the_experiment holds no flag"
    others = {*args.not_the_experiment, "not_the_experiment", *(_variable(f[0]) for f in RUN_FLAGS)}
    if args.schedule in ("constant", "exponential") and not args.warmup:
        others.add("epochs")  # their rates do not depend on it, so the run may be made longer
    return {name: value for name, value in vars(args).items() if name not in others}


def _variable(flag: str) -> str:
    return flag[2:].replace("-", "_")
