"""The flags of a run: a dataclass that a script extends, and the command line that fills it.

Scripts may import from here; the kit above reads the values. It knows nothing of processes or
files. Begin in flags.py, with TrainingConfig; command_line.py has `parse`.
"""

from trainkit.config.command_line import flag as flag
from trainkit.config.command_line import parse as parse
from trainkit.config.flags import UNSET as UNSET
from trainkit.config.flags import WITH_CUDA_GRAPHS as WITH_CUDA_GRAPHS
from trainkit.config.flags import Count as Count
from trainkit.config.flags import Fraction as Fraction
from trainkit.config.flags import MayChange as MayChange
from trainkit.config.flags import Metric as Metric
from trainkit.config.flags import NonNegative as NonNegative
from trainkit.config.flags import Optimizer as Optimizer
from trainkit.config.flags import Positive as Positive
from trainkit.config.flags import ReadOnlyIf as ReadOnlyIf
from trainkit.config.flags import Rule as Rule
from trainkit.config.flags import Schedule as Schedule
from trainkit.config.flags import Seed as Seed
from trainkit.config.flags import Share as Share
from trainkit.config.flags import TrainingConfig as TrainingConfig
from trainkit.config.flags import find_broken_rules as find_broken_rules
from trainkit.config.flags import metric_and_direction as metric_and_direction
