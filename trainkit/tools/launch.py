"""Run `accelerate launch`, pass signals on to the script, and exit with its code.

python -m trainkit.tools.launch --config_file accelerate_configs/2cpu.yaml train_mnist.py

For a scheduler that decides by the exit code whether to restart: docs/kubernetes/train.yaml. By
itself `accelerate launch` exits with 1 after every failure. It passes no signal on to a single
process, and as the first process of a container it hears only those that torchelastic handles.
"""

import contextlib
import os
import signal
import subprocess
import sys
from types import FrameType

import psutil

from trainkit.errors import EXIT_STOPPED, SIGNALS, by_nohup, stopped_early

HEARD: set[int] = set()  # the signals that were passed on


def listen() -> None:
    """Pass on each signal that comes; torchelastic puts handlers of its own in place of most."""
    for number in SIGNALS:
        if not by_nohup(number):
            signal.signal(number, pass_on)


def pass_on(number: int, frame: FrameType | None) -> None:
    """Send a signal on to the processes that were started, or end if there are none yet."""
    HEARD.add(number)
    started = psutil.Process().children()
    for process in started:
        process.send_signal(number)
    if not started:
        with contextlib.suppress(OSError):  # its reader may have gone away
            os.write(2, f"error: {stopped_early(number)}\n".encode())
        os._exit(EXIT_STOPPED)


def main() -> int:
    """Start what the command line says, wait for its end, and return the exit code."""
    # These imports take seconds, in which signals must be heard already.
    from accelerate.commands import launch
    from torch.distributed.launcher.api import ChildFailedError, SignalException

    from trainkit.repairs.replaced import launch_in_own_session

    launch_in_own_session()
    try:
        launch.main()
        return 0
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
    except subprocess.CalledProcessError as error:  # there was one process
        rank, code = 0, error.returncode
    except SignalException:  # sent to this launcher, which passed it on and waited
        return EXIT_STOPPED
    if code >= 0:
        return code
    name = signal.Signals(-code).name  # such a process, ended in its imports say, printed nothing
    why = ", probably because the memory is full" if name == "SIGKILL" else ""
    print(
        f"error: process {rank} was ended by {name}{why}; the checkpoints are intact: remove the "
        "cause, if it was not you, then start the same command with --resume auto",
        file=sys.stderr,
    )
    return EXIT_STOPPED if -code in HEARD else code


if __name__ == "__main__":
    if os.name == "posix":  # elsewhere Ctrl-C, the only signal, reaches every process of a console
        listen()
    code = main()
    for number in SIGNALS:  # one that comes now must not change the code
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)
