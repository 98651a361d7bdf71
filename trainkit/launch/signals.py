"""Turns a signal on one process into a stop at the same step on all."""

import os
import signal
import threading
from datetime import timedelta
from types import FrameType

import torch
from accelerate import Accelerator

from trainkit.errors import SIGNALS, Stopped, by_nohup, stopped_early
from trainkit.launch.processes import deadline
from trainkit.launch.startup import keep_printing


class Signals:
    """Tells all processes at the same step that one of them was asked to stop.

    A signal sets a flag; a second Ctrl-C raises KeyboardInterrupt at once. Before the first step
    the first Ctrl-C does so, and the other signals raise Stopped. Every process must make one of
    these objects, in its main thread.

    With several processes the flags are summed on the CPU, in a gloo group of their own, while the
    next step runs. So a dead process is noticed here within `timeout`, even if the device's own
    collectives never return.
    """

    def __init__(self, accelerator: Accelerator, timeout: timedelta):
        self.signal_name: str | None = None
        self.pending: torch.distributed.Work | None = None
        self.group = None
        if accelerator.num_processes > 1:
            with deadline(timeout):
                self.group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        self.num_asked = torch.zeros(1)  # how many processes were, before their last step
        self.stopping = False  # what requested() returned last
        self.stepping = False  # true from the first step on, when there is something to save
        self.previous = {n: signal.signal(n, self._on_signal) for n in SIGNALS if not by_nohup(n)}

    def requested(self, failed: bool = False) -> bool:
        """True on all processes or on none. Every process must call this after every step.

        `failed`: this process has lost a checkpoint. With several processes the result is that of
        the previous call.
        """
        self.stepping = True
        if self.group is None:
            self.stopping = self.signal_name is not None or failed
            return self.stopping
        self.wait()
        self.stopping = self.num_asked.item() > 0
        self.num_asked = torch.tensor([float(self.signal_name is not None or failed)])
        self.pending = torch.distributed.all_reduce(self.num_asked, group=self.group, async_op=True)
        return self.stopping

    def wait(self) -> None:
        """Wait until all processes have reached the last call of requested()."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def gather(self, mine: list) -> list:
        """Return the lists of all processes in one. Every process must call this."""
        self.wait()
        if self.group is None:
            return mine
        lists = [mine] * torch.distributed.get_world_size(self.group)
        torch.distributed.all_gather_object(lists, mine, group=self.group)
        return [thing for each in lists for thing in each]

    def barrier(self) -> None:
        """Wait for all processes before the host waits for the device: a lost one would hang it."""
        self.wait()
        if self.group is not None:
            torch.distributed.all_reduce(torch.zeros(1), group=self.group)

    def ignore(self, number: int) -> None:
        """Ignore this signal from here on: the run is ending and still has a message to print.

        In a notebook restore() puts Python's own handler for Ctrl-C back.
        """
        if self.previous[number] is not signal.default_int_handler:
            self.previous[number] = signal.SIG_IGN
        signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self.previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not set from Python

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = self.signal_name is not None
        self.signal_name = signal.Signals(number).name
        if number == signal.SIGINT and (again or not self.stepping):
            self.ignore(number)
            raise KeyboardInterrupt
        if not self.stepping:
            raise Stopped(stopped_early(number))


def outlive_signals(worker: int) -> None:
    """Keep a loader worker alive during a stop (Ctrl-C, Slurm, pkill -f), for the last steps."""
    keep_printing()
    for number in {*SIGNALS} - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on Windows or macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_wait_for_parent, daemon=True).start()
    if hasattr(os, "setpgid"):  # not on Windows
        os.setpgid(0, 0)


def _wait_for_parent() -> None:
    """End this worker if the training process sends SIGTERM, because that then waits for it."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
