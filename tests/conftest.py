"""What several test files use: small data, three ways to start a script, and what it left.

1. In this process, or in forks of one that has imported torch already. `run_main(script, *args)`
   calls main(argv) here: one process, nothing to start. `fork_main(script, *args, world=2)` calls
   it in forked processes that meet over gloo, in a tenth of the time of a start; it may kill them
   or let their disk be full. `nursery.run(...)`, below it, is for files that always fork.
2. In a fresh process: `run(script, *args)` is `python script`, to its end; `start` does not wait.
   For what the start itself does. `in_fresh_process(code)` runs a few lines of Python where no
   test has changed anything.
3. Through the launcher: `run(script, *args, config="2cpu")`, or `start`, as a person types it.
   For what the launcher hands on: the YAMLs, signals, nodes.

The first that can see the fault is the right one: the second costs 5 s of CPU, the third 15.

What forks is started once and stopped by the one that started it. The tests have the nursery, a
process of their own that multiprocessing knows nothing of. multiprocessing's own server of forks
belongs to trainkit/tools/rehearse: no test sets, stops or waits for it, because it ends only when
every process that holds its pipe has ended. A test that takes longer than `faulthandler_timeout`
in pyproject.toml ends the run with the stacks of all threads, so that what hangs is seen.
"""

import contextlib
import faulthandler
import gc
import importlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "accelerate_configs"

sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)  # what the tests start in another folder finds the kit
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # two cores, and some tests start two processes
OF_LAUNCHERS = "ACCELERATE_ OMPI_ MV2_ PMI_ MPI_ MASTER_ LOCAL_ WORLD_SIZE RANK NPROC SLURM_"
for name in list(os.environ):
    if name.startswith((*OF_LAUNCHERS.split(), "MIXED_PRECISION")):
        del os.environ[name]
if sys.platform == "darwin":
    os.environ["ACCELERATE_USE_CPU"] = "true"  # not the GPU that a Mac has: these test a CPU
# Nor the cards that `pytest -m gpu` uses. Workers of pytest-xdist inherit both variables.
CARDS = os.environ.setdefault("TEST_CARDS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs what only Linux has")
posix_only = pytest.mark.skipif(
    os.name != "posix", reason="Windows has no signals, no bash, and lets not everybody make a link"
)


gc.disable()  # while the test files import: it would look again and again at what stays


def pytest_collection_finish():
    """Collect from here on, and never look at what was imported."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item):
    """Give a test that is marked slow as long as it takes."""
    if item.get_closest_marker("slow"):
        faulthandler.cancel_dump_traceback_later()


NUM_TRAIN, NUM_TEST = 1009, 251  # primes: nothing divides them


@pytest.fixture(scope="session", autouse=True)
def datasets_cache(tmp_path_factory):
    """A cache of this test session's own, shared with the processes it starts."""
    import datasets  # here, so that it reads HF_HUB_OFFLINE

    cache = tmp_path_factory.mktemp("hf")
    os.environ["HF_HOME"] = str(cache)
    datasets.config.HF_DATASETS_CACHE = cache / "datasets"  # read from HF_HOME at the import


def first_pictures(folder: Path, num_train: int, num_test: int) -> Path:
    """Write the first pictures of the shipped MNIST into a folder."""
    import pyarrow.parquet as pq

    for split, size in (("train", num_train), ("test", num_test)):
        file = f"{split}-00000-of-00001.parquet"
        pq.write_table(pq.read_table(ROOT / "data" / "mnist" / file)[:size], folder / file)
    return folder


@pytest.fixture(scope="session")
def small_mnist(datasets_cache, tmp_path_factory):
    """A folder with 1,009 training and 251 test pictures."""
    return first_pictures(tmp_path_factory.mktemp("small_mnist"), NUM_TRAIN, NUM_TEST)


@pytest.fixture(scope="session")
def tiny_mnist(datasets_cache, tmp_path_factory):
    """A folder with 331 training and 101 test pictures: a run of ten steps in half a second."""
    return first_pictures(tmp_path_factory.mktemp("tiny_mnist"), 331, 101)


