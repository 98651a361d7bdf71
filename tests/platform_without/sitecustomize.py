"""Takes away from this process what Windows or a Mac lacks; tests/test_platforms.py."""

import os
import signal
import sys
from pathlib import Path

import psutil  # noqa: F401  on Linux it needs what is taken away, on Windows it does not

for name in ("fcntl", "resource"):
    sys.modules[name] = None
del signal.SIGUSR1, signal.SIGHUP, os.setpgid
open_file = os.open


def open_no_folder(path: object, flags: int, *args: object, **kwargs: object) -> int:
    if sys._getframe(1).f_code.co_name == "sync" and Path(path).is_dir():
        raise PermissionError(13, "Permission denied", path)
    return open_file(path, flags, *args, **kwargs)


os.open = open_no_folder
