"""What begins a run and ends it: launch, data, run folder, resume; then weights and pictures."""

import argparse
import json
import math
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from trainkit import best, shards
from trainkit import config as arguments

import torch
from accelerate import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import set_seed
from torch import nn

from trainkit.checkpoint import Checkpoints, Progress
from trainkit.checks.calls import allowed, need, out_of_order
from trainkit.checks.data import check_indexable, data_md5, files_of
from trainkit.checks.prepared import Unchanged, check_prepared
from trainkit.cli.console import describe, num_parameters, show_best
from trainkit.cli.reporter import Reporter
from trainkit.cli.text import check_json, count, first_sentence
from trainkit.cli.world import describe_run
from trainkit.ema import Average
from trainkit.errors import RunFailure, failing_together
from trainkit.launch import environment, nodes
from trainkit.launch.signals import Signals
from trainkit.launch.startup import compute_float32_in_full, refuse_pickled_code
from trainkit.loaders import InMemory, batches_of, num_used
from trainkit.metrics import RunningMeans
from trainkit.private import (
    end_workers,
    fix_bucket_order,
    prepared_loaders,
    prepared_models,
    prepared_optimizers,
    share_frozen_weights,
)
from trainkit.rng import NUM_HELD
from trainkit.run_dir import curves
from trainkit.run_dir.files import open_run, write_durably, write_json
from trainkit.run_dir.log import History
from trainkit.run_dir.manifest import sha256_of
from trainkit.run_dir.trackers import make_trackers
from trainkit.run_dir.weights import read_weights, write_tensors
from trainkit.step import Step


