"""Processes and signals: what this process was started as, and how it ends."""
