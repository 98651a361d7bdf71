"""What acts in a run, in the order of a script.

Begin in run.py: `Run` has the calls that a script makes, and holds one part for each thing it does.
step.py is the current optimizer step, guards.py what ends a run because a number would be wrong,
data.py and prepared.py what is refused before the first step, evaluation.py the evaluation, and
reporter.py and results.py what a run says and leaves. It may use every room below it (checkpoints,
numbers, launch, store, config); it knows no data, and of the rooms above it only tools look inside.
"""
