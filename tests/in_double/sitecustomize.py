"""Python imports a module of this name at its start: see tests/double.py."""

from double import use_double

use_double()
