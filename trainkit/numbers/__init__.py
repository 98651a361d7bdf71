"""Samples, random numbers, sums and rates of a step, as functions of seed, epoch and position."""
