"""What acts in a run, in the order of a script."""
