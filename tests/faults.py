"""Start a script many times for little, break it anywhere, and look at what is left.

Importing torch takes seconds, so one process (`python tests/faults.py`) imports it once and forks
a child per run: one, or several that meet over gloo as under a launcher. Any script or module with
a main(argv) runs there. A fault counts the I/O events of one save and strikes at one of them.
"""

import builtins
import contextlib
import ctypes
import errno
import faulthandler
import fcntl
import functools
import gc
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
SCRIPTS = [path.stem for path in sorted(ROOT.glob("train_*.py"))]
PR_SET_PDEATHSIG = 1


@dataclass
class Outcome:
    """What became of a run: an exit code per process (negative: a signal; None: it hung)."""

    codes: list[int | None]
    stdout: str
    stderr: str
    seconds: float

    @property
    def returncode(self) -> int | None:
        """The exit code of the first process; so this may stand for a CompletedProcess."""
        return self.codes[0]

    @property
    def output(self) -> str:
        """All that the processes printed."""
        return self.stdout + self.stderr

    def finished(self) -> str:
        """All that was printed; all processes ended with 0, and the plan has their number."""
        from conftest import assert_num_processes  # which the forked processes need not import

        assert self.codes == [0] * len(self.codes), self.output
        assert_num_processes(self.output, len(self.codes))
        return self.output

    def error(self, code: int) -> str:
        """The one line of stderr; all processes ended with this code, and one printed why."""
        assert {*self.codes} == {code}, f"{self.codes}\n{self.output}"
        (line,) = self.stderr.splitlines()
        assert line.startswith("error: "), line
        return line


class Nursery:
    """The process that forks a child per run; a context manager."""

    def __enter__(self) -> "Nursery":
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object):
        self.process.stdin.close()
        self.process.wait(60)  # on a busy machine leaving takes long

    def run(self, script: str, *args: object, world: int = 1, **plan: Any) -> Outcome:
        """Run a script to its end in `world` processes.

        Args:
            script: a file or module of the repository, of tests/ or by its full path: train_mnist,
                "predict.py", "examples/gpt.py", "trainkit.tools.plots". Without a main(argv) it is
                run by its import.
            args: its flags. A run draws pictures only if --pictures is among them.
            plan: cwd (the folder it starts in); timeout (seconds, 60); fault (see _install); kill
                (a list of [seconds, rank, signal number]; rank None: all); indices (a file: process
                r appends the sample indices of each of its batches to FILE.r, before the forward
                pass); double (True: compute in
                float64); env (variables, also those that a launcher would set; None: not set);
                modules (imported once, before it forks).
        """
        request = {"script": script, "args": [str(arg) for arg in args], "world": world, **plan}
        self.process.stdin.write(json.dumps(request, default=str) + "\n")
        self.process.stdin.flush()
        return Outcome(**json.loads(self.process.stdout.readline()))


def digests(run_dir: Path) -> dict[str, str]:
    """What must be equal between an undisturbed run and one that was broken and resumed."""
    import torch
    from safetensors.torch import load_file

    last = max((run_dir / "checkpoints").glob("step-*")) / "state"
    found = {}
    for name in ("metrics.jsonl", "model.safetensors"):
        found[name] = hashlib.sha256((run_dir / name).read_bytes()).hexdigest()
    for path in last.glob("*.safetensors"):
        found[f"state/{path.name}"] = _digest(load_file(path))
    for path in (*last.glob("*.bin"), *last.glob("scaler.pt")):
        content = torch.load(path, weights_only=True, map_location="cpu")
        found[f"state/{path.name}"] = _digest(content)
    return found


