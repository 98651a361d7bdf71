"""The per-sample pipeline of most tutorials, in a process that imports nothing of this project.

benchmarks/throughput.py starts it and asks, on standard input, for one figure after the other:
pickled (model, batch size, steps, loader workers). The answer is a line with images per second. It
keeps the settings that torch and glibc come with: trainkit/startup.py would change them.
"""

import itertools
import pickle
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from datasets import load_dataset
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

MNIST = Path(__file__).parent.parent / "data" / "mnist"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class PerSample(Dataset):
    """PIL -> ToTensor -> Normalize, a call per picture."""

    def __init__(self) -> None:
        rows = load_dataset(str(MNIST), split="train")
        self.pictures, self.labels = list(rows["image"]), list(rows["label"])
        self.transform = transforms.Compose(
            [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.pictures[index]), self.labels[index]


def images_per_second(
    data: PerSample, net: nn.Module, batch_size: int, steps: int, num_workers: int
) -> float:
    """Of a plain PyTorch loop in float32 and contiguous memory."""
    net = net.to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    loader = DataLoader(data, batch_size, shuffle=True, drop_last=True, num_workers=num_workers)
    batches = iter(loader)
    next(batches)  # workers are up and fetch ahead before the clock starts
    started_at = time.perf_counter()
    for pixels, labels in itertools.islice(batches, steps):
        loss = F.cross_entropy(net(pixels.to(DEVICE)), labels.to(DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return batch_size * steps / (time.perf_counter() - started_at)


def main() -> None:
    data = PerSample()
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        print(images_per_second(data, *request), flush=True)


if __name__ == "__main__":
    main()
