"""Fit a linear model or a small network to numbers, on whatever the YAML describes.

python train_regression.py
accelerate launch --config_file accelerate_configs/2cpu.yaml train_regression.py
python train_regression.py --data houses.csv --target price --model mlp
"""

# isort: off
import trainkit  # noqa: F401  (before torch: it sets what torch reads only once)

# isort: on
import argparse
import csv
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import evaluate
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainkit import arguments, launch, nodes, plots, tables
from trainkit.checkpoint import Checkpoints, md5
from trainkit.finite import FiniteGuard
from trainkit.history import History, RunningSums, epoch_bar
from trainkit.optim import clip_gradients, make_optimizer, make_scheduler, settle_sums
from trainkit.order import NO_SAMPLE, EpochBatches, make_loader, remaining_batches
from trainkit.preemption import Preemption
from trainkit.rundir import close_run, finish_run, open_run, record_run
from trainkit.trackers import draw_pictures, make_trackers

FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
LOSSES = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.huber_loss}


class Linear(nn.Linear):
    """y = W x + b."""

    def __init__(self, num_features: int, num_targets: int, hidden: Sequence[int]):
        super().__init__(num_features, num_targets)


class MLP(nn.Sequential):
    """Linear layers with ReLU between them."""

    def __init__(self, num_features: int, num_targets: int, hidden: Sequence[int]):
        layers: list[nn.Module] = []
        for width, next_width in pairwise((num_features, *hidden)):
            layers += [nn.Linear(width, next_width), nn.ReLU()]
        super().__init__(*layers, nn.Linear((num_features, *hidden)[-1], num_targets))


MODELS = {"linear": Linear, "mlp": MLP}


class Rows(Dataset):
    """Features (n, d) and targets (n, t) as float32; a whole batch is one indexing operation."""

    def __init__(self, features: np.ndarray, targets: np.ndarray, numbers: np.ndarray):
        self.features = torch.from_numpy(features).float()
        self.targets = torch.from_numpy(targets).float()
        self.numbers = torch.from_numpy(numbers)  # of the rows in their table

    def __len__(self) -> int:
        return len(self.targets)

    def __getitems__(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if indices[-1].item() == NO_SAMPLE:  # it fills up a short batch, from the end
            indices = indices[indices != NO_SAMPLE]
        return (
            self.features.index_select(0, indices),
            self.targets.index_select(0, indices),
            indices,
        )


class Regression(evaluate.Metric):
    """MSE, RMSE, MAE and R2 against `baseline`, each the mean over the targets; no network."""

    def _info(self) -> evaluate.MetricInfo:
        value = datasets.Sequence(datasets.Value("float64"))
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            features=datasets.Features({"predictions": value, "references": value}),
        )

    def _compute(self, predictions: list, references: list, baseline: np.ndarray) -> dict:
        references = np.asarray(references)
        error = references - np.asarray(predictions)
        mse = (error**2).mean(0)
        r2 = 1 - mse / ((references - baseline) ** 2).mean(0)
        values = {"mse": mse, "rmse": np.sqrt(mse), "mae": np.abs(error).mean(0), "r2": r2}
        return {name: float(value.mean()) for name, value in values.items()}


def column_names(text: str) -> list[str]:
    """The parts of a list as it is typed after a flag."""
    return [name.strip() for name in text.split(",") if name.strip()]


