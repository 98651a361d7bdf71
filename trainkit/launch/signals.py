"""Turns a signal on one process into a stop at the same step on all."""

import os
import signal
import threading
from datetime import timedelta
from types import FrameType

import torch
from accelerate import Accelerator

from trainkit.errors import SIGNALS, Stopped
from trainkit.launch.nodes import deadline


def by_nohup(number: int) -> bool:
    """True for SIGHUP where nohup has started this process: it is to go on without its terminal."""
    return signal.Signals(number).name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN


class Signals:
    """Tells all processes at the same step that one of them was asked to stop.

    SIGTERM, SIGUSR1, Ctrl-C and SIGHUP (its terminal is gone) set a flag; a second Ctrl-C raises
    KeyboardInterrupt at once. Before the first step, while data are loaded for example, the first
    one does, and the others raise Stopped: there is nothing to save. The death of a launcher
    arrives as SIGTERM (startup.end_with_launcher). Every process must build one, in its main
    thread.

    With several processes the flags are summed on the CPU, over a gloo group of their own, while
    the next step runs: no step waits for a device, and a dead or frozen process is noticed here
    within `timeout` even if the device's own collectives never return.
    """

    def __init__(self, accelerator: Accelerator, timeout: timedelta):
        self.signal_name: str | None = None
        self.pending: torch.distributed.Work | None = None
        self.group = None
        if accelerator.num_processes > 1:
            with deadline(timeout):
                self.group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        self.flag = torch.zeros(1)
        self.stopping = False  # what requested() returned last
        self.stepping = False  # true from the first step on, when there is something to save
        self.previous = {n: signal.signal(n, self._on_signal) for n in SIGNALS if not by_nohup(n)}

    def requested(self) -> bool:
        """True on all processes or on none. Every process must call this after every step.

        With one process the answer is about now; with several it is about the previous call.
        """
        self.stepping = True
        if self.group is None:
            self.stopping = self.signal_name is not None
            return self.stopping
        self.wait()
        self.stopping = self.flag.item() > 0
        self.flag.fill_(self.signal_name is not None)
        self.pending = torch.distributed.all_reduce(self.flag, group=self.group, async_op=True)
        return self.stopping

    def wait(self) -> None:
        """Wait until all processes have come to the last call of requested().

        Call it before waiting for the device: it ends in time if another process is lost.
        """
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def barrier(self) -> None:
        """Wait until all processes have come here; every process must call this.

        Call it, instead of wait, before the host waits for the device: a lost peer raises here
        instead of hanging in a GPU sync.
        """
        self.wait()
        if self.group is not None:
            torch.distributed.all_reduce(torch.zeros(1), group=self.group)

    def ignore(self, number: int) -> None:
        """Let this signal do nothing from here on: the run is ending and has a message to print.

        One more Ctrl-C would change the exit code or leave a traceback. A notebook, which goes on
        after the run, has Python's own handler of it and gets that back.
        """
        if self.previous[number] is not signal.default_int_handler:
            self.previous[number] = signal.SIG_IGN
        signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self.previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not set from Python

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, name = self.signal_name is not None, signal.Signals(number).name
        self.signal_name = name
        if number == signal.SIGINT and (again or not self.stepping):
            self.ignore(number)
            raise KeyboardInterrupt
        if not self.stepping:
            raise Stopped(
                f"stopped by {name} before the first step, with nothing to save: start the "
                "same command with --resume auto"
            )


def outlive_signals(worker: int) -> None:
    """What stops the run (Ctrl-C, Slurm, pkill -f) must not kill the workers of its last steps."""
    for number in {*SIGNALS} - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # neither on Windows nor on a Mac
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_wait_for_parent, daemon=True).start()
    if hasattr(os, "setpgid"):  # not on Windows
        os.setpgid(0, 0)


def _wait_for_parent() -> None:
    """End this worker when the training process, which would else wait for it, sends SIGTERM."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
