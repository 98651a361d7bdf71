"""The flags that every run has, and one message that names all that is wrong with them."""

import argparse
import csv
import difflib
import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from trainkit.errors import UsageError, is_main_rank

OPTIMIZERS = ("adamw", "adam", "sgd")
SCHEDULES = ("onecycle", "cosine", "exponential", "exponential+cosine", "constant")
TRACKERS = ("tensorboard", "trackio", "wandb")

# What other programs call our flags, where the words are not alike.
SLIPS = {
    "--lr": "--learning-rate", "--wd": "--weight-decay", "--bs": "--batch-size",
    "--per-device-train-batch-size": "--batch-size", "--num-train-epochs": "--epochs",
    "--gradient-accumulation-steps": "--accumulate", "--gradient-clipping": "--clip-norm",
    "--max-grad-norm": "--clip-norm", "--grad-clip": "--clip-norm", "--lr-scheduler": "--schedule",
    "--lr-scheduler-type": "--schedule", "--output-dir": "--run-dir", "--out": "--run-dir",
    "--resume-from-checkpoint": "--resume", "--checkpointing-steps": "--save-every",
    "--save-steps": "--save-every", "--logging-steps": "--log-every", "--workers": "--num-workers",
    "--report-to": "--tracker", "--with-tracking": "--tracker", "--data-dir": "--dataset",
}  # fmt: skip
# What the launch decides, though no launcher has such a flag.
OF_THE_LAUNCH = {"--fp16", "--bf16", "--amp", "--precision", "--device", "--gpu", "--gpus",
                 "--no-cuda", "--use-cpu", "--compile", "--distributed-type", "--world-size",
                 "--local-rank", "--nproc-per-node", "--nnodes"}  # fmt: skip