def widths(text: str) -> list[int]:
    """The same for widths of layers."""
    return [int(width) for width in column_names(text)]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument_group("problem").add_argument
    add("--data", default=None,
        help="CSV, JSON (lines) or Parquet file, a folder of one kind of them, or Hub id; "
        "None: synthetic, targets = weights x features + bias + noise")  # fmt: skip
    add("--target", type=column_names, default=None, metavar="COLUMN[,COLUMN]", help="of --data")
    add("--features", type=column_names, default=None, metavar="COLUMN[,COLUMN]",
        help="of --data; None: all columns but the targets")  # fmt: skip
    add("--categorical", type=column_names, default=[], metavar="COLUMN[,COLUMN]",
        help="features that are categories although their values read as numbers")  # fmt: skip
    add(
        "--missing",
        choices=("refuse", "impute", "drop"),
        default="refuse",
        help="a missing value: an error, the training mean or most frequent category, no row",
    )
    add("--num-samples", type=int, default=1000, help="synthetic rows")
    add("--num-features", type=int, default=10, help="synthetic features")
    add("--num-targets", type=int, default=1, help="synthetic targets")
    add("--noise", type=float, default=0.1, help="standard deviation in the synthetic targets")
    add("--data-seed", type=int, default=0, help="of synthetic data and of the split")
    add("--test-fraction", type=float, default=0.2,
        help="of the rows, to evaluate on; 0: train and evaluate on all of them")  # fmt: skip
    add("--model", choices=MODELS, default="linear", help="see the classes above")
    add("--hidden", type=widths, default=[64, 64], metavar="WIDTH[,WIDTH]", help="of --model mlp")
    add("--loss", choices=LOSSES, default="mse", help="huber: squared below 1, absolute above")
    add("--eval-batch-size", type=int, default=1024, help="over all processes")
    add("--target-r2", type=float, default=None,
        help="exit with 3 if the last evaluation is below this")  # fmt: skip
    arguments.add_training_arguments(parser)
    arguments.add_run_arguments(parser, run_dir="runs/regression")
    parser.set_defaults(epochs=30, batch_size=32, learning_rate=3e-2, schedule="cosine")
    return parser.parse_args(argv)


def check_arguments(args: argparse.Namespace, num_processes: int) -> None:
    problems = arguments.shared_problems(args, num_processes)
    for name in ("num_samples", "num_features", "num_targets"):
        arguments.check(problems, args, name, lambda v: v >= 1, "at least 1")
    arguments.check(problems, args, "noise", lambda v: 0 <= v < math.inf, "0 or more")
    arguments.check(problems, args, "data_seed", lambda v: 0 <= v < 2**63, "0 to below 2**63")
    arguments.check(problems, args, "test_fraction", lambda v: 0 <= v < 1, "0 to below 1")
    arguments.check(problems, args, "target_r2", lambda v: v <= 1, "at most 1")
    arguments.check(problems, args, "hidden", lambda v: min(v, default=0) >= 1, "at least 1 each")
    arguments.check(problems, args, "eval_batch_size", lambda v: v > 0 and v % num_processes == 0,
                    f"a multiple of the number of processes, {num_processes}")  # fmt: skip
    if (args.data is None) != (not args.target):
        problems.append("--data and --target belong together: which columns are to be predicted?")
    if args.target and set(args.target) & set(args.features or []):
        problems.append("--target and --features have a column in common")
    arguments.refuse(problems)


def read_table(name: str) -> pd.DataFrame:
    """All rows of a table file, of a folder of such files or of a Hub data set. UsageError."""
    path = Path(name)
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = [str(file) for file in files if file.suffix in FORMATS]
    kinds = {FORMATS[Path(file).suffix] for file in files}
    if not path.exists() and path.suffix in FORMATS:
        raise launch.UsageError(f"--data {name}: there is no such file")
    if path.exists() and len(kinds) != 1:
        raise launch.UsageError(f"--data {name} is not a table: there must be files of one kind of "
                                f"{', '.join(FORMATS)}")  # fmt: skip
    with launch.explained(f"--data {name} cannot be read"):
        if not path.exists():
            return datasets.load_dataset(name, split="train").to_pandas()
        options: dict[str, Any] = {}
        if kinds == {"csv"}:
            with open(files[0], newline="", encoding="utf-8-sig") as file:
                header = next(csv.reader(file), [])
            # A table that pandas wrote begins with a column without a name.
            header = [name or f"Unnamed: {number}" for number, name in enumerate(header)]
            if len(set(header)) < len(header) or not header:
                raise launch.UsageError(f"--data {name}: the first line must name each column once")
            # As texts, so that a value that is no number is found with its row and column.
            options["features"] = datasets.Features(dict.fromkeys(header, datasets.Value("string")))
        rows = datasets.load_dataset(kinds.pop(), data_files=files, split="train", **options)
        return rows.to_pandas()


