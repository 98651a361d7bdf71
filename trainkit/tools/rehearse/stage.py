"""Starts and ends the processes of worlds, several worlds at once, and is each of them."""

import ctypes
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import EXIT_FAILURE
from trainkit.tools.rehearse.worlds import ENV, SETTINGS, Outcome, World, why, why_not

GRACE_SECONDS = 3.0  # for the other processes, once one has failed


@dataclass
class Role:
    """What a process of a rehearsal has to be; it travels to the process by pickle.

    settings: fields of the script's config; env: variables, None: not set.
    """

    world: World
    script: str
    flags: list[str]
    folder: Path
    rank: int
    settings: dict[str, Any]
    env: dict[str, str | None]
    num_epochs: int


class Stage:
    """Runs a script with its flags, in worlds that each have a folder in this one.

    Args:
        epochs: at least so many.
        limit: the seconds after which a world is ended.
    """

    def __init__(self, script: str, flags: list[str], folder: Path, epochs: int, limit: float):
        self.script, self.flags, self.folder = script, flags, folder
        self.epochs, self.limit = epochs, limit
        self.context: Any = multiprocessing.get_context("spawn")
        if sys.platform == "linux":
            self.context = multiprocessing.get_context("forkserver")
            self.context.set_forkserver_preload(imports_of(script))
        self.pool = ThreadPoolExecutor(max(3, os.cpu_count() or 1))
        self.is_over = False

    def run(self, world: World, first: Outcome | None = None) -> Outcome:
        """Run the script in this world to its end."""
        folder = self.folder / re.sub(r"\W+", "-", world.name).strip("-")
        folder.mkdir()
        outcome = Outcome(world, folder)
        if first and world.resumed_after:
            copy_as_killed(first.folder / "run", folder / "run", world.resumed_after)
        started_at = time.monotonic()
        store = open_meeting_point() if world.num_processes > 1 else None
        ranks = range(world.num_processes)
        codes = self._wait([self._process(outcome, rank, store) for rank in ranks])
        outcome.seconds = time.monotonic() - started_at
        if any(code not in (0, 3) for code in codes):  # 3: a target of the script, after few steps
            outcome.problem, outcome.is_refusal = why_not(outcome, codes, self.limit)
        elif not (folder / "facts.json").exists():
            outcome.problem = "it ended without run.finish()"
        return outcome

    def _process(self, outcome: Outcome, rank: int, store: Any) -> Any:
        world, folder = outcome.world, outcome.folder
        joined = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world.num_processes),
            "LOCAL_WORLD_SIZE": str(world.num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store and store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        # A launch of the shell that starts the rehearsal is not that of the worlds.
        launch = joined if store else dict.fromkeys(joined)
        role = Role(
            world=world,
            script=self.script,
            flags=self.flags,
            folder=folder,
            rank=rank,
            settings=SETTINGS | {"run_dir": folder / "run"} | world.settings,
            env={**launch, **ENV, **world.env},
            num_epochs=self.epochs,
        )
        return self.context.Process(target=be, args=(role,))

    def _wait(self, processes: list[Any]) -> list[int | None]:
        """Start processes, and return their exit codes; None: it did not end in time."""
        for process in processes:
            process.start()
        end_at = time.monotonic() + self.limit
        alive = list(processes)
        while alive and time.monotonic() < end_at and not self.is_over:
            sentinels = [process.sentinel for process in alive]
            multiprocessing.connection.wait(sentinels, min(1.0, end_at - time.monotonic()))
            alive = [process for process in alive if process.is_alive()]
            if any(process.exitcode for process in processes):
                end_at = min(end_at, time.monotonic() + GRACE_SECONDS)
        for process in alive:
            process.kill()  # its loader workers end by themselves
            process.join()
        return [None if process in alive else process.exitcode for process in processes]

    def close(self) -> None:
        """End everything that was started."""
        self.is_over = True
        self.pool.shutdown(cancel_futures=True)


def open_meeting_point() -> Any:
    """Open a port by which processes find each other, as torchrun does: so it stays free."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def imports_of(script: str) -> list[str]:
    """The packages that a script imports: the server imports them once, for all processes.

    Modules beside the script are left to each process, because they may do anything.
    """
    names = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "tqdm.auto"]
    names.insert(0, "trainkit.tools.rehearse.watching")
    source = Path(script).read_text(errors="replace")
    names += re.findall(r"^ *(?:from|import) +(\w[\w.]*)", source, re.MULTILINE)
    specs = {name: importlib.util.find_spec(name.partition(".")[0]) for name in names}
    own = "site-packages", f"{os.sep}trainkit{os.sep}"
    return [n for n, spec in specs.items() if any(p in str(spec and spec.origin) for p in own)]


def copy_as_killed(source: Path, target: Path, step: int) -> None:
    """Copy a run folder as it was after the checkpoint of this step, with a longer log."""

    def ignored(folder: str, names: list[str]) -> list[str]:
        later = [name for name in names if name.startswith("step-") and int(name[5:]) > step]
        at_top = [name for name in names if name == "DONE" or name.endswith(".safetensors")]
        return later + (at_top if Path(folder) == source else [])

    shutil.copytree(source, target, ignore=ignored)


def be(role: Role) -> None:
    """Do what `python SCRIPT FLAGS` does; a main(argv) that nothing has called is called."""
    if sys.platform == "linux":  # so that nothing is left if the rehearsal itself is killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    for stream in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    for name, value in role.env.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    tempfile.tempdir = os.environ["TMPDIR"] = str(role.folder)
    sys.dont_write_bytecode = True
    multiprocessing.set_start_method(None, force=True)  # loader workers start as in a run
    from trainkit import startup

    from trainkit.tools.rehearse.watching import Watch  # which imports torch, as the server has

    watch = Watch(role)
    path = Path(role.script).resolve()
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module
    sys.argv = [role.script, *role.flags]
    sys.path.insert(0, str(path.parent))
    startup.run = lambda main, **options: main()
    startup.set_up_process()
    code = 0
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
        if watch.run is None and callable(main := getattr(module, "main", None)):
            main(role.flags)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        code = getattr(error, "exit_code", EXIT_FAILURE)
        (role.folder / f"ended-{role.rank}.json").write_text(json.dumps(why(error, path)))
    startup.leave(code)
