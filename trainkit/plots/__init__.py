"""The pictures of a run: curves, confusion, mistakes, fit, and what the network gets to see.

They are drawn from the files of a run folder alone. A run draws them when it ends, the commands in
tools/ draw them again, and a wing draws what its network sees. Begin with figures.py, whose
draw_run knows which files lead to which picture; style.py is how all of them look.
"""
