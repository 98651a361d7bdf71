"""Lines of metrics for the screen."""

import shutil
import sys
import textwrap

from trainkit.config.directions import metric_and_direction

# The metrics that a person looks at first, by the ends of their names.
READ_FIRST = ("accuracy", "rmse", "r2")


def fit(text: str) -> str:
    """Break long lines between words if the output is a terminal, else return the text unchanged.

    The rest of a broken line of the plan is indented to its column.
    """
    if not sys.stdout.isatty():
        return text
    wrap = textwrap.TextWrapper(
        shutil.get_terminal_size().columns - 1, break_long_words=False, break_on_hyphens=False
    )
    lines = text.split("\n")
    for number, line in enumerate(lines):
        wrap.subsequent_indent = " " * (len(line) - len(line.rpartition("  ")[2]))
        lines[number] = wrap.fill(line)
    return "\n".join(lines)


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
            header = "epoch    " + "".join(
                f"  {n:>9}" for n in (*self.names, "seconds", "samples/s")
            )
        cells = {name: show(name, metrics[name]) if name in metrics else "" for name in self.names}
        cells |= {"seconds": f"{seconds:.1f}", "samples/s": f"{rate:,.0f}"}
        row = "".join(f"  {cell:>{max(9, len(name))}}" for name, cell in cells.items())
        return f"{header}\n{epoch:<9}{row}".lstrip()


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
