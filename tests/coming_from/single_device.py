"""One device and .to(device), as most training scripts begin.

python single_device.py DATA.safetensors LOSSES.json
"""

import json
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

data = load_file(sys.argv[1])
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

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
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

losses = []
for batch in data["batches"]:  # the indices of one batch each; usually a shuffling DataLoader
    images = (data["images"][batch].float() / 255 - 0.1307) / 0.3081
    images, labels = images.to(device), data["labels"][batch].to(device)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

torch.save(model.state_dict(), sys.argv[2] + ".pt")
with open(sys.argv[2], "w") as file:
    json.dump(losses, file)
