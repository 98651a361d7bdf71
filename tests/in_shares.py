"""examples/gpt.py, of which small weights too are made one at a time if the run is sharded."""

from trainkit import deferred

from examples.gpt import main  # noqa: F401

deferred.MIN_BYTES = 8
