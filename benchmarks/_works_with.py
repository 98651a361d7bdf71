"""A small script in which one part is somebody else's: see works_with.py.

    python -m trainkit.tools.rehearse benchmarks/_works_with.py --optimizer-of torch.AdamW

rehearses one part. With a list of jobs it runs them one after another, in one process or several:

    python -m benchmarks._works_with JOBS RESULTS
"""

import importlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit import Run, make_loaders, startup

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn

from benchmarks._sets_of_others import make_set
from trainkit.config import TrainingConfig, parse
from trainkit.tools.rehearse.stage import copy_as_killed

NUM = 60


@dataclass
class Config(TrainingConfig):
    run_dir: Path = Path("runs/works_with")
    epochs: int = 4
    log_every: int | None = 1
    save_every: int | None = 4
    keep: int = 99
    pictures: bool = False
    batch_size: int = 12
    learning_rate: float = 1e-2
    optimizer_of: str = "torch.AdamW"
    """PACKAGE.NAME"""

    schedule_of: str = ""
    """torch.NAME, timm.NAME, transformers.NAME or pytorch_optimizer.NAME"""

    metric_of: str = ""
    """PACKAGE.NAME"""

    tracker_of: str = ""
    """mlflow"""

    set_of: str = "InMemory"
    """what holds the samples"""


