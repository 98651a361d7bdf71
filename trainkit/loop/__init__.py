"""A run, in the order of a script: how it starts, one step, an evaluation, how it ends."""
