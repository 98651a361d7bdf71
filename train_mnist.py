"""Train a digit recogniser on MNIST, on whatever the YAML under accelerate_configs/ describes.

python train_mnist.py
accelerate launch --config_file accelerate_configs/4gpu_fp16.yaml train_mnist.py
python train_mnist.py --resume auto
"""

# isort: off
import trainkit  # noqa: F401  (before torch: it sets what torch reads only once)

# isort: on
import argparse
import functools
import math
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import datasets
import evaluate
import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainkit import arguments, launch, nodes, plots
from trainkit.checkpoint import Checkpoints, md5
from trainkit.finite import FiniteGuard
from trainkit.grey import to_grey
from trainkit.history import History, RunningSums, epoch_bar
from trainkit.optim import clip_gradients, make_optimizer, make_scheduler, settle_sums
from trainkit.order import (
    NO_SAMPLE,
    EpochBatches,
    keyed_uniform,
    make_loader,
    remaining_batches,
    seed_dropout,
)
from trainkit.preemption import Preemption
from trainkit.rundir import close_run, finish_run, open_run, record_run
from trainkit.trackers import draw_pictures, make_trackers

SIZE = 28  # pixels; every picture is brought to SIZE x SIZE grey values
# Decoded pictures beyond this stay in a file that is mapped; --validation-split copies them all.
RESIDENT_BYTES = 2**30
MEAN, STD = 0.1307, 0.3081  # of the MNIST training pixels, as fractions of 255


class Compact(nn.Sequential):
    """Two convolutions, one hidden layer; no BatchNorm: its numbers depend on the processes."""

    def __init__(self, num_classes: int):
        super().__init__(
            nn.Conv2d(1, 24, 5, stride=2), nn.ReLU(),  # (n, 24, 12, 12)
            nn.Conv2d(24, 32, 3), nn.MaxPool2d(2), nn.ReLU(),  # (n, 32, 5, 5)
            nn.Flatten(), nn.Linear(800, 256), nn.ReLU(), nn.Linear(256, num_classes),
        )  # fmt: skip


class LeNet(nn.Sequential):
    """The LeNet of from-scratch tutorials: average pooling, ReLU after each layer."""

    def __init__(self, num_classes: int):
        super().__init__(
            nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2),  # (n, 20, 13, 13)
            nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2),  # (n, 50, 4, 4)
            nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, num_classes),
        )  # fmt: skip


class Wide(nn.Sequential):
    """26 million parameters, dropout: enough to feel the all-reduce."""

    def __init__(self, num_classes: int):
        super().__init__(
            nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(),
            nn.Conv2d(64, 128, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),  # (n, 128, 14, 14)
            nn.Flatten(), nn.Linear(25088, 1024), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(1024, num_classes),
        )  # fmt: skip


class Deep(nn.Sequential):
    """Four convolutions with BatchNorm, which sees a batch as a whole: for one process alone."""

    def __init__(self, num_classes: int):
        super().__init__(
            nn.Conv2d(1, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, bias=False), nn.MaxPool2d(2), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),  # (n, 64, 10, 10)
            nn.Conv2d(64, 64, 3, bias=False), nn.MaxPool2d(2), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(1024, 256, bias=False), nn.BatchNorm1d(256),
            nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, num_classes),
        )  # fmt: skip


MODELS = {"compact": Compact, "lenet": LeNet, "wide": Wide, "deep": Deep}


