"""Data parallelism from scratch: copy the parameters, split the batch, sum the gradients.

python hand_all_reduce.py DATA.safetensors LOSSES.json

Without GPUs two copies live on the CPU; the arithmetic is the same, the copying is not seen.
"""

import json
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

NUM_DEVICES = 2
if torch.cuda.device_count() >= NUM_DEVICES:
    devices = [torch.device("cuda", number) for number in range(NUM_DEVICES)]
else:
    devices = [torch.device("cpu")] * NUM_DEVICES


def lenet(x: torch.Tensor, params: list[torch.Tensor]) -> torch.Tensor:
    h = F.avg_pool2d(F.relu(F.conv2d(x, params[0], params[1])), 2)
    h = F.avg_pool2d(F.relu(F.conv2d(h, params[2], params[3])), 2)
    h = F.relu(h.flatten(1) @ params[4].T + params[5])
    return h @ params[6].T + params[7]


def get_params(params: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [p.detach().to(device, copy=True).requires_grad_() for p in params]


def all_reduce(tensors: list[torch.Tensor]) -> None:
    """Sum on the first device, copy the sum back to all: the first device does all the work."""
    for tensor in tensors[1:]:
        tensors[0] += tensor.to(tensors[0].device)
    for tensor in tensors[1:]:
        tensor.copy_(tensors[0])


data = load_file(sys.argv[1])
start = [data[f"params.{number}"] for number in range(8)]
device_params = [get_params(start, device) for device in devices]

losses = []
for batch in data["batches"]:
    total = 0.0
    for part, params, device in zip(batch.chunk(NUM_DEVICES), device_params, devices, strict=True):
        images = ((data["images"][part].float() / 255 - 0.1307) / 0.3081).to(device)
        labels = data["labels"][part].to(device)
        loss = F.cross_entropy(lenet(images, params), labels, reduction="sum")
        loss.backward()
        total += loss.item()
    with torch.no_grad():
        for copies in zip(*device_params, strict=True):
            all_reduce([param.grad for param in copies])
            for param in copies:
                param -= 0.05 * param.grad / len(batch)
                param.grad.zero_()
    losses.append(total / len(batch))

with open(sys.argv[2], "w") as file:
    json.dump(losses, file)
