"""A model that is sharded over the processes, and its checkpoints."""
