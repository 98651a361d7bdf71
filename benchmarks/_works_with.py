"""A small script in which one part is somebody else's: see works_with.py.

python -m trainkit.tools.rehearse benchmarks/_works_with.py --optimizer-of torch.AdamW
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit import InMemory, Run, make_loaders, startup

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset
from torch.utils.data import TensorDataset as Tensors

from trainkit.config import TrainingConfig, parse

NUM = 60


@dataclass
class Config(TrainingConfig):
    run_dir: Path = Path("runs/works_with")
    epochs: int = 5
    batch_size: int = 12
    learning_rate: float = 1e-2
    optimizer_of: str = "torch.AdamW"
    """torch.NAME, timm.NAME or schedulefree.NAME"""

    set_of: str = "InMemory"
    """what holds the samples"""


class OneByOne(Dataset):
    """Samples that are made one at a time."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor):
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Stream(IterableDataset):
    """Samples without an index."""

    def __iter__(self) -> Any:
        yield torch.zeros(8), torch.tensor(0)


def make_set(kind: str, x: torch.Tensor, y: torch.Tensor) -> Any:
    """A set of this kind, whose samples begin with an input and its class."""
    half = len(x) // 2
    if kind == "datasets.Dataset":
        import datasets

        rows = {"x": x.tolist(), "y": y.tolist()}
        return datasets.Dataset.from_dict(rows).with_format("torch")
    if kind == "np.memmap":
        with tempfile.NamedTemporaryFile() as file:
            held = np.memmap(file.name, np.float32, "w+", shape=tuple(x.shape))
            held[:] = x.numpy()
        return OneByOne(torch.from_numpy(held), y)
    if kind == "torchvision.FakeData":
        from torchvision.datasets import FakeData
        from torchvision.transforms import Compose, Lambda, ToTensor

        shrink = Compose([ToTensor(), Lambda(lambda picture: picture.flatten()[:8])])
        return FakeData(len(x), (3, 4, 4), 3, shrink)
    makers = {
        "InMemory": lambda: InMemory(x, y),
        "list": lambda: list(zip(x, y, strict=True)),
        "TensorDataset": lambda: Tensors(x, y),
        "Dataset": lambda: OneByOne(x, y),
        "Subset": lambda: Subset(OneByOne(x, y), range(len(x))),
        "ConcatDataset": lambda: ConcatDataset(
            [Tensors(x[:half], y[:half]), Tensors(x[half:], y[half:])]
        ),
        "StackDataset": lambda: StackDataset(x, y),
        "random_split": lambda: torch.utils.data.random_split(
            Tensors(x, y), [1.0], torch.Generator().manual_seed(0)
        )[0],
        "IterableDataset": Stream,
    }
    return makers[kind]()


def load_data(config: Config) -> tuple[Any, Any]:
    """Random points, and which of three numbers is the largest."""
    x = torch.randn(NUM + 21, 8, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    return make_set(config.set_of, x[21:], y[21:]), make_set(config.set_of, x[:21], y[:21])


def make_optimizer(name: str, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """The optimizer of this name, with its defaults beside the rate."""
    package, _, kind = name.partition(".")
    if package == "timm":
        from timm.optim import create_optimizer_v2

        return create_optimizer_v2(model, kind, lr=rate, weight_decay=0.0)
    if package == "schedulefree":
        import schedulefree

        return getattr(schedulefree, kind)(model.parameters(), lr=rate)
    parameters = model.parameters()
    if kind == "Muon":
        parameters = [weight for weight in parameters if weight.ndim == 2]
    return getattr(torch.optim, kind)(parameters, lr=rate)


def main(argv: Any = None) -> dict[str, float]:
    config = parse(Config, argv)
    with Run(config, "works_with") as run:
        accelerator = run.accelerator
        train_set, eval_set = run.load(load_data)
        loaders = make_loaders(accelerator, train_set, eval_set, config)
        net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 3, bias=False))
        optimizer = make_optimizer(config.optimizer_of, net, config.learning_rate)
        model, optimizer, train_loader, eval_loader = accelerator.prepare(net, optimizer, *loaders)
        run.begin(model, {"script": "works_with"})

        def losses(batch: Any) -> dict[str, torch.Tensor]:
            x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch[:2]
            return {"loss": F.cross_entropy(model(x), y, reduction="none")}

        for _ in run.epochs():
            for batch in run.steps(train_loader):
                with accelerator.accumulate(model):
                    values = losses(batch)
                    accelerator.backward(run.step_mean(values["loss"]))
                    optimizer.step()
                    optimizer.zero_grad()
                run.add(**values)
                if run.end_step():
                    run.save()
            run.end_epoch(run.evaluate(eval_loader, losses))
        return run.finish()


if __name__ == "__main__":
    startup.run(main)
