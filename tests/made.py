"""train_regression.py with a model that the first process makes, for tests to start."""

import os

from trainkit import Run

import torch
from safetensors.torch import save_file
from torch import nn

import train_regression
from trainkit.checkpoints import sharded as shards


class Made(nn.Module):
    """Made in most of the ways there are. With READS in the environment it reads a weight."""

    def __init__(self, num_features, num_targets, hidden):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)  # copies it
        self.first, self.last = nn.Linear(num_features, 8), nn.Linear(num_features, 8)
        self.last.weight = self.first.weight
        nn.init.orthogonal_(self.first.weight)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        nn.init.kaiming_normal_(self.frozen.weight, generator=torch.Generator().manual_seed(4))
        self.frozen.bias.data.mul_(3).add_(0.1)
        self.register_buffer("noise", torch.rand(8))
        self.register_buffer("kept", torch.rand(8), persistent=False)
        self.scales = [torch.rand(8)]  # not even a buffer
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, num_targets)
        if "READS" in os.environ and self.head.weight.mean().item() > 9:
            nn.init.zeros_(self.head.weight)

    def forward(self, inputs):
        values = self.norm(self.first(inputs) + self.last(inputs) * self.scales[0])
        values = self.inner((values * self.noise + self.kept)[:, None])[:, 0]
        return self.head(self.frozen(values))


def main(argv):
    """Train, and write the initial weights and what torch draws after them to start.safetensors."""
    runs, enter, begin = [], Run.__enter__, Run.begin

    def entering(run):
        runs.append(run)
        return enter(run)

    def make(*sizes):
        return shards.make(runs[-1].accelerator, lambda: Made(*sizes))

    def beginning(run, model, *args, **kwargs):
        drawn = torch.rand(3)
        begin(run, model, *args, **kwargs)
        values = shards.gathered(dict(run.models[0].state_dict()), keep=True)
        values |= {"kept": run.models[0].kept, "scale": run.models[0].scales[0], "drawn": drawn}
        if run.accelerator.process_index == run.accelerator.num_processes - 1:
            copied = {name: value.clone() for name, value in values.items()}
            save_file(copied, run.config.run_dir / "start.safetensors")

    train_regression.MODELS["mlp"] = make
    Run.__enter__, Run.begin = entering, beginning
    return train_regression.main(argv)
