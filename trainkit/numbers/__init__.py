"""Which samples, random numbers, sums and rates a step has: functions of seed, epoch, place."""