class Session:
    """What comes before the first step of a Run and after the last: see trainkit.run.Run."""

    # A script may set it: then model.safetensors and best.safetensors are without what is frozen
    # (requires_grad=False), as all checkpoints are.
    only_trained = False
    args: argparse.Namespace
    stage: str  # see checks/calls.py
    resources: ExitStack  # what is cleaned up at the end
    # Digests of what is frozen, once prepare(...) has sharded it; --start-from may change it later.
    hashes: dict[str, str]
    # Since the body was entered.
    accelerator: Accelerator
    history: History
    reporter: Reporter
    signals: Signals
    # Since load().
    train_set: Any
    eval_set: Any
    data_md5: str
    num_used: int  # samples that an epoch uses
    steps_per_epoch: int
    last_step: int  # of the run, by --epochs and --stop-after-steps
    log_every: int
    # Since begin().
    models: list[nn.Module]  # without the wrappers of DDP and torch.compile
    optimizers: list[AcceleratedOptimizer]
    about: dict[str, Any]
    unchanged: Unchanged
    means: RunningMeans
    average: Average | None  # of --ema
    checkpoints: Checkpoints
    progress: Progress
    step: Step

    def __init__(
        self,
        args: argparse.Namespace,
        project: str,
        check: Callable[[argparse.Namespace, int], None] | None = None,
    ):
        self.args, self.project = args, project
        self.check = check or arguments.check_shared
        self.stage, self.resources, self.hashes = "new", ExitStack(), {}

    def __enter__(self) -> "Session":
        need(self, "`with run`", "new")
        refuse_pickled_code()
        compute_float32_in_full()
        args, timeout = self.args, timedelta(seconds=max(1, self.args.timeout))
        self.history = History(args.run_dir)
        precision = environment.check_launch()
        with nodes.deadline(timeout):
            self.accelerator = Accelerator(
                cpu=not torch.accelerator.is_available(),
                mixed_precision=precision,
                gradient_accumulation_steps=max(1, args.accumulate),
                # A batch is split over the processes: --batch-size is the same under every YAML.
                dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=True),
                kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
                log_with=make_trackers(args, self.history, self.project),
            )
        shards.shard(self.accelerator, self.hashes)
        share_frozen_weights(self.accelerator, shards.frozen)
        nodes.check_world(self.accelerator)
        nodes.check_nodes(self.accelerator, args)
        self.check(args, self.accelerator.num_processes)
        self.reporter = Reporter(self.accelerator, args, self.history)
        self.resources.callback(lambda: self.reporter.bar.close())
        self.signals = Signals(self.accelerator, timeout)
        self.resources.callback(self.signals.restore)
        set_seed(args.seed)
        self.stage = "entered"
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Clean up. No collectives after an error: other processes may be gone."""
        if error is not None and self.stage == "batch" and self.step.num_rows == 0:
            error.add_note(
                "This process has no sample of this short batch, and a layer or a loss may refuse "
                "0 rows (docs/your_own.md): use another --batch-size, or --drop-last"
            )
        with self.resources:
            if error is not None and self.accelerator.num_processes > 1:
                # The launcher sends it to all when the first has left: their sentence comes before.
                self.signals.ignore(signal.SIGTERM)
            if self.stage == "over":
                self.signals.wait()
                end_workers(self.accelerator)
                self.accelerator.end_training()
            elif error is None:
                raise out_of_order("the end of `with Run(...)`", self.stage)

    def print(self, text: str) -> None:
        """Print on the main process."""
        self.reporter.print(text)

    @allowed("entered", then="loaded")
    def load(self, load_data: Callable[[argparse.Namespace], tuple]) -> tuple:
        """Return load_data(args), called first by one process per file system, to fill caches.

        Its first two items are the training set and the evaluation set. Every process must call
        this. Raises UsageError on all processes if one of them does, or if the data differ.
        """
        args = self.args
        data = nodes.first_on_each_node(self.accelerator, lambda: load_data(args))
        self.train_set, self.eval_set = data[:2]
        check_indexable(self.train_set, "training set")
        check_indexable(self.eval_set, "evaluation set")
        self.check(args, self.accelerator.num_processes)  # load_data may have chosen some
        arguments.check_size(args, len(self.train_set), len(self.eval_set))
        self.data_md5 = data_md5(self.train_set, self.eval_set)
        nodes.check_same(self.accelerator, {"the data's md5": self.data_md5})
        self.num_used = num_used(len(self.train_set), args.batch_size, args.drop_last)
        self.steps_per_epoch = math.ceil(self.num_used / args.batch_size)
        num_steps = args.epochs * self.steps_per_epoch
        self.last_step = min(num_steps, args.stop_after_steps or num_steps)
        self.log_every = args.log_every or min(50, max(1, num_steps // 50))
        set_seed(args.seed)  # whatever loading drew, the first weights depend on --seed alone
        return data

    @allowed("loaded", then="between")
    def begin(
        self,
        model: nn.Module | Sequence[nn.Module],
        about: dict[str, Any],
        plan: dict[str, str] | None = None,
    ) -> None:
        """Print the plan, lock the run folder, load the checkpoint. Call after accelerator.prepare.

        Every process must call this. Raises UsageError on all; RuntimeError for what is unprepared.
        A model all of which is in evaluation mode, as from_pretrained returns it, is put into
        training mode; one that is put into evaluation mode later, or in part, stays as it is.

        Args:
            model: what accelerator.prepare returned for the model, or for each of them.
            about: what a reader of model.safetensors must know, as JSON; equal when it is resumed.
            plan: lines to print, by name, for example where the data come from.
        """
        args, accelerator = self.args, self.accelerator
        prepared = [model] if isinstance(model, nn.Module) else list(model)
        check_prepared(accelerator, len(prepared))
        check_json("the `about` of run.begin(...)", about)
        self.about, self.optimizers = about, prepared_optimizers(accelerator)
        self.models = prepared_models(accelerator)  # unwrap_model imports torch's compiler, 1.2 s
        for each in self.models:
            if not any(layer.training for layer in each.modules()):
                each.train()  # as from_pretrained returns it
        self.unchanged = Unchanged(accelerator)
        self.print(describe(self, plan or {}))
        identity = self._identity()
        started_from = args.start_from and self._start_from(identity)
        identity |= (not started_from and self.hashes) or shards.digests(self.models)
        nodes.check_same(accelerator, identity | self.hashes)
        if lock := open_run(accelerator, args):
            self.resources.callback(lock.release)
        self._make_state(identity)
        self.progress = self.checkpoints.resume(args.resume, self.last_step)
        if self.progress.step == 0 and started_from:
            self.print(started_from)
        with failing_together(accelerator, f"--run-dir {args.run_dir} cannot be used"):
            if accelerator.is_main_process:  # not before: a refused resume leaves the run as it was
                (args.run_dir / "DONE").unlink(missing_ok=True)
                write_json(args.run_dir / "run.json", describe_run(accelerator, args))
        for each in prepared:
            fix_bucket_order(each)
        accelerator.init_trackers(self.project, {n: str(v) for n, v in vars(args).items()})

    def _start_from(self, identity: dict[str, Any]) -> str:
        """Load the weights of --start-from; return a line about what fitted."""
        path, model = self.args.start_from, self.models[0]
        with failing_together(self.accelerator, f"--start-from {path} cannot be read"):
            tensors, line = read_weights(path, model)
            identity["start_from"] = sha256_of(path)
        own = model.state_dict()
        shares = {name: shards.share(own[name], value) for name, value in tensors.items()}
        model.load_state_dict(shares, strict=False)
        return line

    def _make_state(self, identity: dict[str, Any]) -> None:
        """What changes from step to step, and the checkpoints that hold it."""
        args, accelerator = self.args, self.accelerator
        samples_draw = type(self.train_set) is not InMemory
        self.step = Step(accelerator, args, self.num_used, self.signals, self.models, samples_draw)
        self.resources.callback(self.step.release)
        self.means = RunningMeans(accelerator)
        self.average = Average(self.models, args.ema) if args.ema else None
        fingerprint = arguments.experiment(args) | identity
        self.checkpoints = Checkpoints(
            accelerator,
            args.run_dir,
            self.history,
            self.means,
            fingerprint,
            args.keep,
            self.average.values if self.average else (),
        )

    def _identity(self) -> dict[str, Any]:
        """What must be equal on all nodes, and when the run is resumed, besides its flags."""
        orders = [
            InMemory(x.order(0, 0, min(x.num_samples, NUM_HELD)))
            for x in map(batches_of, prepared_loaders(self.accelerator))
            if x and x.is_own
        ]
        identity = {
            **files_of(self.train_set, self.eval_set),
            "data": self.data_md5,
            "weights of samples": data_md5(*orders),  # or order=; older checkpoints say this
            "size": num_parameters(self.models),
        }
        about = {f"about[{name}]": json.dumps(value) for name, value in self.about.items()
                 if name not in self.args.not_the_experiment}  # fmt: skip
        return identity | about

    def finish(
        self, next_command: str = "", draw: Callable[[Path], list[Path]] = curves.draw_run
    ) -> dict[str, float]:
        """Write the weights and DONE, draw the pictures; return the metrics of the last evaluation.

        next_command is printed last: what a person may type now. draw draws from the files of the
        run folder and returns the paths of its pictures; the main process calls it. Every process
        must call this, last in the body. Raises RunFailure on all of them if the disk is full. A
        picture that cannot be drawn is a sentence, not a failed run.
        """
        if self.stage != "between" or not self._is_over():
            raise out_of_order("run.finish()", self.stage)
        args, accelerator, progress = self.args, self.accelerator, self.progress
        if self.average is not None:
            self._write_weights("raw")
            self.average.swap()  # for good: what comes after uses what is written
        self._write_weights("model")
        with failing_together(accelerator, f"{args.run_dir} cannot be written", RunFailure):
            if accelerator.is_main_process:
                write_durably(args.run_dir / "DONE", b"")
        drawn: list[Path] = []
        if args.pictures and accelerator.is_main_process:
            try:
                drawn = draw(args.run_dir)
            except Exception as problem:  # no matplotlib, no memory, no disk
                self.print(f"the pictures were not drawn: {first_sentence(problem)}")
        if args.keep_best:
            self.print(best.describe(accelerator, args, progress))
        names = "".join(f", {path.name}" for path in drawn)
        self.print(
            f"done: {count(progress.step, 'step')}, {show_best(progress.metrics)}; in "
            f"{args.run_dir}: weights, metrics, checkpoints{names}"
        )
        if next_command:
            self.print(f"next: {next_command}")
        self.stage = "over"
        return dict(progress.metrics)

    def _write_weights(self, stem: str) -> None:
        """Write the weights of every model: STEM.safetensors, STEM_1.safetensors, ..."""
        for number, model in enumerate(self.models):
            name = f"{stem}_{number}" if number else stem
            self._write(f"{name}.safetensors", self.state_of(model), self.about)

    def state_of(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """What is written of the weights of a model."""
        return shards.state_of(model) if self.only_trained else model.state_dict()

    def _write(self, name: str, tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
        """Write a safetensors file into the run folder. Every process must call this."""
        path, main = self.args.run_dir / name, self.accelerator.is_main_process
        tensors = shards.gathered(tensors, keep=main)
        with failing_together(self.accelerator, f"{path} cannot be written", RunFailure):
            if main:
                write_tensors(path, tensors, about)

    def _is_over(self) -> bool:
        """Is there nothing left to train?"""
        progress = self.progress
        return (
            progress.ended or progress.epoch == self.args.epochs or progress.step == self.last_step
        )
