"""Run `accelerate launch` and exit with the code of the script; its own is 1 for every failure.

python -m trainkit.tools.launch --config_file accelerate_configs/2cpu.yaml train_mnist.py

For a scheduler that decides by the exit code whether to restart: docs/kubernetes/train.yaml.
"""

import signal
import subprocess
import sys

from accelerate.commands.launch import main
from torch.distributed.launcher.api import ChildFailedError, SignalException

try:
    main()
except (ChildFailedError, subprocess.CalledProcessError) as error:
    rank = 0
    if isinstance(error, ChildFailedError):
        rank, failure = error.get_first_failure()
        code = failure.exitcode
    else:  # there was one process
        code = error.returncode
    if code < 0:  # a signal; such a process, killed in its imports say, printed nothing
        name = signal.Signals(-code).name
        why = ", probably because the memory is full" if name == "SIGKILL" else ""
        print(
            f"error: process {rank} was ended by {name}{why}; the checkpoints are intact: "
            "remove the cause, then start the same command with --resume auto",
            file=sys.stderr,
        )
    sys.exit(code)
except SignalException:  # sent to this launcher, which passed it on and waited
    sys.exit(75)
