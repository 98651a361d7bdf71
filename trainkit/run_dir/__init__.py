"""Files: the run folder, its lock, manifests, weights, what was logged."""
