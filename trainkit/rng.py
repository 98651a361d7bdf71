"""Random numbers that a script may draw: functions of the seed, the epoch and the sample."""

from trainkit.numbers.mixing import key, permute
from trainkit.numbers.rng import Dropout, keyed_normal, keyed_uniform

__all__ = ["Dropout", "key", "keyed_normal", "keyed_uniform", "permute"]
