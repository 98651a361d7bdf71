"""One run, from the launch to the exit: everything around a loop that the script itself writes out.

    with Run(args, "mnist", check_arguments) as run:
        train_set, eval_set, classes = run.load(load_data)
        ...  # loaders, model, optimizer, scheduler; accelerator.prepare(the five)
        run.begin(model, about={...})
        for epoch in run.epochs():
            for batch in run.steps(train_loader):
                with accelerator.accumulate(model):
                    ...  # forward; the losses of the samples: reduction="none"
                    accelerator.backward(run.step_mean(losses))
                    run.clip_and_check(optimizer)
                    ...  # optimizer.step, scheduler.step, optimizer.zero_grad
                run.add(loss=losses, accuracy=prediction == labels)
            run.end_epoch(metrics, predictions)
        metrics = run.finish()

Values in, means out: the script hands over what each sample (or token) has, Run divides, over
processes and micro-batches. Run never calls the model, backward or step, never looks into a batch,
and does not know what a metric means. Between two of the script's lines it counts, logs, saves and
stops.
"""

import argparse
import hashlib
import json
import math
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from trainkit import arguments, curves, launch, records, shards, world
from trainkit.average import Average
from trainkit.checkpoint import Checkpoints, Progress, check_states, read_weights
from trainkit.console import (
    MetricsTable,
    describe,
    fit,
    num_parameters,
    show,
    show_best,
    smallest_is_best,
)
from trainkit.errors import (
    EXIT_STOPPED,
    RunFailure,
    UsageError,
    as_usage_error,
    failing_together,
)
from trainkit.finite import Position
from trainkit.history import History, RunningMeans, epoch_bar
from trainkit.internals import (
    fix_bucket_order,
    prepared_loaders,
    prepared_models,
    prepared_optimizers,
    prepared_schedulers,
    registered_objects,
)
from trainkit.manifest import sha256_of
from trainkit.optim import weights_of
from trainkit.order import (
    Dropout,
    EpochBatches,
    InMemory,
    batches_of,
    check_indexable,
    data_md5,
    num_used,
    release_dropout,
)
from trainkit.rundir import (
    check_still_there,
    open_run,
    record_run,
    rename_free,
    to_safetensors,
    write_durably,
    write_tensors,
)
from trainkit.signals import Signals
from trainkit.startup import compute_float32_in_full, refuse_pickled_code
from trainkit.step import Step, sum_and_count
from trainkit.text import check_json, count, first_sentence, printable
from trainkit.trackers import make_trackers

QUIET_SECONDS = 60.0  # off a terminal, an epoch says where it is at least this often

# The stages of a run, and what comes next in each.
NEXT = {
    "new": "`with Run(...) as run`",
    "entered": "run.load(load_data)",
    "loaded": "accelerator.prepare(...), then run.begin(model, ...)",
    "between": "the next epoch of run.epochs(), or run.finish() when there is none left",
    "epoch": "`for batch in run.steps(train_loader)`, to its end",
    "batch": "accelerator.backward(run.step_mean(losses)), in every batch",
    "backward": "run.clip_and_check(optimizer), then the next batch of run.steps(...)",
    "checked": "the next batch of run.steps(...); to end the run early, run.stop()",
    "trained": "run.end_epoch(metrics)",
    "over": "nothing, the run is over",
}
IN_BATCH = ("batch", "backward", "checked")