def _digest(value: Any) -> Any:
    """Tensors as hashes of their bytes, containers as lists."""
    if hasattr(value, "numpy"):
        return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        return [[str(key), _digest(item)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_digest(item) for item in value]
    return repr(value)


def incomplete(run_dir: Path) -> list[str]:
    """Checkpoints that have their final name and are not whole."""
    from trainkit.store.manifest import verify

    folders = sorted((run_dir / "checkpoints").glob("step-*"))
    return [f"{path.name}: {problem}" for path in folders if (problem := verify(path))]


def newest(run_dir: Path) -> int:
    """Step of the newest checkpoint, or -1."""
    names = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    return int(names[-1].removeprefix("step-")) if names else -1


def acknowledged(run_dir: Path) -> int:
    """Step of the last save known to be durable, or -1: the children write it down."""
    path = Path(f"{run_dir}.saved")
    steps = path.read_text().split() if path.exists() else []  # empty: killed before it wrote
    return int(steps[-1]) if steps else -1


# What follows runs in the nursery and in its children.


def _serve():
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    gc.disable()  # while this imports: it would look again and again at what stays
    # torch imports the first of these at the first optimizer and the first DDP, and others are
    # imported when they are needed: once here, not in each child, where it is half of a short run.
    modules = "torch._dynamo torch.distributed.fsdp torch.distributed.checkpoint tqdm.auto"
    modules += " pandas pyarrow.parquet matplotlib.figure matplotlib.backends.backend_agg"
    modules += " datasets numpy.ctypeslib torchvision trainkit.pictures.grey"
    modules += " trainkit.pictures.drawn trainkit.rows.parquet"
    modules += " trainkit.tables.sets trainkit.texts.texts trainkit.language.pretrained"
    if importlib.util.find_spec("timm"):
        modules += " timm"
    if importlib.util.find_spec("transformers"):
        modules += " transformers.tokenization_utils_base"
    for name in (*SCRIPTS, *modules.split()):
        importlib.import_module(name)
    for script in SCRIPTS:  # the first command line that tyro reads makes it import a checker
        sys.modules[script].parse(sys.modules[script].Config, [])
    # Each start of a process group looks for plugins among all packages that are installed.
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
    importlib.metadata.entry_points(group="torch.distributed.backends")
    # Nor does a child clear away at its end what was made here, which takes as long as two saves.
    for finalizer in [*weakref.finalize._registry]:
        finalizer.atexit = False
    # Nor does it hash again the files of the kit.
    sources = importlib.import_module("trainkit.launch.nodes")
    sources.digest_file = functools.cache(sources.digest_file)
    sources.hash_sources()
    gc.enable()
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(_start(json.loads(line))), file=replies, flush=True)


def free_port() -> int:
    """A port that is free, and that the system gives to no connection before a run opens it."""
    while True:
        port = random.randrange(20_000, 32_768)  # Linux gives those above
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port


@functools.cache
def _know_sources(last: str):
    """Let a run look for sources in modules imported after this one, and in those of ROOT.

    A look at each of the thousands that are imported here would copy as many pages of memory.
    """
    known = {n: m for n, m in sys.modules.items() if str(ROOT) in str(getattr(m, "__file__", ""))}

    class Seen:
        argv = property(lambda _: sys.argv)

        @property
        def modules(self) -> dict[str, Any]:
            added = itertools.takewhile(lambda name: name != last, reversed(sys.modules))
            return known | {name: sys.modules[name] for name in added}

    sys.modules["trainkit.launch.nodes"].sys = Seen()


def _start(request: dict[str, Any]) -> dict[str, Any]:
    port = free_port()
    for name in request.get("modules", []):
        importlib.import_module(name)
    _know_sources(next(reversed(sys.modules)))
    gc.freeze()  # or each child copies what its collector looks at
    outputs = os.memfd_create("stdout"), os.memfd_create("stderr")
    for output in outputs:  # or one process may write over what another writes at the same time
        fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
    started_at = time.monotonic()
    children = []
    for rank in range(request["world"]):
        child = os.fork()
        if child == 0:
            _become(request, rank, port, outputs)
        children.append(child)
    codes: dict[int, int | None] = {}
    kills = request.get("kill", [])
    deadline = started_at + request.get("timeout", 60)
    while len(codes) < len(children):
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            codes[child] = os.waitstatus_to_exitcode(status)
            continue
        now = time.monotonic()
        while kills and now >= started_at + kills[0][0]:
            _, rank, number = kills.pop(0)
            for child in children if rank is None else [children[rank]]:
                if child not in codes:
                    os.kill(child, number)
        if now >= deadline:
            for child in set(children) - codes.keys():
                process = psutil.Process(child)
                for one in (*process.children(), process):
                    one.send_signal(signal.SIGQUIT)  # it prints its stacks
                    time.sleep(0.5)
                process.kill()
                os.waitpid(child, 0)
                codes[child] = None
        time.sleep(0.001 if kills else 0.005)
    seconds = time.monotonic() - started_at
    reply = {"codes": [codes[child] for child in children], "seconds": seconds}
    for name, output in zip(("stdout", "stderr"), outputs, strict=True):
        with open(output, "rb") as file:
            file.seek(0)
            reply[name] = file.read().decode(errors="replace")
    return reply


