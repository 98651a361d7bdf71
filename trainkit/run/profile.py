"""--profile N: where the time of a step goes, and what limits it."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend

from trainkit.config import TrainingConfig
from trainkit.repairs.names import is_made_of_others
from trainkit.text import count

WARM_UP = 10  # steps in which memory is reserved, kernels are chosen and models compiled
NUM_ROWS = 10
WIDTH = 34  # of the columns with names and shapes
# Operations that only describe memory, so that they launch no kernel on a card.
VIEWS = {
    f"aten::{name}"
    for name in (
        *("view", "_unsafe_view", "view_as", "reshape", "_reshape_alias", "flatten", "unflatten"),
        *("as_strided", "expand", "expand_as", "permute", "transpose", "t", "movedim", "diagonal"),
        *("slice", "select", "narrow", "unbind", "split", "chunk", "unfold"),
        *("alias", "detach", "detach_", "squeeze", "unsqueeze", "lift_fresh", "set_", "resize_"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "result_type"),
        *("resolve_conj", "resolve_neg", "is_nonzero", "item", "_local_scalar_dense"),
    )
}
PLANNED = "aten::_cudnn_attention_forward"
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
LAUNCHES = ("LaunchKernel", "GraphLaunch")


class Profile:
    """Times N steps, then profiles N more; a run without --profile does nothing here.

    Only the main process measures. The numbers of the run stay as they are. One profile is made,
    which ends early if an evaluation begins, after which the steps would be other ones, or a save,
    whose operations belong to no step.
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
        self.config = config
        self.say = say
        self.num_warm_up = min(WARM_UP, num_steps // 3)
        self.num_timed = min(config.profile, (num_steps - self.num_warm_up) // 2)
        self.is_on = self.num_timed > 0 and accelerator.is_main_process
        if config.profile and self.num_timed < 1 and not config.dry_run:
            say(f"--profile {config.profile}: the run has too few steps left, {num_steps}")
        if self.is_on:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints lines of its own
        self.num_done = 0
        self.profiler: Any = None
        # Seconds of the timed steps, waiting for data, in this thread on a core, and with profiler.
        self.seconds = self.data_seconds = self.core_seconds = self.profiled_seconds = 0.0
        self.num_profiled = 0
        self.num_skipped = 0  # of those that were profiled
        self.paused: tuple[float, float] | None = None  # what at and core_at had counted
        self._mark()

    def read(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield these batches, and time how long the loop waits for each."""
        if not self.is_on:
            yield from batches
            return
        self._mark()
        iterator = iter(batches)
        while True:
            self._resume()
            self._start_profiler()
            started, on_core = time.perf_counter(), time.thread_time()
            with torch.profiler.record_function("waiting for data"):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            if self._is_timed():
                self.data_seconds += time.perf_counter() - started
                self.core_seconds -= time.thread_time() - on_core
            yield batch

    def end_step(self, was_skipped: bool = False) -> None:
        """Count a step; after the last one say what the profiler saw.

        A step that fp16 skips takes time and launches kernels too, so it is one of those that are
        divided by. The profiler goes on until N other steps were made.
        """
        if not self.is_on:
            return
        seconds = time.perf_counter() - self.at
        core_seconds = time.thread_time() - self.core_at
        if self._is_timed():
            self.seconds += seconds
            self.core_seconds += core_seconds
        elif self.profiler:
            self.profiled_seconds += seconds
            self.num_profiled += 1
            self.num_skipped += was_skipped
        self.num_done += 1
        if self.num_profiled - self.num_skipped == self.num_timed:
            self.end()
        self._mark()

    def end(self) -> None:
        """Write trace.json and say what the profile shows, if it has begun."""
        if self.profiler is None:
            return
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        self.profiler.stop()
        profiler = self.profiler
        self.profiler = None
        self.is_on = False
        if self.num_profiled == self.num_skipped:
            self.say(
                f"--profile {self.config.profile}: fp16 skipped the step that was to be profiled: "
                "start the run again, with a larger --profile"
            )
            return
        path = self.config.run_dir / "trace.json"
        hidden = path.with_name(f".tmp-{path.name}")
        try:
            profiler.export_chrome_trace(str(hidden))
            hidden.replace(path)
        except OSError as problem:
            self.say(f"--profile: {path} cannot be written: {problem.strerror}")
        self.say(self._describe(profiler, path))

    def pause(self) -> None:
        """Count nothing until the next batch is read: a save is no part of a step."""
        self.end()
        self.paused = time.perf_counter() - self.at, time.thread_time() - self.core_at

    def _resume(self) -> None:
        """Go on with the step at what it had taken when it was paused."""
        if self.paused:
            self._mark()
            self.at -= self.paused[0]
            self.core_at -= self.paused[1]
            self.paused = None

    def close(self) -> None:
        """Stop the profiler of a run that ends in the middle of it."""
        if self.profiler:
            self.profiler.stop()
            self.profiler = None

    def _start_profiler(self) -> None:
        """Start the profiler before the first batch after the timed steps."""
        if self.profiler or not self.is_on or self.num_done < self.num_warm_up + self.num_timed:
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.accelerator.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        self.profiler = torch.profiler.profile(activities=kinds, record_shapes=True)
        self.profiler.start()
        self._mark()

    def _is_timed(self) -> bool:
        return self.num_warm_up <= self.num_done < self.num_warm_up + self.num_timed

    def _mark(self) -> None:
        self.at = time.perf_counter()
        self.core_at = time.thread_time()

    def _describe(self, profiler: Any, path: Path) -> str:
        on_card = self.accelerator.device.type == "cuda"
        num = self.num_profiled
        step = 1000 * self.seconds / self.num_timed
        parts = self._parts_of(step, profiler, on_card)
        if on_card:
            launches = num_launched(profiler.key_averages()) / num
        else:
            launches = num_launches(profiler.events()) / num
        shares = {name: value / step for name, value in parts.items()}
        # autograd calls the operations of the backward pass in a thread of its own on a card.
        together = (
            " (host and device work at the same time; the host's is without the backward pass)"
            if on_card
            else ""
        )
        would = "" if on_card else " (operations that would launch one on a card)"
        lines = {
            "profile": f"of {self._say_steps()}; the times of a step are of "
            f"{count(self.num_timed, 'step')} before, without the profiler",
            "a step": f"{step:.4g} ms{together}: "
            + ", ".join(f"{name} {ms:.3g} ms ({shares[name]:.0%})" for name, ms in parts.items()),
            "launches": f"{launches:.0f} kernels a step{would}",
            "peak memory": f"{peak_memory(self.accelerator.device) / 2**20:,.0f} MiB",
        }
        text = "\n".join(f"{name:<12} {line}" for name, line in lines.items())
        by_shape = profiler.key_averages(group_by_input_shape=True)
        table = most_expensive(by_shape, num, on_card)
        num_plans = sum(row.key == PLANNED for row in by_shape)
        limit = self._limit(shares, launches, num_plans)
        return f"{text}\n{table}\nlimited by   {limit}\ntrace        {path}, for ui.perfetto.dev"

    def _parts_of(self, step: float, profiler: Any, on_card: bool) -> dict[str, float]:
        """What a step spends its milliseconds on."""
        averages = profiler.key_averages()
        num = self.num_profiled
        data, core = (
            1000 * seconds / self.num_timed for seconds in (self.data_seconds, self.core_seconds)
        )
        if on_card:
            waits = sum(e.cpu_time_total for e in averages if e.key in WAITS) / 1000 / num
            device = min(step, busy_microseconds(profiler.events()) / 1000 / num)
            return {
                "waiting for data": data,
                "host": max(0.0, core - waits),
                "device": device,
                "idle (the device)": step - device,
            }
        inside = sum(e.self_cpu_time_total for e in averages if e.key.startswith("aten::"))
        share = min(1.0, inside / 1e6 / max(self.profiled_seconds, 1e-9))
        return {
            "waiting for data": data,
            "operations": core * share,
            "Python": core * (1 - share),
            "idle": max(0.0, step - data - core),
        }

    def _say_steps(self) -> str:
        skipped = f", of which fp16 skipped {self.num_skipped}" if self.num_skipped else ""
        return f"{count(self.num_profiled, 'step')}{skipped}"

    def _limit(self, shares: dict[str, float], launches: float, num_plans: int = 0) -> str:
        """One sentence: what limits the step, and what helps.

        num_plans: of cuDNN's attention, one for each shape that it was given.
        """
        config, accelerator = self.config, self.accelerator
        if shares["waiting for data"] > 0.2:
            more = 2 * config.num_workers or 4
            return f"the data, which the step waits for: --num-workers {more} makes more at a time"
        if accelerator.device.type != "cuda":
            return self._limit_on_cpu(shares)
        if shares["idle (the device)"] < 0.3:
            if accelerator.mixed_precision == "no":
                return "the device, in float32: accelerate_configs/1gpu_bf16.yaml computes faster"
            return "the device, which hardly ever waits: a smaller model, or more devices"
        if num_plans > 1:
            return (
                f"the host, where cuDNN makes a plan of attention for each of {num_plans} shapes: "
                "torch.backends.cuda.enable_cudnn_sdp(False) leaves it out"
            )
        helps = f"a --batch-size above {config.batch_size} gives each kernel more to do"
        if config.accumulate > 1:
            helps = f"--accumulate 1, if the memory is enough, instead of {config.accumulate}"
        if accelerator.state.dynamo_plugin.backend == DynamoBackend.NO:
            helps += ", and accelerate_configs/1gpu_bf16_compile.yaml launches fewer"
        return f"the host, which launches {launches:.0f} kernels one by one: {helps}"

    def _limit_on_cpu(self, shares: dict[str, float]) -> str:
        largest = max(("operations", "Python", "idle"), key=lambda name: shares[name])
        if largest == "idle" and self.accelerator.num_processes > 1:
            return "waiting for the other processes: give each of them cores of its own"
        if largest == "idle":
            return "waiting for a core: other programs, or loader workers, use them"
        if largest == "Python" and self.config.accumulate > 1:
            return f"Python between the operations: --accumulate 1, not {self.config.accumulate}"
        if largest == "Python":
            return (
                "Python between the operations: a --batch-size above "
                f"{self.config.batch_size} gives each of them more to do"
            )
        return (
            f"the operations themselves, on {count(torch.get_num_threads(), 'thread')}: a smaller "
            "model, or a GPU (accelerate_configs/1gpu_bf16.yaml)"
        )


def busy_microseconds(events: Iterable[Any]) -> float:
    """How long at least one kernel or copy was at work on the device."""
    cuda = torch.autograd.DeviceType.CUDA
    ranges = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == cuda and not getattr(event, "is_user_annotation", False)
    )
    busy, reached = 0.0, 0.0
    for start, end in ranges:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy


def num_launched(averages: Iterable[Any]) -> int:
    """How many kernels, and graphs of kernels, were launched on a card."""
    return sum(row.count for row in averages if any(name in row.key for name in LAUNCHES))


def num_launches(events: Iterable[Any]) -> int:
    """How many operations have a kernel of their own and do more than describe memory.

    What such an operation calls is a part of it: on a CPU adding a number converts the number.
    """
    return sum(_launches_of(event) for event in events if event.cpu_parent is None)


def _launches_of(event: Any) -> int:
    is_operation = event.name.startswith("aten::") and event.name not in VIEWS
    if is_operation and not is_made_of_others(event.name):
        return 1
    return sum(_launches_of(child) for child in event.cpu_children)


def most_expensive(averages: Iterable[Any], num_steps: int, on_card: bool) -> str:
    """A table of the operations that took longest, by name and shapes of what they were given."""
    kind = "self_device_time_total" if on_card else "self_cpu_time_total"
    rows = [row for row in averages if row.key.startswith(("aten::", "c10d::", "nccl:", "triton"))]
    if on_card:  # what is compiled is a kernel without an operation
        rows = [row for row in averages if getattr(row, kind) > 0]
    total = sum(getattr(row, kind) for row in rows) or 1
    rows.sort(key=lambda row: getattr(row, kind), reverse=True)
    lines = [f"{'operation':<{WIDTH}} {'shapes':<{WIDTH}}  calls  ms a step  share"]
    for row in rows[:NUM_ROWS]:
        shapes = " ".join(str(shape).replace(" ", "") for shape in row.input_shapes if shape)
        name = row.key.removeprefix("aten::")
        spent = getattr(row, kind)
        lines.append(
            f"{name[:WIDTH]:<{WIDTH}} {shapes[:WIDTH]:<{WIDTH}}  {row.count / num_steps:>5.3g}  "
            f"{spent / 1000 / num_steps:>9.3g}  {spent / total:>5.0%}"
        )
    return "\n".join(line.rstrip() for line in lines)


def peak_memory(device: torch.device) -> int:
    """The most bytes of tensors on this device so far; on the CPU, of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        import psutil  # 20 ms

        return psutil.Process().memory_info().peak_wset
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