class Images(Dataset):
    """Pictures as one uint8 tensor; a whole batch is one indexing operation."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor):
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if indices[-1].item() == NO_SAMPLE:  # it fills up a short batch, from the end
            indices = indices[indices != NO_SAMPLE]
        # index_select copies whole pictures, which images[indices] does not
        return self.images.index_select(0, indices), self.labels.index_select(0, indices), indices


class Accuracy(evaluate.Metric):
    """Fraction of right predictions; `evaluate.load("accuracy")` would need the network."""

    def _info(self) -> evaluate.MetricInfo:
        value = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            features=datasets.Features({"predictions": value, "references": value}),
        )

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.equal(predictions, references)))}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument_group("problem").add_argument
    add("--dataset", default=str(Path(__file__).parent / "data" / "mnist"),
        help="folder or Hub id that holds an Image and a ClassLabel column")  # fmt: skip
    add("--model", choices=MODELS, default="compact", help="see the classes above")
    add("--label-smoothing", type=float, default=0.1, help="of the training loss, 0 to below 1")
    add("--augment", action=argparse.BooleanOptionalAction, default=True,
        help="shift, turn and warp each training picture anew in each epoch")  # fmt: skip
    add("--max-shift", type=float, default=1.0, help="of --augment, in pixels")
    add("--max-turn", type=float, default=5.0, help="of --augment, in degrees")
    add("--max-warp", type=float, default=0.0,
        help="of --augment, in pixels: how far each of 4 x 4 knots moves")  # fmt: skip
    add("--validation-split", type=int, default=0, metavar="N",
        help="evaluate on N held-out training pictures, to choose settings by")  # fmt: skip
    add("--eval-batch-size", type=int, default=512, help="over all processes")
    add("--target-accuracy", type=float, default=None,
        help="exit with 3 if the last evaluation is below this fraction")  # fmt: skip
    arguments.add_training_arguments(parser)
    arguments.add_run_arguments(parser, run_dir="runs/mnist")
    parser.set_defaults(epochs=3, batch_size=128, learning_rate=None, schedule="onecycle",
                        warmup=0.2, drop_last=True)  # fmt: skip
    args = parser.parse_args(argv)
    if args.learning_rate is None:
        args.learning_rate = 0.1 if args.optimizer == "sgd" else 6e-3
    return args


def check_arguments(args: argparse.Namespace, num_processes: int) -> None:
    problems = arguments.shared_problems(args, num_processes)
    arguments.check(problems, args, "label_smoothing", lambda v: 0 <= v < 1, "0 to below 1")
    arguments.check(problems, args, "target_accuracy", lambda v: 0 <= v <= 1, "a fraction, 0 to 1")
    for name in ("max_shift", "max_turn", "max_warp", "validation_split"):
        arguments.check(problems, args, name, lambda v: 0 <= v < math.inf, "0 or more")
    arguments.check(problems, args, "eval_batch_size", lambda v: v > 0 and v % num_processes == 0,
                    f"a multiple of the number of processes, {num_processes}")  # fmt: skip
    if args.model == "deep" and (num_processes > 1 or args.accumulate > 1):
        problems.append("--model deep has BatchNorm, whose numbers depend on how a batch is split: "
                        "use one process and --accumulate 1")  # fmt: skip
    arguments.refuse(problems)


def decode(pictures: list) -> list[np.ndarray]:
    """PIL pictures of any size and mode to flat uint8 arrays of SIZE * SIZE grey values."""
    flat = []
    for picture in pictures:
        if picture.mode != "L" or picture.size != (SIZE, SIZE):
            import torchvision.transforms.v2.functional as TF  # here: it takes a second to import

            grey = torch.from_numpy(to_grey(picture)).unsqueeze(0)
            picture = TF.resize(grey, [SIZE, SIZE], antialias=True).round()
        flat.append(np.asarray(picture, dtype=np.uint8).reshape(-1))
    return flat


def pixel_tensor(decoded: datasets.Dataset) -> torch.Tensor:
    """One uint8 tensor (n, 1, SIZE, SIZE): in memory, or mapped from a file if it is large."""
    shape = (len(decoded), 1, SIZE, SIZE)
    chunks = (chunk.flatten().to_numpy() for chunk in decoded.data.column("pixels").chunks)
    if math.prod(shape) <= RESIDENT_BYTES:
        return torch.from_numpy(np.concatenate(list(chunks))).view(shape)
    path = Path(decoded.cache_files[0]["filename"]).with_suffix(".pixels")
    if not path.exists():  # beside the cache that datasets keeps, whose parts are not contiguous
        unfinished = path.with_suffix(f".pixels-{os.getpid()}")
        with open(unfinished, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
        os.replace(unfinished, path)
    return torch.from_file(str(path), size=math.prod(shape), dtype=torch.uint8).view(shape)


def load_images(name: str, split: str) -> tuple[Images, list[str]]:
    """Return the pictures and labels of a split, and the names of its classes.

    Decoded once; later runs read the cache that `datasets` keeps. Raises UsageError.
    """
    where = f"--dataset {name}, split {split!r}"
    with launch.explained(f"--dataset {name} cannot be read"):
        splits = datasets.load_dataset(name)
    if split not in splits:
        raise launch.UsageError(f"{where}: there are only {sorted(splits)}; to evaluate on held "
                                "out training pictures use --validation-split N")  # fmt: skip
    rows = splits[split]
    columns = {type(feature): column for column, feature in reversed(rows.features.items())}
    if datasets.Image not in columns or datasets.ClassLabel not in columns or len(rows) == 0:
        raise launch.UsageError(f"{where}: there must be rows with an Image and a ClassLabel, not "
                                f"{len(rows)} rows of {rows.column_names}")  # fmt: skip
    image, label = columns[datasets.Image], columns[datasets.ClassLabel]
    flat = datasets.Sequence(datasets.Value("uint8"), length=SIZE * SIZE)
    with launch.explained(f"{where}: a picture cannot be decoded"):
        decoded = rows.map(
            lambda pictures: {"pixels": decode(pictures)},
            input_columns=image, batched=True, remove_columns=rows.column_names,
            features=datasets.Features(pixels=flat),
        )  # fmt: skip
    labels = torch.from_numpy(rows.data.column(label).to_numpy().astype(np.int64))
    names = rows.features[label].names
    if labels.min() < 0 or labels.max() >= len(names):
        raise launch.UsageError(f"{where}: a label is not one of the {len(names)} classes")
    return Images(pixel_tensor(decoded), labels), names


def make_dataloaders(args: argparse.Namespace) -> tuple[DataLoader, DataLoader, list[str]]:
    """Return the loaders for training and evaluation, and the names of the classes."""
    train_set, names = load_images(args.dataset, "train")
    if args.validation_split:
        # Split by a fixed seed: every run, whatever its --seed, is judged by the same pictures.
        order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(0))
        held_out, kept = order[: args.validation_split], order[args.validation_split :]
        eval_set = Images(train_set.images[held_out], train_set.labels[held_out])
        train_set = Images(train_set.images[kept], train_set.labels[kept])
    else:
        eval_set, eval_names = load_images(args.dataset, "test")
        if eval_names != names:
            raise launch.UsageError(f"--dataset {args.dataset}: train and test differ in classes")
    arguments.refuse(arguments.size_problems(args, len(train_set)))
    train_batches = EpochBatches(len(train_set), args.batch_size, seed=args.seed,
                                 drop_last=args.drop_last, accumulate=args.accumulate)  # fmt: skip
    if args.model == "deep" and 1 in (args.batch_size, train_batches.num_used % args.batch_size):
        arguments.refuse(["--model deep has BatchNorm, which learns nothing from a batch of one "
                          "picture: use another --batch-size"])  # fmt: skip
    eval_batches = EpochBatches(len(eval_set), args.eval_batch_size)
    return (
        make_loader(train_set, train_batches, args.num_workers),
        make_loader(eval_set, eval_batches, args.num_workers),
        names,
    )


def normalise(images: torch.Tensor) -> torch.Tensor:
    """Grey values 0 to 255 to mean 0 and standard deviation 1, channels last."""
    images = images.to(torch.float32, copy=True).sub_(255 * MEAN).mul_(1 / (255 * STD))
    return images.contiguous(memory_format=torch.channels_last)


@functools.cache
def pixel_centres(device: torch.device) -> torch.Tensor:
    """Coordinates x, y, 1 of all pixels, from -1 to 1: (3, SIZE * SIZE)."""
    axis = (2 * torch.arange(SIZE, device=device) + 1) / SIZE - 1
    return torch.stack(
        (axis.repeat(SIZE), axis.repeat_interleave(SIZE), torch.ones_like(axis).repeat(SIZE))
    )


@functools.cache
def knot_shares(device: torch.device) -> torch.Tensor:
    """How much each of 4 x 4 knots moves each pixel, bilinear: (16, SIZE * SIZE)."""
    axis = (2 * torch.arange(SIZE, device=device) + 1) / SIZE - 1
    knots = torch.linspace(-1, 1, 4, device=device).unsqueeze(1)
    share = (1 - (axis - knots).abs() * 3 / 2).clamp(min=0)
    return torch.einsum("iy,jx->ijyx", share, share).reshape(16, SIZE * SIZE)


def augment(
    images: torch.Tensor, indices: torch.Tensor, epoch: int, args: argparse.Namespace
) -> torch.Tensor:
    """Shift, turn and warp each picture by amounts keyed by (seed, epoch, sample index) alone."""
    noise = keyed_uniform(args.seed, epoch, indices, 35 if args.max_warp else 3) * 2 - 1
    turn, right, down = noise[:, :3].unbind(1)
    turn = turn * math.radians(args.max_turn)
    shift = 2 * args.max_shift / SIZE  # coordinates run from -1 to 1
    cos, sin = turn.cos(), turn.sin()
    affine = torch.stack((cos, -sin, right * shift, sin, cos, down * shift), 1).view(-1, 3)
    # What F.affine_grid gives, as one matrix product: an eighth of its time.
    grid = affine @ pixel_centres(images.device)
    if args.max_warp:
        moves = noise[:, 3:].reshape(-1, 16) * (2 * args.max_warp / SIZE)  # x, then y
        grid += moves @ knot_shares(images.device)
    grid = grid.view(-1, 2, SIZE, SIZE).permute(0, 2, 3, 1)
    return F.grid_sample(images.float(), grid, align_corners=False)  # black comes in from outside


@torch.inference_mode()
def validate(
    accelerator: Accelerator, model: nn.Module, loader: DataLoader
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return eval_loss, eval_accuracy, eval_samples, and what plots.save_predictions wants.

    Every process must call this. Each sample counts once at any number of processes, or an
    AssertionError is raised.
    """
    model.eval()
    num_samples = len(loader.dataset)
    loss_sum = torch.zeros((), device=accelerator.device)
    # Each process fills in its own samples; the sum over the processes is the whole picture.
    result = torch.zeros(2, num_samples, dtype=torch.int64, device=accelerator.device)
    probability = torch.zeros(num_samples, device=accelerator.device)
    for images, labels, indices in loader:
        logits = model(normalise(images))
        loss_sum += F.cross_entropy(logits, labels, reduction="sum")
        result[0, indices] = logits.argmax(1)
        result[1, indices] += 1
        probability[indices] = logits.float().softmax(1).amax(1)
    model.train()
    predictions, seen = accelerator.reduce(result, reduction="sum").cpu()
    assert (seen == 1).all(), "a sample was evaluated twice or not at all"
    targets = loader.dataset.labels
    metric = Accuracy(keep_in_memory=True).compute(predictions=predictions, references=targets)
    probability = accelerator.reduce(probability, reduction="sum").cpu()
    return {
        "eval_loss": accelerator.reduce(loss_sum, reduction="sum").item() / num_samples,
        "eval_accuracy": metric["accuracy"],
        "eval_samples": num_samples,
    }, {"prediction": predictions, "target": targets, "probability": probability}


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
            log_with=make_trackers(args, history, "mnist"),
        )
    launch.check_world(accelerator)
    nodes.check_nodes(accelerator, args)
    check_arguments(args, accelerator.num_processes)
    preemption = Preemption(accelerator, timeout)
    set_seed(args.seed)

    # Build: the same five in the same order in both scripts.
    train_loader, eval_loader, class_names = launch.first_here_then_everywhere(
        accelerator, lambda: make_dataloaders(args)
    )
    train_set, eval_set = train_loader.dataset, eval_loader.dataset
    data_md5 = md5(train_set.images, train_set.labels, eval_set.images, eval_set.labels)
    nodes.check_same(accelerator, {"the data's md5": data_md5})
    num_used = train_loader.batch_sampler.num_used
    steps_per_epoch = math.ceil(num_used / args.batch_size)
    model = MODELS[args.model](len(class_names)).to(memory_format=torch.channels_last)
    num_parameters = sum(p.numel() for p in model.parameters())
    optimizer = make_optimizer(accelerator, model, args)
    scheduler = make_scheduler(optimizer, args, steps_per_epoch)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler,
        device_placement=[True] * 5,  # the default; else half a second to look for sharded weights
    )  # fmt: skip
    launch.print_plan(accelerator, args, steps_per_epoch, {
        "data": f"{args.dataset}: {len(train_set)} training pictures of {len(class_names)} classes "
                f"(the last {len(train_set) - num_used} of each shuffle are left out), "
                f"{len(eval_set)} {'held out' if args.validation_split else 'test'} pictures",
        "model": f"{args.model}, {num_parameters:,} parameters",
    })  # fmt: skip

    # Resume: counters and running sums are plain JSON; nothing is registered with Accelerate.
    lock = open_run(accelerator, args)  # the folder is ours while this file is open
    sums = RunningSums(accelerator, "loss", "accuracy")
    guard = FiniteGuard(accelerator, optimizer)
    fingerprint = arguments.experiment(args) | {"dataset": data_md5, "size": num_parameters}
    checkpoints = Checkpoints(
        accelerator, args.run_dir, history, sums, fingerprint, args.keep, steps_per_epoch
    )
    last_step = min(args.epochs * steps_per_epoch, args.stop_after_steps or sys.maxsize)
    progress = checkpoints.resume(args.resume, last_step)
    record_run(accelerator, args)
    per_process = args.batch_size // accelerator.num_processes // args.accumulate
    some = train_set.images[:per_process].to(accelerator.device)  # as many as in each step
    settle_sums(accelerator, model, optimizer, normalise(some))  # one order, in a resumed run too
    accelerator.init_trackers("mnist", vars(args))

    # Train: epochs of batches, then an evaluation.
    while progress.epoch < args.epochs and progress.step < last_step:
        started_at = time.perf_counter()
        num_before = min(progress.batch * args.batch_size, num_used)  # of a run that was resumed
        bar = epoch_bar(accelerator, progress.epoch, num_used, num_before, "images")
        for images, labels, indices in remaining_batches(train_loader, progress, args.batch_size):
            # Samples in this step, over all processes and micro-batches: fewer at an epoch's end.
            num_samples = min(args.batch_size, num_used - progress.batch * args.batch_size)
            with accelerator.accumulate(model):
                seed_dropout(accelerator, args.seed, progress)
                if args.augment:
                    images = augment(images, indices, progress.epoch, args)
                logits = model(normalise(images))
                loss_sum = F.cross_entropy(
                    logits, labels, reduction="sum", label_smoothing=args.label_smoothing
                )
                # The gradient of the mean over num_samples: DDP divides by the number of processes,
                # Accelerate by that of micro-batches, so both are multiplied in. The second term
                # is 0, or NaN if the loss is not finite: then all processes get NaN gradients.
                scale = accelerator.num_processes * args.accumulate / num_samples
                accelerator.backward(loss_sum * (scale + 0 * loss_sum.detach()))
                learning_rate = scheduler.get_last_lr()[0]
                if accelerator.sync_gradients:
                    grad_norm = clip_gradients(accelerator, optimizer, args.clip_norm)
                    guard.check(grad_norm, loss_sum / num_samples, progress, learning_rate)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            sums.add(len(labels), loss_sum, (logits.argmax(1) == labels).sum())
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
        metrics, predictions = validate(accelerator, model, eval_loader)
        eval_seconds = time.perf_counter() - started_at - train_seconds
        num_trained = min(progress.batch * args.batch_size, num_used) - num_before
        if progress.batch == steps_per_epoch:
            progress.epoch, progress.batch = progress.epoch + 1, 0
        progress.metrics = {"epoch": progress.epoch, **sums.means(), **metrics}
        progress.evaluated_at = progress.step
        guard.check_mean(progress.metrics["train_loss"], progress, scheduler.get_last_lr()[0])
        accelerator.log(progress.metrics, step=progress.step)
        history.log_timing({"step": progress.step, "train_seconds": train_seconds,
                            "eval_seconds": eval_seconds, "train_images": num_trained})  # fmt: skip
        accelerator.print(
            f"epoch {progress.epoch}/{args.epochs}  "
            f"train loss {progress.metrics['train_loss']:.4f} "
            f"accuracy {progress.metrics['train_accuracy']:.2%}  "
            f"{'validation' if args.validation_split else 'test'} loss {metrics['eval_loss']:.4f} "
            f"accuracy {metrics['eval_accuracy']:.2%} of {metrics['eval_samples']}  "
            f"{train_seconds:.1f} s  {num_trained / train_seconds:,.0f} images/s",
            flush=True,
        )
        done = progress.epoch == args.epochs or progress.step == last_step
        if progress.batch == 0:  # else the run ends in the middle of an epoch, whose sums stay
            sums.clear()
        if done:  # before the last checkpoint, from which no resume would evaluate again
            predictions["mistake_images"] = eval_set.images[plots.worst_mistakes(**predictions)]
            plots.save_predictions(accelerator, args.run_dir, predictions, classes=class_names)
        # Without --save-every at the end of each epoch.
        if done or not args.save_every or progress.step % args.save_every == 0:
            checkpoints.save(progress)

    # Finish: pictures; weights that load in plain PyTorch; end_training, collective, comes last.
    metrics = progress.metrics
    if args.pictures:
        draw_pictures(accelerator, args.run_dir, progress.step)
    finish_run(accelerator, model, args.run_dir, {
        "script": Path(__file__).stem, "model": args.model, "classes": class_names,
        "size": SIZE, "mean": MEAN, "std": STD,
    })  # fmt: skip
    accelerator.print(
        f"done: {metrics['eval_accuracy']:.2%} of {metrics['eval_samples']} pictures right after "
        f"{progress.step} steps; weights, metrics and checkpoints are in {args.run_dir}"
    )
    preemption.close()
    close_run(lock)
    accelerator.end_training()
    if args.target_accuracy is not None and metrics["eval_accuracy"] < args.target_accuracy:
        sys.exit(launch.EXIT_TARGET_MISSED)
    return metrics


if __name__ == "__main__":
    launch.run(main)
