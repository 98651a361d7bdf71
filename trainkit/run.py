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

Who does it: loaders.py (which samples), step.py (one optimizer step), metrics.py, checkpoint.py,
and session.py (load, begin and finish). Details that you can skip: checks/ (what is refused),
launch/ (processes, signals), run_dir/ (files), cli/ (what is printed).
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn

from trainkit import best, evaluation

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.utils.data import DataLoader

from trainkit.checks.calls import IN_BATCH, allowed, need
from trainkit.checks.finite import Position
from trainkit.checks.prepared import check_loader, check_metrics, check_predictions
from trainkit.errors import EXIT_STOPPED, UsageError
from trainkit.launch import nodes
from trainkit.metrics import sum_and_count
from trainkit.optim import learning_rates
from trainkit.run_dir import records
from trainkit.session import Session


class Run(Session):
    """Use as a context manager, then call its methods in the order shown at the top.

    A call out of order raises RuntimeError, which names the call that comes next. Whatever ends the
    body, signal handlers are restored, the progress bar is closed and the run folder is released.
    It takes whatever accelerator.prepare was given: one model or several, one optimizer or several,
    with their schedules. --start-from and --keep-best are about the first model.

    Args:
        args: the flags of arguments.add_training_arguments and add_run_arguments, and the script's.
        project: the name under which trackers keep the runs of this script.
        check: check(args, num_processes) raises UsageError for flags that do not fit together;
            None checks the flags of trainkit.config alone.
    """

    rates: dict[str, float]  # the learning rate of each optimizer in the step at hand

    @property
    def state(self) -> dict[str, Any]:
        """A dict for the script to use: saved with each checkpoint, restored by begin().

        It is JSON, equal on all processes: its keys are texts. Raises RuntimeError at a checkpoint
        for what JSON does not give back.
        """
        need(self, "run.state", "between", "epoch", *IN_BATCH, "trained", "over")
        return self.progress.state

    @allowed("between")
    def epochs(self) -> Iterator[int]:
        """The epochs that are left; the first of a run is 0.

        The body runs steps() to its end, then end_epoch().
        With --eval-every an epoch comes several times, each time up to the next evaluation. To end
        the run early call stop(); an exception ends it where it is.
        """
        while not self._is_over() or self._must_evaluate():
            self.stage = "epoch"
            yield self.progress.epoch
            need(self, "the next epoch", "between")

    @allowed(*IN_BATCH, "trained")
    def stop(self) -> None:
        """End the run with this step and its evaluation: it stays ended when it is resumed.

        Every process must call this, in the same step, before end_epoch().
        """
        self.progress.ended = True

    @allowed("epoch")
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
        progress = self.progress
        batches = check_loader(self.accelerator, loader, training=True)
        self.unchanged.check(progress.state)
        batches.set_position(progress.epoch, self._num_done())
        self.reporter.start(progress, self._num_done(), self.last_step)
        if not self._must_evaluate():  # resumed where an evaluation is still due
            yield from self._steps_to_evaluation(loader)
        self.signals.barrier()
        self.step.guard.finish(*self.optimizers)
        self.reporter.stop()
        if self.average is not None:
            self.average.swap()  # end_epoch() swaps it back
        self.stage = "trained"

    def _steps_to_evaluation(self, loader: DataLoader) -> Iterator[Any]:
        progress, step = self.progress, self.step
        is_new_step = True
        for micro_batch in loader:
            if is_new_step:
                self.rates = learning_rates(self.optimizers)
                position = Position(progress.step + 1, self.rates["learning_rate"])
                step.start(progress.epoch, progress.batch, position)
            step.start_micro_batch()
            self.stage = "batch"
            yield micro_batch
            is_new_step = self.accelerator.sync_gradients  # False inside an accumulation window
            need(self, "the next batch", "checked" if is_new_step else "backward")
            step.finish_micro_batch(is_last=is_new_step)
            if is_new_step:
                self._finish_step()
                if self._is_over() or self._must_evaluate():
                    loader.end()  # tells Accelerate that nothing more is read of this loader
                    return

    def _finish_step(self) -> None:
        """Count, log and save after a step; leave if a signal asked for it."""
        args, progress = self.args, self.progress
        progress.batch += 1
        if not self.step.finish():
            progress.num_skipped += 1
            return
        progress.step += 1
        if self.average is not None:
            self.average.update(progress.step)
        self.reporter.bar.update()
        if progress.step % self.log_every == 0:
            self.signals.barrier()
            self.reporter.log_window(progress, self.means, self.rates)
        self.reporter.say_where(progress.epoch, self._num_done(), self.num_used)
        if self._is_over():
            return
        stopping = self.signals.requested()
        due = args.save_every and progress.step % args.save_every == 0
        # If an evaluation is due as well, end_epoch() saves after it.
        if stopping or (due and not self._must_evaluate()):
            self.signals.barrier()
            self.step.guard.finish(*self.optimizers)
            self.checkpoints.save(progress)
        if stopping:
            self._leave()

    @allowed(*IN_BATCH, then="backward")
    def step_mean(self, values: torch.Tensor, where: torch.Tensor | None = None) -> torch.Tensor:
        """This process's share of the mean of `values` in the step, for accelerator.backward.

        The gradient becomes that of the mean over the whole step, of all processes and
        micro-batches: DDP divides by the number of processes and Accelerate by that of
        micro-batches, so both are multiplied in. A value that is not finite gives NaN gradients on
        all processes.

        Args:
            values: (samples, ...), the losses of this process's batch, with reduction="none".
            where: bool, True for the values that count, such as the tokens of an answer, or float,
                their weights: the mean is sum(where * values) / sum(where) over the whole step.
                `values` may then have any shape, the same as `where`. The divisor is known only
                after the last backward: clip_and_check() divides the gradients by it, so a step can
                have one such mean and no other. If nothing counts, the gradient is 0.

        Raises RuntimeError if values are reduced already, or not of this batch.
        """
        return self.step.mean(values, where)

    @allowed("backward", "checked")
    def clip_and_check(self, *optimizers: AcceleratedOptimizer) -> None:
        """Clip the gradients to --clip-norm; stop all processes if they are not finite.

        On a GPU that is noticed one step later, and always before a checkpoint.
        Call it between backward and optimizer.step(); inside an accumulation window it does
        nothing. Several optimizers in one call are clipped by the norm of all their gradients.
        Every process must call this. Raises RunFailure on all of them.
        """
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

    @allowed(*IN_BATCH)
    def gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The rows of the whole batch, of all processes, and where those of this process begin.

        For losses that compare the samples of a batch with each other. Gradients flow back to the
        process that a row came from. Every process must call this. Raises UsageError with
        --accumulate, RuntimeError for rows that are not those of this batch.

        Args:
            rows: (samples, ...) of this process's batch.
        """
        return self.step.gather(rows)

    @allowed(*IN_BATCH)
    def add(self, where: torch.Tensor | None = None, **values: torch.Tensor) -> None:
        """Add values of this process's batch: (samples, ...), unreduced; any shape with `where`.

        Their means over all processes become train_NAME in metrics.jsonl, at an evaluation; those
        whose name begins with "loss" also at every --log-every steps. where: of their shape, bool:
        which values count, or float: what they weigh. Every process adds the same names. Waits for
        nothing. Raises RuntimeError for values that are reduced.
        """
        for name, value in values.items():
            call = f"run.add({name}=...)"
            if where is None:
                self.step.check_rows(call, value)
            self.means.add(name, *sum_and_count(call, value.detach(), where))

    @allowed("between", "epoch", "trained")
    def evaluate(
        self, loader: DataLoader, judge: Callable[[Any], dict[str, torch.Tensor]]
    ) -> dict[str, float]:
        """Return eval_NAME, the mean over `loader` of each value of judge(batch); eval_samples.

        judge returns what add() takes: unreduced values by name, and perhaps "where". The models
        are in evaluation mode, without gradients. Each sample counts once, whoever has it. A signal
        ends the run between two batches, and a resume evaluates again. Every process must call
        this. Raises RuntimeError for values that are not one row per sample.
        """
        # Elsewhere a checkpoint could not say that an evaluation is still due.
        stopping = self.signals.requested if self.stage == "trained" else lambda: False
        metrics = evaluation.evaluate(self.accelerator, loader, judge, stopping)
        if metrics is not None:
            return metrics
        if self.average is not None:
            self.average.swap()
        self.checkpoints.save(self.progress)
        self._leave()

    @allowed("trained", then="between")
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
        args, progress, about = self.args, self.progress, about or {}
        tensors = check_predictions(predictions or {}, about)
        metrics = nodes.agree(self.accelerator, metrics)
        num_trained = self._num_done() - self.reporter.num_before
        if progress.batch == self.steps_per_epoch:
            progress.epoch, progress.batch = progress.epoch + 1, 0
        self._log_evaluation(metrics, num_trained)
        if progress.batch == 0:  # else the epoch goes on, perhaps after a resume
            self.means.clear()
        is_best = best.judge(args, progress)
        if is_best:
            about_best = self.about | {"step": progress.step}
            self._write("best.safetensors", self.state_of(self.models[0]), about_best)
        if self._is_over() and predictions is not None:
            # Before the last checkpoint, which says that this evaluation was made.
            self._write(records.PREDICTIONS, tensors, about)
        if self.average is not None:
            self.average.swap()
        unknown = best.problem(args, progress)
        due = not args.save_every or progress.step % args.save_every == 0
        if self._is_over() or is_best or due or unknown:
            self.checkpoints.save(progress)
        if unknown:  # only now: the epoch is not lost
            raise UsageError(unknown)
        self.unchanged.note(progress.state)

    def _log_evaluation(self, metrics: dict[str, float], num_trained: int) -> None:
        progress, means = self.progress, self.means.means("train")
        check_metrics(means, metrics)
        progress.metrics = {"epoch": progress.epoch, **means, **metrics}
        progress.metrics_step = progress.step
        done = progress.epoch + progress.batch / self.steps_per_epoch
        self.reporter.log_evaluation(progress, done, num_trained)

    def _must_evaluate(self) -> bool:
        """Is an evaluation due before the next step? Not if it was done before a resume."""
        progress, every = self.progress, self.args.eval_every
        due = progress.batch == self.steps_per_epoch or (every and progress.step % every == 0)
        due = due or self._is_over()  # stopped in the last evaluation
        return bool(due) and progress.step > progress.metrics_step

    def _num_done(self) -> int:
        """Samples of this epoch trained on so far."""
        return min(self.progress.batch * self.args.batch_size, self.num_used)

    def _leave(self) -> NoReturn:
        """End every process with exit code 75, after a checkpoint of this step."""
        self.signals.ignore(signal.SIGINT)
        self.reporter.bar.close()  # or the sentence would begin on its line
        with suppress(BrokenPipeError):  # of a tee that the same Ctrl-C has ended
            self.print(
                f"stopped by {self.signals.signal_name or 'a signal to another process'} at step "
                f"{self.progress.step}, saved: start the same command with --resume auto to "
                "continue"
            )
        self.stage = "over"
        sys.exit(EXIT_STOPPED)
