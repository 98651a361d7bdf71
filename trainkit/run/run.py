"""One run, from launch to exit: everything around the training loop, which the script contains.

A script calls load and begin. Then, in each of epochs(): for each batch of steps() it calls
step_mean, add, end_step and, if that returns True, save; then end_epoch. At last it calls finish.
Run never calls the model, backward or step, and never looks into a batch.
"""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainkit.checkpoints.contents import Contents, Frozen
from trainkit.checkpoints.resume import fingerprint_run
from trainkit.checkpoints.save import Checkpoints, start_from
from trainkit.config import TrainingConfig
from trainkit.errors import EXIT_STOPPED
from trainkit.launch.processes import start_beating, wait_for_all
from trainkit.launch.run_folder import open_run
from trainkit.launch.signals import Signals
from trainkit.launch.startup import same_bits
from trainkit.numbers.means import RunningMeans, Selection
from trainkit.numbers.orders import Length
from trainkit.numbers.randoms import key, seed_generators
from trainkit.run import evaluation
from trainkit.run.data import load_checked
from trainkit.run.ema import EMA
from trainkit.run.ending import check_metrics, leave_if_missed, update_best
from trainkit.run.guards import IN_BATCH, allowed, need, out_of_order
from trainkit.run.plan import describe_plan
from trainkit.run.prepared import Prepared, check_loader
from trainkit.run.profile import Profile
from trainkit.run.results import Results, check_predictions, write_start
from trainkit.run.session import leave_processes, start_accelerator
from trainkit.run.step import CountValues, Step, sums_of
from trainkit.store.records import page_command
from trainkit.text import check_json


