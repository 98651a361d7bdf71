"""Be one process of a rehearsal: run the script as it stands, shortened, in a folder of its own."""

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import types
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainkit import startup

from trainkit.tools.rehearse import watching
from trainkit.tools.rehearse.worlds import World


@dataclass
class Role:
    """What a process of a rehearsal has to be; it travels to the process by pickle.

    Attributes:
        script, flags: what a person types after `python`.
        folder: of this world; each process writes its output there, and the run is in folder/run.
        rank: of the process. Only the first one writes down what it sees.
        settings: fields of the script's config, and their values in this world.
        env: variables of the environment, None: not set.
        num_epochs: at least so many.
    """

    world: World
    script: str
    flags: list[str]
    folder: Path
    rank: int
    settings: dict[str, Any]
    env: dict[str, str | None]
    num_epochs: int


def be(role: Role) -> None:
    """Do what `python SCRIPT FLAGS` does; a main(argv) that nothing has called is called."""
    if sys.platform == "linux":  # so that nothing is left if the rehearsal itself is killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    names = [role.folder / f"{name}-{role.rank}" for name in ("stdout", "stderr")]
    outputs = [os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in names]
    for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), *outputs)):
        os.dup2(file, stream)
    for name, value in role.env.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    tempfile.tempdir = os.environ["TMPDIR"] = str(role.folder)
    sys.dont_write_bytecode = True
    multiprocessing.set_start_method(None, force=True)  # loader workers start as in a run
    watch = watching.Watch(role)
    path = Path(role.script).resolve()
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module
    sys.argv = [role.script, *role.flags]
    sys.path.insert(0, str(path.parent))
    exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    if watch.run is None and callable(main := getattr(module, "main", None)):
        startup.run(partial(main, role.flags))