def _become(request: dict[str, Any], rank: int, port: int, outputs: tuple[int, int]):
    """Be one process of a run, then exit."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), *outputs)):
        os.dup2(file, stream)
    code = 1
    try:
        script = Path(request["script"].removesuffix(".py"))
        if script.is_absolute():
            sys.path.insert(0, str(script.parent))
            script = Path(script.name)
        os.chdir(request.get("cwd", ROOT))
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        faulthandler.register(signal.SIGQUIT)
        if request["world"] > 1:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(request["world"]),
                LOCAL_WORLD_SIZE=str(request["world"]),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
        for variable, value in request.get("env", {}).items():
            os.environ.pop(variable, None)
            os.environ.update({variable: value} if value is not None else {})
        if cache := request.get("env", {}).get("HF_DATASETS_CACHE"):  # was read at the import
            sys.modules["datasets"].config.HF_DATASETS_CACHE = Path(cache)
        if request.get("double"):
            importlib.import_module("double").use_double()
        sys.argv, fault = [request["script"], *request["args"]], request.get("fault", {})
        script = importlib.import_module(script.as_posix().replace("/", "."))
        sys.argv[0] = script.__file__
        can_draw = hasattr(getattr(script, "Config", None), "pictures")
        if can_draw and not {"--pictures", "--no-pictures"} & {*request["args"]}:
            request["args"].append("--no-pictures")  # drawing takes as long as the rest of a run
        if hasattr(script, "Wide"):
            script.MODELS |= {"wide": _narrow, "normed": normed}
            script.Config.__annotations__["model"] = str
        if hasattr(script, "write_sample"):  # of 300 letters, for each of which the model is called
            script.range = lambda *ends: range(20) if ends == (300,) else range(*ends)
        if talking := sys.modules.get("trainkit.language.conversations"):
            talking.answer.__defaults__ = (5,)  # tokens of a sample answer, instead of 50
        if "indices" in request:
            _log_indices(script, f"{request['indices']}.{rank}")
        if hasattr(script, "main"):
            _install(script, fault if rank == fault.get("rank", 0) else {}, rank)
            run = importlib.import_module("trainkit.launch.startup").run
            run(functools.partial(script.main, request["args"]))
        code = 0
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _narrow(num_classes: int) -> Any:
    """In the place of --model wide: both kinds of dropout, and small enough for a sweep."""
    from trainkit import Dropout

    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=3),
        nn.Dropout(0.2),
        nn.ReLU(),
        nn.Flatten(),
        Dropout(0.5),
        nn.Linear(512, num_classes),
    )


def normed(num_classes: int) -> Any:
    """--model normed: two layers of BatchNorm, which the script's own models do without."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.BatchNorm1d(512),
        nn.Linear(512, num_classes),
    )


def _log_indices(script: Any, path: str):
    augment = script.augment

    def logging(images, indices, epoch: int, args):
        with open(path, "a") as file:
            file.write(f"{json.dumps([epoch, *indices.tolist()])}\n")
        return augment(images, indices, epoch, args)

    script.augment = logging


