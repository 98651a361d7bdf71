"""Fit a linear model or a network to numbers, on whatever the YAML describes.

By default, 30 epochs on 1,000 synthetic rows take 0.4 s; the training loss is then 0.004 % above
that of least squares (benchmarks/RECORDS.md).

python train_regression.py
accelerate launch --config_file accelerate_configs/2cpu.yaml train_regression.py
python train_regression.py --data houses.csv --target price
"""

import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from trainkit import (
    EXIT_TARGET_MISSED,
    InMemory,
    Run,
    make_loaders,
    make_optimizer,
    make_scheduler,
    startup,
)

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from trainkit.config import UNSET, Count, MayChange, NonNegative, ReadOnlyIf, Rule, Schedule, parse
from trainkit.tables import network, sets

Widths = Annotated[
    list[int],
    sets.comma_separated(int),
    Rule(lambda value: min(value, default=0) >= 1, "at least 1 each"),
]
# Defaults of linear and mlp.
PLAIN = {"epochs": 30, "batch_size": 32, "learning_rate": 3e-2}
PLAIN |= {"weight_decay": 0.0, "warmup": 0.0, "clip_norm": math.inf}
LOSSES: dict[str, Callable] = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.huber_loss}


class Linear(nn.Linear):
    """y = W x + b."""

    def __init__(self, num_features: int, num_targets: int, hidden: Sequence[int]):
        super().__init__(num_features, num_targets)


class MLP(nn.Sequential):
    """Linear layers with ReLU between them."""

    def __init__(self, num_features: int, num_targets: int, hidden: Sequence[int]):
        widths = pairwise((num_features, *hidden, num_targets))
        layers = [layer for pair in widths for layer in (nn.Linear(*pair), nn.ReLU())]
        super().__init__(*layers[:-1])


MODELS: dict[str, type] = {"linear": Linear, "mlp": MLP}


def make_model(metadata: dict[str, Any]) -> nn.Module:
    """Make the model that the metadata name; predict.py loads the saved weights into it."""
    if metadata["model"] == "tabm":
        return network.TabM(len(metadata["targets"]), metadata["edges"])
    sizes = len(metadata["features"]), len(metadata["targets"])
    return MODELS[metadata["model"]](*sizes, metadata["hidden"])


def measure(prediction: np.ndarray, truth: np.ndarray, baseline: np.ndarray) -> dict[str, float]:
    """Return MSE, RMSE, MAE and R2 of (rows, targets), each as the mean over the targets.

    r2 is scikit-learn's r2_score; r2_train_mean compares with `baseline` instead of the mean of the
    truth. For a target that does not vary both are 0, or 1 if its predictions are exact.
    """
    error = truth - prediction
    mse = (error**2).mean(0)
    values = {"mse": mse, "rmse": np.sqrt(mse), "mae": np.abs(error).mean(0)}
    for name, guess in (("r2", truth.mean(0)), ("r2_train_mean", baseline)):
        spread = ((truth - guess) ** 2).mean(0)
        values[name] = np.where(spread > 0, 1 - mse / np.where(spread > 0, spread, 1), mse == 0)
    return {f"eval_{name}": float(value.mean()) for name, value in values.items()}


@dataclass
class Config(sets.TableConfig):
    num_samples: Annotated[Count, ReadOnlyIf("data", (None,))] = 1000
    """synthetic rows, without --data"""
    num_features: Annotated[Count, ReadOnlyIf("data", (None,))] = 10
    """synthetic features"""
    num_targets: Annotated[Count, ReadOnlyIf("data", (None,))] = 1
    """synthetic targets"""
    noise: Annotated[NonNegative[float], ReadOnlyIf("data", (None,))] = 0.1
    """standard deviation in the synthetic targets"""
    model: Literal["linear", "mlp", "tabm"] = UNSET
    """tabm: a network that begins as ridge regression (default: that with --data, else linear)"""
    hidden: Annotated[Widths, ReadOnlyIf("model", ("mlp",))] = field(
        default_factory=lambda: [64, 64]
    )
    """widths of --model mlp"""
    loss: Literal["mse", "mae", "huber"] = "mse"
    """huber: squared below 1, absolute above"""
    target_r2: MayChange[Annotated[float, Rule(lambda value: value <= 1, "at most 1")] | None] = (
        None
    )
    """exit with 3 if eval_r2 ends below"""

    # These defaults differ from those of trainkit.config.
    run_dir: Path = Path("runs/regression")
    schedule: Schedule = "cosine"

    def __post_init__(self):
        self.set_unset({"model": "tabm" if self.data else "linear"})
        self.set_unset(network.DEFAULTS if self.model == "tabm" else PLAIN)

    def find_problems(self, num_processes: int) -> list[str]:
        problems = super().find_problems(num_processes)
        if self.data is None and (self.target or self.features):
            problems.append("--target and --features name columns of --data: give that as well")
        return problems


