"""Tools that start a script where there is more than `accelerate launch` to do."""
