"""Save and resume: what a checkpoint holds, when it counts, which one is taken."""