def make_synthetic(config: Config) -> tuple[pd.DataFrame, list[str], dict[str, Any]]:
    """Return what sets.load_table does; targets = weights x features + bias + normal noise."""
    generator = torch.Generator().manual_seed(config.data_seed)  # only used here
    size = {"generator": generator, "dtype": torch.float64}
    truth = torch.randn(config.num_targets, config.num_features + 1, **size)  # the bias comes last
    features = torch.randn(config.num_samples, config.num_features, **size)
    noise = config.noise * torch.randn(config.num_samples, config.num_targets, **size)
    targets = features @ truth[:, :-1].T + truth[:, -1] + noise
    x = pd.DataFrame(features.numpy()).add_prefix("x")
    y = pd.DataFrame(targets.numpy()).add_prefix("y")
    return x.join(y), [*y], {"truth": truth.tolist(), "plan": {"data": "synthetic"}}


def load_data(config: Config) -> sets.TableSets:
    """Return the training set, the evaluation set (with row numbers), and metadata."""
    load = make_synthetic if config.data is None else sets.load_table
    made = sets.make_table_sets(*load(config), config, in_folds=config.model == "tabm")
    hidden = config.hidden if config.model == "mlp" else []
    made.metadata.update(input="table", script=Path(__file__).stem, model=config.model)
    made.metadata["hidden"] = hidden
    if config.model == "tabm":
        made.metadata["edges"] = network.find_edges(made.train.tensors[0])
        config.set_unset(network.choose_sizes(len(made.train), config.batch_size))
    return made


def in_own_unit(values: torch.Tensor, metadata: dict[str, Any], kind: str = "target") -> np.ndarray:
    """Undo the standardisation of targets, outputs or features; returns float64."""
    return values.double().numpy() * metadata[f"{kind}_std"] + metadata[f"{kind}_mean"]


def validate(
    run: Run,
    model: nn.Module,
    loader: DataLoader,
    eval_set: InMemory,
    loss: str,
    metadata: dict[str, Any],
) -> tuple[dict[str, float], dict[str, torch.Tensor], dict[str, Any]]:
    """Return the metrics, and the tensors and metadata of predictions.safetensors.

    The metrics are eval_loss, eval_samples and, in the units of the targets, those of measure().
    The tensors are row numbers, features, predictions and targets. Every process must call this.
    """
    features, targets, rows = eval_set.tensors
    # Of each sample once, in the order of the set, on every process.
    outputs = run.predict(loader, lambda batch: model(batch[0]).float())
    prediction = in_own_unit(outputs, metadata)
    target = in_own_unit(targets, metadata)
    metrics = {
        "eval_loss": LOSSES[loss](outputs.double(), targets.double()).item(),
        **measure(prediction, target, np.asarray(metadata["baseline"])),
        "eval_samples": len(targets),
    }
    predictions = {
        "index": rows,
        "feature": torch.from_numpy(in_own_unit(features, metadata, "feature")),
        "prediction": torch.from_numpy(prediction),
        "target": torch.from_numpy(target),
    }
    names = {"targets": metadata["targets"], "feature": metadata["features"][0]}
    return metrics, predictions, names


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train and evaluate the model, write the run folder and return the last metrics."""
    config = parse(Config, argv)
    with Run(config, "regression") as run:  # creates run.accelerator
        accelerator = run.accelerator
        train_set, eval_set, metadata = run.load(load_data)
        train_loader, eval_loader = make_loaders(accelerator, train_set, eval_set, config)
        model = make_model(metadata)
        if config.model == "tabm":
            network.start_linear(model, train_set, network.fit_ridge)
        optimizer = make_optimizer(accelerator, model.parameters(), config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, scheduler
        )
        plan = metadata.pop("plan") | {"loss": config.loss}
        run.begin(model, metadata, plan)  # locks the run folder, loads the checkpoint

        for _ in run.epochs():
            for features, targets, *others in run.steps(train_loader):
                with accelerator.accumulate(model):
                    if config.model == "tabm":  # (rows, members, targets): each has its own loss
                        outputs = model(features, others[0])  # and the fold of each row
                        targets = targets[:, None].expand_as(outputs)
                    else:
                        outputs = model(features)
                    losses = LOSSES[config.loss](outputs, targets, reduction="none")
                    accelerator.backward(run.step_mean(losses))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(loss=losses)
                if run.end_step():  # --save-every, or a signal to any process
                    run.save()  # accelerator.save_state; after a signal it ends the run with 75
            if config.model == "tabm":
                network.set_scale(accelerator, model, train_set, LOSSES[config.loss])
            results = validate(run, model, eval_loader, eval_set, config.loss, metadata)
            run.end_epoch(*results)

        metrics = run.finish(f"python app.py {shlex.quote(str(config.run_dir))}")
    if config.target_r2 is not None and metrics["eval_r2"] < config.target_r2:
        sys.exit(EXIT_TARGET_MISSED)
    return metrics


if __name__ == "__main__":
    startup.run(main)
