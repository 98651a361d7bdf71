"""--profile N: where the time of N steps goes, by torch's profiler."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from accelerate import Accelerator
from accelerate.utils import ProfileKwargs

from trainkit.config import TrainingConfig
from trainkit.text import count

WARM_UP = 10  # steps in which memory is reserved, kernels are chosen and models compiled
NUM_ROWS = 10
LAUNCHES = ("LaunchKernel", "GraphLaunch")  # in the names of the calls that a card is given


class Profile:
    """Profiles N steps on the main process; a run without --profile does nothing here.

    The numbers of the run stay as they are. One profile is made, which ends early if an evaluation
    or a save begins, whose operations belong to no step.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrainingConfig,
        num_steps: int,
        say: Callable[[str], None],
    ):
        """num_steps: how many the run still has; if they are few, fewer are profiled."""
        self.accelerator = accelerator
        self.path = config.run_dir / "trace.json"
        self.say = say
        self.num_before = max(1, min(WARM_UP, num_steps // 2))
        is_wanted = accelerator.is_main_process and not config.dry_run
        self.num = config.profile if is_wanted else 0
        self.num_done = 0
        self.profiler: Any = None
        self.started = ExitStack()
        self._start_if_due()

    def _start_if_due(self) -> None:
        if self.num and self.num_done == self.num_before - 1:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints lines of its own
            schedule = {"wait": 0, "warmup": 1, "active": self.num, "repeat": 1}
            options = ProfileKwargs(schedule_option=schedule, record_shapes=True)
            self.profiler = self.started.enter_context(self.accelerator.profile(options))

    def end_step(self) -> None:
        """Count a step, also one that fp16 skips; after the last one say what was seen."""
        self.num_done += 1
        if self.num_done == self.num_before + self.num:
            self.end()
        elif self.num and self.profiler is not None:
            self.profiler.step()
        else:
            self._start_if_due()

    def end(self) -> None:
        """Write trace.json and say what the profile shows, if a step was profiled."""
        num = self.num_done - self.num_before
        if self.profiler is None or num < 1 or self.num == 0:
            return
        self.close()
        self.profiler.export_chrome_trace(str(self.path))
        self.say(self.describe(num))

    def describe(self, num: int) -> str:
        """Return the table of the most expensive operations of `num` steps, and its heading."""
        averages = self.profiler.key_averages(group_by_input_shape=True)
        on_card = self.accelerator.device.type == "cuda"
        table = averages.table(
            sort_by="self_device_time_total" if on_card else "self_cpu_time_total",
            row_limit=NUM_ROWS,
            max_name_column_width=40,
            max_shapes_column_width=50,
        )
        calls = sum(row.count for row in averages if any(name in row.key for name in LAUNCHES))
        launches = f", {calls / num:.0f} kernels launched in each" if on_card else ""
        trace = f"{self.path}, for ui.perfetto.dev"
        return f"profile      of {count(num, 'step')}{launches}\n{table}trace        {trace}"

    def close(self) -> None:
        """Stop the profiler, if it runs, and profile no more."""
        self.num = 0
        self.started.close()
