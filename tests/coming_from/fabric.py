"""Lightning Fabric: setup, setup_dataloaders, backward.

python fabric.py DATA.safetensors LOSSES.json
"""

import json
import sys

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="auto", devices=1)
fabric.launch()
data = load_file(sys.argv[1])
images = (data["images"].float() / 255 - 0.1307) / 0.3081
loader = DataLoader(TensorDataset(images, data["labels"]), batch_sampler=data["batches"].tolist())
loader = fabric.setup_dataloaders(loader)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 20, 3),
    nn.ReLU(),
    nn.AvgPool2d(2),
    nn.Conv2d(20, 50, 5),
    nn.ReLU(),
    nn.AvgPool2d(2),
    nn.Flatten(),
    nn.Linear(800, 128),
    nn.ReLU(),
    nn.Linear(128, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)

losses = []
for inputs, labels in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    fabric.backward(loss)
    optimizer.step()
    losses.append(loss.item())

if fabric.is_global_zero:
    torch.save(model.module.state_dict(), sys.argv[2] + ".pt")
    with open(sys.argv[2], "w") as file:
        json.dump(losses, file)