# Flags that may differ when a run is resumed; all others are the experiment and must be equal.
NOT_THE_EXPERIMENT = {
    "run_dir", "resume", "save_every", "keep", "keep_best", "log_every", "tracker", "num_workers",
    "timeout", "stop_after_steps", "target_accuracy", "target_r2", "accumulate", "pictures",
    "eval_batch_size", "eval_every", "patience", "dataset", "data",  # instead of their names the md5 of the data is compared
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """ArgumentParser that prints once per run, not once per process, and reads flags from @FILE.

    Such a file may hold several flags to a line; # starts a comment.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(
            formatter_class=argparse.ArgumentDefaultsHelpFormatter, fromfile_prefix_chars="@",
            allow_abbrev=False, **kwargs,
        )  # fmt: skip

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return arg_line.split("#")[0].split()

    def _read_args_from_files(self, arg_strings: list[str]) -> list[str]:
        try:
            return super()._read_args_from_files(arg_strings)
        except UsageError:
            raise
        except (RecursionError, ValueError) as problem:
            self.error(f"a file named with @ is no text or names itself: {problem}")

    def error(self, message: str) -> NoReturn:
        unknown = message.split() if message.startswith("unrecognized") else []
        hints = dict.fromkeys(self.hint(word) for word in unknown if word.startswith("-"))
        script = Path(sys.argv[0]).name
        raise UsageError("; ".join([message, *filter(None, hints)]) + f" (see {script} --help)")

    def hint(self, word: str) -> str:
        """What somebody who typed this unknown flag may have meant, or nothing."""
        from accelerate.commands.launch import launch_command_parser  # 0.1 s

        typed, flags = word.split("=")[0], self._option_string_actions
        flag = "--" + typed.strip("-").replace("_", "-").lower()
        if SLIPS.get(flag, flag) in flags:
            return f"instead of {typed} use {SLIPS.get(flag, flag)}"
        if flag in OF_THE_LAUNCH or flag in launch_command_parser()._option_string_actions:
            return f"{typed} is for the launch: the YAML, accelerate launch or torchrun decides it"
        near = difflib.get_close_matches(flag, flags, 1)
        return f"instead of {typed} perhaps {near[0]}" if near else ""

    def _print_message(self, message: str, file: Any = None) -> None:
        if is_main_rank():
            super()._print_message(message, file)


def names(text: str) -> list[str]:
    """The names in `a,b`, as a flag takes them; one with a comma inside in quotes, `"a, b",c`."""
    found = next(csv.reader(io.StringIO(text, newline=""), skipinitialspace=True), [])
    return [name.strip() for name in found if name.strip()]


def whole_numbers(text: str) -> list[int]:
    """The numbers in `1,2`, as a flag takes them."""
    return [int(name) for name in names(text)]


def add_training_arguments(parser: Parser) -> None:
    """Add the flags that decide the numbers of a run, whatever its model and data."""
    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=int, default=10, help="passes over the training data")
    add("--batch-size", type=int, default=128,
        help="samples per optimizer step, over all processes and micro-batches")  # fmt: skip
    add("--eval-batch-size", type=int, default=1024, help="in evaluations; changes no result")
    add("--learning-rate", type=float, default=1e-3, help="peak learning rate; None: by optimizer")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="fused where torch offers it")
    add("--momentum", type=float, default=0.9, help="of --optimizer sgd")
    add("--weight-decay", type=float, default=0.0, help="decoupled for adamw, else an L2 penalty")
    add("--schedule", choices=SCHEDULES, default="constant", help="learning rate of each step")
    add("--warmup", type=float, default=0.0,
        help="fraction of all steps in which the learning rate rises to its peak")  # fmt: skip
    add("--min-learning-rate", type=float, default=0.0,
        help="lowest learning rate of the onecycle and cosine schedules")  # fmt: skip
    add("--ema", type=float, default=None,
        help="evaluate and write a moving average of the weights, with this decay per step")  # fmt: skip
    add("--gamma", type=float, default=0.9, help="decay per epoch of the exponential schedules")
    add("--cosine-epochs", type=float, default=None,
        help="half a period of the cosine, in epochs; None: the whole run")  # fmt: skip
    add("--scale-lr", type=int, default=None, metavar="REFERENCE_BATCH",
        help="multiply the learning rate by batch-size / REFERENCE_BATCH")  # fmt: skip
    add("--accumulate", type=int, default=1,
        help="micro-batches per optimizer step: less memory, the same numbers")  # fmt: skip
    add("--clip-norm", type=float, default=math.inf, help="largest norm of the gradient; inf: any")
    add("--drop-last", action=argparse.BooleanOptionalAction, default=False,
        help="leave out the last short batch of each epoch")  # fmt: skip
    add("--seed", type=int, default=0, help="of weights, order, augmentation and dropout")


def add_run_arguments(parser: Parser, run_dir: str) -> None:
    """Add the flags that say where a run lives, how it is watched, stopped and continued."""
    add = parser.add_argument_group("run folder").add_argument
    add("--run-dir", type=Path, default=Path(run_dir),
        help="folder of this run; an earlier run in it is moved aside, never deleted")  # fmt: skip
    add("--resume", default=None, metavar="auto|latest|PATH",
        help="continue from the newest whole checkpoint if there is one (auto), or fail if there "
        "is none (latest), or from exactly this one; None: start a new run")  # fmt: skip
    add("--save-every", type=int, default=None, help="steps between checkpoints; None: each epoch")
    add("--keep", type=int, default=2, help="checkpoints to keep, at least 2")
    add("--keep-best", default=None, metavar="METRIC",
        help="also keep the checkpoint with the best METRIC, such as eval_accuracy, and its "
        "weights as best.safetensors; of a loss or error the smallest is best")  # fmt: skip
    add("--patience", type=int, default=None, help="evaluations without a better --keep-best")
    add("--eval-every", type=int, default=None, help="steps between evaluations")
    add("--start-from", type=Path, default=None, metavar="FILE",
        help="begin with the weights in this safetensors file, by name; no resume")  # fmt: skip
    add("--stop-after-steps", type=int, default=None,
        help="end the run after this many optimizer steps as if it were done")  # fmt: skip
    add("--pictures", action=argparse.BooleanOptionalAction, default=True,
        help="draw curves and results into the run folder at the end")  # fmt: skip
    add = parser.add_argument_group("watching and loading").add_argument
    add("--log-every", type=int, default=None, help="steps between rows of metrics.jsonl")
    add("--tracker", choices=TRACKERS, default=None, help="log there as well")
    add("--num-workers", type=int, default=0, help="loader processes per training process")
    add("--timeout", type=int, default=300,
        help="seconds after which a process that does not answer counts as lost")  # fmt: skip


def check(
    problems: list[str], args: argparse.Namespace, name: str, good: Callable[[Any], bool], rule: str
) -> None:
    """Add a phrase to problems unless the flag is None or good."""
    value = getattr(args, name)
    if value is not None and not good(value):
        problems.append(f"--{name.replace('_', '-')} {value} must be {rule}")


def shared_problems(args: argparse.Namespace, num_processes: int) -> list[str]:
    """All that is wrong with the shared flags, one phrase each."""
    problems: list[str] = []
    for name in ("epochs", "batch_size", "eval_batch_size", "accumulate", "scale_lr", "save_every",
                 "log_every", "stop_after_steps", "timeout"):  # fmt: skip
        check(problems, args, name, lambda v: v >= 1, "at least 1")
    for name in ("learning_rate", "gamma", "cosine_epochs"):
        check(problems, args, name, lambda v: 0 < v < math.inf, "a number above 0")
    for name in ("momentum", "weight_decay"):
        check(problems, args, name, lambda v: 0 <= v < math.inf, "a number of at least 0")
    check(problems, args, "clip_norm", lambda v: v > 0, "above 0")
    check(problems, args, "warmup", lambda v: 0 <= v < 1, "at least 0 and below 1")
    check(problems, args, "keep", lambda v: v >= 2, "at least 2")
    check(problems, args, "num_workers", lambda v: v >= 0, "at least 0")
    check(problems, args, "seed", lambda v: 0 <= v < 2**32, "at least 0 and below 2**32")
    if args.accumulate > 1 and os.environ.get("ACCELERATE_DYNAMO_MODE") == "reduce-overhead":
        problems.append(
            f"--accumulate {args.accumulate} would add up gradients where the CUDA graphs of "
            "dynamo_mode reduce-overhead write the next ones: use --accumulate 1, or dynamo_mode: "
            "default in the YAML"
        )
    parts = num_processes * args.accumulate
    if args.batch_size >= 1 and args.accumulate >= 1 and args.batch_size % parts:
        problems.append(f"--batch-size {args.batch_size} must be a multiple of {num_processes} "
                        f"processes x --accumulate {args.accumulate} = {parts}")  # fmt: skip
    return problems


def check_shared(args: argparse.Namespace, num_processes: int) -> None:
    """Raise UsageError for what is wrong with the shared flags."""
    refuse(shared_problems(args, num_processes))


def size_problems(args: argparse.Namespace, num_train: int) -> list[str]:
    """All that is wrong with the flags for this number of training samples."""
    if num_train < 1:
        return ["no training samples are left"]
    if args.drop_last and args.batch_size > num_train:
        return [f"--batch-size {args.batch_size} is larger than the {num_train} training samples: "
                "with --drop-last no step would be left"]  # fmt: skip
    return []


def refuse(problems: Sequence[str]) -> None:
    """Raise one UsageError that names all problems, if there are any."""
    if problems:
        raise UsageError("; ".join(problems))


def experiment(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that decide the numbers, for the fingerprint of a checkpoint."""
    values = {name: value for name, value in vars(args).items() if name not in NOT_THE_EXPERIMENT}
    if args.schedule in ("constant", "exponential") and not args.warmup:
        del values["epochs"]  # their rates do not depend on it, so the run may be made longer
    return values