def load_table(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict]:
    """Row numbers, features, targets, and what a prediction for a new row must know of them.

    What is learned from rows (categories, means) is learned from the training rows alone.
    """
    where = f"--data {args.data}"
    table = read_table(args.data)
    chosen = args.features or [name for name in table.columns if name not in args.target]
    tables.check_columns(table, [*args.target, *chosen, *args.categorical], where)
    if args.missing == "drop":
        table = table.dropna(subset=[*chosen, *args.target])
    train, _ = split(len(table), args)
    learned = [
        tables.learn_column(
            table.iloc[train],
            name,
            where,
            categorical=name in args.categorical or tables.is_text(table[name]),
            impute=args.missing == "impute",
        )
        for name in chosen
    ]
    columns = [column for column in learned if column is not None]
    if not columns:
        raise launch.UsageError(f"{where}: there is no feature column whose values differ")
    features = tables.encode(table, columns, where)
    targets = tables.encode(table, [tables.Column(name) for name in args.target], where)
    return table.index.to_numpy(), features, targets, {
        "columns": [asdict(column) for column in columns],
        "features": [name for column in columns for name in column.feature_names()],
        "constant": [name for name, column in zip(chosen, learned, strict=True) if column is None],
        "targets": args.target,
        "truth": None,
    }  # fmt: skip


def make_synthetic(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict]:
    """The same four for targets = weights x features + bias + noise, all of them normal."""
    generator = torch.Generator().manual_seed(args.data_seed)  # nothing else draws from it
    size = {"generator": generator, "dtype": torch.float64}
    truth = torch.randn(args.num_targets, args.num_features + 1, **size)  # the bias comes last
    features = torch.randn(args.num_samples, args.num_features, **size)
    noise = args.noise * torch.randn(args.num_samples, args.num_targets, **size)
    targets = features @ truth[:, :-1].T + truth[:, -1] + noise
    names = [f"x{number}" for number in range(args.num_features)]
    return np.arange(args.num_samples), features.numpy(), targets.numpy(), {
        "columns": [asdict(tables.Column(name)) for name in names],
        "features": names,
        "constant": [],
        "targets": [f"y{number}" for number in range(args.num_targets)],
        "truth": truth.tolist(),
    }  # fmt: skip


def split(num_rows: int, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """The positions of the training and of the test rows. Raises UsageError if one is empty."""
    num_test = round(args.test_fraction * num_rows)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(args.data_seed))
    order = order.numpy()
    train, test = np.sort(order[num_test:]), np.sort(order[:num_test])
    if args.test_fraction == 0:
        test = train
    if min(len(test), len(train)) < 1:
        raise launch.UsageError(
            f"--data {args.data or 'synthetic'}: of {num_rows} rows {len(train)} are left to train "
            f"on and {len(test)} to evaluate on (--test-fraction {args.test_fraction}, "
            f"--missing {args.missing})"
        )
    return train, test


def make_dataloaders(args: argparse.Namespace) -> tuple[DataLoader, DataLoader, dict[str, Any]]:
    """Return the loaders for training and evaluation, and what is saved beside the weights."""
    load = make_synthetic if args.data is None else load_table
    numbers, features, targets, about = load(args)
    train, test = split(len(numbers), args)
    constant = targets[train].max(0) == targets[train].min(0)
    if constant.any():
        name = about["targets"][constant.argmax()]
        raise launch.UsageError(f"--data {args.data or 'synthetic'}: target column {name!r} is the "
                                f"same in all {len(train)} training rows")  # fmt: skip
    arguments.refuse(arguments.size_problems(args, len(train)))
    about["baseline"] = targets[train].mean(0).tolist()  # what R2 compares with
    # A table is standardised by its training rows; synthetic data have the unit that they have.
    for name, values in (("feature", features), ("target", targets)):
        mean, std = np.zeros(values.shape[1]), np.ones(values.shape[1])
        if args.data is not None:
            mean, std = values[train].mean(0), values[train].std(0)
        values -= mean
        values /= std
        about |= {f"{name}_mean": mean.tolist(), f"{name}_std": std.tolist()}
    train_set = Rows(features[train], targets[train], numbers[train])
    eval_set = Rows(features[test], targets[test], numbers[test])
    train_batches = EpochBatches(len(train_set), args.batch_size, seed=args.seed,
                                 drop_last=args.drop_last, accumulate=args.accumulate)  # fmt: skip
    eval_batches = EpochBatches(len(eval_set), args.eval_batch_size)
    return (
        make_loader(train_set, train_batches, args.num_workers),
        make_loader(eval_set, eval_batches, args.num_workers),
        about,
    )


