"""A fault anywhere loses nothing that a save reported, and the resumed run ends with equal bytes.

The short part runs with the other tests. The long one prints a table of what was tried and lost:

    python -m pytest -m slow tests/test_faults.py -s
"""

import random
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import rows
from faults import SCRIPTS, Nursery, Outcome, acknowledged, digests, incomplete, newest
from sharded import SHARDED, env

SAVE = 4  # the save that is broken: the first whose pruning removes a checkpoint


@dataclass
class Row:
    """One line of the table."""

    fault: str
    script: str
    world: int
    tried: int = 0
    lost: int = 0  # saves known to be durable that were not there afterwards
    incomplete: int = 0  # folders under a final name that are not whole
    different: int = 0  # resumed runs whose final bytes are not those of an undisturbed run
    hung: int = 0

    def look(self, run_dir: Path):
        self.incomplete += len(incomplete(run_dir))
        self.lost += newest(run_dir) < acknowledged(run_dir)

    def good(self) -> bool:
        return self.tried > 0 and not (self.lost or self.incomplete or self.different or self.hung)

    def show(self):
        print("| " + " | ".join(f"{name} {value}" for name, value in vars(self).items()) + " |")


class Sweep:
    """Runs of one script in one number of processes, held against an undisturbed one."""

    def __init__(
        self,
        nursery: Nursery,
        script: str,
        args: list[object],
        world: int,
        where: Path,
        env: dict[str, str] | None = None,
    ):
        self.nursery, self.script, self.args, self.world = nursery, script, args, world
        self.run_dir, self.env = where / "broken", env or {}
        whole = nursery.run(script, *args, "--run-dir", where / "whole", world=world, env=self.env)
        assert whole.codes == [0] * world, whole.output
        self.expected, self.seconds = digests(where / "whole"), whole.seconds
        begun, done = ((where / "whole" / name).stat().st_mtime for name in ("run.json", "DONE"))
        self.start_seconds = self.seconds - (done - begun)
        self.finished: set[int] = set()

    def clear(self):
        shutil.rmtree(self.run_dir, ignore_errors=True)
        Path(f"{self.run_dir}.saved").unlink(missing_ok=True)

    def run(self, row: Row, **plan: Any) -> Outcome:
        """Start or continue the run, and look at what is left of it."""
        args = [*self.args, "--run-dir", self.run_dir, "--resume", "auto"]
        outcome = self.nursery.run(self.script, *args, world=self.world, env=self.env, **plan)
        row.hung += None in outcome.codes
        row.look(self.run_dir)
        return outcome

    def finish(self, row: Row):
        outcome = self.run(row)
        assert outcome.codes == [0] * self.world, outcome.output
        row.different += digests(self.run_dir) != self.expected

    def fill_the_disk(self, row: Row, event: int, rank: int):
        """One fresh run that finds the disk full at an I/O event of its fourth save; its resume."""
        self.clear()
        fault = {"rank": rank, "save": SAVE, "event": event, "how": "enospc"}
        outcome = self.run(row, fault=fault)
        row.tried += 1
        if outcome.codes != [0] * self.world:  # some events may fail without harm
            assert "found the disk full" in outcome.error(1)
        self.finish(row)

    def break_each_save(self, rank: int = 0, stride: int = 1) -> list[Row]:
        """Each fault at every I/O event of the fourth save of a process, resumed after some."""
        self.clear()
        names = {
            "kill": "SIGKILL before each I/O event of a save",
            "tear": "SIGKILL after each, its file torn",
            "full": "disk full at each",
        }
        rows = [Row(f"{n}, process {rank}", self.script, self.world) for n in names.values()]
        fault = {"rank": rank, "save": SAVE, "how": "copy", "folder": self.run_dir}
        self.run(Row("copy", self.script, self.world), fault=fault)
        copies = {
            how: sorted(self.run_dir.parent.glob(f"{self.run_dir.name}.???-{how}")) for how in names
        }
        num_events = len(copies["kill"])
        for row, folders in zip(rows, copies.values(), strict=True):
            for number, folder in enumerate(folders):
                self.finish_copy(row, folder, resume=number % stride == 0)
        for event in range(1, num_events + 1, stride):
            self.fill_the_disk(rows[-1], event, rank)
        for row in rows:
            row.show()
        return rows if num_events else []

    def finish_copy(self, row: Row, folder: Path, resume: bool):
        """Look at a folder that a kill would leave so, and resume from it; each content once."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        content = hash(tuple((path.relative_to(folder), path.read_bytes()) for path in paths))
        run_dir, self.run_dir = self.run_dir, folder
        row.tried += 1
        row.look(folder)
        if resume and content not in self.finished:
            self.finished.add(content)
            self.finish(row)
        self.clear()
        self.run_dir = run_dir


def test_a_fault_inside_a_save_loses_nothing(nursery, arguments, tmp_path):
    sweep = Sweep(nursery, "train_mnist", arguments["train_mnist"], 2, tmp_path)
    rows = sweep.break_each_save(stride=83)
    for event in (2, 8):  # without copies, which the first process would change
        sweep.fill_the_disk(rows[-1], event, rank=1)
    assert len(rows) == 3 and all(row.good() for row in rows), rows


# What strikes beside the full disk, in one of how many processes, and the last step that is made.
LOST = [
    ({"rank": 1, "event": 5}, 2, range(100, 200)),  # its part of the manifest
    ({"signal": [3, signal.SIGTERM], "event": 9}, 1, [3]),
]


@pytest.mark.parametrize("fault, world, steps", LOST)
def test_a_checkpoint_that_is_lost_ends_all_processes_at_once_and_no_signal_hides_it(
    nursery, arguments, tmp_path, fault, world, steps
):
    """Long before the next save, which would find it too."""
    args = [*arguments["train_mnist"], "--epochs", 99, "--save-every", 100, "--run-dir", tmp_path]
    plan = {"fault": {"save": 1, "how": "enospc", **fault}}
    outcome = nursery.run("train_mnist", *args, world=world, **plan)
    assert re.match("error: saving .*found the disk full", outcome.error(1))
    assert "stopped by" not in outcome.output
    assert newest(tmp_path) == -1 and rows(tmp_path)[-1]["step"] in steps


def test_a_folder_that_cannot_be_written_is_refused(nursery, arguments, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for run_dir, world in ((tmp_path / "file", 1), ("/proc/run", 2)):
        args = [*arguments["train_mnist"], "--run-dir", run_dir]
        outcome = nursery.run("train_mnist", *args, world=world)
        assert str(run_dir) in outcome.error(2)


def strike_at_random_times(
    sweep: Sweep, row: Row, num_strikes: int, number: int, rank: int | None = None
):
    """Send a signal to a run again and again, let it finish every sixth time, compare."""
    generator = random.Random(0)
    sweep.clear()
    wanted, count = row.tried + num_strikes, 0
    while row.tried < wanted:
        count += 1
        # Three quarters of the strikes meet the training, whose share of a short run is small.
        early = generator.random() < 0.25
        earliest, latest = 0.1 * sweep.seconds, 1.1 * sweep.seconds
        at = generator.uniform(earliest if early else sweep.start_seconds, latest)
        outcome = sweep.run(row, kill=[[at, rank, number]])
        # Ended by the signal; saved and stopped; done before it came; or left by a peer that ended.
        assert {*outcome.codes} <= {-number, 75, 0, 1}, outcome.output
        assert sweep.world > 1 or 1 not in outcome.codes, outcome.output
        done = outcome.codes == [0] * sweep.world
        row.tried += not done
        if done or count % 6 == 0:
            sweep.finish(row)
            sweep.clear()
    sweep.finish(row)


EXAMPLES = {
    "examples.gan": "",  # two models, each with an optimizer
    "examples.gpt": "--num-bytes 16000 --batch-size 24 --layers 1 --width 32 --ema 0.9",
    "examples.text": "--num-lines 300",
    "examples.two_towers": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("script", [*SCRIPTS, *EXAMPLES])
def test_sweep(nursery, arguments, tiny_mnist, tmp_path, script, world):
    shared = arguments["train_regression"][4:]
    more = EXAMPLES.get(script, "").split() or ["--dataset", tiny_mnist]
    sweep = Sweep(nursery, script, arguments.get(script, [*shared, *more]), world, tmp_path)
    rows = sweep.break_each_save()
    num_strikes, num_others = (80, 20) if script in SCRIPTS else (20, 10)
    at_random = [
        ("SIGKILL of all at a random time", num_strikes, signal.SIGKILL, None),
        ("SIGTERM to all at a random time", num_others, signal.SIGTERM, None),
        ("SIGKILL of the first process", num_others, signal.SIGKILL, 0),
        ("SIGKILL of the last process", num_others, signal.SIGKILL, 1),
    ]
    for fault, number_of_strikes, number, rank in at_random[: 2 * world]:
        rows.append(row := Row(fault, script, world))
        strike_at_random_times(sweep, row, number_of_strikes, number, rank)
        row.show()
    assert all(row.good() for row in rows), rows


@pytest.mark.slow
def test_sweep_of_a_sharded_run(nursery, tmp_path):
    args = "--num-lines 60 --batch-size 12 --epochs 2 --save-every 2 --timeout 20"
    sweep = Sweep(nursery, "examples.text", args.split(), 2, tmp_path, env(SHARDED))
    rows = [*sweep.break_each_save(0), *sweep.break_each_save(1)]
    assert rows and all(row.good() for row in rows), rows
