"""Run a script on the cards of this machine, twice the same bits: python real.py SCRIPT ARGS."""

import os
import runpy
import sys
from pathlib import Path

import torch

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when it first multiplies
torch.use_deterministic_algorithms(True, warn_only=True)
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
