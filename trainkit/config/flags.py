"""The flags that every run has, as the fields of a dataclass; a script adds its own in a subclass.

The text below a field is its line of --help.
"""

import inspect
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin

from trainkit.config.command_line import flag
from trainkit.errors import UsageError

T = TypeVar("T")

# For which metrics a smaller or a larger value is better, by a part of the name.
BETTER = {
    "min": "loss error mse rmse mae mape logloss nll perplexity bpb brier ece wer cer eer fid",
    "max": "accuracy acc f1 r2 auc auroc ap map precision recall specificity mcc kappa pearson "
    "spearman iou miou dice bleu chrf rouge psnr ssim ndcg mrr reward margin",
}
DIRECTION = {name: direction for direction, names in BETTER.items() for name in names.split()}
# A name that contains one of these does not tell the direction: neg_loss, accuracy_gap, loss_std.
UNCLEAR = "neg negative negated minus inv inverse inverted free rejected gap drop gain delta diff "
UNCLEAR += "difference change ratio reduction improvement increase decrease std stdev var variance"


def metric_and_direction(text: str) -> tuple[str, str]:
    """Return the metric of --keep-best, and "min" or "max": given as NAME:min, or by the name.

    A name is recognised by its parts, as in eval_wer, eval_clean-loss, ndcg@10; else it is "".
    """
    name, _, direction = text.rpartition(":")
    if name and direction in ("min", "max"):
        return name, direction
    parts = set(re.split(r"[\W_]+", "" if ":" in text else text.lower()))
    directions = {DIRECTION.get(part) or DIRECTION.get(part.rstrip("0123456789")) for part in parts}
    clear = len(directions - {None}) == 1 and parts.isdisjoint(UNCLEAR.split())
    return text, max(filter(None, directions)) if clear else ""


class Rule(NamedTuple):
    """What a value must be; None is not checked."""

    holds: Callable[[Any], bool]
    text: str


class ReadOnlyIf(NamedTuple):
    """In Annotated: a flag that does nothing unless another has one of these values.

    Without values that other one must be given, or on; (None,): it must not be given. A script that
    declares the field again, because it reads it always, has this no longer.
    """

    name: str
    values: tuple[Any, ...] = ()


Count = Annotated[int, Rule(lambda value: 1 <= value < 2**31, "at least 1 and below 2**31")]
NonNegative = Annotated[T, Rule(lambda value: 0 <= value < math.inf, "a number of at least 0")]
Positive = Annotated[float, Rule(lambda value: 0 < value < math.inf, "a number above 0")]
Fraction = Annotated[float, Rule(lambda value: 0 <= value < 1, "at least 0 and below 1")]
Share = Annotated[float, Rule(lambda value: 0 <= value <= 1, "at least 0 and at most 1")]
Seed = Annotated[int, Rule(lambda value: 0 <= value < 2**32, "at least 0 and below 2**32")]

Metric = Annotated[
    str,
    Rule(
        lambda value: bool(metric_and_direction(value)[1]),
        "followed by :min or :max: the name does not say whether a smaller or a larger value is "
        "better",
    ),
]
Optimizer = Literal["adamw", "adam", "sgd", "muon"]
Schedule = Literal["onecycle", "cosine", "linear", "exponential", "exponential+cosine", "constant"]
# Those that reach the lowest learning rate at the end of the run.
FALLING = ("onecycle", "cosine", "linear")

WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile
MAY_CHANGE = "may have another value when a run is resumed"
MayChange = Annotated[T, MAY_CHANGE]

# The default of a field for which a script chooses a value: see TrainingConfig.set_unset. Any, so
# that a field is annotated with the type that it has later.
UNSET: Any = None


