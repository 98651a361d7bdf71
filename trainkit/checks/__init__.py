"""What is refused: the order of calls, what was prepared, data, numbers that are not finite."""
