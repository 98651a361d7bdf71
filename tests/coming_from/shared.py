"""What the programs of this folder have in common: the model, the data, and what they leave."""

import json
import sys

import torch
from safetensors.torch import load_file
from torch import nn

data = load_file(sys.argv[1])


def load_batch(indices: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures, normalised, and labels of these samples."""
    images = (data["images"][indices].float() / 255 - 0.1307) / 0.3081
    return images.to(device), data["labels"][indices].to(device)


def make_lenet() -> nn.Module:
    """LeNet for 28 x 28 pictures of ten classes."""
    torch.manual_seed(0)
    return nn.Sequential(
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


def write(losses: list[float], model: nn.Module) -> None:
    """Write the loss of each step, and the weights."""
    torch.save(model.state_dict(), sys.argv[2] + ".pt")
    with open(sys.argv[2], "w") as file:
        json.dump(losses, file)
