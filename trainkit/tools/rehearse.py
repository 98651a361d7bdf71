"""Does a script keep the promises? Run it for some twenty steps in several worlds, and compare.

python -m trainkit.tools.rehearse SCRIPT [FLAGS ...]

SCRIPT is any script that has a Run, in any folder, and FLAGS are those that it is trained with. It
runs twice, resumed, with loader workers, with --accumulate 2, in two processes, sharded over two
and, if there is one, on a card. A line says for each whether the numbers are the same, and a second
one names the row of a page in docs/ that has the cure. Epochs are cut to 4 steps, so that several
of them are seen, with their evaluations. Nothing is written into --run-dir, and nothing is left.

Before SCRIPT: --epochs N for what begins in a later epoch, --limit SECONDS for a slow script, and
--only TEXT for the worlds whose name has it. Exit code 0: the promises are kept; 1: something
differs that should not, or fails; 2: the script does not run.
"""

import argparse
import ast
import functools
import importlib.util
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# torch and the kit are imported in functions: while this process does so, the server, which forks
# the processes of all worlds, imports them too.

# A launch of the shell that starts the rehearsal is not that of the worlds.
NOT_SET = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
WITHOUT_TRACKERS = {"WANDB_MODE": "disabled"}
ON_CPU = {"CUDA_VISIBLE_DEVICES": "-1", "ACCELERATE_USE_CPU": "true"}
SHARDED = {  # as in accelerate_configs/2cpu_fsdp.yaml
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
SETTINGS: dict[str, Any] = {
    "resume": None,
    "keep": 99,
    "pictures": False,
    "tracker": None,
    "mirror": None,
    "mirror_must": False,
    "stop_after_steps": None,
    "num_workers": 0,
    "accumulate": 1,
    "timeout": 60,
}

# Worlds differ by rounding, and training amplifies it. How much is measured: a run whose weights
# are changed by one rounding at the start may differ by a TIMES-th of what two worlds may.
TIMES = 50.0
FLOOR = 1e-5  # of the largest value of a column
FLOOR_OF_CARD = 1e-4
# A unit of ReLU that switches changes gradients more than the loss: so many times.
TIMES_FOR_GRADIENTS = 10
FLOOR_OF_WEIGHTS = 1e-3  # of the largest value of a tensor
GRACE_SECONDS = 3.0  # for the other processes, once one has failed

# Rows of docs/loop.md, or of docs/resume.md.
BATCH_NORM = BUFFERS = "BatchNorm"
ORDER_OF_CHANCE = "random augmentation in a `Dataset`"
OWN_STATE = "state of your own that a resume must restore"
OWN_SCHEDULE = "a schedule that is no schedule of torch"
REGISTERED = "anything else that the loop changes"
CHANGED_SET = "a set that the loop itself fills or changes"
TEACHER = "a momentum teacher"
OWN_MEAN = "a metric that needs all predictions"
SAMPLES_COMPARED = "a loss that compares the samples of a batch"
MASKED = "a loss over tokens or pixels with a mask"
SEVERAL = "several objectives with labels missing in places"
NO_GRADIENT = "parameters that get no gradient in some steps"
ON_DEVICE = "augmentation or noise on the device"
GRADIENTS = "code that reads the gradients"
RESUMED = {OWN_STATE, OWN_SCHEDULE, REGISTERED, CHANGED_SET, TEACHER}  # of docs/resume.md
# What a refusal or an error says, and the row with its cure.
SAID = {
    r"mixed torch.Tensor and DTensor|sharded weights, of which": TEACHER,
    r"gather|compares the samples": SAMPLES_COMPARED,
    r"count=|over=": SEVERAL,
    r"mask=|reduction=|padded": MASKED,
    r"did not receive grad|Expected to have finished reduction": NO_GRADIENT,
    r"BatchNorm": BATCH_NORM,
}


@dataclass
class World:
    """One way to run the script.

    Attributes:
        settings: values for fields of its config.
        env: variables, beside those that make several processes one world.
        is_exact: it must give the bytes of the first run.
        resumed_after: the step of the checkpoint of the first run that it begins with; 0: none.
        still, nudge: see rehearsed.Plan.
        floor: relative differences up to this are rounding.
        row: of a page, if nothing tells more about a difference.
        is_compared: its numbers must be those of the first run; else it must only come to its end.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=lambda: dict(ON_CPU))
    num_processes: int = 1
    is_exact: bool = False
    resumed_after: int = 0
    still: tuple[str, ...] = ()
    nudge: bool = False
    floor: float = FLOOR
    row: str = SAMPLES_COMPARED
    is_compared: bool = True


AGAIN = World("the same again", is_exact=True, row=ORDER_OF_CHANCE)


@dataclass
class Outcome:
    """What became of a world: where its files are, and why it did not come to its end."""

    world: World
    folder: Path
    problem: str = ""
    is_refusal: bool = False
    seconds: float = 0.0

    @property
    def run_dirs(self) -> list[Path]:
        """The folder of its run, or of its runs in the order of the script."""
        found = [path.parent for path in self.folder.glob("run*/run.json")]
        return sorted(found, key=lambda path: (len(path.name), path.name))

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Those of metrics.jsonl."""
        texts = [(run_dir / "metrics.jsonl").read_text() for run_dir in self.run_dirs]
        return [json.loads(line) for text in texts for line in text.splitlines()]

    @functools.cached_property
    def weights(self) -> dict[str, Any]:
        """The tensors of model.safetensors."""
        from safetensors.torch import load_file

        files = [load_file(run_dir / "model.safetensors") for run_dir in self.run_dirs]
        return {name: tensor for tensors in files for name, tensor in tensors.items()}

    def bytes_of(self, *patterns: str) -> dict[str, bytes]:
        """The content of the files of these names in the run folders."""
        paths = [path for run_dir in self.run_dirs for p in patterns for path in run_dir.glob(p)]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}

    @property
    def changes_its_set(self) -> bool:
        """Whether the run has said so."""
        said = written_in(self.folder / "stdout-0") + written_in(self.folder / "stderr-0")
        return re.search(r"samples of the .* have changed since", said) is not None

    @property
    def notes(self) -> list[str]:
        """Lines of its output that may say why its numbers are others."""
        reason = "no checkpoint holds" if self.world.resumed_after else "how a batch is split"
        lines = written_in(self.folder / "stdout-0").splitlines()
        return [line for line in lines if line.startswith("note: ") and reason in line]

    def noted(self, name: str) -> Any:
        """What a process of this world wrote down."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}


class Verdict(NamedTuple):
    """What is printed of a world."""

    text: str
    is_kept: bool
    row: str = ""


class Stage:
    """Starts the processes of worlds, several worlds at once, and ends them all."""

    def __init__(self, script: str, flags: list[str], folder: Path, epochs: int, limit: float):
        self.script = script
        self.flags = flags
        self.folder = folder
        self.epochs = epochs
        self.limit = limit
        self.context: Any = multiprocessing.get_context("spawn")
        if sys.platform == "linux":
            self.context = multiprocessing.get_context("forkserver")
            self.context.set_forkserver_preload(["trainkit.tools.rehearsed", *imports_of(script)])
        self.card = self._look_for_card()  # so the server begins to import
        self.pool = ThreadPoolExecutor(max(3, os.cpu_count() or 1))
        self.is_over = False

    def _look_for_card(self) -> Any:
        """Start a process that does so: in this one, or in the server, no other could use it."""
        from trainkit.tools import rehearsed

        looking = self.context.Process(target=rehearsed.note_card, args=(self.folder / "card",))
        looking.start()
        return looking

    def has_card(self) -> bool:
        """Whether torch sees a GPU or another accelerator."""
        self.card.join()
        return (self.folder / "card").exists()

    def run(self, world: World, first: Outcome | None = None) -> Outcome:
        """Run the script in this world to its end."""
        folder = self.folder / re.sub(r"\W+", "-", world.name).strip("-")
        folder.mkdir()
        outcome = Outcome(world, folder)
        limit = self.limit
        if first:
            limit = min(limit, 60 + 30 * first.seconds)
            if world.resumed_after:
                for run_dir in first.run_dirs:
                    copy_as_killed(run_dir, folder / run_dir.name, world.resumed_after)
        started_at = time.monotonic()
        with meeting(world.num_processes) as joined:
            processes = [
                self._process(outcome, joined, rank, limit) for rank in range(world.num_processes)
            ]
            codes = self._wait(processes, limit)
        outcome.seconds = time.monotonic() - started_at
        if any(code not in (0, 3) for code in codes):  # 3: a target of the script, after few steps
            outcome.problem, outcome.is_refusal = why_not(folder, codes, self.script, limit)
        elif not (folder / "facts.json").exists():
            outcome.problem = "it ended without run.finish()"
        return outcome

    def _process(self, outcome: Outcome, joined: dict[str, str], rank: int, limit: float) -> Any:
        from trainkit.tools import rehearsed

        world = outcome.world
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if joined else {}
        plan = rehearsed.Plan(
            script=self.script,
            flags=self.flags,
            folder=outcome.folder,
            settings=SETTINGS | {"run_dir": outcome.folder / "run"} | world.settings,
            env={**dict.fromkeys(NOT_SET), **WITHOUT_TRACKERS, **world.env, **joined, **ranks},
            num_epochs=self.epochs,
            still=world.still,
            nudge=world.nudge,
            stacks_at=time.time() + limit - 3,  # before it is ended
        )
        return self.context.Process(target=rehearsed.be, args=(plan, rank))

    def _wait(self, processes: list[Any], limit: float) -> list[int | None]:
        """Start processes, and return their exit codes; None: it did not end in time."""
        for process in processes:
            process.start()
        end_at = time.monotonic() + limit
        alive = list(processes)
        while alive and time.monotonic() < end_at and not self.is_over:
            sentinels = [process.sentinel for process in alive]
            multiprocessing.connection.wait(sentinels, min(1.0, end_at - time.monotonic()))
            alive = [process for process in alive if process.is_alive()]
            if any(process.exitcode for process in processes):
                end_at = min(end_at, time.monotonic() + GRACE_SECONDS)
        for process in alive:
            kill_tree(process)
        return [None if process in alive else process.exitcode for process in processes]

    def close(self) -> None:
        """End everything that was started."""
        self.is_over = True
        self.pool.shutdown(cancel_futures=True)


def kill_tree(process: Any) -> None:
    """End a process and its loader workers."""
    import psutil

    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
    process.kill()
    process.join()


@contextmanager
def meeting(num_processes: int) -> Iterator[dict[str, str]]:
    """Yield the variables by which processes find each other: as torchrun, this one has the store.

    So no port has to be free until the first of them opens it.
    """
    if num_processes == 1:
        yield {}
        return
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    del store


def imports_of(script: str) -> list[str]:
    """The packages that a script imports: the server imports them once, for all processes.

    Modules beside the script are left to each process, because they may do anything.
    """
    names = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "tqdm.auto"]
    with suppress(SyntaxError, ValueError):  # the first run says so
        for node in ast.walk(ast.parse(Path(script).read_bytes())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.append(node.module)
    return [name for name in dict.fromkeys(names) if is_installed(name.partition(".")[0])]


def is_installed(package: str) -> bool:
    """Whether it is found in a folder of installed packages, or is this one."""
    spec = importlib.util.find_spec(package)
    return package == "trainkit" or "site-packages" in str(getattr(spec, "origin", ""))


def copy_as_killed(source: Path, target: Path, step: int) -> None:
    """Copy a run folder as it was after the checkpoint of this step, with a longer log."""

    def ignored(folder: str, names: list[str]) -> list[str]:
        later = [name for name in names if name.startswith("step-") and int(name[5:]) > step]
        at_top = [name for name in names if name == "DONE" or name.endswith(".safetensors")]
        return later + (at_top if Path(folder) == source else [])

    shutil.copytree(source, target, ignore=ignored)


def why_not(
    folder: Path, codes: Sequence[int | None], script: str, limit: float
) -> tuple[str, bool]:
    """Why a world did not come to its end, in one sentence, and whether that is a refusal."""
    texts = [written_in(folder / f"stderr-{rank}") for rank in range(len(codes))]
    for text, code in zip(texts, codes, strict=True):
        said = [line[7:] for line in text.splitlines() if line.startswith("error: ")]
        if said and code != 0:
            return said[-1], code == 2
    for text in texts:
        if "Traceback (most recent call last)" in text:
            problem, is_refusal = of_traceback(text, script)
            path = folder / "between.json"
            if path.exists():
                problem += f", in the evaluation after step {json.loads(path.read_text())}"
            return problem, is_refusal
    if None in codes:
        where = place_of(folder, codes.index(None), script)
        return f"it did not end within {limit:.0f} s, and was ended{where}", False
    code = next(code for code in codes if code)
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"it ended with {name}, and said nothing", False


def written_in(path: Path) -> str:
    """What a process wrote; nothing if it was ended before it began."""
    return path.read_text(errors="replace") if path.exists() else ""


def of_traceback(text: str, script: str) -> tuple[str, bool]:
    """The error of the last traceback, with the line of the script; a refusal if the kit raised."""
    last = text.rpartition("Traceback (most recent call last)")[2]
    places = re.findall(r'^ *File "([^"]+)", line (\d+)', last, re.M)
    errors = re.findall(
        r"^(?!\s)[\w.]+(?:Error|Exception|Interrupt|Exit|Warning|Failure)?: .*", last, re.M
    )
    error = errors[-1] if errors else last.strip().splitlines()[-1]
    name, _, sentence = error.partition(": ")
    path = str(Path(script).resolve())
    lines = [number for place, number in places if place == path]
    where = f" ({Path(script).name}, line {lines[-1]})" if lines else ""
    is_refusal = name.endswith(".UsageError") or (
        name == "RuntimeError" and "/trainkit/" in Path(places[-1][0]).as_posix()
    )
    return (sentence if is_refusal else error) + where, is_refusal


def place_of(folder: Path, rank: int, script: str) -> str:
    """Where a process that did not end was, in the script."""
    path = folder / f"stacks-{rank}"
    found = re.findall(
        rf'File "{re.escape(str(Path(script).resolve()))}", line (\d+)', written_in(path)
    )
    return f": process {rank} was in line {found[0]} of {Path(script).name}" if found else ""


def scales(*outcomes: Outcome) -> dict[str, float]:
    """The largest absolute value of each column: values near zero are compared against it."""
    largest: dict[str, float] = {}
    for row in (row for outcome in outcomes for row in outcome.rows):
        for name, value in row.items():
            if isinstance(value, float) and math.isfinite(value):
                largest[name] = max(largest.get(name, 0.0), abs(value))
    return largest


def gap_of(one: Any, other: Any, scale: float) -> float:
    """How much two values of a column differ, relative to it; infinite if not by rounding."""
    if one == other or (one != one and other != other):
        return 0.0
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    if not numbers or not math.isfinite(one) or not math.isfinite(other):
        return math.inf
    return abs(one - other) / scale if scale else math.inf


def is_one_sample(one: float, other: float, num_samples: int) -> bool:
    """Whether two shares of many samples differ by one: a sample whose values are nearly equal."""
    counts = one * num_samples, other * num_samples
    are_counts = all(abs(count - round(count)) < 1e-6 * num_samples for count in counts)
    return num_samples >= 1000 and are_counts and abs(round(counts[0]) - round(counts[1])) <= 1


class Rounding:
    """What rounding alone makes of a run: a nudged one differs by it from the same unchanged.

    Attributes:
        rows: for each row, the largest relative difference of each column so far.
        weights: the relative difference of each tensor at the end.
    """

    def __init__(self, first: Outcome, nudged: Outcome):
        self.rows: list[dict[str, float]] = []
        self.weights: dict[str, float] = {}
        if first.problem or nudged.problem:
            return
        so_far: dict[str, float] = {}
        scale = scales(first)
        for row, other in zip(first.rows, nudged.rows, strict=False):
            for name in row.keys() & other.keys():
                gap = gap_of(row[name], other[name], scale.get(name, 0.0))
                so_far[name] = max(so_far.get(name, 0.0), gap)
            self.rows.append(dict(so_far))
        self.weights = gaps_of_weights(first, nudged)

    def of(self, row: int, name: str) -> float:
        """What may be rounding in this column, up to this row."""
        return TIMES * self.rows[row].get(name, 0.0) if row < len(self.rows) else 0.0


class Comparison:
    """Compares worlds with a first one."""

    def __init__(self, first: Outcome, rounding: Rounding):
        self.first = first
        self.rounding = rounding

    def judge(self, outcome: Outcome) -> Verdict:
        """Say whether this world has the numbers of the first one."""
        world = outcome.world
        if outcome.problem:
            kind = "refused" if outcome.is_refusal else "fails"
            row = next((row for said, row in SAID.items() if re.search(said, outcome.problem)), "")
            return Verdict(f"{kind}: {outcome.problem}", outcome.is_refusal, row)
        if not world.is_compared:
            return Verdict("comes to its end, with other numbers", True)
        if self.has_same_files(outcome):
            if world.is_exact and (lost := self._lost(outcome, "held-end")):
                return Verdict(f"equal bytes, but at the end {lost}", False, REGISTERED)
            return Verdict("equal bytes", True)
        where, worst = self._first_difference(outcome)
        if not where and not world.is_exact:
            grown = ": rounding, which training amplifies here" if worst > world.floor else ""
            held = "".join(f"; {name} is held still: see its row" for name in world.still)
            return Verdict(f"equal to {number(worst)}{grown}{held}", True)
        where = where or "has the same rows and weights, and other bytes in another file"
        if world.resumed_after and (lost := self._lost(outcome, "held-resumed")):
            where += f"; after the resume {lost}"
        row = self._row(outcome, where)
        facts = self.first.noted("facts")
        if row == BUFFERS:
            where += f"; the buffer `{facts['buffers'][0]}` changes in the run"
        elif row == OWN_MEAN:
            where += (
                "; a mean over samples comes from run.evaluate(...), not from a process's share"
            )
        elif row == GRADIENTS:
            where += f"; {facts['hooked'][0]} has a hook, which is given the gradient of a share"
        elif row == ON_DEVICE and facts["draws"]:
            where += f"; the loop draws from {' and '.join(facts['draws'])}"
        return Verdict(where, False, row)

    def has_same_files(self, outcome: Outcome) -> bool:
        """Whether the log and the weights are equal to the last byte."""
        weights = "*.safetensors" if outcome.world.is_exact else "model.safetensors"
        names = "metrics.jsonl", weights
        return outcome.bytes_of(*names) == self.first.bytes_of(*names)

    def _first_difference(self, outcome: Outcome) -> tuple[str, float]:
        """Name the first value that differs by more than it may; and the largest difference."""
        first, worst, world = self.first, 0.0, outcome.world
        scale = scales(first, outcome)
        for n, (row, other) in enumerate(zip(first.rows, outcome.rows, strict=False)):
            if row.keys() != other.keys() or row.get("step") != other.get("step"):
                names = ", ".join(sorted(row.keys() ^ other.keys())) or "step"
                return f"first differs in step {row.get('step')}: only one has {names}", worst
            for name, value in row.items():
                gap = gap_of(value, other[name], scale.get(name, 0.0))
                floor = world.floor
                if name.startswith("grad_norm"):
                    floor *= TIMES_FOR_GRADIENTS
                may_differ = max(floor, self.rounding.of(n, name))
                if gap <= (0 if world.is_exact else may_differ):
                    worst = max(worst, gap)
                elif world.is_exact or not is_one_sample(
                    value, other[name], row.get("eval_samples", 0)
                ):
                    pair = told_apart(value, other[name])
                    return f"first differs in step {row['step']}: {name} {pair}", worst
        if len(first.rows) != len(outcome.rows):
            return f"has {len(outcome.rows)} rows and not {len(first.rows)}", worst
        for name, gap in gaps_of_weights(first, outcome).items():
            may_differ = max(FLOOR_OF_WEIGHTS, TIMES * self.rounding.weights.get(name, 0.0))
            if gap > (0 if world.is_exact else may_differ):
                return f"has the same rows, and other weights at the end: {name}", worst
        return "", worst

    def _lost(self, outcome: Outcome, name: str) -> str:
        """Which variables of the script did not hold what they held in the first run."""
        step = outcome.world.resumed_after
        there = self.first.noted(f"held-{step}" if name == "held-resumed" else name)
        here = outcome.noted(name)
        others = [key for key in there if key in here and there[key] != here[key]]
        if not others:
            return ""
        one, other = there[others[0]], here[others[0]]
        parts = [key for key in one if one[key] != other.get(key)]
        part = f" ({parts[0]}, {len(parts)} in all)" if parts and parts[0] else ""
        return f"`{others[0]}` is not what it was{part}"

    def _row(self, outcome: Outcome, where: str) -> str:
        world, facts = outcome.world, self.first.noted("facts")
        if world.resumed_after and ": learning_rate" in where:
            return OWN_SCHEDULE
        if world.resumed_after and "is not what it was" in where:
            return REGISTERED
        if (
            world.resumed_after or world.settings.get("num_workers")
        ) and self.first.changes_its_set:
            return CHANGED_SET
        if world.resumed_after:
            return OWN_STATE
        if world.num_processes > 1 and re.search(r": eval_\w+ ", where):
            return OWN_MEAN
        is_split = world.num_processes > 1 or world.settings.get("accumulate", 1) > 1
        if is_split and facts["buffers"]:
            return BUFFERS
        if is_split and facts["draws"]:
            return ON_DEVICE
        if is_split and facts["hooked"]:
            return GRADIENTS
        return world.row


def gaps_of_weights(first: Outcome, other: Outcome) -> dict[str, float]:
    """By how much each tensor of model.safetensors differs, relative to its largest value."""
    gaps = {}
    for name, one in first.weights.items():
        two = other.weights.get(name)
        if two is None or two.shape != one.shape:
            gaps[name] = math.inf
        elif one.numel():
            largest = one.abs().max().double().item()
            gap = (one.double() - two.double()).abs().max().item()
            gaps[name] = gap_of(gap, 0.0, largest)
    return gaps


def number(value: float) -> str:
    """1.6e-07 as 2e-7."""
    return re.sub(r"e-0*", "e-", f"{value:.0e}") if value else "the last digit"


def told_apart(one: Any, other: Any) -> str:
    """Two values with as many digits as tell them apart."""
    for digits in (4, 6, 9, 17):
        texts = [f"{v:.{digits}g}" if isinstance(v, float) else str(v) for v in (one, other)]
        if texts[0] != texts[1]:
            break
    return " and ".join(texts)


def worlds_of(first: Outcome, has_card: bool) -> tuple[list[World], World, World | None]:
    """The worlds to compare with the first run, the nudged one, and the still one if needed.

    What draws or computes by process gives other numbers if a batch is split otherwise, as the docs
    say. Its worlds are compared with a first run in which that is held still, as it is in them.
    """
    facts = first.noted("facts")
    still = tuple(facts["by_process"])
    saved = sorted((first.folder / "run/checkpoints").glob("step-*"))
    steps = [int(path.name[5:]) for path in saved]
    worlds = [AGAIN]
    worlds += [
        World(
            f"resumed after step {n}",
            {"resume": "auto"},
            is_exact=True,
            resumed_after=n,
            row=OWN_STATE,
        )
        for n in steps[:-1]
    ]
    worlds += [
        World("2 loader workers", {"num_workers": 2}, row=ORDER_OF_CHANCE),
        World("--accumulate 2", {"accumulate": 2}, still=still),
        World("2 processes", num_processes=2, still=still),
        World("sharded over 2", env=ON_CPU | SHARDED, num_processes=2, still=still),
    ]
    if facts.get("moves_registered_averages"):
        # Held still, what registered things have of BatchNorm is equal on all processes.
        worlds.append(World("2 processes, not held", num_processes=2, is_compared=False))
    if has_card:
        worlds.append(World("on the card", env={}, still=still, floor=FLOOR_OF_CARD, row=ON_DEVICE))
    nudged = World("nudged", still=still, nudge=True)
    return worlds, nudged, World("still", still=still) if still else None


def rehearse(stage: Stage, only: str) -> int:
    """Run all worlds, and print a line for each as soon as it is known; return the exit code."""
    from trainkit.errors import UsageError
    from trainkit.text import count

    first = stage.run(World("the first run"))
    if first.problem:
        raise UsageError(f"{stage.script} does not run: {first.problem}")
    facts = first.noted("facts")
    worlds, nudged, still = worlds_of(first, stage.has_card())
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

    others = [start(world) for world in ([still, nudged] if still else [nudged])]
    jobs = [(world, start(world)) for world in worlds if only in world.name or world is AGAIN]
    held = others[0].result() if still else first
    rounding = Rounding(held, others[-1].result())
    if not Comparison(first, rounding).has_same_files(jobs[0][1].result()):
        rounding = Rounding(first, first)  # the nudged run differs by more than its nudge
    is_kept = True
    for world, job in jobs:
        if only not in world.name:
            continue
        compared = held if world.still and not held.problem else first
        verdict = Comparison(compared, rounding).judge(job.result())
        is_kept &= verdict.is_kept
        print(f"{world.name:<22}{verdict.text}", flush=True)
        notes = [] if verdict.is_kept else job.result().notes
        for note in notes:
            print(f"{'':<22}{note}", flush=True)
        if verdict.row and not (notes and verdict.row == world.row):  # which is a guess
            page = "resume.md" if verdict.row in RESUMED else "loop.md"
            print(f"{'':<22}see docs/{page}: {verdict.row}", flush=True)
    return 0 if is_kept else 1


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
    check_call(args.script)
    with tempfile.TemporaryDirectory(prefix="rehearsal-", ignore_cleanup_errors=True) as folder:
        stage = Stage(args.script, args.flags, Path(folder), args.epochs, args.limit)
        try:
            return rehearse(stage, args.only)
        finally:
            stage.close()


def check_call(script: str) -> None:
    """Refuse what cannot be rehearsed, before anything is imported."""
    problem = ""
    if not Path(script).is_file():
        problem = f"SCRIPT {script} is not a file: give the path of a training script"
    elif os.environ.get("WORLD_SIZE", "1") != "1" or "LOCAL_RANK" in os.environ:
        problem = "a launcher started this process: start it with `python -m`, as it starts others"
    if problem:
        from trainkit.errors import UsageError

        raise UsageError(problem)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; the worlds share the cores
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the folder is removed
    from trainkit.errors import UsageError

    try:
        code = main()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
