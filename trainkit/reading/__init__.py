"""What more than one wing needs to read what people have: paths, tables, splits.

It stands on the core and below the wings, which alone import it. Begin with splits.py, which says
which rows are trained on and which are evaluated; frames.py reads tables as they are written,
kept.py keeps rows that are computed once, and recall.py says what an accuracy is worth.
"""
