"""Files that survive a crash, and what is in them.

Begin in atomic.py, which every file is written by. manifest.py says whether a checkpoint is whole,
weights.py writes model.safetensors, log.py metrics.jsonl, places.py opens files behind URLs, and
records.py reads a run folder. It knows nothing of a run, a model or processes; every room above
it, and the tools, may use it.
"""
