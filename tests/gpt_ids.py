"""examples/gpt.py that writes the ids of its samples to the file $IDS, a line for each batch.

In the token lists of test_rows.py the first two tokens are the sample's id. With --num-workers it
has a collate_fn: without one the batches of such data are made in the training process.
"""

import os
import sys
from functools import partial

import torch
from torch.utils.data import default_collate

from examples import gpt
from trainkit.rows import parquet as rows
from trainkit.store import places as stores

stores.WAITS, rows.HF_HOME = (0, 0, 0.1), os.environ["HF_HOME"]
main, compute_losses = gpt.main, gpt.compute_losses


def noting(model, batch):
    if torch.is_grad_enabled():
        with open(f"{os.environ['IDS']}.{os.environ.get('RANK', 0)}", "a") as file:
            print((batch[0][:, 0] * 256 + batch[0][:, 1]).tolist(), file=file)
    return compute_losses(model, batch)


gpt.compute_losses = noting
if "--num-workers" in sys.argv:
    gpt.make_loaders = partial(gpt.make_loaders, collate_fn=default_collate)
