"""mp.spawn, init_process_group, DistributedSampler and DistributedDataParallel by hand.

python spawn_ddp.py DATA.safetensors LOSSES.json
"""

import json
import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from lenet import make_lenet
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

WORLD_SIZE = 2


def train(rank: int, port: int) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)  # nccl on GPUs
    data = load_file(sys.argv[1])
    order, batch_size = data["batches"].flatten().tolist(), data["batches"].shape[1]
    images = (data["images"].float() / 255 - 0.1307) / 0.3081
    dataset = Subset(TensorDataset(images, data["labels"]), order)
    # The order is given, so the sampler only deals it out; with shuffle=True each epoch would begin
    # with sampler.set_epoch(epoch), and without that call every epoch has the same order.
    sampler = DistributedSampler(dataset, WORLD_SIZE, rank, shuffle=False)
    loader = DataLoader(dataset, batch_size // WORLD_SIZE, sampler=sampler)

    torch.manual_seed(0)
    model = make_lenet()
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    losses = []
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / WORLD_SIZE)

    if rank == 0:
        torch.save(model.module.state_dict(), sys.argv[2] + ".pt")
        with open(sys.argv[2], "w") as file:
            json.dump(losses, file)
    dist.barrier()  # else one process takes the group down while the other still uses it
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    mp.spawn(train, args=(free_port,), nprocs=WORLD_SIZE)
