"""The rehearsal: does a script keep the promises? It runs in several worlds, which are compared.

Begin with __main__.py, which starts the worlds of worlds.py and prints a line for each. stage.py
starts their processes; process.py is what each of them is, watching.py and held.py write down what
the files of a run do not say, and still.py holds still what depends on processes by design.
outcome.py reads what a world has left, compare.py its numbers, and causes.py names what makes them
others, with the cure. Whatever is only known from a script's source, or from two runs of it,
belongs here and not into training. The rehearsal may look into every room; none may import it.
"""
