"""What a run says and leaves: the plan, lines of metrics, weights, predictions, pictures."""
