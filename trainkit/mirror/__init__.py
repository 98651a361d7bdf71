"""The copy of a run in another place."""
