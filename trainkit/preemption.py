"""A signal becomes a flag, and the flag a decision that all processes take at the same step."""

import signal
import sys
from datetime import timedelta
from types import FrameType

import torch
from accelerate import Accelerator

from trainkit.launch import EXIT_STOPPED, deadline

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Preemption:
    """Tells all processes at the same step that one of them was asked to stop.

    SIGTERM, SIGUSR1 and Ctrl-C set a flag; a second Ctrl-C interrupts at once. The death of a
    launcher arrives as SIGTERM (trainkit/__init__.py). Every process must build one.

    With several processes the flags are summed on the CPU, over a gloo group of their own, while
    the next step runs: no step waits for a device, and a dead or frozen process is noticed here
    within `timeout` even if the device's own collectives never return.
    """

    def __init__(self, accelerator: Accelerator, timeout: timedelta):
        self.accelerator = accelerator
        self.signal_name: str | None = None
        self.pending: torch.distributed.Work | None = None
        self.group = None
        if accelerator.num_processes > 1:
            with deadline(timeout):
                self.group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        self.flag = torch.zeros(1)
        self.previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def requested(self) -> bool:
        """True on all processes or on none. Every process must call this after every step.

        With one process the answer is about now; with several it is about the previous call.
        """
        if self.group is None:
            return self.signal_name is not None
        stop = False
        if self.pending is not None:
            self.pending.wait()
            stop = self.flag.item() > 0
        self.flag.fill_(self.signal_name is not None)
        self.pending = torch.distributed.all_reduce(self.flag, group=self.group, async_op=True)
        return stop

    def stop(self, step: int) -> None:
        """End every process with exit code 75, after a checkpoint of this step."""
        self.previous[signal.SIGINT] = signal.SIG_IGN  # one more Ctrl-C would change the exit code
        self.close()
        if self.accelerator.is_main_process:
            print(
                f"stopped by {self.signal_name or 'a signal to another process'} at step {step}, "
                "saved: start the same command with --resume auto to continue",
                flush=True,
            )
        self.accelerator.end_training()
        sys.exit(EXIT_STOPPED)

    def close(self) -> None:
        """Finish the reduction under way, give the signals back. Every process must call this."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a third would leave a traceback
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
