"""The flags of a run: a dataclass that a script extends, and the command line that fills it."""

from trainkit.config.command_line import flag, parse
from trainkit.config.flags import (
    MAY_CHANGE,
    UNSET,
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
)

__all__ = [
    "MAY_CHANGE",
    "UNSET",
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
    "flag",
    "parse",
]
