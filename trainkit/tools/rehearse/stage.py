"""Starts the processes of worlds, several worlds at once, and ends them all."""

import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainkit.tools.rehearse.outcome import Outcome, why_not
from trainkit.tools.rehearse.worlds import ENV, SETTINGS, World

GRACE_SECONDS = 3.0  # for the other processes, once one has failed
PROCESS = "trainkit.tools.rehearse.process"


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
            self.context.set_forkserver_preload([PROCESS, *imports_of(script)])
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
            outcome.problem, outcome.is_refusal = why_not(folder, codes, self.script, self.limit)
        elif not (folder / "facts.json").exists():
            outcome.problem = "it ended without run.finish()"
        return outcome

    def _process(self, outcome: Outcome, rank: int, store: Any) -> Any:
        from trainkit.tools.rehearse.process import Role, be

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