@dataclass
class TrainingConfig:
    """The shared flags; a script changes a default by declaring the field again.

    A field must have the same value on all nodes and when a run is resumed. A MayChange field may
    change then. If a script adds it, such as where the data are, the nodes may differ in it too.
    """

    MOVED: ClassVar[dict[str, str]] = {  # flags that scripts had, and what is given instead
        "--target-accuracy": "give --target eval_accuracy:VALUE",
        "--target-r2": "give --target eval_r2:VALUE",
        "--dry-run": "give --stop-after-steps 1 --run-dir FOLDER",
    }

    epochs: Count = 10
    """passes over the training data"""
    batch_size: Count = 128
    """samples per optimizer step, over all processes and micro-batches"""
    learning_rate: Positive = 1e-3
    """peak learning rate"""
    run_dir: MayChange[Path] = Path("runs/run")
    """folder of this run; an earlier run in it is moved aside, never deleted"""
    resume: MayChange[str | None] = None
    """auto: the newest complete checkpoint, if any; latest: the same, or fail; or a checkpoint"""

    optimizer: Optimizer = "adamw"
    """fused, except under fp16"""
    momentum: Annotated[NonNegative[float], ReadOnlyIf("optimizer", ("sgd", "muon"))] = 0.9
    """of --optimizer sgd and muon"""
    weight_decay: NonNegative[float] = 0.0
    """decoupled for adamw and muon, else an L2 penalty"""
    schedule: Schedule = "constant"
    """learning rate of each step"""
    warmup: Fraction = 0.0
    """fraction of all steps in which the learning rate rises to its peak"""
    decay: Fraction = 0.0
    """fraction of all steps, the last ones, in which a constant or exponential rate falls"""
    min_learning_rate: NonNegative[float] = 0.0
    """lowest learning rate of onecycle, cosine, linear and --decay"""
    gamma: Annotated[
        float,
        Rule(lambda value: 0 < value <= 1, "above 0 and at most 1"),
        ReadOnlyIf("schedule", ("exponential", "exponential+cosine")),
    ] = 0.9
    """decay per epoch of the exponential schedules"""
    cosine_epochs: Annotated[
        Positive | None, ReadOnlyIf("schedule", ("cosine", "exponential+cosine"))
    ] = None
    """half a period of the cosine, in epochs (default: the whole run)"""
    scale_lr: Count | None = None
    """a reference batch size: multiply the learning rate by --batch-size / this"""
    clip_norm: Annotated[float, Rule(lambda value: value > 0, "above 0")] = math.inf
    """largest norm of the gradient; inf: do not clip"""
    ema: Annotated[float, Rule(lambda value: 0 < value < 1, "above 0 and below 1")] | None = None
    """evaluate and write a moving average of the weights, with this decay per step"""
    drop_last: bool = False
    """leave out the last short batch of each epoch"""
    seed: Seed = 0
    """of weights, order, augmentation and dropout"""

    save_every: MayChange[Count | None] = None
    """steps between checkpoints (default: each epoch)"""
    keep: MayChange[Annotated[int, Rule(lambda value: value >= 2, "at least 2")]] = 2
    """checkpoints to keep, at least 2"""
    keep_best: MayChange[Metric | None] = None
    """a metric, or METRIC:min, METRIC:max: keep its best checkpoint and write best.safetensors"""
    patience: MayChange[Annotated[Count | None, ReadOnlyIf("keep_best")]] = None
    """end the run after this many evaluations in a row that are not the best by --keep-best"""
    target: MayChange[str | None] = None
    """METRIC:VALUE, such as eval_accuracy:0.99: exit with 3 if the last evaluation misses it"""
    start_from: MayChange[Path | None] = None
    """initial weights, a safetensors file, matched by name; a checkpoint of --resume comes first"""
    mirror: MayChange[str | None] = None
    """where checkpoints are copied and --resume finds them: s3://, gs://, hf://, another folder"""
    mirror_must: MayChange[Annotated[bool, ReadOnlyIf("mirror")]] = False
    """exit with 1 if --mirror does not have the whole run at the end"""
    stop_after_steps: MayChange[Count | None] = None
    """end the run after this many optimizer steps as if it were done"""
    pictures: MayChange[bool] = True
    """draw curves and results into the run folder at the end"""
    log_every: MayChange[Count | None] = None
    """steps between rows of metrics.jsonl (default: 50, or fewer for at least 50 rows in a run)"""
    eval_every: MayChange[Count | None] = None
    """steps between evaluations, besides those at an epoch's end"""
    eval_batch_size: MayChange[Count] = 1024
    """in evaluations; changes nothing but rounding"""
    accumulate: MayChange[Count] = 1
    """micro-batches per optimizer step: less memory, the same numbers"""
    tracker: MayChange[Literal["tensorboard", "trackio", "wandb"] | None] = None
    """also log to this tracker"""
    num_workers: MayChange[NonNegative[int]] = 0
    """loader processes per training process"""
    deterministic: MayChange[bool] = False
    """on a GPU: only algorithms that give the same bits each time, of which some are slower"""
    profile: MayChange[NonNegative[int]] = 0
    """steps to profile: trace.json, and a table of their operations"""
    timeout: MayChange[Count] = 300
    """seconds after which a process that does not answer counts as lost"""

    def set_unset(self, values: dict[str, Any]) -> str:
        """Give fields these values where they are UNSET, that is, where the user gave no value.

        To be called in __post_init__ or load_data. Returns the flags that were set.
        """
        chosen = {name: value for name, value in values.items() if getattr(self, name) is UNSET}
        vars(self).update(chosen)
        return " ".join(self._typed(name, value) for name, value in chosen.items())

    @property
    def peak_learning_rate(self) -> float:
        """--learning-rate after the linear scaling rule (Goyal et al. 2017, arXiv:1706.02677)."""
        scale = self.batch_size / self.scale_lr if self.scale_lr and self.batch_size else 1.0
        return (self.learning_rate or 0.0) * scale

    @property
    def resume_may_change(self) -> set[str]:
        """The fields that may have another value when a run is resumed."""
        names = {name for name, note in _notes_of(type(self)) if note is MAY_CHANGE}
        return names - {"target"} if self._has_own_target else names

    @property
    def _has_own_target(self) -> bool:
        """Has the script a --target of its own, such as a column, in place of that of every run?"""
        own = next(k for k in type(self).__mro__ if "target" in inspect.get_annotations(k))
        return own is not TrainingConfig

    @property
    def metric_target(self) -> tuple[str, str, float] | None:
        """The metric of --target, "min" or "max", and its value; else None, or a ValueError."""
        if self._has_own_target or self.target is None:
            return None
        metric, _, value = self.target.rpartition(":")
        name, direction = metric_and_direction(metric)
        if not name or not direction:
            raise ValueError("or METRIC:min:VALUE where the name does not say what is better")
        return name, direction, float(value)

    @property
    def nodes_may_differ(self) -> set[str]:
        """Those of them that are the script's own: they may differ between the nodes of a run."""
        return self.resume_may_change - {field.name for field in fields(TrainingConfig)}

    @property
    def time_limit(self) -> timedelta:
        """How long a process waits for the others; they meet before the flags are checked."""
        return timedelta(seconds=max(1, self.timeout))

    def experiment(self) -> dict[str, Any]:
        """The values that decide the numbers, for the fingerprint of a checkpoint."""
        others = self.resume_may_change
        has_end = self.warmup or self.decay
        if self.schedule in ("constant", "exponential") and not has_end:
            others.add("epochs")  # their rates do not depend on it, so the run may be made longer
        return {name: value for name, value in vars(self).items() if name not in others}

    def find_problems(self, num_processes: int) -> list[str]:
        """What is wrong with the values, one phrase each; a script adds to what this returns."""
        problems = find_broken_rules(self)
        try:
            self.metric_target  # noqa: B018
        except ValueError as problem:
            problems.append(f"--target {self.target} must be METRIC:VALUE, {problem}")
        mode = os.environ.get("ACCELERATE_DYNAMO_MODE")
        if self.accumulate > 1 and mode in WITH_CUDA_GRAPHS:
            problems.append(
                f"--accumulate {self.accumulate} does not work with dynamo_mode: {mode}, whose "
                "CUDA graphs overwrite gradients: use --accumulate 1, or dynamo_mode: default"
            )
        peak = self.peak_learning_rate
        if self.decay and self.schedule not in ("constant", "exponential"):
            problems.append(
                f"--decay {self.decay:g} needs --schedule constant or exponential: {self.schedule} "
                "falls by itself"
            )
        elif self.decay and (self.warmup or 0) + self.decay > 1:
            problems.append(
                f"--warmup {self.warmup:g} and --decay {self.decay:g} are more than the whole run"
            )
        if self.min_learning_rate > 0 and self.schedule not in FALLING and not self.decay:
            problems.append(
                "--min-learning-rate needs --schedule onecycle, cosine or linear, or --decay"
            )
        elif 0 < peak <= self.min_learning_rate:
            problems.append(
                f"--min-learning-rate must be below the peak of {peak:g}, which is --learning-rate "
                "after --scale-lr"
            )
        parts = num_processes * self.accumulate
        if parts > 0 and (self.batch_size or 0) % parts:
            problems.append(
                f"--batch-size {self.batch_size} must be a multiple of {num_processes} processes x "
                f"--accumulate {self.accumulate} = {parts}"
            )
        return problems

    def find_unread(self) -> list[str]:
        """A phrase for each flag that is not at its default and does nothing beside the others."""
        problems = []
        for name, note in dict.fromkeys(_notes_of(type(self))):
            if not isinstance(note, ReadOnlyIf):
                continue
            value = getattr(self, name)
            other = getattr(self, note.name)
            is_read = other in note.values if note.values else other
            if value != self._default(name) and not is_read:
                values = " or ".join(str(each) for each in note.values if each is not None)
                wanted = f"{flag(note.name)} {values}" if values else flag(note.name)
                way = f"beside {wanted}" if None in note.values else f"without {wanted}"
                problems.append(f"{self._typed(name, value)} does nothing {way}: leave it out")
        return problems

    def _default(self, name: str) -> Any:
        field = self.__dataclass_fields__[name]
        return field.default if field.default_factory is MISSING else field.default_factory()

    def _typed(self, name: str, value: Any) -> str:
        """A flag and its value, as they are typed."""
        if isinstance(value, bool):
            return flag(name if value else f"no_{name}")
        values = value if isinstance(value, list | tuple) else [value]
        words = [
            str(each).removesuffix(".0") if isinstance(each, float) else str(each)
            for each in values
        ]
        return f"{flag(name)} {','.join(words)}"

    def validate(self, num_processes: int, is_loaded: bool = False) -> None:
        """Raise one UsageError that names all that is wrong, before load_data or after it."""
        problems = self.find_problems(num_processes)
        if not is_loaded:
            problems += self.find_unread()
        else:
            needed = [each.name for each in fields(TrainingConfig) if each.default is not UNSET]
            problems += [
                f"{flag(name)} has no value: give one, or let load_data call config.set_unset(...)"
                for name in needed
                if getattr(self, name) is UNSET
            ]
        if problems:
            raise UsageError("; ".join(problems))


def find_broken_rules(config: Any) -> list[str]:
    """A phrase for each value that breaks the rule of its field."""
    problems = []
    for name, rule in dict.fromkeys(_notes_of(type(config))):
        value = getattr(config, name)
        if isinstance(rule, Rule) and value is not None and not rule.holds(value):
            problems.append(f"{flag(name)} {value} must be {rule.text}")
    return problems


def _notes_of(kind: type) -> Iterator[tuple[str, Any]]:
    """What Annotated has for each field, in its own class or in one that it comes from.

    A ReadOnlyIf counts only in the last class that declares the field.
    """
    hints = [x for base in reversed(kind.__mro__) for x in inspect.get_annotations(base).items()]
    last = dict(hints)
    for name, hint in hints:
        for note in _notes(hint):
            if hint is last[name] or not isinstance(note, ReadOnlyIf):
                yield name, note


def _notes(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Literal:
        yield Rule(get_args(hint).__contains__, f"one of {', '.join(get_args(hint))}")
    yield from getattr(hint, "__metadata__", ())
    for part in get_args(hint):
        yield from _notes(part)
