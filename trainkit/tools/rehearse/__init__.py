"""The rehearsal: does a script keep the promises? It runs in several worlds, which are compared.

Begin with __main__.py, which starts the worlds of worlds.py and prints a line for each. stage.py
starts their processes, in which watching.py, samples.py and held.py write down what the files of a
run do not say. causes.py compares the numbers and names what makes them others, with the cure. The
rehearsal may look into every room; none may import it.
"""
