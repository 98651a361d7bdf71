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
        self.accelerator, self.config, self.say = accelerator, config, say
        self.num_before = max(1, min(WARM_UP, num_steps // 2))
        self.num_done = 0
        self.profiler: Any = None
        self.started = ExitStack()
        if config.profile and accelerator.is_main_process:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints lines of its own
            schedule = {"wait": self.num_before - 1, "warmup": 1, "active": config.profile}
            options = ProfileKwargs(schedule_option=schedule | {"repeat": 1}, record_shapes=True)
            self.profiler = self.started.enter_context(accelerator.profile(options))

    def end_step(self) -> None:
        """Count a step, also one that fp16 skips; after the last one say what was seen."""
        self.num_done += 1
        if self.num_done == self.num_before + self.config.profile:
            self.end()
        elif self.profiler is not None:
            self.profiler.step()

    def end(self) -> None:
        """Write trace.json and say what the profile shows, if a step was profiled."""
        num, profiler = self.num_done - self.num_before, self.profiler
        if profiler is not None and num > 0:
            self.close()
            path = self.config.run_dir / "trace.json"
            profiler.export_chrome_trace(str(path))
            table = self.describe(profiler.key_averages(group_by_input_shape=True), num)
            self.say(f"{table}trace        {path}, for ui.perfetto.dev")

    def describe(self, averages: Any, num: int) -> str:
        """Return the table of the most expensive operations of `num` steps, and its heading."""
        on_card = self.accelerator.device.type == "cuda"
        table = averages.table(
            sort_by="self_device_time_total" if on_card else "self_cpu_time_total",
            row_limit=NUM_ROWS,
            max_name_column_width=40,
            max_shapes_column_width=50,
        )
        calls = sum(row.count for row in averages if any(name in row.key for name in LAUNCHES))
        launches = f", {calls / num:.0f} kernels launched in each" if on_card else ""
        return f"profile      of {count(num, 'step')}{launches}\n{table}"

    def close(self) -> None:
        """Stop the profiler, if it runs, and profile no more."""
        self.profiler = None
        self.started.close()
