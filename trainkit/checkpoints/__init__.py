"""What a checkpoint holds, when it counts, which one a resume takes, and how a model is sharded.

Begin in save.py, with `Checkpoints.save` and `resume`: a folder has its name only when all of it is
on the disk. contents.py is what a checkpoint holds, state.py what of it the script carries itself,
hashing.py how data are hashed, parts.py its files, commit.py the thread that makes them durable,
resume.py which of them is taken and whether it is of the same run, mirror.py the copies elsewhere.
sharded.py spreads a model over processes. A run calls it and tools read its folders; it knows
flags, processes, numbers and files, and neither data nor the loop.
"""
