"""Report on a run as it trains: a bar or a line a minute, and one line for each evaluation."""

import time
from typing import Any

import torch
from accelerate import Accelerator
from tqdm import tqdm

from trainkit.config import TrainingConfig, metric_and_direction
from trainkit.launch import processes
from trainkit.numbers.means import RunningMeans
from trainkit.numbers.orders import Length, Progress
from trainkit.store.log import JsonlTracker, is_evaluation
from trainkit.text import printable

# The metrics that a person looks at first, by the ends of their names.
READ_FIRST = ("accuracy", "rmse", "r2")
QUIET_SECONDS = 60.0  # off a terminal, an epoch prints its position about this often


class Reporter:
    """Prints on the main process, and writes the rows of metrics.jsonl and timing.jsonl."""

    def __init__(self, accelerator: Accelerator, config: TrainingConfig, tracker: JsonlTracker):
        self.accelerator = accelerator
        self.config = config
        self.tracker = tracker
        self.bar = tqdm(disable=True)
        self.table = MetricsTable(config.keep_best)
        self.num_done_at_start = 0  # samples of this epoch that were trained on before
        self.started_at = self.train_seconds = self.evaluated_at = self.said_at = 0.0
        self.last_loss = ""

    def print(self, text: str) -> None:
        if self.accelerator.is_main_process:
            print(printable(text), flush=True)

    def start(self, progress: Progress, num_done_at_start: int, last_step: int) -> None:
        """Begin the steps of an epoch, of whose samples num_done_at_start were already trained on.

        On a terminal there is one bar over the steps of the whole run.
        """
        self.num_done_at_start = num_done_at_start
        self.last_loss = ""
        self.started_at = self.said_at = time.perf_counter()
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

    def write_row(
        self,
        progress: Progress,
        means: RunningMeans,
        rates: dict[str, float],
        norms: dict[str, torch.Tensor],
    ) -> None:
        """Write a row of metrics.jsonl: the losses since the last one, the rest of this step."""
        flushed = means.flush("train")
        losses = {name: mean for name, mean in flushed.items() if name.startswith("train_loss")}
        numbers = {name: norm.item() for name, norm in norms.items()}
        row = {"epoch": progress.epoch, **losses, **rates, **numbers}
        self.accelerator.log(row, step=progress.step)
        name, loss = next(iter(losses.items()), ("", 0.0))
        self.last_loss = f"{name} {loss:.4f}" if name else ""
        self.bar.set_postfix_str(self.last_loss)

    def say_where(self, epoch: int, num_done: int, num_used: int) -> None:
        """Print a line a minute where there is no progress bar."""
        if self.bar.disable and time.perf_counter() - self.said_at > QUIET_SECONDS:
            self.said_at = time.perf_counter()
            self.print(
                f"epoch {epoch + 1}: {num_done:,} of {num_used:,} samples, "
                f"{self.last_loss or 'no loss yet'}"
            )

    def say_stopped(self, signal_name: str | None, step: int) -> None:
        self.bar.close()  # or the sentence would begin on its line
        self.print(
            f"stopped by {signal_name or 'a signal to another process'} at step {step}, saved: "
            "start the same command with --resume auto to continue"
        )

    def stop(self) -> None:
        """End the steps of an epoch."""
        self.bar.clear()  # the evaluation prints where it was
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
        """Write a row of metrics.jsonl and of timing.jsonl, and print a line."""
        metrics = processes.agree(self.accelerator, metrics)
        if not is_evaluation(metrics) or means.keys() & metrics.keys():
            raise RuntimeError(
                f"run.end_epoch(...) got {', '.join(metrics) or 'no metrics'}: there must be a "
                "name that begins with eval_, as that of an evaluation, and none of "
                f"{', '.join(means)}"
            )
        progress.metrics = {"epoch": progress.epoch, **means, **metrics}
        progress.metrics_step = progress.step
        num_trained = num_done - self.num_done_at_start
        self.accelerator.log(progress.metrics, step=progress.step)
        row = {"step": progress.step, "train_seconds": self.train_seconds}
        row["eval_seconds"] = time.perf_counter() - self.evaluated_at
        self.tracker.log_timing(row | {"train_samples": num_trained})
        num_epochs = progress.epoch + progress.step_in_epoch / length.steps_per_epoch
        epoch = f"{round(num_epochs, 2):g}/{self.config.epochs}"
        rate = num_trained / self.train_seconds
        self.print(self.table.line(epoch, progress.metrics, self.train_seconds, rate))


class MetricsTable:
    """Formats a line for each evaluation below one header: the losses, then other metrics."""

    def __init__(self, keep_best: str | None):
        self.keep_best = keep_best
        self.names = list[str]()

    def line(self, epoch: str, metrics: dict[str, float], seconds: float, rate: float) -> str:
        """Return the next line, the first time with the header above it."""
        header = ""
        if not self.names:
            losses = [name for name in ("train_loss", "eval_loss") if name in metrics]
            self.names = list(dict.fromkeys(losses + by_interest(metrics, self.keep_best)))[:4]
            columns = (*self.names, "seconds", "samples/s")
            header = "epoch    " + "".join(f"  {name:>9}" for name in columns) + "\n"
        cells = {name: show(name, metrics[name]) if name in metrics else "" for name in self.names}
        cells |= {"seconds": f"{seconds:.1f}", "samples/s": f"{rate:,.0f}"}
        row = "".join(f"  {cell:>{max(9, len(name))}}" for name, cell in cells.items())
        return f"{header}{epoch:<9}{row}"


def show(name: str, value: float) -> str:
    """Format a metric with a readable number of digits; an accuracy in percent."""
    if "accuracy" in name:
        return f"{100 * value:.2f} %"
    return f"{value:,.0f}" if abs(value) > 9999 else f"{value:.4g}"


def by_interest(metrics: dict[str, float], keep_best: str | None) -> list[str]:
    """Return the names of an evaluation's metrics: that of --keep-best, those of READ_FIRST."""
    best, _ = metric_and_direction(keep_best or "")
    names = [name for name in metrics if name.startswith("eval_") and name != "eval_samples"]
    if best in metrics and best not in names:
        names.append(best)
    return sorted(names, key=lambda name: (name != best, not name.endswith(READ_FIRST)))


def show_best(metrics: dict[str, float], keep_best: str | None) -> str:
    """Return the two most interesting metrics of an evaluation as text."""
    names = by_interest(metrics, keep_best)[:2]
    return ", ".join(f"{name} {show(name, metrics[name])}" for name in names)