def command(
    script: str | Path,
    *args: object,
    config: str | Path | None = None,
    launcher_flags: Sequence[str] = (),
) -> list[str]:
    """The command line that a person types: with python, or with accelerate and a YAML.

    Without a YAML launcher_flags follow python: `-m torch.distributed.run` for example.
    """
    start = [sys.executable]
    if config is not None:
        if sys.platform == "win32":
            pytest.skip("the launcher was never tried on Windows")
        path = config if isinstance(config, Path) else CONFIGS / f"{config}.yaml"
        start += ["-m", "accelerate.commands.launch", "--config_file", str(path)]
    path = ROOT / script if str(script).endswith(".py") else script  # else a module, after -m
    return [*start, *launcher_flags, str(path), *words_of(script, args)]


def split_flags(args: Sequence[object]) -> list[str]:
    """The arguments as strings; flags may be given in one string, as a person types them."""
    return [word for arg in map(str, args) for word in (arg.split() if arg[:2] == "--" else [arg])]


def words_of(script: str | Path, args: Sequence[object]) -> list[str]:
    """The arguments as strings; drawing takes a second, so who wants it says --pictures."""
    words = split_flags(args)
    if Path(script).name.startswith("train_") and not {"--pictures", "--no-pictures"} & {*words}:
        words.append("--no-pictures")
    return words


def start(
    script: str, *args: object, config: str | Path | None = None, **options: Any
) -> subprocess.Popen:
    """Start a script; `processes` and `kill_all` then reach every process that comes of it.

    The words of before=, if there are some, come before python.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TEST_RUN": mark}
    if config is not None:
        environment.pop("ACCELERATE_USE_CPU", None)  # the YAML says it
    words = command(script, *args, config=config, launcher_flags=options.pop("launcher_flags", ()))
    process = subprocess.Popen(
        [*options.pop("before", ()), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | options.pop("env", {}),
        **options,
    )
    process.mark = mark
    return process


def processes(started: subprocess.Popen) -> list[psutil.Process]:
    """The living processes of a start: launcher, training processes, loader workers."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # a zombie has no environment
            if process.environ().get("TEST_RUN") == started.mark:
                found.append(process)
    return found


def kill_all(started: subprocess.Popen):
    """SIGKILL to all of them. (The N-process launcher puts each rank in a session of its own.)"""
    while alive := processes(started):
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()


def run(
    script: str,
    *args: object,
    config: str | Path | None = None,
    timeout: float = 120,
    code: int | None = 0,
    **options: Any,
) -> subprocess.CompletedProcess:
    """Run a script to its end, which is this exit code (None: any); one that hangs fails too."""
    process = start(script, *args, config=config, **options)
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_all(process)
        output, errors = process.communicate()
        pytest.fail(f"{' '.join(process.args)} hung\n{output}\n{errors}")
    assert code in (None, process.returncode), output + errors
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@contextlib.contextmanager
def refused(words: str) -> Iterator[pytest.ExceptionInfo]:
    """What a person gave is refused, in one sentence that has these words (a pattern)."""
    from trainkit.errors import UsageError

    with pytest.raises(UsageError, match=words) as raised:
        yield raised
    sentence = str(raised.value)
    assert sentence.isprintable() and len(sentence) < 1000, sentence


def rows(run_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl: all, those of "steps" or those of "epochs"."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    kinds = {None: (True, False), "epochs": (True,), "steps": (False,)}[kind]
    return [row for row in map(json.loads, lines) if ("eval_loss" in row) in kinds]


def saved(run_dir: Path, name: str = "model") -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a file of a run folder, and what is saved about them."""
    from trainkit.store.records import load_predictions

    return load_predictions(run_dir / f"{name}.safetensors")


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files in a folder."""
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and not p.is_symlink()}


def assert_same_bytes(one: Path, other: Path, *more: str):
    """Their logs and weights are equal, and these files too."""
    for name in ("metrics.jsonl", "model.safetensors", *more):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def assert_same_numbers(one: Path, other: Path):
    """Two runs in float64 have the same rows, but for the rounding of sums in another order."""
    from double import SAME  # it imports torch, which reads OMP_NUM_THREADS

    ours, theirs = rows(one), rows(other)
    assert len(ours) == len(theirs) > 2
    for row, same in zip(ours, theirs, strict=True):
        assert row == pytest.approx(same, rel=SAME)
        for exact in ("learning_rate", "eval_accuracy"):  # not one picture is judged differently
            assert row.get(exact) == same.get(exact)


def forget_accelerator():
    """Let the next Accelerator of this process be a new one: its state outlives the object."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture
def accelerator():
    """An Accelerator of this test's own, one process on the CPU."""
    from accelerate import Accelerator

    forget_accelerator()
    return Accelerator(cpu=True)