@torch.inference_mode()
def predict(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> torch.Tensor:
    """Return the outputs for all rows in their order, (n, t), on the CPU.

    Every process must call this. Each sample counts once at any number of processes, or an
    AssertionError is raised.
    """
    model.eval()
    # Each process fills in its own samples; the sum over the processes is the whole table.
    shape = (len(loader.dataset), loader.dataset.targets.shape[1] + 1)
    result = torch.zeros(shape, device=accelerator.device)
    for features, _, indices in loader:
        result[indices, :-1] = model(features).float()
        result[indices, -1] += 1
    model.train()
    result = accelerator.reduce(result, reduction="sum").cpu()
    assert (result[:, -1] == 1).all(), "a sample was evaluated twice or not at all"
    return result[:, :-1]


def in_own_unit(values: torch.Tensor, about: dict[str, Any], kind: str = "target") -> np.ndarray:
    """Undo the standardisation of targets, outputs or features, float64."""
    return values.double().numpy() * about[f"{kind}_std"] + about[f"{kind}_mean"]


def validate(
    accelerator: Accelerator, model: nn.Module, loader: DataLoader, loss: str, about: dict
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return eval_loss, eval_samples and, in the targets' own unit, eval_mse, _rmse, _mae, _r2.

    The second dict is what plots.save_predictions takes. Every process must call this.
    """
    outputs, targets = predict(accelerator, model, loader), loader.dataset.targets
    prediction, target = in_own_unit(outputs, about), in_own_unit(targets, about)
    metric = Regression(keep_in_memory=True).compute(
        predictions=prediction, references=target, baseline=about["baseline"]
    )
    metrics = {
        "eval_loss": LOSSES[loss](outputs.double(), targets.double()).item(),
        **{f"eval_{name}": value for name, value in metric.items()},
        "eval_samples": len(targets),
    }
    predictions = {
        "index": loader.dataset.numbers,
        "prediction": torch.from_numpy(prediction),
        "target": torch.from_numpy(target),
    }
    if len(about["features"]) == 1:  # the picture of the fit needs it
        feature = in_own_unit(loader.dataset.features, about, "feature")
        predictions["feature"] = torch.from_numpy(feature)
    return metrics, predictions


def compare(model: nn.Module, train_set: Rows, about: dict, noise: float) -> dict[str, float]:
    """A linear model beside the least-squares optimum of its training rows and the known truth.

    standard_error is the root of the expected square of the optimum's own distance to the truth.
    """
    learned = torch.cat((model.weight, model.bias[:, None]), 1).detach().cpu().double()
    inputs = F.pad(train_set.features.double(), (0, 1), value=1.0)  # a column of ones for the bias
    targets = train_set.targets.double()
    optimum = torch.linalg.lstsq(inputs, targets, driver="gelsd").solution.T
    result = {
        "train_mse": F.mse_loss(inputs @ learned.T, targets).item(),
        "least_squares_mse": F.mse_loss(inputs @ optimum.T, targets).item(),
    }
    if about["truth"] is not None:
        variances = noise**2 * torch.linalg.pinv(inputs.T @ inputs).diagonal()
        result |= {
            "distance_to_least_squares": (learned - optimum).norm().item(),
            "distance_to_truth": (learned - torch.tensor(about["truth"])).norm().item(),
            "standard_error": math.sqrt(len(learned) * variances.sum().item()),
        }
    return result


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, write the run folder; return the last metrics."""
    # Setup: is this the world that the YAML asked for?
    args = parse_args(argv)
    launch.check_launch()
    if not (sys.stderr.isatty() and launch.is_main_rank()):
        datasets.disable_progress_bars()
    history = History(args.run_dir)
    timeout = timedelta(seconds=max(1, args.timeout))
    with launch.deadline(timeout):
        accelerator = Accelerator(
            cpu=not torch.accelerator.is_available(),
            gradient_accumulation_steps=max(1, args.accumulate),
            # A batch is split over the processes: --batch-size means the same under every YAML.
            dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=True),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
            log_with=make_trackers(args, history, "regression"),
        )
    launch.check_world(accelerator)
    nodes.check_nodes(accelerator, args)
    check_arguments(args, accelerator.num_processes)
    preemption = Preemption(accelerator, timeout)
    set_seed(args.seed)

    # Build: the same five in the same order in both scripts.
    train_loader, eval_loader, about = launch.first_here_then_everywhere(
        accelerator, lambda: make_dataloaders(args)
    )
    train_set, eval_set = train_loader.dataset, eval_loader.dataset
    part = "test" if args.test_fraction else "training"
    data_md5 = md5(train_set.features, train_set.targets, eval_set.features, eval_set.targets)
    nodes.check_same(accelerator, {"the data's md5": data_md5})
    num_used = train_loader.batch_sampler.num_used
    steps_per_epoch = math.ceil(num_used / args.batch_size)
    model = MODELS[args.model](len(about["features"]), len(about["targets"]), args.hidden)
    num_parameters = sum(p.numel() for p in model.parameters())
    optimizer = make_optimizer(accelerator, model, args)
    scheduler = make_scheduler(optimizer, args, steps_per_epoch)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler,
        device_placement=[True] * 5,  # the default; else half a second to look for sharded weights
    )  # fmt: skip
    launch.print_plan(accelerator, args, steps_per_epoch, {
        "data": f"{args.data or 'synthetic'}: {len(train_set)} training rows (the last "
                f"{len(train_set) - num_used} of each shuffle are left out), "
                f"{len(eval_set)} {part} rows",
        "features": f"{len(about['features'])} (constant and left out: "
                    f"{', '.join(about['constant']) or 'none'})",
        "targets": ", ".join(about["targets"]),
        "model": f"{args.model}, {num_parameters:,} parameters, {args.loss}",
    })  # fmt: skip

    # Resume: counters and running sums are plain JSON; nothing is registered with Accelerate.
    lock = open_run(accelerator, args)  # the folder is ours while this file is open
    sums = RunningSums(accelerator, "loss")
    guard = FiniteGuard(accelerator, optimizer)
    fingerprint = arguments.experiment(args) | {"data": data_md5, "size": num_parameters}
    checkpoints = Checkpoints(
        accelerator, args.run_dir, history, sums, fingerprint, args.keep, steps_per_epoch
    )
    last_step = min(args.epochs * steps_per_epoch, args.stop_after_steps or sys.maxsize)
    progress = checkpoints.resume(args.resume, last_step)
    record_run(accelerator, args)
    per_process = args.batch_size // accelerator.num_processes // args.accumulate
    some = train_set.features[:per_process].to(accelerator.device)  # as many as in each step
    settle_sums(accelerator, model, optimizer, some)  # one order, in a resumed run too
    accelerator.init_trackers("regression", vars(args))

    # Train: epochs of batches, then an evaluation.
    while progress.epoch < args.epochs and progress.step < last_step:
        started_at = time.perf_counter()
        num_before = min(progress.batch * args.batch_size, num_used)  # of a run that was resumed
        bar = epoch_bar(accelerator, progress.epoch, num_used, num_before, "rows")
        for features, targets, _ in remaining_batches(train_loader, progress, args.batch_size):
            # Samples in this step, over all processes and micro-batches: fewer at an epoch's end.
            num_samples = min(args.batch_size, num_used - progress.batch * args.batch_size)
            num_values = num_samples * len(about["targets"])  # the loss is a mean over both
            with accelerator.accumulate(model):
                loss_sum = LOSSES[args.loss](model(features), targets, reduction="sum")
                # The gradient of the mean over num_values: DDP divides by the number of processes,
                # Accelerate by that of micro-batches, so both are multiplied in. The second term
                # is 0, or NaN if the loss is not finite: then all processes get NaN gradients.
                scale = accelerator.num_processes * args.accumulate / num_values
                accelerator.backward(loss_sum * (scale + 0 * loss_sum.detach()))
                learning_rate = scheduler.get_last_lr()[0]
                if accelerator.sync_gradients:
                    grad_norm = clip_gradients(accelerator, optimizer, args.clip_norm)
                    guard.check(grad_norm, loss_sum / num_values, progress, learning_rate)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            sums.add(targets.numel(), loss_sum)
            if not progress.advance(accelerator):
                continue  # inside an accumulation window, or a step that fp16 skipped
            bar.update(num_samples)
            if progress.step % args.log_every == 0:
                window = sums.flush()
                mean_loss = window["loss"] / window["samples"]
                guard.check_mean(mean_loss, progress, learning_rate)
                accelerator.log({"epoch": progress.epoch, "train_loss": mean_loss,
                                 "learning_rate": learning_rate}, step=progress.step)  # fmt: skip
                bar.set_postfix(loss=f"{mean_loss:.4f}")
            if progress.step == last_step:
                break
            stopping = preemption.requested()
            due = args.save_every and progress.step % args.save_every == 0
            if stopping or (due and progress.batch < steps_per_epoch):  # else after the evaluation
                guard.finish()
                checkpoints.save(progress)
            if stopping:
                preemption.stop(progress.step)
        bar.close()
        guard.finish()
        sums.flush()
        train_seconds = time.perf_counter() - started_at
        metrics, predictions = validate(accelerator, model, eval_loader, args.loss, about)
        eval_seconds = time.perf_counter() - started_at - train_seconds
        num_trained = min(progress.batch * args.batch_size, num_used) - num_before
        if progress.batch == steps_per_epoch:
            progress.epoch, progress.batch = progress.epoch + 1, 0
        progress.metrics = {"epoch": progress.epoch, **sums.means(), **metrics}
        progress.evaluated_at = progress.step
        guard.check_mean(progress.metrics["train_loss"], progress, scheduler.get_last_lr()[0])
        accelerator.log(progress.metrics, step=progress.step)
        history.log_timing({"step": progress.step, "train_seconds": train_seconds,
                            "eval_seconds": eval_seconds, "train_rows": num_trained})  # fmt: skip
        accelerator.print(
            f"epoch {progress.epoch}/{args.epochs}  "
            f"train loss {progress.metrics['train_loss']:.4g}  "
            f"{part} loss {metrics['eval_loss']:.4g} RMSE {metrics['eval_rmse']:.4g} "
            f"MAE {metrics['eval_mae']:.4g} R2 {metrics['eval_r2']:.4f} "
            f"of {metrics['eval_samples']}  "
            f"{train_seconds:.1f} s  {num_trained / train_seconds:,.0f} rows/s",
            flush=True,
        )
        done = progress.epoch == args.epochs or progress.step == last_step
        if progress.batch == 0:  # else the run ends in the middle of an epoch, whose sums stay
            sums.clear()
        if done:  # before the last checkpoint, from which no resume would evaluate again
            plots.save_predictions(
                accelerator,
                args.run_dir,
                predictions,
                targets=about["targets"],
                feature=about["features"][0],
            )
        # Without --save-every at the end of each epoch.
        if done or not args.save_every or progress.step % args.save_every == 0:
            checkpoints.save(progress)

    # Finish: pictures; weights that load in plain PyTorch; end_training, collective, comes last.
    metrics = progress.metrics
    if args.pictures:
        draw_pictures(accelerator, args.run_dir, progress.step)
    finish_run(accelerator, model, args.run_dir, {
        "script": Path(__file__).stem, "model": args.model,
        "hidden": args.hidden if args.model == "mlp" else [], **about,
    })  # fmt: skip
    if args.model == "linear":
        plain = accelerator.unwrap_model(model, keep_torch_compile=False)
        comparison = compare(plain, train_set, about, args.noise)
        accelerator.print("  ".join(f"{name} {value:.6g}" for name, value in comparison.items()))
        metrics = metrics | comparison
    accelerator.print(
        f"done: R2 {metrics['eval_r2']:.4f} on {metrics['eval_samples']} {part} rows after "
        f"{progress.step} steps; weights, metrics and checkpoints are in {args.run_dir}"
    )
    preemption.close()
    close_run(lock)
    accelerator.end_training()
    if args.target_r2 is not None and metrics["eval_r2"] < args.target_r2:
        sys.exit(launch.EXIT_TARGET_MISSED)
    return metrics


if __name__ == "__main__":
    launch.run(main)
