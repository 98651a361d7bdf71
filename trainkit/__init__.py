"""The mechanics of a training run: launch, arguments, order, checkpoints, history, the end."""
