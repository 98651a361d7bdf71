"""nn.DataParallel: one process, one line changed, the first GPU does the rest.

python data_parallel.py DATA.safetensors LOSSES.json

Without a GPU nn.DataParallel calls the model directly; scatter, replicas and gather need GPUs.
"""

import json
import sys

import torch
import torch.nn.functional as F
from lenet import make_lenet
from safetensors.torch import load_file
from torch import nn

data = load_file(sys.argv[1])
device_ids = list(range(torch.cuda.device_count()))
device = torch.device("cuda:0" if device_ids else "cpu")

torch.manual_seed(0)
model = make_lenet()
model = nn.DataParallel(model.to(device), device_ids=device_ids or None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

losses = []
for batch in data["batches"]:
    images = (data["images"][batch].float() / 255 - 0.1307) / 0.3081
    images, labels = images.to(device), data["labels"][batch].to(device)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)  # all outputs gathered on the first GPU
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

torch.save(model.module.state_dict(), sys.argv[2] + ".pt")  # model.state_dict() has "module." keys
with open(sys.argv[2], "w") as file:
    json.dump(losses, file)
