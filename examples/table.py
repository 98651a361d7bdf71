"""Predict a column of a table from the others: a number, several numbers, or a class.

python examples/table.py --data penguins.csv --target body_mass_g
python examples/table.py --data penguins.csv --target species
python predict.py runs/table new_penguins.csv
accelerate launch --config_file accelerate_configs/2cpu.yaml examples/table.py --data penguins.csv \
    --target species
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/
from trainkit import (  # pip install .
    InMemory,
    Run,
    make_loaders,
    make_optimizer,
    make_scheduler,
    startup,
)

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from trainkit.config import Schedule, parse
from trainkit.tables import (
    TableConfig,
    TableSets,
    TabM,
    choose_sizes,
    make_table_sets,
    measure_classes,
    measure_numbers,
    set_scale,
    start_linear,
)


@dataclass
class Config(TableConfig):
    run_dir: Path = Path("runs/table")
    schedule: Schedule = "cosine"


def load_data(config: Config) -> TableSets:
    """Return the training set, the evaluation set (with row numbers), metadata, plan."""
    made = make_table_sets(config)
    made.metadata["script"] = Path(__file__).stem
    config.set_unset(choose_sizes(len(made.train), config.batch_size))
    return made


def make_model(metadata: dict[str, Any]) -> nn.Module:
    """Make the model that the metadata describe; predict.py loads the saved weights into it."""
    return TabM(len(metadata.get("classes") or metadata["targets"]), metadata["edges"])


def compute_losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return squared errors of numbers, or cross-entropies of classes; outputs come last."""
    if targets.is_floating_point():
        return F.mse_loss(outputs, targets, reduction="none")
    return F.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none")


def validate(
    run: Run, model: nn.Module, loader: DataLoader, eval_set: InMemory, metadata: dict[str, Any]
) -> tuple[dict[str, float], dict[str, torch.Tensor], dict[str, Any]]:
    """Return the metrics, and the tensors and metadata of predictions.safetensors.

    Numbers are in the units of the targets. Every process must call this.
    """
    features, targets, rows = eval_set.tensors
    # Of each row once, in the order of the set, on every process.
    outputs = run.predict(loader, lambda batch: model(batch[0]).float()).cpu()
    loss = compute_losses(outputs.double(), targets if "classes" in metadata else targets.double())
    metrics = {"eval_loss": loss.mean().item()}
    predictions = {"feature": torch.from_numpy(in_own_unit(features, metadata, "feature"))}
    if "classes" in metadata:
        metrics |= measure_classes(outputs, targets)
        predictions |= {"logits": outputs, "prediction": outputs.argmax(1), "target": targets}
        names = {"classes": metadata["classes"]}
    else:
        prediction, target = (in_own_unit(x, metadata, "target") for x in (outputs, targets))
        metrics |= measure_numbers(prediction, target, metadata["baseline"])
        predictions |= {
            "prediction": torch.from_numpy(prediction),
            "target": torch.from_numpy(target),
        }
        names = {"targets": metadata["targets"], "feature": metadata["features"][0]}
    return metrics | {"eval_samples": len(rows)}, predictions | {"index": rows}, names


def in_own_unit(values: torch.Tensor, metadata: dict[str, Any], kind: str) -> np.ndarray:
    """Undo the standardisation of targets, outputs or features; returns float64."""
    return values.double().numpy() * metadata[f"{kind}_std"] + metadata[f"{kind}_mean"]


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train and evaluate the model, write the run folder and return the last metrics."""
    config = parse(Config, argv)
    with Run(config, "table") as run:
        accelerator = run.accelerator
        train_set, eval_set, metadata, plan = run.load(load_data)
        train_loader, eval_loader = make_loaders(accelerator, train_set, eval_set, config)
        model = make_model(metadata)
        start_linear(model, train_set)  # solved, before the network adds to it
        optimizer = make_optimizer(accelerator, model.parameters(), config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, scheduler
        )
        run.begin(model, metadata, plan)

        for _ in run.epochs():
            for features, targets, fold, _ in run.steps(train_loader):
                with accelerator.accumulate(model):
                    # (rows, members, outputs): each member has a loss of its own.
                    outputs = model(features, fold)
                    shape = *outputs.shape[:2], *targets.shape[1:]
                    losses = compute_losses(outputs, targets[:, None].expand(shape))
                    accelerator.backward(run.step_mean(losses))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(loss=losses)
                if run.end_step():
                    run.save()
            set_scale(accelerator, model, train_set, compute_losses)
            run.end_epoch(*validate(run, model, eval_loader, eval_set, metadata))
        return run.finish()


if __name__ == "__main__":
    startup.run(main)