@pytest.fixture(scope="session")
def run_main():
    """Call main(argv) of a script in this process: fast, one process, no launcher."""

    def call(script: str, *args: object) -> dict[str, float]:
        forget_accelerator()
        return importlib.import_module(script).main(words_of(script, args))

    return call


@pytest.fixture(scope="session")
def mnist_run(small_mnist, tmp_path_factory, run_main):
    """The folder of a finished run on digits, with its pictures. No test may change it."""
    folder = tmp_path_factory.mktemp("runs") / "mnist"
    flags = "--batch-size 32 --epochs 3 --no-augment --label-smoothing 0 --save-every 1000000"
    run_main("train_mnist", f"{flags} --pictures --dataset {small_mnist} --run-dir {folder}")
    return folder


@pytest.fixture(scope="session")
def table_run(tmp_path_factory, run_main):
    """The folder of a finished run on houses.csv, which lies beside it. No test may change it."""
    folder = tmp_path_factory.mktemp("private")
    table = [
        f"{area},{city},1970-01-0{area % 7 + 1},{area * 3 + area % 7 + 100 * (city == 'Rome')}"
        for area in range(20, 220)
        for city in ("Bonn", "Rome")
    ]
    (folder / "houses.csv").write_text("\n".join(["area,city,age,price", *table]))
    flags = f"--data {folder}/houses.csv --target price --epochs 5"
    run_main("examples.table", flags, "--run-dir", folder / "houses")
    return folder / "houses"


def without_numbers(text: str) -> str:
    """A text with 0 for each of its numbers, and one blank between words."""
    return re.sub(r"\d[\d.,]*(e-?\d+)?", "0", " ".join(text.split()))


def assert_num_processes(output: str, number: int):
    """The plan of a run says how many processes it has."""
    device = next((line for line in output.splitlines() if line.startswith("device ")), "")
    processes = "process" if number == 1 else "processes"
    assert f"{number} {processes} on cpu" in device, output


# Of the runs that tests/test_ray.py, test_slurm.py and test_kubernetes.py disturb.
ENGINE_FLAGS = "--epochs 60 --batch-size 60 --save-every 5 --no-pictures --dataset "


def typed(start: str) -> list[str]:
    """The words of the first command of docs/scaling.md that begins so, comments left out."""
    text = (ROOT / "docs" / "scaling.md").read_text().replace("\\\n", " ")
    return shlex.split(re.search(rf"^{start} .*", text, re.MULTILINE)[0], comments=True)


def wait_until(condition: Callable[[], Any], launched: subprocess.Popen | None = None):
    """Until it is true; fails after two minutes, or when what was launched ends before."""
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline or (launched and launched.poll() is not None):
            pytest.fail(f"this never came true: {launched and launched.args}")
        time.sleep(0.02)


def wait_for_step(run_dir: Path, step: int, launched: subprocess.Popen | None = None):
    """Until this step is saved."""
    name = f"step-{step:010}"
    saved = run_dir / "checkpoints"
    wait_until(lambda: any(path.name >= name for path in saved.glob("step-*")), launched)


def find_process(run_dir: Path) -> psutil.Process:
    """A process of train_mnist.py with this run folder, not a launcher."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(run_dir) in words and "train_mnist.py" in words[1:3]:
            return process
    raise AssertionError("no process of the run was found")


@pytest.fixture(scope="session")
def undisturbed(tiny_mnist, tmp_path_factory):
    """The folder of a run with ENGINE_FLAGS that `accelerate launch` started."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    flags = f"{ENGINE_FLAGS} {tiny_mnist} --run-dir {run_dir}"
    assert_num_processes(run("train_mnist.py", flags, config="2cpu").stdout, 2)
    return run_dir


@pytest.fixture(scope="session")
def nursery(datasets_cache):
    """tests/faults.py's process that forks runs."""
    if sys.platform != "linux":
        pytest.skip("forks processes with memfd_create and prctl, which only Linux has")
    from faults import Nursery

    with Nursery() as started:
        yield started


def write_script(folder: Path, code: str, names: dict[str, Any]) -> str:
    """The path of a script in which these names have these values before its first line."""
    path = folder / "given.py"
    lines = [f"{name} = {value!r}" for name, value in names.items()]
    path.write_text("\n".join([*lines, code]))
    return path.as_posix()


