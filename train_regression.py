"""Fit a linear model or a network to numbers, on whatever the YAML describes.

By default, 30 epochs on 1,000 synthetic rows take 0.4 s; the training loss is then 0.004 % above
that of least squares (benchmarks/RECORDS.md). A table of your own: examples/table.py.

python train_regression.py
accelerate launch --config_file accelerate_configs/2cpu.yaml train_regression.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from trainkit import Run, make_loaders, make_optimizer, make_scheduler, startup  # pip install .

import torch
import torch.nn.functional as F
from torch import nn

from trainkit.config import Count, NonNegative, ReadOnlyIf, Schedule, Seed, TrainingConfig, parse
from trainkit.tables import TABLE_FLAGS, Widths, make_number_sets, measure_numbers

LOSSES: dict[str, Callable] = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.huber_loss}


class MLP(nn.Sequential):
    """Linear layers with ReLU between them."""

    def __init__(self, num_features: int, num_targets: int, hidden: Sequence[int]):
        widths = pairwise((num_features, *hidden, num_targets))
        layers = [layer for pair in widths for layer in (nn.Linear(*pair), nn.ReLU())]
        super().__init__(*layers[:-1])


MODELS: dict[str, Callable] = {"linear": lambda n, m, hidden: nn.Linear(n, m), "mlp": MLP}


def make_model(metadata: dict[str, Any]) -> nn.Module:
    """Make the model that the metadata name; predict.py loads the saved weights into it."""
    sizes = len(metadata["features"]), len(metadata["targets"])
    return MODELS[metadata["model"]](*sizes, metadata["hidden"])


@dataclass
class Config(TrainingConfig):
    num_samples: Count = 1000
    """synthetic rows"""
    num_features: Count = 10
    """synthetic features"""
    num_targets: Count = 1
    """synthetic targets"""
    noise: NonNegative[float] = 0.1
    """standard deviation in the synthetic targets"""
    data_seed: Seed = 0
    """of the synthetic data and their split; a fifth is evaluated"""
    model: Literal["linear", "mlp"] = "linear"
    hidden: Annotated[Widths, ReadOnlyIf("model", ("mlp",))] = field(default_factory=[64, 64].copy)
    """widths of --model mlp"""
    loss: Literal["mse", "mae", "huber"] = "mse"
    """huber: squared below 1, absolute above"""

    MOVED = TrainingConfig.MOVED | TABLE_FLAGS  # to examples/table.py

    epochs: int = 30
    batch_size: int = 32
    learning_rate: float = 3e-2
    run_dir: Path = Path("runs/regression")
    schedule: Schedule = "cosine"


def load_data(config: Config) -> tuple:
    """Return sets to train and to evaluate on, metadata, plan; y = weights x + bias + noise."""
    generator = torch.Generator().manual_seed(config.data_seed)  # only used here
    size = {"generator": generator, "dtype": torch.float64}
    truth = torch.randn(config.num_targets, config.num_features + 1, **size)  # the bias comes last
    features = torch.randn(config.num_samples, config.num_features, **size)
    noise = config.noise * torch.randn(config.num_samples, config.num_targets, **size)
    targets = features @ truth[:, :-1].T + truth[:, -1] + noise
    made = make_number_sets(features, targets, config)
    of_model = {"script": Path(__file__).stem, "model": config.model}
    of_model["hidden"] = config.hidden if config.model == "mlp" else []
    return made._replace(metadata={"truth": truth.tolist()} | made.metadata | of_model)


def validate(run: Run, model: nn.Module, loader: Any, eval_set: Any, metadata: dict) -> tuple:
    """Return metrics, and what predictions.safetensors holds. Every process must call this."""
    _, targets, rows = eval_set.tensors
    # Of each sample once, in the order of the set, on every process.
    outputs = run.predict(loader, lambda batch: model(batch[0]).float()).double()
    targets = targets.double()
    metrics = {"eval_loss": LOSSES[run.config.loss](outputs, targets).item()}
    metrics |= measure_numbers(outputs.numpy(), targets.numpy(), metadata["baseline"])
    predictions = {"index": rows, "prediction": outputs, "target": targets}
    return metrics | {"eval_samples": len(rows)}, predictions, {"targets": metadata["targets"]}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train and evaluate the model, write the run folder and return the last metrics."""
    config = parse(Config, argv)
    with Run(config, "regression") as run:  # creates run.accelerator
        accelerator = run.accelerator
        train_set, eval_set, metadata, plan = run.load(load_data)
        train_loader, eval_loader = make_loaders(accelerator, train_set, eval_set, config)
        model = make_model(metadata)
        optimizer = make_optimizer(accelerator, model.parameters(), config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, scheduler
        )
        run.begin(model, metadata, plan)  # locks the run folder, loads the checkpoint
        for _ in run.epochs():
            for features, targets, _ in run.steps(train_loader):
                with accelerator.accumulate(model):
                    losses = LOSSES[config.loss](model(features), targets, reduction="none")
                    accelerator.backward(run.step_mean(losses))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(loss=losses)
                if run.end_step():  # --save-every, or a signal to any process
                    run.save()  # accelerator.save_state; after a signal it ends the run with 75
            run.end_epoch(*validate(run, model, eval_loader, eval_set, metadata))
        return run.finish()


if __name__ == "__main__":
    startup.run(main)