def _install(script: Any, fault: dict[str, Any], rank: int):
    """Write down each save that is durable; let one fault happen in this process.

    fault: save (which save of the process, from 1), event (which I/O event of it, from 1) and how:
    "kill" before the event, "enospc" makes it fail as on a full disk. With how "copy" and a folder,
    the run folder, nothing strikes: FOLDER.007-kill is what a kill before event 7 leaves behind,
    and FOLDER.007-tear what one after it leaves, with the file that the event wrote half as long.
    Or signal: [step, signal number], which the process then sends to itself. Or call: see
    _kill_in_call. Or add: a call of cross_entropy (from 1) and what is added to its loss, whose
    gradient stays as it is.
    """
    import accelerate.utils.other
    import torch

    from trainkit.checkpoints import parts
    from trainkit.checkpoints.commit import Commits
    from trainkit.checkpoints.save import Checkpoints
    from trainkit.launch.signals import Signals
    from trainkit.numbers.orders import Progress

    saves, events, armed, in_save, saved = 0, 0, False, False, 0

    def watch(holder, name: str, written: Callable[..., Any] | None = None):
        original = getattr(holder, name)

        @functools.wraps(original)
        def watched(*args, **kwargs):
            nonlocal events
            path = written(*args, **kwargs) if written else None
            by_save = in_save or threading.current_thread() is not threading.main_thread()
            if not (armed and by_save) or (written and path is None):
                return original(*args, **kwargs)
            events += 1
            if fault["how"] == "copy":
                copy("kill")
                try:
                    return original(*args, **kwargs)
                finally:
                    copy("tear", path)
            if events == fault["event"]:
                if fault["how"] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **kwargs)

        setattr(holder, name, watched)

    def copy(name: str, torn: str | None = None):
        """Copy the run folder: SIGKILL would now leave exactly these bytes."""
        nonlocal armed
        armed, target = False, Path(f"{fault['folder']}.{events:03d}-{name}")
        with contextlib.suppress(shutil.Error):  # the training removes a temporary file meanwhile
            shutil.copytree(fault["folder"], target)
        shutil.copy(f"{fault['folder']}.saved", f"{target}.saved")
        torn = target / Path(torn or fault["folder"]).relative_to(fault["folder"])
        if torn.is_file():
            os.truncate(torn, torn.stat().st_size // 2)
        armed = True

    def opened(file, mode: str = "r", *args, **kwargs):
        return file if set(mode) & set("wx") else None  # a log that grows is not torn

    if fault.get("how"):
        # Not unlink and rmdir: what they remove has lost its name before.
        for name in ("mkdir", "rename", "replace", "fsync"):
            watch(os, name)
        watch(io, "open", opened)
        builtins.open = io.open
        watch(torch, "save", lambda value, file, **kwargs: file)
        watch(accelerate.utils.other, "safe_save_file", lambda value, file, **kwargs: file)
        watch(parts, "save_file", lambda value, file: file)

    save, wait = Checkpoints.save, Commits.wait

    def saving(self: Checkpoints, progress: Progress):
        nonlocal saves, in_save, saved
        saves, in_save = saves + 1, True
        save(self, progress)
        in_save, saved = False, progress.step

    def waiting(self: Commits, **options):
        """Write down a save once it is known to be durable; the fault is in all of the save."""
        nonlocal armed
        run_dir, is_pending = self.tracker.path.parent, bool(self.jobs)
        wait(self, **options)
        if rank == 0 and is_pending:
            with open(f"{run_dir}.saved", "a") as file:
                file.write(f"{saved}\n")
        armed = in_save and saves == fault.get("save")

    Checkpoints.save, Commits.wait = saving, waiting
    if "call" in fault:
        _kill_in_call(fault["call"])
    if "signal" in fault:
        (step, number), steps = fault["signal"], itertools.count(1)
        requested = Signals.requested

        def requesting(self: Signals, *args: Any) -> bool:
            # Not those of an evaluation.
            after_step = sys._getframe(1).f_code.co_name == "_finish_step"
            if after_step and next(steps) == step:
                os.kill(os.getpid(), number)
            return requested(self, *args)

        Signals.requested = requesting
    if "add" in fault:
        (number, added), calls = fault["add"], itertools.count(1)
        cross_entropy, script.F = script.F.cross_entropy, types.SimpleNamespace(**vars(script.F))

        def adding(*args, **kwargs):
            loss = cross_entropy(*args, **kwargs)
            return loss + float(added) if next(calls) == number else loss

        script.F.cross_entropy = adding


def _kill_in_call(number: int):
    """Kill this process halfway through what a call writes to a --mirror that is a folder.

    number: how many such calls come before it.
    """
    from fsspec.implementations.local import LocalFileSystem

    calls = itertools.count()

    def watch(name: str, half: Callable[..., Any]):
        original = getattr(LocalFileSystem, name)

        def called(self, *args: Any, **kwargs: Any) -> Any:
            if next(calls) == number:
                half(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, *args, **kwargs)

        setattr(LocalFileSystem, name, called)

    def half_a_file(source: str, target: str):
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        content = Path(source).read_bytes()
        Path(target).write_bytes(content[: len(content) // 2])

    def half_a_folder(path: str, *_: Any):
        for file in sorted(Path(path).rglob("*"))[::2]:
            if file.is_file():
                file.unlink()

    watch("put_file", half_a_file)
    watch("rm", half_a_folder)


if __name__ == "__main__":
    _serve()
