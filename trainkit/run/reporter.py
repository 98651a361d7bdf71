"""Report on a run as it trains: a bar or a line a minute, and one line for each evaluation."""

import math
import time
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm import tqdm

from trainkit.config import TrainingConfig
from trainkit.launch import together
from trainkit.launch.streams import LOST
from trainkit.numbers.means import HostCopy, RunningMeans
from trainkit.numbers.orders import Length, Progress
from trainkit.run.profile import peak_memory
from trainkit.run.tables import MetricsTable, fit
from trainkit.store.log import JsonlTracker, is_evaluation
from trainkit.text import printable

NUM_LINES = 25  # of epochs are printed, if there are many; metrics.jsonl has all
QUIET_SECONDS = 60.0  # off a terminal, an epoch prints its position about this often


class Row(NamedTuple):
    """A row of metrics.jsonl whose losses and norms are on their way from the device."""

    step: int
    epoch: int
    means: RunningMeans
    rates: dict[str, float]
    norms: dict[str, HostCopy]


class Reporter:
    """Prints on the main process, and writes the rows of metrics.jsonl and timing.jsonl.

    Attributes:
        row: the row of metrics.jsonl that has begun and is not written yet.
    """

    def __init__(self, accelerator: Accelerator, config: TrainingConfig, tracker: JsonlTracker):
        self.accelerator = accelerator
        self.config = config
        self.tracker = tracker
        self.bar = tqdm(disable=True)
        self.table = MetricsTable(config.keep_best)
        self.num_done_at_start = 0  # samples of this epoch that were trained on before
        self.started_at = self.train_seconds = self.evaluated_at = self.said_at = 0.0
        self.last_loss = ""
        self.row: Row | None = None
        self.has_noted_lost = False

    def print(self, text: str) -> None:
        """Print on the main process."""
        if self.accelerator.is_main_process:
            print(fit(printable(text)), flush=True)

    def start(self, progress: Progress, num_done_at_start: int, last_step: int) -> None:
        """Begin the steps of an epoch, of whose samples num_done_at_start were already trained on.

        On a terminal there is one bar over the steps of the whole run. Its time left is estimated
        from the mean speed since this process's first step, including evaluations and saves.
        """
        self.num_done_at_start = num_done_at_start
        self.last_loss = ""
        self.said_at = time.monotonic()
        self.started_at = time.perf_counter()
        desc = f"epoch {progress.epoch + 1}/{self.config.epochs}"
        if self.bar.total is None:
            self.bar = tqdm(
                desc=desc,
                total=last_step,
                initial=progress.step,
                bar_format="{desc} {percentage:3.0f} %|{bar}| {remaining} left{postfix}",
                smoothing=0,  # or the speed would be that of the newest steps alone
                miniters=1,  # else tqdm's thread may draw the bar into an evaluation
                leave=False,
                disable=None if self.accelerator.is_main_process else True,
            )
        self.bar.set_description_str(desc)

    def start_row(
        self,
        progress: Progress,
        means: RunningMeans,
        rates: dict[str, float],
        norms: dict[str, torch.Tensor],
    ) -> None:
        """Begin a row of metrics.jsonl: the losses since the last one, and of this step the rest.

        A device is still computing these numbers, so end_row waits for it and writes the row. Every
        process must call this.
        """
        self.end_row()
        means.start_flush()
        copies = {name: HostCopy(norm) for name, norm in norms.items()}
        self.row = Row(progress.step, progress.epoch, means, rates, copies)
        if self.accelerator.device.type == "cpu":
            self.end_row()

    def end_row(self) -> None:
        """Write the row that has begun, if there is one."""
        if self.row is None:
            return
        step, epoch, means, rates, norms = self.row
        self.row = None
        flushed = means.end_flush("train")
        losses = {name: mean for name, mean in flushed.items() if name.startswith("train_loss")}
        numbers = {name: norm.read().item() for name, norm in norms.items()}
        self.accelerator.log({"epoch": epoch, **losses, **rates, **numbers}, step=step)
        texts = [f"{name} {loss:.4f}" for name, loss in losses.items()]
        self.last_loss = ", ".join(texts)
        self.bar.set_postfix_str("".join(texts[:1]))  # more would leave no room for the bar

    def say_where(self, epoch: int, num_done: int, num_used: int) -> None:
        """Print a line a minute where there is no progress bar."""
        if self.bar.disable and time.monotonic() - self.said_at > QUIET_SECONDS:
            self.said_at = time.monotonic()
            self.print(
                f"epoch {epoch + 1}: {num_done:,} of {num_used:,} samples, "
                f"{self.last_loss or 'no loss yet'}"
            )

    def say_stopped(self, signal_name: str | None, step: int) -> None:
        """Print that a signal has ended the run, after a checkpoint."""
        self.bar.close()  # or the sentence would begin on its line
        self.print(
            f"stopped by {signal_name or 'a signal to another process'} at step {step}, saved: "
            "start the same command with --resume auto to continue"
        )
        self._note_lost()

    def _note_lost(self) -> None:
        """Say once in timing.jsonl that something could not be printed, and why."""
        if LOST and not self.has_noted_lost:
            self.has_noted_lost = True
            self.tracker.log_timing({"not printed": LOST})

    def log_memory(self, step: int) -> str:
        """Write what each process needed of its GPU to timing.jsonl; return it for the last line.

        Every process must call this. It returns nothing for a run on CPUs.
        """
        device = self.accelerator.device
        if device.type != "cuda":
            return ""
        peaks = gather_object([peak_memory(device)])
        self.tracker.log_timing({"step": step, "peak_memory_bytes": peaks})
        amounts = [f"{peak / 2**20:,.0f}" for peak in peaks]
        if len(set(amounts)) == 1:
            each = " each" if len(peaks) > 1 else ""
            return f", peak memory {amounts[0]} MiB{each}"
        return f", peak memory of the processes {'; '.join(amounts)} MiB"

    def stop(self) -> None:
        """End the steps of an epoch; the evaluation comes next, and prints where the bar was."""
        self.bar.clear()
        self.train_seconds = time.perf_counter() - self.started_at

    def start_evaluation(self) -> None:
        """Begin the time of an evaluation, after the checkpoint that was saved before it."""
        self.evaluated_at = time.perf_counter()

    def log_evaluation(
        self,
        progress: Progress,
        length: Length,
        num_done: int,
        means: dict[str, float],
        metrics: dict[str, Any],
    ) -> None:
        """Write a row of metrics.jsonl and of timing.jsonl, and print a line.

        num_done: samples of this epoch that are done. Every process must call this.
        """
        metrics = together.agree(self.accelerator, metrics)
        check_metrics(means, metrics)
        progress.metrics = {"epoch": progress.epoch, **means, **metrics}
        progress.metrics_step = progress.step
        num_trained = num_done - self.num_done_at_start
        done = (
            progress.epoch + progress.step_in_epoch / length.steps_per_epoch
        )  # epochs, with fractions
        eval_seconds = time.perf_counter() - self.evaluated_at
        self.accelerator.log(progress.metrics, step=progress.step)
        self.tracker.log_timing(
            {
                "step": progress.step,
                "train_seconds": self.train_seconds,
                "eval_seconds": eval_seconds,
                "train_samples": num_trained,
            }
        )
        epoch = f"{round(done, 2):g}/{self.config.epochs}"
        rate = num_trained / self.train_seconds
        is_rest = progress.epoch > 1 and progress.epoch % math.ceil(self.config.epochs / NUM_LINES)
        if progress.step_in_epoch or not is_rest or length.is_over(progress):
            self.print(self.table.line(epoch, progress.metrics, self.train_seconds, rate))
        self._note_lost()


def check_metrics(means: dict[str, float], metrics: dict[str, Any]) -> None:
    """Refuse metrics whose row in metrics.jsonl could not be recognised as an evaluation."""
    if not is_evaluation(metrics) or means.keys() & metrics.keys():
        raise RuntimeError(
            f"run.end_epoch(...) got {', '.join(metrics) or 'no metrics'}: there must be a name "
            f"that begins with eval_, as that of an evaluation, and none of {', '.join(means)}"
        )