@pytest.fixture(scope="session")
def fork_main(nursery, tmp_path_factory):
    """Call main(argv) of a script in forked processes that meet as under a launcher.

    script: its path, or its text. given: names that this text has, and their values.

    A faults.Outcome comes back, with returncode, stdout and stderr; .finished() asks for exit code
    0 of all processes. A main that hangs fails the test. See faults.Nursery.run for the names that
    may follow: world=3, double=True, fault=...
    """

    def call(script: str | Path, *args: object, given: Any = (), **plan: Any) -> Any:
        if "\n" in str(script):
            script = write_script(tmp_path_factory.mktemp("script"), script, dict(given))
        outcome = nursery.run(script, *words_of(script, args), **{"timeout": 100, **plan})
        assert None not in outcome.codes, f"{script} hung\n{outcome.output}"
        return outcome

    return call


@pytest.fixture(scope="session")
def in_fresh_process(request, datasets_cache, tmp_path_factory):
    """Run code, with these names, in a process of its own, in which no test has changed anything.

    On Linux it is forked from the nursery, which has imported torch and the scripts already.
    """

    def call(code: str, **names: Any):
        path = write_script(tmp_path_factory.mktemp("fresh"), code, names)
        if sys.platform == "linux":
            outcome = request.getfixturevalue("nursery").run(path, timeout=100)
            assert outcome.codes == [0], outcome.output
        else:
            run(path, timeout=100)

    return call


@pytest.fixture
def float64_default():
    """What this test makes is float64: a model starts as in fork_main(..., double=True)."""
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def tuned_base(nursery, tmp_path_factory):
    """The folder of a small model and of rows to tune it on, as tuned.make_base makes them."""
    from tuned import make_base

    folder = tmp_path_factory.mktemp("tuned")
    make_base(nursery, folder)
    return folder


@pytest.fixture
def in_double(float64_default, flags, monkeypatch):
    """The test file's `flags` for a base in float64; here all is computed in it, losses too."""
    import torch

    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return [*flags[:-1], flags[-1].replace("/base", "/double/base")]


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The folder of a small encoder and of texts, as made_texts.make_base makes it."""
    from made_texts import make_base

    folder = tmp_path_factory.mktemp("base")
    make_base(folder)
    return folder


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """137 colour pictures in two classes, and a small network of timm with BatchNorm."""
    timm, folder = pytest.importorskip("timm"), tmp_path_factory.mktemp("photos")
    import torch
    from made_pictures import fill

    parts = ["train"] * 110 + ["test"] * 27
    fill(folder / "data", *(f"{part}/class {n % 2}/{n}.png" for n, part in enumerate(parts)))
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", pretrained=False).double()
    timm.models.save_for_hf(network, folder / "base", safe_serialization=True)
    return folder


@pytest.fixture(scope="session")
def table(tmp_path_factory):
    """137 rows, in a file t.csv."""
    from made_tables import make_table

    folder = tmp_path_factory.mktemp("table")
    make_table(folder / "t.csv", 137, kind=lambda t: (t.a * t.b > 0).map(str))  # not linear
    return folder


@pytest.fixture(scope="session")
def arguments(tiny_mnist):
    """Per script, a run of ten steps in two epochs that saves at every second step."""
    shared = "--batch-size 60 --epochs 2 --log-every 1 --save-every 2 --eval-batch-size 50"
    shared = f"{shared} --timeout 20 --no-pictures".split()
    return {
        "train_mnist": ["--dataset", tiny_mnist, "--model", "wide", *shared],
        "train_regression": ["--num-samples", 375, "--model", "mlp", *shared],
    }


@pytest.fixture
def s3(monkeypatch):
    """moto's server, with a bucket; answer(number, request) is called before each answer."""
    pytest.importorskip("s3fs")
    import fsspec

    moto = pytest.importorskip("moto.moto_server.threaded_moto_server")
    application, numbers = moto.DomainDispatcherApplication, itertools.count()
    call = application.__call__
    server = SimpleNamespace(answer=lambda number, request: None, numbers=numbers)

    def answering(self, request, start_response):
        server.answer(next(server.numbers), request)
        return call(self, request, start_response)

    monkeypatch.setattr(application, "__call__", answering)
    running = moto.ThreadedMotoServer(port=0)
    running.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*running.get_host_and_port()))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    server.store = fsspec.filesystem("s3", skip_instance_cache=True)
    server.store.makedirs("bucket", exist_ok=True)
    server.env = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    yield server
    running.stop()
