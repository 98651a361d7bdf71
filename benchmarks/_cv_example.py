"""Train on MNIST as Accelerate's examples/cv_example.py would, in a process without this project.

benchmarks/peers.py starts it. The example trains a ResNet on photos of pets; this script has the
default network, batches, optimizer, schedule and epochs of train_mnist.py. As in the example, a
Dataset opens one picture per sample with PIL, four workers load the data, the batch is normalised,
and the loss has no label smoothing. There is no augmentation.
"""

import io
import sys
from pathlib import Path

import PIL.Image
import pyarrow.parquet
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import ToTensor

EPOCHS, BATCH_SIZE, LEARNING_RATE = 3, 128, 6e-3
MEAN, STD = 0.1307, 0.3081


class Digits(Dataset):
    """The pictures of one Parquet file, each decoded every time it is read."""

    def __init__(self, path: Path) -> None:
        self.rows = pyarrow.parquet.read_table(path).to_pylist()
        self.transform = ToTensor()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        row = self.rows[index]
        picture = PIL.Image.open(io.BytesIO(row["image"]["bytes"]))
        return {"image": self.transform(picture), "label": row["label"]}


def make_model() -> nn.Module:
    """Make the same network as Compact in train_mnist.py."""
    return nn.Sequential(
        nn.Conv2d(1, 24, 5, stride=2), nn.ReLU(),
        nn.Conv2d(24, 32, 3), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(800, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


def main() -> None:
    data_dir = Path(sys.argv[1])
    accelerator = Accelerator()
    set_seed(0)
    train_set, eval_set = Digits(data_dir / "train.parquet"), Digits(data_dir / "test.parquet")
    train_loader = DataLoader(train_set, BATCH_SIZE, shuffle=True, num_workers=4)
    eval_loader = DataLoader(eval_set, BATCH_SIZE, num_workers=4)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    steps = EPOCHS * len(train_loader)
    scheduler = OneCycleLR(optimizer, LEARNING_RATE, steps, pct_start=0.2, cycle_momentum=False)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    for epoch in range(EPOCHS):
        # benchmarks/peers.py reads these lines, which are worded as in the other examples.
        accelerator.print(f"Train Epoch: {epoch} [0/{len(train_set)}]")
        model.train()
        for batch in train_loader:
            outputs = model((batch["image"] - MEAN) / STD)
            loss = F.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"Train Epoch: {epoch} [{len(train_set)}/{len(train_set)}]")

        model.eval()
        correct, total = 0, 0
        for batch in eval_loader:
            with torch.no_grad():
                predictions = model((batch["image"] - MEAN) / STD).argmax(dim=-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, batch["label"]))
            correct += (predictions == labels).sum().item()
            total += len(labels)
        accelerator.print(f"Test set: Accuracy: {correct}/{total}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
