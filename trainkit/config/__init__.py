"""The flags of a run: a dataclass that a script extends, and the command line that fills it."""

from trainkit.config.command_line import find_urls, flag, parse
from trainkit.config.directions import metric_and_direction
from trainkit.config.flags import (
    MAY_CHANGE,
    UNSET,
    WITH_CUDA_GRAPHS,
    Count,
    Fraction,
    MayChange,
    Metric,
    NonNegative,
    Optimizer,
    Positive,
    ReadOnlyIf,
    Rule,
    Schedule,
    Seed,
    Share,
    TrainingConfig,
    find_broken_rules,
)

__all__ = [
    "MAY_CHANGE",
    "UNSET",
    "WITH_CUDA_GRAPHS",
    "Count",
    "Fraction",
    "MayChange",
    "Metric",
    "NonNegative",
    "Optimizer",
    "Positive",
    "ReadOnlyIf",
    "Rule",
    "Schedule",
    "Seed",
    "Share",
    "TrainingConfig",
    "find_broken_rules",
    "find_urls",
    "flag",
    "metric_and_direction",
    "parse",
]
