"""Which samples, random numbers, sums and rates a step has: functions of seed, epoch and position.

Begin in loaders.py, with `make_loaders`; orders.py says which sample is at a position and where a
run stands, randoms.py what is drawn for it, means.py adds up what it gave, optim.py has optimizers
and schedules. Nothing here is saved but the sums of an epoch. Runs, checkpoints and wings call it;
it knows the flags and the processes, and neither a run nor a file.
"""
