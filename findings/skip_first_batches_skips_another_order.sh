#!/usr/bin/env bash
# accelerate 1.15.0: after load_state, skip_first_batches skips the first batches of another order.
#
# One would guess that the way to resume in the middle of an epoch that Accelerate's guide to
# checkpoints shows (load_state, then skip_first_batches(loader, n) for the rest of the epoch) gives
# the samples that the epoch has not had yet. With shuffle=True and the defaults it does not. The
# order of an epoch is drawn from torch's generator when its iteration begins, but the checkpoint
# holds that generator as it was in the middle of the epoch. So the loader draws another order, and
# its first n batches are skipped: some samples come twice in that epoch and as many never. With
# use_stateful_dataloader=True, where nothing is to be skipped as load_state puts the loader back,
# it is the same: the position comes back, and the order does not. With use_seedable_sampler=True
# and loader.set_epoch(epoch) each sample comes once. The guide does not say so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-cache-dir torch==2.14.1 numpy==2.4.6 accelerate==1.15.0 \
    torchdata==0.11.0
cat > "$folder/resume.py" <<'PYTHON'
import sys

import accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

ROWS, BATCH, SAVED_IN, AFTER = 40, 4, 1, 4  # saved in the second epoch, after four batches


def rows_of(kind: str, folder: str, resume: bool) -> list[int]:
    """The rows of the second epoch, up to the checkpoint or from it on."""
    set_seed(0)
    options = {} if kind == "default" else {kind: True}
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    loader = DataLoader(torch.arange(ROWS), batch_size=BATCH, shuffle=True)
    loader = accelerator.prepare(loader)
    if resume:
        accelerator.load_state(folder)
        rest = loader
        if kind == "use_seedable_sampler":
            loader.set_epoch(SAVED_IN)
        if kind != "use_stateful_dataloader":
            rest = accelerator.skip_first_batches(loader, AFTER)
        return [row for batch in rest for row in batch.tolist()]
    for epoch in range(SAVED_IN + 1):
        rows: list[int] = []
        if kind == "use_seedable_sampler":
            loader.set_epoch(epoch)
        for number, batch in enumerate(loader, 1):
            rows += batch.tolist()
            if epoch == SAVED_IN and number == AFTER:
                accelerator.save_state(folder)
                return rows
    raise AssertionError


kind, life, folder = sys.argv[1:]
print("accelerate", accelerate.__version__, kind, life, *rows_of(kind, folder, life == "resumed"))
PYTHON
for kind in default use_stateful_dataloader use_seedable_sampler; do
    : > "$folder/said"
    for life in killed resumed; do # each in a process of its own
        "$folder/venv/bin/python" "$folder/resume.py" "$kind" "$life" "$folder/$kind" \
            | tee -a "$folder/said"
    done
    "$folder/venv/bin/python" - "$kind" "$folder/said" <<'PYTHON'
import sys

kind, path = sys.argv[1:]
rows = [int(word) for line in open(path) for word in line.split()[4:]]
never = 40 - len(set(rows))
print(f"{kind}: {len(rows)} samples in the epoch, {never} of 40 never\n")
assert len(rows) == 40
assert (never == 0) == (kind == "use_seedable_sampler"), never
PYTHON
done
