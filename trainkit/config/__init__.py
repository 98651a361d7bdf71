"""The flags of a run: a dataclass that a script extends, and the command line that fills it.

Scripts may import from here; the kit above reads the values. It knows nothing of processes or
files. Begin in flags.py, with TrainingConfig; command_line.py has `parse`.
"""

from trainkit.config.command_line import flag, parse
from trainkit.config.flags import (
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
    metric_and_direction,
)

__all__ = [
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
    "flag",
    "metric_and_direction",
    "parse",
]
