"""How this process was launched, what all processes do together, signals, and how it ends.

It knows the flags and the files of a run, and nothing of models or data. Runs and checkpoints call
it; a script has `trainkit.startup`. Begin in startup.py, with `run`; environment.py is what is
refused before there is an Accelerator, nodes.py what is refused right after that.
"""
