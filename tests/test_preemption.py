"""Signals, dead launchers and frozen peers, through the real launchers (killed: test_shards.py)."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import timedelta

import psutil
import pytest
from conftest import (
    CONFIGS,
    ROOT,
    kill_all,
    linux_only,
    processes,
    refused,
    start,
    wait_for_step,
    wait_until,
)

from trainkit.errors import Stopped
from trainkit.launch.signals import Signals

if os.name != "posix":
    pytest.skip("Windows has no signals but Ctrl-C", allow_module_level=True)

import pty  # not on Windows

ENDLESS = "--epochs 1000 --batch-size 60 --log-every 1 --save-every 5 --schedule constant "
ENDLESS += "--warmup 0 --eval-batch-size 50 --no-pictures"


@pytest.fixture
def started(tiny_mnist, tmp_path):
    """Start an endless run and wait until it trains."""
    running = []

    def call(*args: object, config: str | None = None, **options: object) -> subprocess.Popen:
        flags = f"--dataset {tiny_mnist} --run-dir {tmp_path}/run {ENDLESS}"
        process = start("train_mnist.py", flags, *args, config=config, **options)
        running.append(process)
        wait_for_step(tmp_path / "run", 1, process)
        return process

    yield call
    for process in running:
        kill_all(process)
        process.communicate()


@linux_only
def test_sigterm_to_loader_workers_too_saves_and_a_second_run_is_refused(
    started, run_main, tiny_mnist, tmp_path
):
    process = started("--num-workers", 2, start_new_session=True)
    with refused("in use by another process"):
        run_main("train_mnist", f"--dataset {tiny_mnist} --run-dir {tmp_path}/run")
    wait_until(lambda: len(processes(process)) >= 3, process)
    for each in processes(process)[::-1]:  # workers first, as pkill -f may have it
        with contextlib.suppress(psutil.NoSuchProcess):  # the worker of an epoch that ended
            each.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 75, errors
    assert "stopped by SIGTERM at step" in output and "--resume auto" in output
    assert "Traceback" not in errors
    wait_until(lambda: not processes(process))


# A training that takes a minute somewhere: there nothing looks at a first Ctrl-C.
SLOW = """
import time
import train_mnist
from accelerate import Accelerator

def slow(*args, **kwargs):
    print("slow", flush=True)
    time.sleep(60)

def main(argv):
    Accelerator.save_state = slow
    train_mnist.main(argv)
"""


@linux_only
def test_a_second_interrupt_ends_at_once(fork_main, tiny_mnist, tmp_path):
    """(test_resume.py: after a single one the run saves and ends with 75.)"""
    flags = f"--dataset {tiny_mnist} --run-dir {tmp_path}/run {ENDLESS}"
    # The third is of an impatient person, while the process exits.
    kill = [[seconds, None, signal.SIGINT] for seconds in (4, 5.5, 5.55)]
    ended = fork_main(SLOW, flags, kill=kill)
    assert ended.error(130).startswith("error: interrupted at once") and "slow" in ended.stdout
    assert ended.seconds < 15


@pytest.fixture
def watching(accelerator):
    """Make Signals; in the end what was handled before is handled again."""
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started these tests
    with ExitStack() as ending:

        def make() -> Signals:
            signals = Signals(accelerator, timedelta(seconds=9))
            ending.callback(signals.restore)
            return signals

        yield make
    signal.signal(signal.SIGHUP, hangup)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_before_the_first_step_a_signal_ends_at_once_and_later_it_waits_for_the_step(
    number, watching
):
    watching()
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Stopped):
        os.kill(os.getpid(), number)
    signals = watching()
    assert not signals.requested()
    os.kill(os.getpid(), number)
    assert signals.requested()


def test_under_nohup_a_run_goes_on_without_its_terminal(watching):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    signals = watching()
    os.kill(os.getpid(), signal.SIGHUP)
    signals.restore()
    assert not signals.requested() and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@linux_only  # elsewhere nothing tells a process that its launcher died
@pytest.mark.parametrize(
    "config, number",
    [("1cpu_bf16", signal.SIGKILL), pytest.param("2cpu", signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_a_dead_launcher_leaves_a_saved_run_and_no_process(started, tmp_path, config, number):
    process = started(config=config)
    process.send_signal(number)
    wait_until(lambda: not processes(process))
    output, errors = process.communicate()
    assert "at step" in output and "saved: start the same command" in output, errors
    assert output.count("stopped by") == 1


LAUNCHER = f"-m trainkit.tools.launch --config_file {CONFIGS}/1cpu_bf16.yaml"


# A script that prints the signals which it hears, and ends with 7 after the last.
HEARS = """
import signal, sys
names = "SIGINT SIGHUP SIGUSR1 SIGTERM".split()
def hear(number, frame):
    print("heard", signal.Signals(number).name, flush=True)  # fails without a terminal
    if number == signal.SIGTERM:
        sys.exit(7)
for name in names:
    signal.signal(getattr(signal, name), hear)
print("listening", flush=True)
while True:
    signal.pause()
"""


def test_a_single_process_hears_each_signal_to_its_launcher_once(tmp_path):
    """(Several: tests/test_multinode.py; torchelastic passes the signals on.)"""
    (tmp_path / "hears.py").write_text(HEARS)
    command = [sys.executable, *LAUNCHER.split(), str(tmp_path / "hears.py")]
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started these tests
        os.execv(command[0], command)
    output = b""

    def read_until(words: bytes):
        nonlocal output
        while words not in output:
            output += os.read(terminal, 65536)

    try:
        read_until(b"listening")
        os.write(terminal, b"\x03")  # Ctrl-C, which a terminal sends to all that it started
        read_until(b"SIGINT")
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
            os.kill(child, number)
            read_until(number.name.encode())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, output
    finally:
        os.close(terminal)  # which ends what still runs, by SIGHUP and SIGTERM
    assert output.count(b"heard") == 4, output


@pytest.mark.slow
def test_a_frozen_peer_ends_the_job_within_the_timeout(started):
    process = started("--timeout", 4, config="2cpu")
    (peer,) = [each for each in processes(process) if each.environ().get("RANK") == "1"]
    peer.send_signal(signal.SIGSTOP)
    at = time.monotonic()
    _output, errors = process.communicate(timeout=60)
    seconds = time.monotonic() - at
    assert process.returncode == 1
    assert "error: process 0 lost contact with another process of this run" in errors
    assert seconds < 4 + 35, seconds  # torchrun waits 30 s before it kills a frozen process
    assert not processes(process)
