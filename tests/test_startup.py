"""Settings of the whole process: each does what it says, and is noticed if its target changes."""

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, linux_only, posix_only

from trainkit import errors, startup, world


def test_freed_memory_is_kept(in_fresh_process: Callable) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("glibc's settings")
    in_fresh_process("""
import resource, torch
from trainkit import startup
startup.keep_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for step in range(20):
        torch.ones(16_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
# 64 MB: glibc learns to keep what is smaller than 32 MB. 15,600 pages each, else 312,000 or, with
# huge pages, 640.
assert faults() < 500, "a freed tensor of 64 MB was given back"
""")


def test_no_code_is_unpickled_however_main_was_started(in_fresh_process: Callable) -> None:
    in_fresh_process("""
import os, pickle, torch
import train_regression
try:
    train_regression.main(["--epochs", "0", "--run-dir", "/nowhere/at/all"])
except ValueError as refused:
    assert "--epochs 0" in str(refused)
import io
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


def test_float32_is_float32_however_main_was_started(in_fresh_process: Callable) -> None:
    in_fresh_process("""
import torch
import train_regression
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
try:
    train_regression.main(["--epochs", "0", "--run-dir", "/nowhere/at/all"])
except ValueError as refused:
    assert "--epochs 0" in str(refused)
assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
""")


ORPHAN = """
import os, time
reader, writer = os.pipe()
if os.fork() == 0:
    launcher = os.getpid()
    if os.fork() > 0:
        os._exit(0)  # the launcher dies while its process imports torch
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(writer)
    if launched:
        os.environ |= {"ACCELERATE_DYNAMO_MODE": "default", "ACCELERATE_MIXED_PRECISION": "no"}
    while os.getppid() == launcher:
        time.sleep(0.01)
    try:
        from trainkit import startup
        startup.run(lambda: os.write(1, b"trained on"))
    finally:
        os._exit(0)
os.close(writer)
os.wait()
output = os.fdopen(reader).read()
assert ("trained on" in output) != launched, output
assert ("the launcher of this process is gone" in output) == launched, output
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
@pytest.mark.parametrize("launched", [True, False])
def test_a_launcher_that_died_during_the_imports_is_found(
    launched: bool, in_fresh_process: Callable
) -> None:
    in_fresh_process(ORPHAN, launched=launched)


# How startup.run ends what main does: main, exit code, words of the one line on stderr.
ENDS = [
    ("raise UsageError('wrong')", 2, "error: wrong"),
    ("raise RunFailure('broken')", 1, "error: broken"),
    ("raise Stopped('stopped by SIGTERM')", 75, "error: stopped by SIGTERM"),
    ("raise KeyboardInterrupt", 130, "error: interrupted at once, without saving"),
    ("raise OSError(24, 'Too many open files')", 1, "may open no more files, raise ulimit -n"),
    ("raise RuntimeError('Too many open files. Communication')", 1, "may open no more files"),
    (
        "raise RuntimeError('unable to allocate shared memory(shm): No space left')",
        1,
        "if /dev/shm is full give it more",
    ),
    ("raise RuntimeError('DataLoader timed out after 300 seconds')", 1, "got no batch from a load"),
    ('raise RuntimeError("can\'t start new thread")', 1, "may start no more threads"),
    ("raise OSError(28, 'No space left on device')", 1, "found the disk full"),
    ("raise RuntimeError('basic_ios::clear: iostream error')", 1, "found the disk full"),
    ("raise RuntimeError('[a/gloo/pair.cc:545] Read error')", 1, "did not meet the other proc"),
    ("in_a_thread(launch.check_launch)", 2, "error: a run needs the main thread"),
    ("close(1, 2)", 0, ""),
    ("one_of_two(75)", 75, "the exit functions ran"),
    ("beside_a_worker_that_hangs()", 1, "got no batch from a load"),
]
IN_A_PROCESS_OF_ITS_OWN = """
import atexit, concurrent.futures, multiprocessing, os, signal, sys, threading, time
sys.path.insert(0, root)
from trainkit import launch, startup
from trainkit.errors import RunFailure, Stopped, UsageError

def in_a_thread(function):
    thread = threading.Thread(target=lambda: startup.run(function))
    thread.start()
    thread.join()
    os._exit(9)

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

def close(*streams):
    print("to nobody", file=sys.stderr)

def main():
    exec(what)

if what.startswith("close"):
    sys.stdout = sys.stderr = None  # what Python makes of >&- and 2>&-
began = time.monotonic()
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.dup2(writer, 2)
    try:
        startup.run(main)
    except SystemExit as end:
        os._exit(end.code)
    os._exit(0)
os.close(writer)
said = os.fdopen(reader).read()
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
line = said.splitlines()[-1] if said else ""
assert (ended, words in line) == (expected, True), (ended, said)
assert time.monotonic() - began < 60  # else something that was started has lived on
"""


@linux_only
@pytest.mark.parametrize(("what", "code", "words"), ENDS)
def test_every_end_has_its_code_and_its_sentence(
    what: str, code: int, words: str, in_fresh_process: Callable
) -> None:
    in_fresh_process(IN_A_PROCESS_OF_ITS_OWN, what=what, expected=code, words=words, root=str(ROOT))


@posix_only  # Windows has another error for it
def test_a_closed_pipe_ends_quietly() -> None:
    code = (
        "import time\nfrom trainkit import startup\n"
        "def main():\n"
        "    for number in range(100):\n        print('x' * 999, flush=True)\n"
        "startup.run(main)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    time.sleep(0.1)
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and errors == b"", errors


def test_a_variable_that_would_let_code_be_unpickled_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")  # put back after the test
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    startup.refuse_pickled_code()
    file = io.BytesIO()
    torch.save({"a": torch.ones(1)}, file)
    file.seek(0)
    assert torch.load(file)["a"] == 1


# Flags of python, variables, flags of the script, and the sentence.
SPEAKS = [
    pytest.param(["-OO"], {}, [], "python -OO removes", marks=pytest.mark.slow),  # compiles torch
    ([], {"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "1"}, ["--bad"], "arguments: --bad"),
    ([], {"RANK": "", "LOCAL_RANK": "", "WORLD_SIZE": ""}, ["--bad"], "arguments: --bad"),
]


@pytest.mark.parametrize(("options", "variables", "flags", "words"), SPEAKS)
def test_a_start_that_cannot_be_says_why(
    options: list[str], variables: dict[str, str], flags: list[str], words: str
) -> None:
    command = [sys.executable, *options, ROOT / "train_regression.py", *flags]
    env = {**os.environ, **variables}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 2 and words in done.stderr, done.stderr


@posix_only
@pytest.mark.parametrize("program", ["no program", "#!/bin/sh\nexec /bin/sleep 60\n"])
def test_a_git_that_does_not_answer_is_no_git(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "git").write_text(program)
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(world, "GIT_SECONDS", 0.2)
    begun = time.monotonic()
    assert world.git_revision() is None
    assert time.monotonic() - begun < 30


def test_a_run_folder_may_be_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (world, errors):
        monkeypatch.setattr(module, "gather_object", lambda mine: mine * 2)
    monkeypatch.setattr(world, "broadcast_object_list", lambda mine: mine)
    two = SimpleNamespace(num_processes=2, is_main_process=True)
    for name in (".", "runs/a"):
        world.check_shared_folder(two, Path(name))
        assert not [*Path(name).glob(".tmp-*"), *Path(name).parent.glob(".tmp-*")]
