"""Settings of the whole process: each does what it says, and is noticed if its target changes."""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, linux_only, posix_only
from loops import train


def test_settings_about_numbers_and_safety_hold_however_main_was_started(in_fresh_process):
    in_fresh_process("""
import io, os, pickle, torch
import train_regression
os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "0"  # that would let code be unpickled
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
try:
    train_regression.main(["--epochs", "0", "--run-dir", "/nowhere/at/all"])
except ValueError as refused:
    assert "--epochs 0" in str(refused)
assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
file = io.BytesIO()
torch.save({"a": torch.ones(1)}, file)
file.seek(0)
assert torch.load(file)["a"] == 1
file = io.BytesIO()
torch.save(os.system, file)
file.seek(0)
try:
    torch.load(file, weights_only=False)
except pickle.UnpicklingError:
    pass
else:
    raise AssertionError("a function was unpickled")
""")


# What main does, and how the process ends: its exit code and its last line.
ENDS = r"""
raise UsageError('wrong')
    2 error: wrong
raise RunFailure('broken')
    1 error: broken
raise Stopped('stopped by SIGTERM')
    75 error: stopped by SIGTERM
raise KeyboardInterrupt
    130 error: interrupted at once, without saving
raise torch.OutOfMemoryError('CUDA')
    1 0 ran out of memory: if it was during
raise ValueError("Caught ValueError in DataLoader worker process 0.\n...\nValueError: mine")
    1 got no batch: the data set raised ValueError: mine
beside_a_worker_that_is_killed()
    1 lost a loader worker, which was killed, probably because the memory is full
raise OSError(28, 'No space left on device')
    1 found the disk full; the checkpoints are
raise torch.distributed.DistBackendError('NCCL')
    1 lost contact with another process
raise RuntimeError('about gloo and my own bug')
    1 RuntimeError: about gloo
sum_of_nested().backward()
    1 error: torch has no gradient for this operation on a nested tensor: call
torch.ones(2).add_(sharded_ones())
    1 error: sharded weights, of which each process has a part, were combined with a tensor that is
one_of_two(75)
    75 the exit functions ran
sys.exit('a text')
    1 a text
sys.exit()
    0
beside_a_worker_that_hangs()
    1 got no batch from a load
"""
IN_A_PROCESS_OF_ITS_OWN = """
import atexit, concurrent.futures, multiprocessing, os, signal, sys, time, torch
from trainkit.launch import startup
from trainkit.errors import RunFailure, Stopped, UsageError

pool = []

def one_of_two(code):
    os.environ["WORLD_SIZE"] = "2"
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)  # too late for another exit code
    atexit.register(print, "the exit functions ran", file=sys.stderr)
    pool.append(concurrent.futures.ThreadPoolExecutor(1))
    pool[0].submit(int)  # its thread ends when it is told to, at the exit
    sys.exit(code)

def beside_a_worker_that_hangs():
    def hang():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready.set()
        time.sleep(90)
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    fork.Process(target=hang, daemon=True).start()
    ready.wait()
    raise RuntimeError("DataLoader timed out after 300 seconds")

class Ends:
    def __len__(self):
        return 1
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)

def beside_a_worker_that_is_killed():
    # Another way to start it, the default of Python 3.14, imports this script again.
    how = {"num_workers": 1, "timeout": 60, "multiprocessing_context": "fork"}
    list(torch.utils.data.DataLoader(Ends(), **how))

def nested():
    rows = [torch.ones(length, 2, requires_grad=True) for length in (1, 3)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

def sum_of_nested():
    return nested().sum(1).sum()

def sharded_ones():
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh("cpu", (1,))
    return DTensor.from_local(torch.ones(2), mesh, [Shard(0)])

def end():
    exec(what)

began = time.monotonic()
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.dup2(writer, 2)
    try:
        startup.run(end)
    except SystemExit as end:
        if isinstance(end.code, str):  # as Python does
            os.write(2, end.code.encode())
        os._exit(end.code if isinstance(end.code, int) else 1)
os.close(writer)
said = os.fdopen(reader).read()
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
line = said.splitlines()[-1] if said else ""
assert (ended, words in line) == (expected, True), (ended, said)
assert time.monotonic() - began < 60  # else something that was started has lived on
"""


@linux_only
@pytest.mark.parametrize(
    "what, code, words", re.findall(r"^(\S.*)\n +(\d+) ?(.*)$", ENDS, re.MULTILINE)
)
def test_every_end_has_its_code_and_its_sentence(what, code, words, fork_main):
    given = {"what": what, "expected": int(code), "words": words}
    done = fork_main(IN_A_PROCESS_OF_ITS_OWN, given=given)
    assert done.codes == [0], done.output


@posix_only
def test_ctrl_c_during_the_imports_is_one_sentence():
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "train_mnist.py", "--help"],
        stderr=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        # Else ignored, if a shell started this in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not process.stderr.readline().endswith(" torch\n"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    *more, last = process.communicate()[1].splitlines()
    assert (process.returncode, last) == (130, "error: interrupted at once, without saving")
    assert all(line.startswith("import time:") for line in more)


@linux_only
def test_a_run_folder_that_is_not_one_for_all_processes_is_refused(tmp_path, fork_main):
    script = """
import os
import train_regression
from trainkit.launch import nodes

def main(argv):
    nodes.SHOWN_SECONDS = 0.1
    if os.environ["RANK"] == "1":
        os.mkdir("b")
        os.chdir("b")
    train_regression.main(argv)
"""
    done = fork_main(script, "--run-dir", "runs/a", world=2, cwd=tmp_path)
    assert "is not the same folder" in done.error(2)
    assert not [*tmp_path.rglob(".tmp-*")]


def test_every_process_prints_its_traceback_before_it_leaves_the_others(fork_main):
    script = """
import io, sys, torch

def main(argv=None):
    torch.distributed.init_process_group("gloo")
    sys.stderr = io.TextIOWrapper(io.BufferedWriter(io.FileIO(2, "w", closefd=False)))
    raise ZeroDivisionError("in the middle")
"""
    outcome = fork_main(script, world=2)
    assert outcome.returncode == 1
    assert outcome.stderr.count("ZeroDivisionError: in the middle") == 2, outcome.output


def test_deterministic_algorithms_are_on_as_long_as_the_run_asks_for_them(tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen = []

    def look(run, number):
        seen.append((torch.are_deterministic_algorithms_enabled(), workspaces()))

    def workspaces():
        return os.environ.get("CUBLAS_WORKSPACE_CONFIG")

    train(f"--run-dir {tmp_path}/a --epochs 1", body=look)
    assert {*seen} == {(False, None)}
    seen.clear()
    train(f"--run-dir {tmp_path}/b --epochs 1 --deterministic", body=look)
    assert {*seen} == {(True, ":4096:8")}
    assert not torch.are_deterministic_algorithms_enabled()
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == (
        tmp_path / "b" / "metrics.jsonl"
    ).read_text()
