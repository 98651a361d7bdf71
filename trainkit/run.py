"""One run, from the launch to the exit: everything around a loop that the script itself writes out.

    with Run(args, "mnist", check_arguments) as run:
        train_set, eval_set, classes = run.load(load_data)
        ...  # loaders, model, optimizer, scheduler; accelerator.prepare(the five)
        run.begin(model, train_loader, about={...})
        for epoch in run.epochs():
            for batch in run.steps():
                with accelerator.accumulate(model):
                    ...  # forward
                    accelerator.backward(run.step_mean(loss_sum))
                    run.clip_and_check(optimizer)
                    ...  # optimizer.step, scheduler.step, optimizer.zero_grad
                run.add(num_samples, loss=loss_sum)
            run.end_epoch(metrics, predictions)
        metrics = run.finish()

Run never calls the model, backward or step, never looks into a batch, and does not know what a
metric means. Between two of the script's lines it counts, logs, saves and stops.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend, set_seed
from torch import nn
from torch.utils.data import DataLoader

from trainkit import arguments, launch, plots, rundir, world
from trainkit.checkpoint import Checkpoints, read_weights
from trainkit.errors import (
    EXIT_STOPPED,
    RunFailure,
    UsageError,
    failing_together,
)
from trainkit.finite import FiniteGuard, Position
from trainkit.history import History, RunningSums, epoch_bar, means
from trainkit.internals import (
    fix_bucket_order,
    prepared_models,
    prepared_optimizers,
    prepared_schedulers,
    registered_objects,
)
from trainkit.manifest import sha256_of
from trainkit.optim import clip_gradients
from trainkit.order import (
    Dropout,
    Indices,
    batches_of,
    data_md5,
    dealt,
    release_dropout,
    seed_dropout,
)
from trainkit.rundir import open_run, record_run, write_durably, write_tensors
from trainkit.signals import Signals
from trainkit.startup import compute_float32_in_full, refuse_pickled_code
from trainkit.text import count, first_sentence, printable
from trainkit.trackers import add_pictures, make_trackers

SMALLEST_IS_BEST = ("loss", "error", "mse", "mae")  # parts of names of metrics, of --keep-best
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
QUIET_SECONDS = 60.0  # off a terminal, an epoch says where it is at least this often


class Run:
    """Use as a context manager, then call its methods in the order of the lines above.

    Whatever ends the body, signals are given back, the progress bar is closed and the run folder is
    released. It takes whatever accelerator.prepare was given: one model or several, one optimizer
    or several, with their schedules. The learning rate that is logged is that of the first
    optimizer's first group; --start-from and --keep-best are about the first model.

    Args:
        args: the flags of arguments.add_training_arguments and add_run_arguments, and the script's.
        project: the name under which trackers keep the runs of this script.
        check: check(args, num_processes) raises UsageError for flags that do not fit together;
            None checks the flags of trainkit.arguments alone.

    Attributes:
        accelerator: made when the body is entered.
        progress: step, epoch and batch reached, and the last metrics.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        project: str,
        check: Callable[[argparse.Namespace, int], None] | None = None,
    ):
        self.args, self.project, self.check = args, project, check
        self.resources = ExitStack()
        self.stage, self.ended_together = "new", False

    def __enter__(self) -> "Run":
        refuse_pickled_code()
        compute_float32_in_full()
        precision = launch.check_launch()
        args, timeout = self.args, timedelta(seconds=max(1, self.args.timeout))
        self.history = History(args.run_dir)
        with world.deadline(timeout):
            self.accelerator = Accelerator(
                cpu=not torch.accelerator.is_available(),
                mixed_precision=precision,
                gradient_accumulation_steps=max(1, args.accumulate),
                # A batch is split over the processes: --batch-size is the same under every YAML.
                dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=True),
                kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
                log_with=make_trackers(args, self.history, self.project),
            )
        world.check_world(self.accelerator)
        world.check_nodes(self.accelerator, args)
        check = self.check or arguments.check_shared
        check(args, self.accelerator.num_processes)
        self.signals = Signals(self.accelerator, timeout)
        self.resources.callback(self.signals.restore)
        set_seed(args.seed)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Give everything back. No collectives after an error: other processes may be gone."""
        with self.resources:
            if isinstance(error, FileNotFoundError):
                rundir.check_still_there(self.args.run_dir)
            if self.ended_together:
                self.signals.wait()
                self.accelerator.end_training()

    def print(self, text: str) -> None:
        """Print on the main process."""
        if self.accelerator.is_main_process:
            print(printable(text), flush=True)

    def load(self, load_data: Callable[[argparse.Namespace], tuple]) -> tuple:
        """Return load_data(args), called first by one process per file system, to fill caches.

        Its first two items are the training set and the evaluation set. Every process must call
        this. Raises UsageError on all processes if one of them does, or if the data differ.
        """
        data = world.first_on_each_node(self.accelerator, lambda: load_data(self.args))
        self.train_set, self.eval_set = data[:2]
        self.data_md5 = data_md5(self.train_set, self.eval_set)
        world.check_same(self.accelerator, {"the data's md5": self.data_md5})
        arguments.check_size(self.args, len(self.train_set))
        set_seed(self.args.seed)  # whatever loading drew, the first weights depend on --seed alone
        return data

    def begin(
        self,
        model: nn.Module | Sequence[nn.Module],
        train_loader: DataLoader,
        about: dict[str, Any],
        plan: dict[str, str] | None = None,
    ) -> None:
        """Say what is about to happen, take the run folder, resume. Call after accelerator.prepare.

        Every process must call this. Raises UsageError on all of them.

        Args:
            model: what accelerator.prepare returned for the model, or for each of them.
            train_loader: the prepared loader that steps() reads.
            about: what a reader of model.safetensors must know, as JSON.
            plan: lines to print, by name, for example where the data come from.
        """
        args, accelerator = self.args, self.accelerator
        self.models = prepared_models(accelerator)
        self.optimizers = prepared_optimizers(accelerator)
        prepared = [model] if isinstance(model, nn.Module) else list(model)
        if len(prepared) != len(self.models):
            raise RuntimeError(
                "run.begin(...) needs every model that accelerator.prepare was given"
            )
        if registered_objects(accelerator):
            raise UsageError(
                "register_for_checkpointing is not supported, because reading it back could "
                "execute code: keep the state in a buffer of a module that is prepared"
            )
        self.about, self.loader = about, train_loader
        self.batches = batches_of(train_loader)
        self.num_used = self.batches.num_used
        self.steps_per_epoch = -(-self.num_used // args.batch_size)
        last_step = args.epochs * self.steps_per_epoch
        self.last_step = min(last_step, args.stop_after_steps or sys.maxsize)
        self.log_every = args.log_every or max(1, min(50, last_step // 50))
        self._print_plan(plan or {})
        facts = {}
        if args.start_from is not None:
            with failing_together(accelerator, f"--start-from {args.start_from} cannot be read"):
                weights, notice = read_weights(args.start_from, self.models[0])
                facts = {"start_from": sha256_of(args.start_from)}
            world.check_same(accelerator, facts)
        held = open_run(accelerator, args)
        if held is not None:
            self.resources.callback(held.release)
        self.sums, self.guard = RunningSums(accelerator), FiniteGuard(accelerator)
        num_parameters = sum(p.numel() for model in self.models for p in model.parameters())
        self.checkpoints = Checkpoints(
            accelerator, args.run_dir, self.history, self.sums,
            arguments.experiment(args) | {"data": self.data_md5, "size": num_parameters} | facts,
            args.keep, self.steps_per_epoch,
        )  # fmt: skip
        self.progress = self.checkpoints.resume(args.resume, self.last_step)
        if args.start_from is not None and self.progress.step == 0:
            self.models[0].load_state_dict(weights, strict=False)
            self.print(notice)
        record_run(accelerator, args)
        layers = (layer for model in self.models for layer in model.modules())
        self.dropouts = [layer for layer in layers if isinstance(layer, Dropout)]
        self.resources.callback(release_dropout, self.dropouts)
        for model in prepared:
            fix_bucket_order(model)
        accelerator.init_trackers(self.project, vars(args))

    def epochs(self) -> Iterator[int]:
        """The epochs that are left, from 0. The body runs steps() to its end, then end_epoch().

        `break` after end_epoch() ends the run early; an exception ends it where it is.
        """
        progress = self.progress
        while progress.epoch < self.args.epochs and progress.step < self.last_step:
            self.stage = "new"
            yield progress.epoch
            if self.stage != "ended":
                raise RuntimeError("the body of run.epochs() must call run.end_epoch(...) last")

    def steps(self) -> Iterator[Any]:
        """The batches that are left of this epoch, this process's share of each.

        What a step owes the run (count, log, checkpoint, stop) is done when the body asks for the
        next batch. `continue` is therefore fine once the step is made, and a RuntimeError before,
        because a step that one process leaves out leaves the others waiting. `break` would lose the
        last step, so end_epoch() then raises RuntimeError: use --stop-after-steps. An exception, or
        a second Ctrl-C, ends the run without saving: a resume repeats what came after the newest
        checkpoint.
        """
        args, accelerator, progress = self.args, self.accelerator, self.progress
        self.stage, self.started_at = "training", time.perf_counter()
        self.num_before = self._num_done()  # of a run that was resumed
        bar = epoch_bar(accelerator, progress.epoch, self.num_used, self.num_before, "samples")
        self.resources.callback(bar.close)
        self.said_at, self.last_loss = time.monotonic(), ""
        self.batches.set_position(progress.epoch, progress.batch * args.batch_size)
        micro_batches = itertools.count()
        size = args.batch_size // args.accumulate
        share = size // accelerator.num_processes
        start = share * accelerator.process_index
        for batch in self.loader:
            # Samples in this step, over all processes and micro-batches: fewer at an epoch's end.
            self.num_samples = min(args.batch_size, self.num_used - self._num_done())
            self.position = Position(progress.step + 1, self._learning_rate())
            before = next(micro_batches) * size
            first, _ = dealt(min(size, self.num_samples - before), size, start, start + share)
            seed_dropout(self.dropouts, accelerator.device, before + first,
                         args.seed, progress.epoch, progress.batch)  # fmt: skip
            self.loss, self.checked = None, False
            yield batch
            if self.loss is None:
                raise RuntimeError("a batch was left out: each needs backward(run.step_mean(...))")
            if not accelerator.sync_gradients:
                continue  # inside an accumulation window
            if not self.checked:
                raise RuntimeError(
                    "a step was not checked: each needs run.clip_and_check(optimizer)"
                )
            micro_batches = itertools.count()
            if not self._count_step():
                continue  # fp16 skipped the step
            bar.update(self.num_samples)
            if progress.step % self.log_every == 0:
                self._log_window(bar)
            self._say_where(bar)
            if progress.step == self.last_step:
                break
            stopping = self.signals.requested()
            due = args.save_every and progress.step % args.save_every == 0
            # At an epoch's end it is saved after evaluating.
            if stopping or (due and progress.batch < self.steps_per_epoch):
                self._save()
            if stopping:
                self._stop()
        bar.close()
        self.signals.meet()
        self.guard.finish(*self.optimizers)
        self.sums.flush()
        self.train_seconds = time.perf_counter() - self.started_at
        self.stage = "trained"

    def step_mean(self, loss_sum: torch.Tensor, per_sample: int = 1) -> torch.Tensor:
        """This process's share of the mean loss of the step, for accelerator.backward.

        `loss_sum` is the sum over the samples of this process's batch; where a sample has several
        targets, and the mean is over them too, per_sample is their number. The gradient becomes
        that of the mean over all samples of the step, of all processes and micro-batches: DDP
        divides by the number of processes and Accelerate by that of micro-batches, so both are
        multiplied in. A loss that is not finite gives NaN gradients on all processes.
        """
        num_values = self.num_samples * per_sample
        self.loss = loss = loss_sum.detach() / num_values
        scale = self.accelerator.num_processes * self.args.accumulate / num_values
        return loss_sum * (scale + 0 * loss)  # 0 * inf is NaN

    def clip_and_check(self, optimizer: AcceleratedOptimizer) -> None:
        """Clip the gradients to --clip-norm; stop all processes if they are not finite.

        Call it between backward and optimizer.step(); inside an accumulation window it does
        nothing. Every process must call this. Raises RunFailure on all of them, weights untouched.
        """
        if self.accelerator.sync_gradients:
            # They end in time if a process died, and a wait for the device may not. Under fp16
            # optimizer.step() reads this step's gradients, else the guard those of the step before.
            (self.signals.wait if self.accelerator.scaler is None else self.signals.meet)()
            norm = clip_gradients(self.accelerator, optimizer, self.args.clip_norm)
            self.guard.check(optimizer, norm, self.loss, self.position)
            self.checked = True

    def add(self, num_samples: int, **sums: torch.Tensor) -> None:
        """Add samples of this process and sums over them, scalars on the device.

        Their means over all samples become train_NAME in metrics.jsonl, at an epoch's end; those
        whose name begins with "loss" also at every --log-every steps. Waits for nothing.
        """
        self.sums.add(num_samples, **sums)

    def end_epoch(
        self,
        metrics: dict[str, float],
        predictions: dict[str, torch.Tensor] | None = None,
        **about: Any,
    ) -> None:
        """Log, print and save after an evaluation.

        Every process must call this, with the same values. The predictions of the last evaluation,
        if there are any, are written to predictions.safetensors, with `about` as metadata.
        """
        if self.stage != "trained":
            raise RuntimeError("run.steps() was not run to its end: its last step is not counted")
        self.stage = "ended"
        args, progress = self.args, self.progress
        eval_seconds = time.perf_counter() - self.started_at - self.train_seconds
        num_trained = self._num_done() - self.num_before
        if progress.batch == self.steps_per_epoch:
            progress.epoch, progress.batch = progress.epoch + 1, 0
        progress.metrics = {"epoch": progress.epoch, **self.sums.means(), **metrics}
        progress.metrics_step = progress.step
        for name, value in progress.metrics.items():
            if name.startswith("train_loss"):
                self.guard.check_mean(value, Position(progress.step, self._learning_rate()))
        self.accelerator.log(progress.metrics, step=progress.step)
        self.history.log_timing({"step": progress.step, "train_seconds": self.train_seconds,
                                 "eval_seconds": eval_seconds,
                                 "train_samples": num_trained})  # fmt: skip
        inside = f"in epoch {progress.epoch + 1}" if progress.batch else f"epoch {progress.epoch}"
        numbers = "  ".join(
            f"{name} {value if isinstance(value, int) else f'{value:.5g}'}"
            for name, value in progress.metrics.items()
            if name != "epoch"
        )
        self.print(
            f"{inside}/{args.epochs}  {numbers}  {self.train_seconds:.1f} s  "
            f"{num_trained / self.train_seconds:,.0f} samples/s"
        )
        self.predictions = predictions, about
        if progress.batch == 0:  # else the run ends inside an epoch, which a resume goes on with
            self.sums.clear()
        done = progress.epoch == args.epochs or progress.step == self.last_step
        best = args.keep_best is not None and self._keep_best()
        if done:  # before the last checkpoint: a resume from it does not evaluate again
            self._write_predictions()
        if done or best or not args.save_every or progress.step % args.save_every == 0:
            self.checkpoints.save(progress)

    def finish(self) -> dict[str, float]:
        """Write the weights and DONE, draw the pictures; return the metrics of the last epoch.

        Every process must call this, last in the body. Raises RunFailure on all of them if the
        disk is full. A picture that cannot be drawn is a sentence, not a failed run.
        """
        args, accelerator, progress = self.args, self.accelerator, self.progress
        if self.stage in ("training", "trained"):
            raise RuntimeError("run.finish() comes after run.end_epoch(...)")
        early = progress.epoch < args.epochs and progress.step < self.last_step
        if early:  # the script left run.epochs() by a break
            self._write_predictions()
            self.checkpoints.save(progress)
        with failing_together(accelerator, f"{args.run_dir} cannot be written", RunFailure):
            if accelerator.is_main_process:
                for number, model in enumerate(self.models):
                    name = f"model_{number}.safetensors" if number else "model.safetensors"
                    write_tensors(args.run_dir / name, model.state_dict(), self.about)
                write_durably(args.run_dir / "DONE", b"")
        if args.pictures and accelerator.is_main_process:
            try:
                add_pictures(accelerator, plots.draw_run(args.run_dir), progress.step)
            except Exception as problem:  # no matplotlib, no memory, no disk
                self.print(f"the pictures were not drawn: {first_sentence(problem)}")
        self.print(f"done: {count(progress.step, 'step')}; weights, metrics and checkpoints are in "
                   f"{args.run_dir}")  # fmt: skip
        self.ended_together = True
        return dict(progress.metrics)

    def _keep_best(self) -> bool:
        """Write best.safetensors if this evaluation is the best so far; True if it is."""
        name, progress = self.args.keep_best, self.progress
        if name not in progress.metrics:
            self.checkpoints.save(progress)  # the epoch is not lost
            raise UsageError(f"--keep-best {name}: there are only {', '.join(progress.metrics)}")
        value, best = progress.metrics[name], progress.best
        better = best is None or (value < best if self._smallest_is_best() else value > best)
        if not (better and math.isfinite(value)):
            return False
        progress.best, progress.best_step = value, progress.step
        path = self.args.run_dir / "best.safetensors"
        with failing_together(self.accelerator, f"{path} cannot be written", RunFailure):
            if self.accelerator.is_main_process:
                write_tensors(path, self.models[0].state_dict(), self.about)
        return True

    def _smallest_is_best(self) -> bool:
        return any(part in self.args.keep_best for part in SMALLEST_IS_BEST)

    def _num_done(self) -> int:
        """Samples of this epoch trained on so far."""
        return min(self.progress.batch * self.args.batch_size, self.num_used)

    def _learning_rate(self) -> float:
        return self.optimizers[0].param_groups[0]["lr"]

    def _count_step(self) -> bool:
        """Count the batch whose gradients were just used. True if an optimizer step was made."""
        skipped = self.accelerator.optimizer_step_was_skipped
        self.progress.batch += 1
        self.progress.step += not skipped
        self.progress.num_skipped += skipped
        return not skipped

    def _log_window(self, bar: Any) -> None:
        self.signals.meet()
        window = means(self.sums.flush())
        losses = {name: mean for name, mean in window.items() if name.startswith("train_loss")}
        for loss in losses.values():
            self.guard.check_mean(loss, self.position)
        row = {"epoch": self.progress.epoch, **losses, "learning_rate": self.position.learning_rate}
        self.accelerator.log(row, step=self.progress.step)
        self.last_loss = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        bar.set_postfix_str(self.last_loss)

    def _say_where(self, bar: Any) -> None:
        """Print a line a minute where there is no progress bar."""
        if bar.disable and time.monotonic() - self.said_at > QUIET_SECONDS:
            self.said_at = time.monotonic()
            self.print(f"epoch {self.progress.epoch + 1}: {self._num_done():,} of "
                       f"{self.num_used:,} samples, {self.last_loss or 'no loss yet'}")  # fmt: skip

    def _save(self) -> None:
        self.signals.meet()
        self.guard.finish(*self.optimizers)
        self.checkpoints.save(self.progress)

    def _stop(self) -> None:
        """End every process with exit code 75, after a checkpoint of this step."""
        self.signals.ignore_interrupts()
        self.print(
            f"stopped by {self.signals.signal_name or 'a signal to another process'} at step "
            f"{self.progress.step}, saved: start the same command with --resume auto to continue"
        )
        self.ended_together = True
        sys.exit(EXIT_STOPPED)

    def _write_predictions(self) -> None:
        path = self.args.run_dir / plots.PREDICTIONS
        with failing_together(self.accelerator, f"{path} cannot be written", RunFailure):
            tensors, about = self.predictions
            if self.accelerator.is_main_process and tensors is not None:
                write_tensors(path, tensors, about)

    def _print_plan(self, plan: dict[str, str]) -> None:
        """What is about to happen, read from the objects that will do it, one line per item."""
        args, accelerator = self.args, self.accelerator
        num_parts = accelerator.num_processes * args.accumulate
        left_out = len(self.train_set) - self.num_used
        steps = f"{count(args.epochs, 'epoch')} x {count(self.steps_per_epoch, 'step')}"
        ends = f"{self.last_step} (--stop-after-steps) of " if args.stop_after_steps else ""
        lines = {
            "device": world.describe_world(accelerator),
            **plan,
            "samples": f"{len(self.train_set)} to train on (the last {left_out} of each shuffle "
                       f"are left out), {len(self.eval_set)} to evaluate on",
            "model": "; ".join(map(self._describe_model, self.models)),
            "batch": f"{args.batch_size} per step = {count(accelerator.num_processes, 'process')} "
                     f"x {count(args.accumulate, 'micro-batch')} x {args.batch_size // num_parts}",
            "updates": f"{ends}{args.epochs * self.steps_per_epoch} = {steps}",
            "optimizer": "; ".join(map(self._describe_optimizer, self.optimizers)),
            "run folder": str(args.run_dir),
        }  # fmt: skip
        if args.keep_best is not None:
            kind = "smallest" if self._smallest_is_best() else "largest"
            lines["kept too"] = f"the checkpoint with the {kind} {args.keep_best}"
        norms = [m for model in self.models for m in model.modules() if isinstance(m, BATCH_NORMS)]
        if norms and num_parts > 1:
            kind = type(norms[0]).__name__
            lines["note"] = (
                f"{count(len(norms), kind + ' layer')}: its numbers depend on how a batch is "
                "split, so other processes or micro-batches give other losses"
            )
        self._check_batch_norm(norms)
        width = max(map(len, lines))
        self.print("\n".join(f"{name:<{width}}  {text}" for name, text in lines.items()))

    def _check_batch_norm(self, norms: list[nn.Module]) -> None:
        """Refuse a share of a batch that a BatchNorm layer cannot normalise, before training."""
        args, num_processes = self.args, self.accelerator.num_processes
        size = args.batch_size // args.accumulate  # of a micro-batch, over all processes
        share = size // num_processes
        last = Indices(torch.arange(self.num_used % size or size), size)
        smallest = min(len(last[n : n + share].values) for n in range(0, size, share))
        if norms and smallest < 2:
            raise UsageError(
                f"--batch-size {args.batch_size}: {type(norms[0]).__name__} needs more than a "
                f"batch of {smallest}, which a process gets here: use another --batch-size or "
                "--drop-last"
            )

    def _describe_model(self, model: nn.Module) -> str:
        backend = self.accelerator.state.dynamo_plugin.backend
        compiled = ""
        if backend != DynamoBackend.NO:
            compiled = f", compiled with {backend.value.lower()} (the first step waits for it)"
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        return f"{type(model).__name__}, {num_parameters:,} parameters{compiled}"

    def _describe_optimizer(self, optimizer: AcceleratedOptimizer) -> str:
        schedules = [
            type(wrapped.scheduler).__name__
            for wrapped in prepared_schedulers(self.accelerator)
            if optimizer in wrapped.optimizers
        ]
        groups = optimizer.param_groups
        peaks = [group.get("max_lr", group.get("initial_lr", group["lr"])) for group in groups]
        rates = " and ".join(f"{peak:g}" for peak in dict.fromkeys(peaks))
        fused = " fused" if all(group.get("fused") for group in groups) else ""
        return (
            f"{type(optimizer.optimizer).__name__}{fused}, {', '.join(schedules) or 'no schedule'},"
            f" learning rate {rates} at its peak"
        )
