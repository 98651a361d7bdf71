"""Data parallelism from scratch: copy the model, split the batch, sum the gradients.

python hand_all_reduce.py DATA.safetensors LOSSES.json

Without GPUs two copies live on the CPU; the arithmetic is the same, the copying is not seen.
"""

import copy

import torch
import torch.nn.functional as F
from shared import data, load_batch, make_lenet, write

NUM_DEVICES = 2
if torch.cuda.device_count() >= NUM_DEVICES:
    devices = [torch.device("cuda", number) for number in range(NUM_DEVICES)]
else:
    devices = [torch.device("cpu")] * NUM_DEVICES


def all_reduce(tensors: list[torch.Tensor]) -> None:
    """Sum on the first device, copy the sum back to all: the first device does all the work."""
    for tensor in tensors[1:]:
        tensors[0] += tensor.to(tensors[0].device)
    for tensor in tensors[1:]:
        tensor.copy_(tensors[0])


model = make_lenet()
replicas = [copy.deepcopy(model).to(device) for device in devices]

losses = []
for batch in data["batches"]:
    total = 0.0
    for part, replica, device in zip(batch.chunk(NUM_DEVICES), replicas, devices, strict=True):
        images, labels = load_batch(part, device)
        loss = F.cross_entropy(replica(images), labels, reduction="sum")
        loss.backward()
        total += loss.item()
    with torch.no_grad():
        for copies in zip(*(replica.parameters() for replica in replicas), strict=True):
            all_reduce([param.grad for param in copies])
            for param in copies:
                param -= 0.05 * param.grad / len(batch)
                param.grad.zero_()
    losses.append(total / len(batch))

write(losses, replicas[0])
