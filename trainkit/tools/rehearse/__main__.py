"""Does a script keep the promises? Run it for some twenty steps in several worlds, and compare.

python -m trainkit.tools.rehearse SCRIPT [FLAGS ...]

SCRIPT is any script that has a Run, in any folder, and FLAGS are those that it is trained with. It
runs on the CPU: twice, resumed, with loader workers, with --accumulate 2, in two processes and
sharded over two. A line says for each whether the numbers are the same and, if not, what makes them
others; a second one names the row of a page in docs/ that has the cure. Epochs are cut to 4 steps,
so that several of them are seen, with their evaluations. Nothing is written into --run-dir, and
nothing is left but a mark in the cache of the user if the promises are kept.

Before SCRIPT: --epochs N for what begins in a later epoch, --limit SECONDS for a slow script, and
--only TEXT for the worlds whose name has it. Exit code 0: the promises are kept; 1: something
differs that should not, or fails; 2: the script does not run.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from trainkit.errors import UsageError
from trainkit.store.rehearsals import mark_of_rehearsal
from trainkit.text import count
from trainkit.tools.rehearse.causes import judge, told
from trainkit.tools.rehearse.pages import REMARKS, RESUMED
from trainkit.tools.rehearse.stage import Stage
from trainkit.tools.rehearse.worlds import AGAIN, FIRST, Outcome, World, worlds_of


def main(argv: Sequence[str] | None = None) -> int:
    """Rehearse the script that the command line names."""
    reader = argparse.ArgumentParser(
        prog="python -m trainkit.tools.rehearse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    reader.add_argument("--epochs", type=int, default=5, help="at least so many (default: 5)")
    reader.add_argument("--limit", type=float, default=300.0, help="seconds of a run (300)")
    reader.add_argument("--only", default="", help="the worlds whose name has this text")
    reader.add_argument("script", metavar="SCRIPT")
    reader.add_argument("flags", metavar="FLAGS", nargs="...")
    args = reader.parse_args(argv)
    if not Path(args.script).is_file():
        raise UsageError(f"SCRIPT {args.script} is not a file: give the path of a training script")
    with tempfile.TemporaryDirectory(prefix="rehearsal-", ignore_cleanup_errors=True) as folder:
        stage = Stage(args.script, args.flags, Path(folder), args.epochs, args.limit)
        try:
            is_kept = rehearse(stage, args.only)
        finally:
            stage.close()
    if is_kept and not args.only:
        leave_mark(Path(args.script))
    return 0 if is_kept else 1


def rehearse(stage: Stage, only: str) -> bool:
    """Run all worlds, and print a line for each as soon as it is known; are the promises kept?"""
    first = stage.run(FIRST)
    if first.problem:
        raise UsageError(f"{stage.script} does not run: {first.problem}")
    facts = first.noted("facts")
    worlds = worlds_of(first.folder)
    if not any(only in world.name for world in worlds):
        names = ", ".join(world.name for world in worlds)
        raise UsageError(f"--only {only}: no world has this in its name: {names}")
    is_cut = facts["steps_in_whole_epoch"] > facts["steps_per_epoch"]
    cut = f" (of {facts['steps_in_whole_epoch']})" if is_cut else ""
    print(
        f"{Path(stage.script).name}: {count(facts['epochs'], 'epoch')} of "
        f"{count(facts['steps_per_epoch'], 'step')}{cut}, in {first.seconds:.1f} s",
        flush=True,
    )

    def start(world: World) -> Future[Outcome]:
        return stage.pool.submit(stage.run, world, first)

    jobs = [(world, start(world)) for world in worlds if only in world.name or world is AGAIN]
    again = jobs[0][1].result()
    is_kept = True
    for world, job in jobs:
        if only not in world.name:
            continue
        verdict = judge(first, again, job.result())
        is_kept &= verdict.is_kept
        print(f"{world.name:<22}{verdict.text}", flush=True)
        if verdict.row:
            page = "resume.md" if verdict.row in RESUMED else "loop.md"
            print(f"{'':<22}see docs/{page}: {verdict.row}", flush=True)
    for (line,) in told(facts, REMARKS):
        print(f"note: {line}", flush=True)
    return is_kept


def leave_mark(script: Path) -> None:
    """Let the plan of a run say no more that the script was not rehearsed."""
    with suppress(OSError):  # a home folder that is read-only, or none
        mark = mark_of_rehearsal(script)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; the worlds share the cores
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the folder is removed
    try:
        code = main()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
