"""Run `accelerate launch` and exit with the code of the script; its own is 1 for every failure.

python -m trainkit.tools.launch --config_file accelerate_configs/2cpu.yaml train_mnist.py

For a scheduler that decides by the exit code whether to restart: docs/kubernetes/train.yaml.
"""

import sys

from accelerate.commands.launch import main
from torch.distributed.launcher.api import ChildFailedError, SignalException

try:
    main()
except ChildFailedError as error:
    sys.exit(error.get_first_failure()[1].exitcode)
except SignalException:  # sent to this launcher, which passed it on and waited
    sys.exit(75)
