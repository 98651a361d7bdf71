"""Predict the class of a row of a table: texts, true or false, or a few whole numbers.

python examples/table_classes.py --data penguins.csv --target species
python predict.py runs/table_classes new_penguins.csv
accelerate launch --config_file accelerate_configs/2cpu.yaml examples/table_classes.py \
    --data penguins.csv --target species
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/
from trainkit import InMemory, Run, make_loaders, make_optimizer, make_scheduler, startup

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from trainkit.config import Schedule, parse
from trainkit.tables import network, sets


@dataclass
class Config(sets.TableConfig):
    run_dir: Path = Path("runs/table_classes")
    schedule: Schedule = "cosine"

    def __post_init__(self):
        self.set_unset(network.DEFAULTS)

    def find_problems(self, num_processes: int) -> list[str]:
        problems = super().find_problems(num_processes)
        return problems if self.data else [*problems, "name the table with --data FILE"]


def load_data(config: Config) -> sets.TableSets:
    """Return the training set, the evaluation set (with row numbers), and metadata."""
    made = sets.make_class_sets(*sets.load_table(config, predicts_classes=True), config)
    made.metadata.update(input="table_class", script=Path(__file__).stem)
    made.metadata["edges"] = network.find_edges(made.train.tensors[0])
    config.set_unset(network.choose_sizes(len(made.train), config.batch_size))
    return made


def make_model(metadata: dict[str, Any]) -> nn.Module:
    """Make the model that the metadata describe; predict.py loads the saved weights into it."""
    return network.TabM(len(metadata["classes"]), metadata["edges"])


def measure(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Return accuracy, balanced accuracy and log loss of (rows, classes); AUC of two classes.

    Balanced accuracy is the mean over the classes, of those that have rows, of the share that is
    recognised. AUC is the share of pairs, one row of each class, that are in the right order.
    """
    right = (logits.argmax(1) == labels).double()
    shares = [right[labels == number].mean() for number in labels.unique()]
    metrics = {
        "eval_loss": F.cross_entropy(logits, labels).item(),
        "eval_accuracy": right.mean().item(),
        "eval_balanced_accuracy": torch.stack(shares).mean().item(),
    }
    if logits.shape[1] == 2 and len(shares) == 2:
        # The sum of the ranks (Mann and Whitney, 1947); equal scores share their mean rank.
        _, place, counts = (logits[:, 1] - logits[:, 0]).unique(
            return_inverse=True, return_counts=True
        )
        rank = (counts.cumsum(0) - (counts - 1) / 2)[place]
        positive, negative = (labels == 1).sum(), (labels == 0).sum()
        pairs = rank[labels == 1].double().sum() - positive * (positive + 1) / 2
        metrics["eval_auc"] = (pairs / (positive * negative)).item()
    return metrics | {"eval_samples": len(labels)}


def validate(
    run: Run, model: nn.Module, loader: DataLoader, eval_set: InMemory, classes: list[str]
) -> tuple[dict[str, float], dict[str, torch.Tensor], dict[str, Any]]:
    """Return the metrics, and the tensors and metadata of predictions.safetensors.

    Every process must call this.
    """
    _, labels, rows = eval_set.tensors
    logits = run.predict(loader, lambda batch: model(batch[0]).float()).cpu()
    predictions = {"index": rows, "logits": logits, "prediction": logits.argmax(1)}
    return measure(logits, labels), predictions | {"target": labels}, {"classes": classes}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train and evaluate the model, write the run folder and return the last metrics."""
    config = parse(Config, argv)
    with Run(config, "table_classes") as run:
        accelerator = run.accelerator
        train_set, eval_set, metadata = run.load(load_data)
        classes = metadata["classes"]
        train_loader, eval_loader = make_loaders(accelerator, train_set, eval_set, config)
        model = make_model(metadata)
        fit = partial(network.fit_logistic, num_classes=len(classes))
        network.start_linear(model, train_set, fit)
        optimizer = make_optimizer(accelerator, model.parameters(), config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, scheduler
        )
        run.begin(model, metadata, metadata.pop("plan"))

        for _ in run.epochs():
            for features, labels, fold, _ in run.steps(train_loader):
                with accelerator.accumulate(model):
                    # (rows, members, classes), as each member has its own loss
                    logits = model(features, fold)
                    targets = labels[:, None].expand(logits.shape[:2])
                    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
                    accelerator.backward(run.step_mean(losses))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(loss=losses, accuracy=logits.mean(1).argmax(1) == labels)
                if run.end_step():
                    run.save()
            network.set_scale(accelerator, model, train_set, F.cross_entropy)
            run.end_epoch(*validate(run, model, eval_loader, eval_set, classes))
        return run.finish(f"python predict.py {shlex.quote(str(config.run_dir))} FILE")


if __name__ == "__main__":
    startup.run(main)