def load_data(config: Config) -> tuple[Any, Any]:
    """Random points, and which of three numbers is the largest."""
    x = torch.randn(NUM + 21, 8, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    return make_set(config.set_of, x[21:], y[21:]), make_set(config.set_of, x[:21], y[:21])


def make_optimizer(name: str, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """The optimizer of this name, with its defaults beside the rate."""
    package, _, kind = name.partition(".")
    parameters: Any = list(model.parameters())
    if package == "timm":
        from timm.optim import create_optimizer_v2

        return create_optimizer_v2(model, kind, lr=rate, weight_decay=0.0)
    if package == "torch":
        return getattr(torch.optim, kind)(parameters, lr=rate)
    if package in ("galore_torch", "apollo_torch"):
        low = {"rank": 2, "update_proj_gap": 5, "scale": 1.0, "proj_type": "std"}
        more = {"proj": "random", "scale_type": "channel"} if package == "apollo_torch" else {}
        parameters = [{"params": parameters, **low, **more}]
    if package == "adam_mini":
        parameters = list(model.named_parameters())
    if kind.startswith("Lookahead") or kind.endswith("Wrapper"):
        inner = torch.optim.AdamW(parameters, lr=rate)
        return getattr(importlib.import_module(package), kind)(inner)
    if package == "heavyball":
        import heavyball

        heavyball.utils.compile_mode = None  # else it is compiled for minutes
    if kind.startswith("safe."):  # the way out that the refusal names
        from galore_torch.galore_projector import GaLoreProjector

        kind = kind.removeprefix("safe.")
        torch.serialization.add_safe_globals([GaLoreProjector])
    if kind == "Ranger21":
        return importlib.import_module(package).Ranger21(parameters, 20, lr=rate)
    module = {"torchao": "torchao.optim", "bitsandbytes": "bitsandbytes.optim"}
    return getattr(importlib.import_module(module.get(package, package)), kind)(parameters, lr=rate)


def make_schedule(name: str, optimizer: torch.optim.Optimizer, rate: float) -> Any:
    """The schedule of this name, over the 20 steps of a rehearsal."""
    package, _, kind = name.partition(".")
    schedules = torch.optim.lr_scheduler
    if package == "timm":
        import timm.scheduler

        options = (
            {"t_initial": 20, "t_in_epochs": False, "lr_min": rate / 10}
            if kind.startswith("Cos")
            else {}
        )
        return getattr(timm.scheduler, kind)(optimizer, **options)
    if package == "transformers":
        import transformers

        return getattr(transformers, kind)(optimizer, 5, 20)
    if package == "pytorch_optimizer":
        import pytorch_optimizer

        return getattr(pytorch_optimizer, kind)(optimizer, 20, rate, rate / 10, 5)
    options = {
        "OneCycleLR": {"max_lr": rate, "total_steps": 20},
        "CosineAnnealingWarmRestarts": {"T_0": 7},
        "CyclicLR": {"base_lr": rate / 10, "max_lr": rate, "step_size_up": 3},
        "ReduceLROnPlateau": {"patience": 0, "threshold": 0.5},
    }
    return getattr(schedules, kind)(optimizer, **options.get(kind, {}))


def step_schedule(schedule: Any, name: str, step: int) -> None:
    """One step of a schedule, with what its package gives it."""
    if name.startswith("timm."):
        schedule.step_update(step + 1)
    elif "Plateau" in name:
        schedule.step(1.0)
    else:
        schedule.step()


def make_metric(name: str, logits: torch.Tensor, targets: torch.Tensor) -> float:
    """A metric of somebody else, of all samples: what run.predict returns on each process."""
    guessed = logits.argmax(1)
    if name == "sklearn.roc_auc_score":
        from sklearn.metrics import roc_auc_score

        return float(roc_auc_score(targets, logits.softmax(1), multi_class="ovr"))
    if name == "sklearn.f1_score":
        from sklearn.metrics import f1_score

        return float(f1_score(targets, guessed, average="macro"))
    if name == "monai.compute_roc_auc":
        from monai.metrics import compute_roc_auc

        return float(compute_roc_auc(logits.softmax(1), F.one_hot(targets, 3)))
    if name == "evaluate.EvaluationModule":
        return with_evaluate(guessed, targets)
    import torchmetrics

    _, kind, *synced = name.split(".")
    options = {} if synced else {"sync_on_compute": False}
    if kind == "SumMetric":
        metric = torchmetrics.SumMetric(**options)
        metric.update((guessed == targets).float())
    else:
        metric = getattr(torchmetrics, kind)("multiclass", num_classes=3, **options)
        metric.update(logits, targets)
    return float(metric.compute())


def with_evaluate(guessed: torch.Tensor, targets: torch.Tensor) -> float:
    """The share that is right, by a metric module of the library `evaluate`, made here."""
    import datasets
    import evaluate

    class Right(evaluate.Metric):
        def _info(self) -> Any:
            integers = {name: datasets.Value("int64") for name in ("predictions", "references")}
            features = datasets.Features(integers)
            return evaluate.MetricInfo(description="", citation="", features=features)

        def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
            return {"right": float((np.array(predictions) == np.array(references)).mean())}

    return Right().compute(predictions=guessed, references=targets)["right"]


def make_tracker(run_dir: Path) -> Any:
    """Accelerate's tracker for mlflow, which writes into the run folder."""
    from accelerate.tracking import MLflowTracker

    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{run_dir.resolve()}/mlflow.db"
    tracker = MLflowTracker("works_with")
    tracker.start()
    return tracker


def main(argv: Any = None) -> dict[str, float]:
    config = parse(Config, argv)
    with Run(config, "works_with") as run:
        accelerator = run.accelerator
        train_set, eval_set = run.load(load_data)
        loaders = make_loaders(accelerator, train_set, eval_set, config)
        net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 3, bias=False))
        optimizer = make_optimizer(config.optimizer_of, net, config.learning_rate)
        model, optimizer, train_loader, eval_loader = accelerator.prepare(net, optimizer, *loaders)
        schedule = None
        if config.schedule_of:
            schedule = make_schedule(config.schedule_of, optimizer, config.learning_rate)
            if config.schedule_of.startswith("timm."):
                accelerator.register_for_checkpointing(schedule)
            else:
                schedule = accelerator.prepare(schedule)
        run.begin(model, {"script": "works_with"})
        if config.tracker_of and accelerator.is_main_process:
            accelerator.trackers.append(make_tracker(config.run_dir))

        def losses(batch: Any) -> dict[str, torch.Tensor]:
            x, y = (batch["x"], batch["y"]) if hasattr(batch, "keys") else batch[:2]
            return {"loss": F.cross_entropy(model(x), y, reduction="none")}

        def predict(batch: Any) -> dict[str, torch.Tensor]:
            return {"logits": model(batch[0]), "targets": batch[1]}

        for _ in run.epochs():
            for batch in run.steps(train_loader):
                with accelerator.accumulate(model):
                    values = losses(batch)
                    accelerator.backward(run.step_mean(values["loss"]))
                    optimizer.step()
                    if schedule is not None:
                        step_schedule(schedule, config.schedule_of, run.progress.step)
                    optimizer.zero_grad()
                run.add(**values)
                if run.end_step():
                    run.save()
            results = run.evaluate(eval_loader, losses)
            if config.metric_of:
                found = run.predict(eval_loader, predict)
                results["eval_metric"] = make_metric(config.metric_of, **found)
            run.end_epoch(results)
        return run.finish()


def work(jobs: Path, results: Path) -> None:
    """Run each job that has no result yet, and write its number and why it did not end."""
    done = {json.loads(line)[0] for line in results.read_text().splitlines()}
    for number, (flags, env, source) in enumerate(json.loads(jobs.read_text())):
        if number in done:
            continue
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        os.environ.update(env)
        folder = Path(flags[flags.index("--run-dir") + 1])
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.tempdir = str(folder.parent)
        is_first = os.environ.get("RANK", "0") == "0"
        if is_first and source:
            copy_as_killed(Path(source), folder, 12)
        problem = ""
        try:
            main(flags)
        except (Exception, SystemExit) as error:
            problem = f"{type(error).__name__}: {error}"
        if is_first:
            with open(results, "a") as file:
                file.write(json.dumps([number, problem]) + "\n")
        for name in env:
            del os.environ[name]
        if problem and "RANK" in os.environ:
            sys.exit(1)  # its group would fail what comes next: works_with starts another


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].endswith(".json"):
        work(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        startup.run(main)
