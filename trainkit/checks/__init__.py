"""Checks of the order of calls, of what was prepared, of the data, and for NaN and infinity."""