class Run:
    """Use as a context manager, then call its methods in the order shown at the top.

    A call out of order raises RuntimeError, which names the call that comes next. Whatever ends the
    body, signal handlers are restored, the progress bar is closed and the run folder is released.
    It takes whatever accelerator.prepare was given: one model or several, one optimizer or several,
    with their schedules. --start-from and --keep-best are about the first model.

    Args:
        args: the flags of arguments.add_training_arguments and add_run_arguments, and the script's.
        project: the name under which trackers keep the runs of this script.
        check: check(args, num_processes) raises UsageError for flags that do not fit together;
            None checks the flags of trainkit.arguments alone.
    """

    args: argparse.Namespace
    project: str
    check: Callable[[argparse.Namespace, int], None]
    stage: str  # see NEXT
    resources: ExitStack  # what is cleaned up at the end
    # Since the body was entered.
    accelerator: Accelerator
    history: History
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
    trained: list[bool]  # of each weight of the optimizers: does it require a gradient?
    saved: str | None  # what end_epoch() saved of schedules and run.state
    optimizers: list[AcceleratedOptimizer]
    about: dict[str, Any]
    means: RunningMeans
    average: Average | None  # of --ema
    checkpoints: Checkpoints
    progress: Progress
    step: Step
    # Since steps().
    bar: tqdm
    table: MetricsTable
    num_before: int  # samples of this epoch that were trained on before
    started_at: float
    train_seconds: float  # without the evaluation
    said_at: float  # when a line was last printed where there is no bar
    last_loss: str
    rates: dict[str, float]  # the learning rate of each optimizer in the step at hand

    def __init__(
        self,
        args: argparse.Namespace,
        project: str,
        check: Callable[[argparse.Namespace, int], None] | None = None,
    ):
        self.args, self.project = args, project
        self.check = check or arguments.check_shared
        self.stage, self.resources = "new", ExitStack()

    def __getattr__(self, name: str) -> Any:
        """Called for an attribute that is not set: it comes later if it is declared above."""
        if name in Run.__annotations__:
            raise self._out_of_order(f"run.{name}")
        raise AttributeError(f"Run has no attribute {name!r}")

    def _need(self, call: str, *stages: str) -> None:
        if self.stage not in stages:
            raise self._out_of_order(call)

    def _out_of_order(self, call: str) -> RuntimeError:
        return RuntimeError(f"{call} is out of order: what comes next is {NEXT[self.stage]}")

    def __enter__(self) -> "Run":
        self._need("`with run`", "new")
        refuse_pickled_code()
        compute_float32_in_full()
        precision = launch.check_launch()
        plugin = shards.plugin(precision)
        args, timeout = self.args, timedelta(seconds=max(1, self.args.timeout))
        self.history = History(args.run_dir)
        with world.deadline(timeout):
            self.accelerator = Accelerator(
                cpu=not torch.accelerator.is_available(),
                mixed_precision=precision,
                gradient_accumulation_steps=max(1, args.accumulate),
                # A batch is split over the processes: --batch-size is the same under every YAML.
                dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=True),
                fsdp_plugin=plugin,
                kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
                log_with=make_trackers(args, self.history, self.project),
            )
        shards.shard(self.accelerator, plugin)
        world.check_world(self.accelerator)
        world.check_nodes(self.accelerator, args)
        self.check(args, self.accelerator.num_processes)
        self.signals = Signals(self.accelerator, timeout)
        self.resources.callback(self.signals.restore)
        set_seed(args.seed)
        self.stage = "entered"
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Clean up. No collectives after an error: other processes may be gone."""
        with self.resources:
            if error is not None and self.accelerator.num_processes > 1:
                # The launcher sends it to all when the first has left: their sentence comes before.
                self.signals.ignore(signal.SIGTERM)
            if isinstance(error, FileNotFoundError):
                check_still_there(self.args.run_dir)
            if self.stage == "over":
                self.signals.wait()
                self.accelerator.end_training()
            elif error is None:
                raise self._out_of_order("the end of `with Run(...)`")

    def print(self, text: str) -> None:
        """Print on the main process."""
        if self.accelerator.is_main_process:
            print(fit(printable(text)), flush=True)

    def load(self, load_data: Callable[[argparse.Namespace], tuple]) -> tuple:
        """Return load_data(args), called first by one process per file system, to fill caches.

        Its first two items are the training set and the evaluation set. Every process must call
        this. Raises UsageError on all processes if one of them does, or if the data differ.
        """
        self._need("run.load(...)", "entered")
        args = self.args
        data = world.first_on_each_node(self.accelerator, lambda: load_data(args))
        self.train_set, self.eval_set = data[:2]
        check_indexable(self.train_set, "training set")
        check_indexable(self.eval_set, "evaluation set")
        arguments.check_size(args, len(self.train_set), len(self.eval_set))
        self.data_md5 = data_md5(self.train_set, self.eval_set)
        world.check_same(self.accelerator, {"the data's md5": self.data_md5})
        self.num_used = num_used(len(self.train_set), args.batch_size, args.drop_last)
        self.steps_per_epoch = math.ceil(self.num_used / args.batch_size)
        num_steps = args.epochs * self.steps_per_epoch
        self.last_step = min(num_steps, args.stop_after_steps or num_steps)
        self.log_every = args.log_every or min(50, max(1, num_steps // 50))
        set_seed(args.seed)  # whatever loading drew, the first weights depend on --seed alone
        self.stage = "loaded"
        return data

    def begin(
        self,
        model: nn.Module | Sequence[nn.Module],
        about: dict[str, Any],
        plan: dict[str, str] | None = None,
    ) -> None:
        """Print the plan, lock the run folder, load the checkpoint. Call after accelerator.prepare.

        Every process must call this. Raises UsageError on all; RuntimeError for what is unprepared.

        Args:
            model: what accelerator.prepare returned for the model, or for each of them.
            about: what a reader of model.safetensors must know, as JSON; equal when it is resumed.
            plan: lines to print, by name, for example where the data come from.
        """
        self._need("run.begin(...)", "loaded")
        args, accelerator = self.args, self.accelerator
        prepared = [model] if isinstance(model, nn.Module) else list(model)
        self._check_prepared(len(prepared))
        check_json("the `about` of run.begin(...)", about)
        self.about, self.optimizers = about, prepared_optimizers(accelerator)
        self.models = prepared_models(accelerator)  # unwrap_model imports torch's compiler, 1.2 s
        self.trained = [weight.requires_grad for weight in weights_of(*self.optimizers)]
        self.saved = None
        self.print(describe(self, plan or {}))
        facts, notice = self._start_from()
        world.check_same(accelerator, facts)
        held = open_run(accelerator, args)
        if held is not None:
            self.resources.callback(held.release)
        self._make_state(facts)
        self.progress = self.checkpoints.resume(args.resume, self.last_step)
        self._check_best_name()
        if notice and self.progress.step == 0:
            self.print(notice)
        if self.progress.ended:
            self.print(
                "this run has ended early, as run.stop() or --patience asked for: to go on, start "
                "a new one with --start-from"
            )
        record_run(accelerator, args)
        for each in prepared:
            fix_bucket_order(each)
        accelerator.init_trackers(self.project, vars(args))
        self.stage = "between"

    def _check_prepared(self, num_models: int) -> None:
        """Raise an error for what could not be trained or resumed as it was prepared."""
        accelerator, models = self.accelerator, prepared_models(self.accelerator)
        if num_models != len(models):
            raise RuntimeError(
                "run.begin(...) needs every model that accelerator.prepare was given"
            )
        if registered_objects(accelerator):
            raise UsageError(
                "register_for_checkpointing is not supported, because reading it back could "
                "execute code: keep numbers in run.state, tensors in a buffer of a prepared module"
            )
        if any(batches_of(loader) is None for loader in prepared_loaders(accelerator)):
            raise RuntimeError(
                "accelerator.prepare was given a loader that make_loaders(...) did not make: "
                "Accelerate may give some of its samples twice"
            )
        optimizers = prepared_optimizers(accelerator)
        if not optimizers:
            raise RuntimeError("accelerator.prepare was given no optimizer: prepare every one")
        check_states(models)
        weights = Counter(weights_of(*optimizers))
        if twice := [weight for weight, num in weights.items() if num > 1]:
            raise RuntimeError(
                f"{len(twice)} of the weights are in two optimizers, or twice in one"
            )
        if strange := weights.keys() - {w for model in models for w in model.parameters()}:
            raise RuntimeError(
                f"{len(strange)} of the optimizers' weights are in no model that "
                "accelerator.prepare was given, so they would be neither averaged nor saved: "
                "prepare every module that is trained"
            )
        schedules = prepared_schedulers(accelerator)
        steered = [optimizer for schedule in schedules for optimizer in schedule.optimizers]
        for optimizer in optimizers:
            # A schedule notes its first rate there.
            if "initial_lr" in optimizer.param_groups[0] and optimizer not in steered:
                raise RuntimeError(
                    "a learning rate schedule was not given to accelerator.prepare, so a resume "
                    "would begin it anew: prepare it with its optimizer"
                )

    def _start_from(self) -> tuple[dict[str, Any], str]:
        """What must be equal in a resumed run, and a line about what --start-from has loaded."""
        args = self.args
        weights = [
            getattr(batches_of(x), "weights", None) for x in prepared_loaders(self.accelerator)
        ]
        facts = {
            "data": self.data_md5,
            "weights of samples": data_md5(*(InMemory(w) for w in weights if w is not None)),
            "size": num_parameters(self.models),
        }
        for name, value in self.about.items():
            text = json.dumps(value)
            digest = hashlib.sha256(text.encode()).hexdigest()
            if name not in args.not_the_experiment:
                facts[f"about[{name}]"] = min(text, digest, key=len)
        if args.start_from is None:
            return facts, ""
        what = f"--start-from {args.start_from} cannot be read"
        with failing_together(self.accelerator, what):
            tensors, notice = read_weights(args.start_from, self.models[0])
            facts["start_from"] = sha256_of(args.start_from)
        own = self.models[0].state_dict()
        self.models[0].load_state_dict(shards.shared_out(tensors, own), strict=False)
        return facts, notice

    def _make_state(self, facts: dict[str, Any]) -> None:
        """Create what counts, averages and saves; the facts must be equal in a resumed run."""
        args, accelerator = self.args, self.accelerator
        layers = (layer for model in self.models for layer in model.modules())
        dropouts = [layer for layer in layers if isinstance(layer, Dropout)]
        self.resources.callback(release_dropout, dropouts)
        samples_draw = not isinstance(self.train_set, InMemory)
        self.step = Step(accelerator, args, self.num_used, self.signals, dropouts, samples_draw)
        self.bar, self.table = tqdm(disable=True), MetricsTable()
        self.resources.callback(lambda: self.bar.close())
        self.means = RunningMeans(accelerator)
        self.average = Average(accelerator, self.models, args.ema) if args.ema else None
        self.checkpoints = Checkpoints(
            accelerator,
            args.run_dir,
            self.history,
            self.means,
            arguments.experiment(args) | facts,
            args.keep,
            self.average.values if self.average else [],
        )

    @property
    def state(self) -> dict[str, Any]:
        """A dict for the script to use: saved with each checkpoint, restored by begin().

        It is JSON, equal on all processes: its keys are texts. Raises RuntimeError at a checkpoint
        for what JSON does not give back.
        """
        self._need("run.state", "between", "epoch", *IN_BATCH, "trained", "over")
        return self.progress.state

    def epochs(self) -> Iterator[int]:
        """The epochs that are left, from 0. The body runs steps() to its end, then end_epoch().

        With --eval-every an epoch comes several times, each time up to the next evaluation. To end
        the run early call stop(); an exception ends it where it is.
        """
        self._need("run.epochs()", "between")
        while not self._is_over():
            self.stage = "epoch"
            yield self.progress.epoch
            self._need("the next epoch", "between")

    def stop(self) -> None:
        """End the run with this step and its evaluation: it stays ended when it is resumed.

        Every process must call this, in the same step, before end_epoch().
        """
        self._need("run.stop()", *IN_BATCH, "trained")
        self.progress.ended = True

    def steps(self, loader: DataLoader) -> Iterator[Any]:
        """The batches of `loader` up to the next evaluation, this process's share of each.

        Counting, logging, saving and stopping happen when the body asks for the next batch. So
        `continue` is fine once the step is made. Before that it raises RuntimeError: a process that
        leaves out a step keeps the others waiting. `break` would lose the last step and raises
        RuntimeError too: use stop(). An exception, or a second Ctrl-C, ends the run without saving:
        a resume repeats what came after the newest checkpoint.

        Args:
            loader: the training loader of order.make_loaders, prepared.
        """
        self._need("run.steps(...)", "epoch")
        progress, step = self.progress, self.step
        self.num_before = self._num_done()
        self.said_at, self.started_at, self.last_loss = time.monotonic(), time.perf_counter(), ""
        self.bar = epoch_bar(self.accelerator, progress.epoch, self.args.epochs, self.num_used)
        self.bar.update(self.num_before)
        self._batches(loader).set_position(progress.epoch, self.num_before)
        is_new = True
        for batch in () if self._must_evaluate() else loader:
            if is_new:
                self.rates = self._learning_rates()
                position = Position(progress.step + 1, self.rates["learning_rate"])
                step.start(progress.epoch, progress.batch, position)
            step.start_micro_batch()
            self.stage = "batch"
            yield batch
            is_new = self.accelerator.sync_gradients  # else inside an accumulation window
            self._need("the next batch", "checked" if is_new else "backward")
            step.finish_micro_batch(is_last=is_new)
            if is_new and self._finish_step():
                loader.end()  # Accelerate's own, at an end that comes before the loader's
                break
        self.bar.close()
        self.signals.meet()
        step.guard.finish(*self.optimizers)
        self.train_seconds = time.perf_counter() - self.started_at
        if self.average is not None:
            self.average.swap()  # end_epoch() swaps it back
        self.stage = "trained"

    def _batches(self, loader: DataLoader) -> EpochBatches:
        """The batches of the prepared training loader.

        Raises RuntimeError for another one, and for weights that were frozen or unfrozen since.
        """
        batches = batches_of(loader)
        mine = loader in prepared_loaders(self.accelerator)
        if batches is None or batches.seed is None or not mine:
            raise RuntimeError(
                f"run.steps(...) got a {type(loader).__name__} whose order cannot be resumed: give "
                "it the training loader that make_loaders(...) made and accelerator.prepare "
                "returned (for a sampler of your own see its weights=)"
            )
        if self.trained != [weight.requires_grad for weight in weights_of(*self.optimizers)]:
            raise RuntimeError(
                "other weights require gradients than when they were prepared, which is when "
                "DistributedDataParallel looks: to unfreeze weights start a new run with "
                "--start-from, or let them wait in a group whose learning rate is 0"
            )
        if not all(model.training for model in self.models):
            raise RuntimeError(
                "a model is in evaluation mode: call model.train() before run.steps(...), then "
                "eval() of the layers that are to stay in it"
            )
        if self.saved not in (None, self._to_save()):
            raise RuntimeError(
                "a learning rate schedule was stepped, or run.state changed, after "
                "run.end_epoch(...), whose checkpoint does not know it: do that before"
            )
        return batches

    def _to_save(self) -> str:
        """What the script may change between two steps: how far schedules are, and run.state."""
        schedulers = prepared_schedulers(self.accelerator)
        return repr(([each.scheduler.last_epoch for each in schedulers], self.progress.state))

    def _finish_step(self) -> bool:
        """Count, log and save after a step; True if an evaluation comes next."""
        args, progress = self.args, self.progress
        progress.batch += 1
        if not self.step.finish():
            progress.num_skipped += 1
            return self._must_evaluate()
        progress.step += 1
        if self.average is not None:
            self.average.update(progress.step)
        self.bar.update(self.step.num_samples)
        if progress.step % self.log_every == 0:
            self._log_window()
        self._say_where()
        if self._is_over():
            return True
        stopping = self.signals.requested()
        due = args.save_every and progress.step % args.save_every == 0
        # If an evaluation is due as well, end_epoch() saves after it.
        if stopping or (due and not self._must_evaluate()):
            self.signals.meet()
            self.step.guard.finish(*self.optimizers)
            self.checkpoints.save(progress)
        if stopping:
            self._leave()
        return self._must_evaluate()

    def step_mean(self, values: torch.Tensor, where: torch.Tensor | None = None) -> torch.Tensor:
        """This process's share of the mean of `values` in the step, for accelerator.backward.

        The gradient becomes that of the mean over the whole step, of all processes and
        micro-batches: DDP divides by the number of processes and Accelerate by that of
        micro-batches, so both are multiplied in. A value that is not finite gives NaN gradients on
        all processes.

        Args:
            values: (samples, ...), the losses of this process's batch, with reduction="none".
            where: bool, True for the values that count, such as the tokens of an answer. `values`
                may then have any shape, the same as `where`, and the mean is over all that count in
                the step. Their number is known only after the last backward: clip_and_check()
                divides the gradients by it, so a step can have one such mean and no other. If none
                counts, the gradient is 0.

        Raises RuntimeError if values are reduced already, or not of this batch.
        """
        self._need("run.step_mean(...)", *IN_BATCH)
        self.stage = "backward"
        return self.step.mean(values, where)

    def clip_and_check(self, *optimizers: AcceleratedOptimizer) -> None:
        """Clip the gradients to --clip-norm; stop all processes if they are not finite.

        Call it between backward and optimizer.step(); inside an accumulation window it does
        nothing. Several optimizers in one call are clipped by the norm of all their gradients.
        Every process must call this. Raises RunFailure on all of them.
        """
        self._need("run.clip_and_check(...)", "backward", "checked")
        for each in optimizers:
            if each not in self.optimizers:
                raise RuntimeError(
                    f"run.clip_and_check(...) got a {type(each).__name__} that accelerator.prepare "
                    "did not return: prepare every optimizer, or a resume loses its state, and "
                    "hand over several as *optimizers"
                )
        if self.accelerator.sync_gradients:
            self.step.clip_and_check(*optimizers)
            self.stage = "checked"

    def gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The rows of the whole batch, of all processes, and where those of this process begin.

        For losses that compare the samples of a batch with each other. Gradients flow back to the
        process that a row came from. Every process must call this. Raises UsageError with
        --accumulate, RuntimeError for rows that are not those of this batch.

        Args:
            rows: (samples, ...) of this process's batch.
        """
        self._need("run.gather(...)", *IN_BATCH)
        return self.step.gather(rows)

    def add(self, where: torch.Tensor | None = None, **values: torch.Tensor) -> None:
        """Add values of this process's batch: (samples, ...), unreduced; any shape with `where`.

        Their means over all processes become train_NAME in metrics.jsonl, at an evaluation; those
        whose name begins with "loss" also at every --log-every steps. where: bool of their shape,
        which values count. Every process adds the same names. Waits for nothing. Raises
        RuntimeError for values that are reduced.
        """
        self._need("run.add(...)", *IN_BATCH)
        for name, value in values.items():
            call = f"run.add({name}=...)"
            if where is None:
                self.step.check_rows(call, value)
            self.means.add(name, *sum_and_count(call, value.detach(), where))

    def evaluate(
        self, loader: DataLoader, judge: Callable[[Any], dict[str, torch.Tensor]]
    ) -> dict[str, float]:
        """Return eval_NAME, the mean over `loader` of each value of judge(batch); eval_samples.

        judge returns what add() takes: unreduced values by name, and perhaps "where". The models
        are in evaluation mode, without gradients. Each sample counts once, whoever has it. Every
        process must call this. Raises RuntimeError for values that are not one row per sample.
        """
        self._need("run.evaluate(...)", "between", "epoch", "trained")
        batches = batches_of(loader)
        mine = loader in prepared_loaders(self.accelerator)
        if batches is None or batches.seed is not None or not mine:
            raise RuntimeError(
                f"run.evaluate(...) got a {type(loader).__name__} that is not the evaluation "
                "loader of make_loaders(...), prepared: it may give a sample twice, or not at all"
            )
        layers = [layer for model in self.models for layer in model.modules()]
        modes = [layer.training for layer in layers]
        means, num_samples = RunningMeans(self.accelerator), len(loader.dataset)
        num_rows: Counter[str] = Counter()  # of what is not masked
        for model in self.models:
            model.eval()
        with torch.inference_mode():
            for batch in loader:
                values = judge(batch)
                where = values.pop("where", None)
                for name, value in values.items():
                    if value.ndim == 0:
                        raise RuntimeError(
                            f"run.evaluate(...) got a single number for {name}: let it be one "
                            'value for each sample, as losses with reduction="none" are'
                        )
                    if where is None:
                        num_rows[name] += len(value)
                    means.add(name, *sum_and_count("run.evaluate(...)", value, where))
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode
        self._check_evaluated(num_rows, num_samples)
        metrics = means.means("eval")
        if "eval_samples" in metrics:
            raise RuntimeError("run.evaluate(...) counts samples itself: rename the value samples")
        return metrics | {"eval_samples": num_samples}

    def _check_evaluated(self, num_rows: dict[str, int], num_samples: int) -> None:
        """Raise RuntimeError if a metric does not have a row for each sample."""
        counts = torch.tensor([*num_rows.values()], device=self.accelerator.device)
        counts = self.accelerator.reduce(counts, reduction="sum").tolist() if num_rows else []
        for name, num in zip(num_rows, counts, strict=True):
            if num != num_samples:
                raise RuntimeError(
                    f"run.evaluate(...) got {num} rows of {name} for {num_samples} samples: let "
                    "it be one value for each sample, or say which values count with `where`"
                )

    def end_epoch(
        self,
        metrics: dict[str, Any],
        predictions: dict[str, torch.Tensor] | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        """Log, print and save after an evaluation.

        Every process must call this, with the same values. The predictions of the last evaluation,
        if there are any, are written to predictions.safetensors, with `about` as metadata.
        """
        self._need("run.end_epoch(...)", "trained")
        plain = {  # tensors and arrays of one number too
            name: v.item() if math.prod(getattr(v, "shape", (0,))) == 1 else v
            for name, v in metrics.items()
        }
        metrics = world.agree(self.accelerator, plain)
        args, progress, about = self.args, self.progress, about or {}
        with as_usage_error("run.end_epoch(...) got predictions, or about, that cannot be written"):
            # Tried in each epoch: at the end it would be too late.
            tensors = {name: torch.as_tensor(v) for name, v in (predictions or {}).items()}
            to_safetensors({name: tensor.new_empty(0) for name, tensor in tensors.items()}, about)
        self._log_evaluation(metrics)
        if progress.batch == 0:  # else the epoch goes on, perhaps after a resume
            self.means.clear()
        is_best = args.keep_best is not None and self._keep_best()
        if self._is_over() and predictions is not None:
            # Before the last checkpoint: a resume from it does not evaluate again.
            self._write(records.PREDICTIONS, tensors, about)
        if self.average is not None:
            self.average.swap()
        due = not args.save_every or progress.step % args.save_every == 0
        if self._is_over() or is_best or due:
            self.checkpoints.save(progress)
        self.saved = self._to_save()
        self.stage = "between"

    def _log_evaluation(self, metrics: dict[str, float]) -> None:
        progress = self.progress
        eval_seconds = time.perf_counter() - self.started_at - self.train_seconds
        num_trained = self._num_done() - self.num_before
        if progress.batch == self.steps_per_epoch:
            progress.epoch, progress.batch = progress.epoch + 1, 0
        means = self.means.means("train")
        if nothing := [name for name in self.means.sums if f"train_{name}" not in means]:
            raise RuntimeError(
                f"{nothing[0]}: no value was counted since the epoch began: add every name in each "
                "epoch, and let its where= count some"
            )
        if "eval_loss" not in metrics or means.keys() & metrics.keys():
            raise RuntimeError(
                f"run.end_epoch(...) got {', '.join(metrics) or 'no metrics'}: eval_loss must be "
                f"among them, by which a row is known, and not {', '.join(means)}"
            )
        progress.metrics = {"epoch": progress.epoch, **means, **metrics}
        progress.metrics_step = progress.step
        self.accelerator.log(progress.metrics, step=progress.step)
        self.history.log_timing(
            {
                "step": progress.step,
                "train_seconds": self.train_seconds,
                "eval_seconds": eval_seconds,
                "train_samples": num_trained,
            }
        )
        done = progress.epoch + progress.batch / self.steps_per_epoch
        rate = num_trained / self.train_seconds
        epoch = f"{round(done, 2):g}/{self.args.epochs}"
        self.print(self.table.line(epoch, progress.metrics, self.train_seconds, rate))

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
            raise self._out_of_order("run.finish()")
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
        if args.keep_best and progress.best is not None:
            self.print(
                f"{args.keep_best} was best at step {progress.best_step}, "
                f"{show(args.keep_best, progress.best)}: {self._best_file()} those weights"
            )
        elif args.keep_best:
            self.print(f"{args.keep_best} was never a finite number: nothing was kept for it")
        names = ", ".join(path.name for path in drawn)
        self.print(
            f"done: {count(progress.step, 'step')}, {show_best(progress.metrics)}; in "
            f"{args.run_dir}: weights, metrics, checkpoints{f', {names}' if names else ''}"
        )
        if next_command:
            self.print(f"next: {next_command}")
        self.stage = "over"
        return dict(progress.metrics)

    def _write_weights(self, stem: str) -> None:
        """Write the weights of every model: STEM.safetensors, STEM_1.safetensors, ..."""
        for number, model in enumerate(self.models):
            name = f"{stem}_{number}" if number else stem
            self._write(f"{name}.safetensors", model.state_dict(), self.about)

    def _write(self, name: str, tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
        """Write a safetensors file into the run folder. Every process must call this."""
        path = self.args.run_dir / name
        tensors = shards.whole(tensors, self.accelerator.is_main_process)
        with failing_together(self.accelerator, f"{path} cannot be written", RunFailure):
            if self.accelerator.is_main_process:
                write_tensors(path, tensors, about)

    def _keep_best(self) -> bool:
        """Write best.safetensors if this evaluation is the best so far; True if it is."""
        name, progress, patience = self.args.keep_best, self.progress, self.args.patience
        if name not in progress.metrics:
            if self.average is not None:
                self.average.swap()
            self.checkpoints.save(progress)  # the epoch is not lost
            raise UsageError(f"--keep-best {name}: there are only {', '.join(progress.metrics)}")
        value, best, progress.best_name = progress.metrics[name], progress.best, name
        better = best is None or (value < best if smallest_is_best(name) else value > best)
        if not (better and math.isfinite(value)):
            progress.num_worse += 1
            progress.ended |= patience is not None and progress.num_worse >= patience
            return False
        progress.best, progress.best_step, progress.num_worse = value, progress.step, 0
        about = self.about | {"step": progress.step}
        self._write("best.safetensors", self.models[0].state_dict(), about)
        return True

    def _check_best_name(self) -> None:
        """Forget a best value of another metric, or one that a part of the run was not held to."""
        wanted, progress = self.args.keep_best, self.progress
        if wanted and progress.best_name not in (None, wanted):
            self.print(f"--keep-best was {progress.best_name}: what is best is found anew")
            progress.best, progress.best_step, progress.num_worse = None, 0, 0
        if not wanted and progress.best_name:
            progress.best_name = "left out"  # what comes now is compared with nothing

    def _best_file(self) -> str:
        """What has the best weights: a resume from an older checkpoint has left others behind."""
        path, step = self.args.run_dir / "best.safetensors", self.progress.best_step
        if path.exists() and self.accelerator.is_main_process:
            with suppress(UsageError), as_usage_error(f"{path} cannot be read"):
                if records.read_metadata(path)["step"] == step:
                    return f"{path.name} has"
            rename_free(path, f"abandoned-{path.name}")
        kept = f"checkpoints/step-{step:010d}"
        return f"{kept} has" if (self.args.run_dir / kept).exists() else "no file any more has"

    def _is_over(self) -> bool:
        """Is there nothing left to train?"""
        progress = self.progress
        done = progress.epoch == self.args.epochs or progress.step == self.last_step
        return done or progress.ended

    def _must_evaluate(self) -> bool:
        """Is an evaluation due before the next step? Not if it was done before a resume."""
        progress, every = self.progress, self.args.eval_every
        due = progress.batch == self.steps_per_epoch or (every and progress.step % every == 0)
        return bool(due) and progress.step > progress.metrics_step

    def _num_done(self) -> int:
        """Samples of this epoch trained on so far."""
        return min(self.progress.batch * self.args.batch_size, self.num_used)

    def _learning_rates(self) -> dict[str, float]:
        """Those of the first group of each optimizer."""
        rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        return {f"learning_rate_{n}" if n else "learning_rate": r for n, r in enumerate(rates)}

    def _log_window(self) -> None:
        self.signals.meet()
        means = self.means.flush("train")
        losses = {name: mean for name, mean in means.items() if name.startswith("train_loss")}
        row = {"epoch": self.progress.epoch, **losses, **self.rates}
        self.accelerator.log(row, step=self.progress.step)
        self.last_loss = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        self.bar.set_postfix_str(self.last_loss)

    def _say_where(self) -> None:
        """Print a line a minute where there is no progress bar."""
        if self.bar.disable and time.monotonic() - self.said_at > QUIET_SECONDS:
            self.said_at = time.monotonic()
            self.print(
                f"epoch {self.progress.epoch + 1}: {self._num_done():,} of {self.num_used:,} "
                f"samples, {self.last_loss or 'no loss yet'}"
            )

    def _leave(self) -> None:
        """End every process with exit code 75, after a checkpoint of this step."""
        self.signals.ignore(signal.SIGINT)
        self.bar.close()  # or the sentence would begin on its line
        with suppress(BrokenPipeError):  # of a tee that the same Ctrl-C has ended
            self.print(
                f"stopped by {self.signals.signal_name or 'a signal to another process'} at step "
                f"{self.progress.step}, saved: start the same command with --resume auto to "
                "continue"
            )
        self.stage = "over"
        sys.exit(EXIT_STOPPED)
