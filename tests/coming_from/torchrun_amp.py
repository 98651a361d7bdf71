"""DistributedDataParallel under torchrun, with autocast, GradScaler and two schedulers.

torchrun --standalone --nproc_per_node 2 torchrun_amp.py DATA.safetensors LOSSES.json

Without a GPU there is no float16 training: autocast and GradScaler are switched off.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared import data, load_batch, make_lenet, write
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR

amp = torch.cuda.is_available()
dist.init_process_group("nccl" if amp else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda" if amp else "cpu", int(os.environ["LOCAL_RANK"]) if amp else 0)
num_steps = len(data["batches"])

model = DistributedDataParallel(make_lenet().to(device))
optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
# Both stepped after each batch: down by a tenth over the epoch, and half a cosine on top.
schedulers = [
    ExponentialLR(optimizer, 0.9 ** (1 / num_steps)),
    CosineAnnealingLR(optimizer, num_steps),
]
scaler = torch.amp.GradScaler(device.type, enabled=amp)

losses = []
for batch in data["batches"]:
    images, labels = load_batch(batch.chunk(world_size)[rank], device)
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=torch.float16, enabled=amp):
        loss = F.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    for scheduler in schedulers:
        scheduler.step()  # also after a step that the scaler skipped
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / world_size)

if rank == 0:
    write(losses, model.module)
dist.barrier()  # else one process takes the group down while the other still uses it
dist.destroy_process_group()