class Run:
    """A context manager. Every process must make every call, in the order given above.

    A call out of order raises RuntimeError, which names the call that comes next. There may be one
    model and optimizer or several, with their schedules; all must go through accelerator.prepare.
    --start-from and --keep-best apply to the first model. Trackers show the run under `project`.

    Attributes:
        stage: which calls may come next: see run/guards.py.
        models: the models without the wrappers of DDP and torch.compile.
        progress: where the run stands: progress.step, and progress.epoch, completed ones.
    """

    def __init__(self, config: TrainingConfig, project: str):
        self.config = config
        self.project = project
        self.stage = "new"
        self.resources = ExitStack()

    def __enter__(self) -> "Run":
        need(self, "`with run`", "new")
        config = self.config
        self.accelerator, self.log = start_accelerator(config, self.project)
        self.print = self.log.print
        self.resources.callback(lambda: self.log.bar.close())
        self.signals = Signals(self.accelerator, config.time_limit)
        self.resources.callback(self.signals.restore)
        self.resources.callback(start_beating(self.accelerator))
        if config.deterministic:
            self.resources.enter_context(same_bits())
        set_seed(config.seed)
        self.stage = "entered"
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        with self.resources:
            leave_processes(self.accelerator, self.signals, error, is_over=self.stage == "over")
            if error is None:
                need(self, "the end of `with Run(...)`", "over")

    @allowed("entered", then="loaded")
    def load(self, load_data: Callable[[TrainingConfig], tuple]) -> tuple:
        """Return load_data(config): the training set, the evaluation set, and anything else.

        One process per file system calls it first, to fill caches.
        """
        data, self.data_hashes = load_checked(self.accelerator, self.config, load_data)
        self.sets = data[:2]
        self.length = Length(self.config, len(data[0]))
        self.steps_per_epoch = self.length.steps_per_epoch  # for make_scheduler
        set_seed(self.config.seed)  # so that the initial weights depend only on --seed
        return data

    @allowed("loaded", then="ready")
    def begin(
        self,
        model: nn.Module | Sequence[nn.Module],
        metadata: dict[str, Any],
        plan: dict[str, str] | None = None,
        save_frozen: bool = True,
        fixed: dict[str, nn.Module | str | Path] | None = None,
    ) -> None:
        """Print the plan, lock the run folder, load the checkpoint. Call after accelerator.prepare.

        Args:
            model: what accelerator.prepare returned for the model, or for each of them.
            metadata: what a reader of model.safetensors needs, as JSON; equal on a resume.
            plan: lines to print, by name; "next" is what finish() prints last for page_command.
            save_frozen: False leaves frozen weights out of the files that the run writes.
            fixed: modules, files and folders that are used and not trained, such as a teacher, by
                name. Their content is compared between processes and on a resume.
        """
        check_json("the metadata of run.begin(...)", metadata)
        accelerator, config, fixed = self.accelerator, self.config, fixed or {}
        self.prepared = Prepared(accelerator, model)
        models = self.models = self.prepared.models
        self.next_command = (plan or {}).get("next") or page_command(config, metadata)
        self.print(describe_plan(self, plan or {}))
        started_from, weights_hash = start_from(accelerator, config)
        frozen = Frozen(models)
        fingerprint = fingerprint_run(
            accelerator, config, self.data_hashes, metadata, weights_hash, fixed
        )
        self.step = Step(accelerator, config, self.signals, models, self.length)
        self.resources.callback(self.step.release)
        self.means = RunningMeans(accelerator, self.signals.gather)
        self.ema = EMA(models, config.ema, self.prepared.optimizers)
        self.results = Results(
            accelerator, config, frozen, metadata, save_frozen, self.ema.trained_weights
        )
        contents = Contents(accelerator, frozen, self.ema.values, fixed, fingerprint)
        self._open_folder(contents, fingerprint)
        if self.progress.step == 0 and started_from:
            self.print(started_from)
        write_start(accelerator, config, self.project)  # a refused resume leaves them
        num_steps = self.length.last_step - self.progress.step
        self.profile = Profile(accelerator, config, num_steps, self.print)
        self.resources.callback(self.profile.close)
        self._seed("after begin")

    def _open_folder(self, contents: Contents, fingerprint: dict[str, Any]) -> None:
        accelerator, config = self.accelerator, self.config
        self.checkpoints = Checkpoints(
            accelerator, config, fingerprint, self.log.tracker, self.means, contents
        )
        # Only now, as --mirror may have refused this run: it moves an earlier run aside.
        if lock := open_run(accelerator, config):
            self.resources.callback(lock.release)
        self.resources.callback(self.checkpoints.commits.close)
        with self.ema.trained_weights():
            self.progress = self.checkpoints.resume(config.resume, self.length.last_step)

    def _seed(self, place: str, *position: int) -> None:
        """Seed what the script draws where no batch is, so that a resume draws the same there."""
        seed_generators(self.accelerator.device, key(place, self.config.seed, *position))

    @property
    def state(self) -> dict[str, Any]:
        """What the script carries besides weights, a dict: saved, and restored by begin().

        It holds numbers, texts, None, tensors, arrays, lists, tuples, deques and dicts, equal on
        all processes. It may change before run.epochs(), inside `if run.starts_epoch:`, in a step
        before run.end_step(), and between the evaluation and run.end_epoch(...).
        """
        need(self, "run.state", "ready", "epoch", *IN_BATCH, "trained", "over")
        return self.checkpoints.state.values

    @property
    def starts_epoch(self) -> bool:
        """Whether an epoch begins here, before run.steps(...); False where a resume goes on.

        Inside `if run.starts_epoch:` is made what run.state keeps for an epoch, from its weights.
        """
        need(self, "run.starts_epoch", "epoch")
        is_start = self.progress.step_in_epoch == 0
        if is_start:
            self.checkpoints.state.allow_changes()
        return is_start

    @allowed("ready")
    def epochs(self) -> Iterator[int]:
        """Yield the number of the current epoch, from 0; with --eval-every once per evaluation.

        The body must run steps() to its end and then call end_epoch(). stop() ends the run early.
        """
        state = self.checkpoints.state
        state.put_back()  # what the script has set since, for a new run
        while not self.length.is_over(self.progress) or self.length.must_evaluate(self.progress):
            wait_for_all(self.accelerator, self.config.time_limit)
            state.check_unchanged("run.end_epoch(...)", "or inside `if run.starts_epoch:` after it")
            state.note()
            self._seed("in epoch", self.progress.epoch)
            self.stage = "epoch"
            yield self.progress.epoch
            need(self, "the next epoch", "ready")

    @allowed("epoch")
    def steps(self, loader: DataLoader, count: CountValues | None = None) -> Iterator[Any]:
        """Yield this process's share of each training batch, up to the next evaluation.

        A process without a sample of a short batch gets a padding sample; num_samples is then 0.
        The body must end with `if run.end_step(): run.save()`; a `continue` before that, and
        `break`, raise RuntimeError. An exception or a second Ctrl-C ends the run without saving. At
        the end a checkpoint is saved, which becomes durable while the script evaluates; with
        --save-every only at its steps and at the end of the run. A run that is resumed from it
        evaluates first.

        count: needed for means with a mask or weights with --accumulate above 1, used only then:
            count(micro_batch) returns how many values its mean is over, or a dict of the numbers
            of several means by name. All micro-batches of a step are read before it.
        """
        progress = self.progress
        num_done = self.length.num_done(progress)
        batches = check_loader(self.accelerator, loader, "run.steps(...)", to_train=True)
        self.prepared.check_unchanged()
        state = self.checkpoints.state
        state.check_unchanged("the start of an epoch", "or inside `if run.starts_epoch:`")
        batches.set_position(progress.epoch, num_done)
        self.log.start(progress, num_done, self.length.last_step)
        with self.ema.trained_weights(), batches.read_by_run():
            self.checkpoints.restore()
            if not self.length.must_evaluate(progress):  # it is due if a resume begins with it
                yield from self._steps_to_evaluation(loader, count)
            self.step.check_weights()
            self.profile.end()
            self.log.stop()
            if self._is_due():  # now, so that an error in the evaluation does not lose the epoch
                self.checkpoints.save(progress)
            state.note()  # a signal in the evaluation saves this too
        self.log.start_evaluation()
        self._seed("in evaluation", progress.epoch, progress.step_in_epoch)
        self.stage = "trained"

    def _is_due(self) -> bool:
        """Is a checkpoint due with this evaluation, whatever its metrics are?"""
        progress, every = self.progress, self.config.save_every
        return not every or progress.step % every == 0 or self.length.is_over(progress)

    def _steps_to_evaluation(self, loader: DataLoader, count: CountValues | None) -> Iterator[Any]:
        progress, length = self.progress, self.length
        batches = iter(loader)
        while length.num_in_step(progress):
            before = progress.step
            self.step.start(progress)
            for micro_batch in self.step.take_micro_batches(batches, count):
                self.step.start_micro_batch(loader)
                self.stage = "batch"
                yield micro_batch
                need(self, "the next batch", "counted")
            if before < progress.step == self.checkpoints.saved_step:  # fp16 may have skipped it
                self.prepared.check_unchanged()
                self.checkpoints.state.check_unchanged("run.save()", "or in the next step")
            if length.is_over(progress) or length.must_evaluate(progress):
                break
        loader.end()  # tells Accelerate that this loader is not read further

    @property
    def num_samples(self) -> int:
        """How many samples this process has in the current batch; 0: only a padding sample."""
        if self.stage in ("ready", "epoch", "trained") and self.step.num_evaluated is not None:
            return self.step.num_evaluated
        need(self, "run.num_samples", *IN_BATCH)
        return self.step.num_samples

    @allowed(*IN_BATCH, then="backward")
    def step_mean(
        self,
        values: Tensor,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
        over: str | None = None,
    ) -> Tensor:
        """This process's share of the mean of `values` over the step, for accelerator.backward.

        Its gradient is that of the mean over all processes and micro-batches. A padding sample
        counts nothing. A value that is not finite gives NaN gradients on all processes. A loss may
        be a sum of several means. Every process must make the same calls.

        Args:
            values: (samples, ...), the losses of this process's batch, with reduction="none";
                without mask or weights the mean is over all dimensions.
            mask: bool, True for the values that count, such as the tokens of an answer.
            weights: float: the mean is sum(weights * values) / sum(weights). With mask or weights,
                of the shape of `values`, these may have any; if nothing counts, the gradient is 0.
            over: the name by which count=, of run.steps, returns how many values count.

        Raises RuntimeError if values are already reduced, or are not of this batch, and UsageError
        for a mask or weights with --accumulate above 1 without count=.
        """
        return self.step.mean(values, mask, weights, over)

    @allowed("backward")
    def clip_and_check(self, *optimizers: AcceleratedOptimizer) -> None:
        """Clip several optimizers to --clip-norm by their joint norm, before their steps.

        Without it each is clipped by its own. Raises RunFailure on all processes if the norm is not
        finite; on a GPU that is noticed one step later, but always before a checkpoint.
        """
        self.step.clip_and_check(*optimizers)

    @allowed(*IN_BATCH)
    def gather(self, rows: Tensor) -> tuple[Tensor, int]:
        """The rows of the whole batch, of all processes, and where this process's rows start.

        This is for losses that compare the samples of a batch with each other. Gradients flow back
        to the process that a row came from. Raises UsageError with --accumulate above 1.
        """
        return self.step.gather(rows)

    @allowed(*IN_BATCH)
    def mean(self, values: Tensor) -> Tensor:
        """The mean of `values`, (samples, ...), over all samples of the step, as (...).

        It is the same on every process, has no gradient, and padding counts nothing. Call it in
        each micro-batch of --accumulate, and use what it returns inside
        `if accelerator.sync_gradients:`; before that any use of it raises RuntimeError.
        """
        return self.step.mean_of_samples(values)

    @allowed(*IN_BATCH)
    def put(self, table: Tensor, index: Tensor, rows: Tensor) -> None:
        """Write a row for each sample of the batch, of all processes, into a table of run.state.

        It is for what belongs to samples or streams, such as hidden states: every process has the
        whole table. Call it in each micro-batch.

        table: (rows, ...), equal on all processes.
        index: (samples,), int64, where in it the row of each sample of this process's batch goes;
            of a row that comes twice the last one counts.
        rows: (samples, ...), written without a gradient.
        """
        self.step.put(table, index, rows)

    @allowed(*IN_BATCH)
    def add(self, mask: Selection = None, weights: Selection = None, **values: Tensor) -> None:
        """Add values of this process's batch to the means in metrics.jsonl, without waiting.

        They are unreduced, as in step_mean. Their means over all processes are logged as train_NAME
        at each evaluation; those whose name begins with "loss" also every --log-every steps.
        mask, weights: a tensor for all values, or a dict with one for some of the names.
        """
        num, sizes, dtype = self.step.num_samples, self.step.sizes, self.means.dtype
        self.means.add_all(sums_of("run.add(...)", values, mask, weights, num, sizes, dtype))

    @allowed(*IN_BATCH, "trained")
    def stop(self) -> None:
        """End the run after this step and its evaluation; a resume does not continue it."""
        self.progress.ended = True

    @allowed("backward")
    def end_step(self) -> bool:
        """Finish the step: count it, average the weights, log. Return True if save() is due.

        It is due every --save-every steps and after a signal to any process, on all processes
        alike. It is not due inside an accumulation window, or if end_epoch() comes next and saves.
        """
        is_last = self.accelerator.sync_gradients
        self.step.finish_micro_batch(is_last)
        is_due = is_last and self._finish_step()
        self.stage = "must save" if is_due else "counted"
        return is_due

    def _finish_step(self) -> bool:
        progress, length, every = self.progress, self.length, self.config.save_every
        progress.step_in_epoch += 1
        is_watched = self.step.loop.num_left > 0
        if not self.step.finish():  # fp16 overflowed
            progress.num_skipped += 1
            self.profile.end_step()
            return False
        if is_watched:  # a mistake is told now, and not after an epoch
            self.checkpoints.contents.check()
        progress.step += 1
        self.ema.update(progress.step)
        self.profile.end_step()
        self.log.bar.update()
        if progress.step % length.log_every == 0:
            self.log.write_row(progress, self.means, self.step.rates, self.step.norms)
        self.log.say_where(progress.epoch, length.num_done(progress), length.num_used)
        if length.is_over(progress):
            return False
        due = every and progress.step % every == 0 and not length.must_evaluate(progress)
        return self.signals.requested(self.checkpoints.commits.failed()) or bool(due)

    @allowed("must save", then="counted")
    def save(self) -> None:
        """Save a checkpoint with accelerator.save_state; after a signal exit with code 75."""
        self.profile.end()
        with self.ema.trained_weights():
            self.step.check_weights()
            self.checkpoints.save(self.progress)
        self.prepared.note()
        self.checkpoints.state.note()
        if self.signals.stopping:
            self.checkpoints.commits.wait()
            self.checkpoints.wait_for_mirror(self.config.timeout)
            self.stage = "over"
            self.signals.ignore(signal.SIGINT)
            self.log.say_stopped(self.signals.signal_name, self.progress.step)
            sys.exit(EXIT_STOPPED)

    @allowed("ready", "epoch", "trained")
    def evaluate(
        self, loader: DataLoader, compute_losses: Callable[[Any], dict[str, Tensor]]
    ) -> dict[str, float]:
        """Return eval_NAME: the mean of each value of compute_losses(batch). See evaluation.py."""
        return self._evaluate(evaluation.evaluate, loader, compute_losses)

    @allowed("ready", "epoch", "trained")
    def predict(self, loader: DataLoader, function: Callable[[Any], Any]) -> Any:
        """Return function(batch) of each evaluated sample, once and in order: see evaluation.py."""
        return self._evaluate(evaluation.predict, loader, function)

    def _evaluate(self, collect: Callable, loader: DataLoader, function: Callable) -> Any:
        is_due = self.stage == "trained"

        def stopping() -> bool:
            # Only an evaluation that is due can be recorded as still to be done.
            return is_due and self.signals.requested()

        collected = collect(self.step, loader, function, stopping)
        if is_due:
            self.checkpoints.state.check_unchanged("the last step", "or after the evaluation")
        if self.signals.stopping:
            self.stage = "must save"
            self.save()
        return collected

    @allowed("trained", then="ready")
    def end_epoch(
        self,
        metrics: dict[str, Any],
        predictions: dict[str, Tensor] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Log and print an evaluation, with the same metrics on all processes.

        A checkpoint of the best step of --keep-best is saved, unless run.steps(...) has saved it.
        The predictions of the last evaluation and `metadata` go to predictions.safetensors.
        """
        wait_for_all(self.accelerator, self.config.time_limit)
        progress, length = self.progress, self.length
        self.checkpoints.state.check()
        predicted = check_predictions(predictions, metadata or {})
        num_done = length.num_done(progress)
        if progress.step_in_epoch == length.steps_per_epoch:
            progress.epoch += 1
            progress.step_in_epoch = 0
        self.log.log_evaluation(progress, length, num_done, self.means.compute("train"), metrics)
        if progress.step_in_epoch == 0:  # otherwise the epoch continues, perhaps after a resume
            self.means.clear()
        check_metrics(self.config, progress.metrics)
        if is_best := update_best(self.config, progress):  # before a checkpoint that records it
            self.results.write_best(progress.step)
        if length.is_over(progress):
            self.results.write_predictions(predicted)
        is_saved = self.checkpoints.saved_step == progress.step
        if not is_saved and (is_best or self._is_due()):
            self.stage = "must save"
            self.save()
        self.prepared.note()
        self.checkpoints.state.note()

    def finish(self, next_command: str = "") -> dict[str, float]:
        """Write weights, pictures and, last, DONE; return the metrics of the last evaluation.

        next_command is printed last, in place of that of begin(). If the metrics miss
        --target, this ends the process with exit code 3.
        """
        if self.stage != "ready" or not self.length.is_over(self.progress):
            raise out_of_order("run.finish()", self.stage)
        wait_for_all(self.accelerator, self.config.time_limit)
        self.checkpoints.commits.wait()
        command, mirror = next_command or self.next_command, self.checkpoints.finish_mirror
        self.results.finish(self.progress, command, self.print, mirror)
        self.stage = "over"
        leave_if_missed(self.config, self.progress.metrics, self.print)
        return dict(self.progress.metrics)
