"""Signals, dead launchers and dead peers, through the real launchers."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from accelerate import Accelerator
from conftest import ROOT, command, kill_all, linux_only, processes, run, start
from faults import digests

from trainkit.errors import Stopped
from trainkit.launch.signals import Signals

if os.name != "posix":
    pytest.skip("Windows has no signals but Ctrl-C", allow_module_level=True)

ENDLESS = ["--epochs", 1000, "--batch-size", 60, "--log-every", 1, "--save-every", 5]
ENDLESS += ["--schedule", "constant", "--warmup", 0, "--eval-batch-size", 50]


@pytest.fixture
def started(tiny_mnist: Path, tmp_path: Path) -> Iterator:
    """Start an endless run and wait until it trains."""
    running: list[subprocess.Popen] = []

    def call(*args: object, config: str | None = None, **options: object) -> subprocess.Popen:
        folder = tmp_path / "run"
        args = ["--dataset", tiny_mnist, "--run-dir", folder, *ENDLESS, *args]
        process = start("train_mnist.py", *args, config=config, **options)
        running.append(process)
        wait_until(lambda: list(folder.glob("checkpoints/step-*")), 90, process)
        return process

    yield call
    for process in running:
        kill_all(process)
        process.communicate()


def wait_until(condition: Callable, seconds: float, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            kill_all(process)
            pytest.fail(f"{process.returncode}: {process.communicate()}")
        time.sleep(0.02)


def ranks(process: subprocess.Popen) -> list[psutil.Process]:
    """The training processes of a start, by rank."""
    found = {}
    for one in processes(process):
        line = " ".join(one.cmdline())
        if "train_mnist.py" in line and "commands.launch" not in line:
            found.setdefault(int(one.environ().get("RANK", "0")), one)
    return [found[rank] for rank in sorted(found)]


def gone(process: subprocess.Popen, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while processes(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not processes(process)


@linux_only
def test_sigterm_to_loader_workers_too_saves_and_a_second_run_is_refused(
    started: Callable, fork_main: Callable, tiny_mnist: Path, tmp_path: Path
) -> None:
    process = started("--num-workers", 2, start_new_session=True)
    second = fork_main("train_mnist.py", "--dataset", tiny_mnist, "--run-dir", tmp_path / "run")
    assert second.returncode == 2
    assert f"in use by process {process.pid}" in second.stderr and "Traceback" not in second.stderr
    wait_until(lambda: len(processes(process)) >= 3, 10, process)
    for each in processes(process)[::-1]:  # workers first, as pkill -f may have it
        each.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 75, errors
    assert "stopped by SIGTERM at step" in output and "--resume auto" in output
    assert "Traceback" not in errors
    assert gone(process, 6)


@pytest.mark.slow
def test_sigkill_of_a_run_ends_its_loader_workers(started: Callable) -> None:
    process = started("--num-workers", 2)
    wait_until(lambda: len(processes(process)) >= 3, 10, process)
    process.kill()
    process.wait()
    assert gone(process, 8)


# A training that takes a minute somewhere: there nothing looks at a first Ctrl-C.
SLOW = """
import time
import train_mnist
from accelerate import Accelerator

def slow(*args, **kwargs):
    print("slow", flush=True)
    time.sleep(60)

def main(argv):
    {where} = slow
    train_mnist.main(argv)
"""


@linux_only
def test_a_second_interrupt_ends_at_once(
    fork_main: Callable, tiny_mnist: Path, tmp_path: Path
) -> None:
    """(test_resume.py: after a single one the run saves and ends with 75.)"""
    (tmp_path / "slow.py").write_text(SLOW.format(where="Accelerator.save_state"))
    flags = ["--dataset", tiny_mnist, "--run-dir", tmp_path / "run", "--no-pictures", *ENDLESS]
    # The third is of an impatient person, while the process exits.
    kill = [[seconds, None, signal.SIGINT] for seconds in (4, 5.5, 5.55)]
    ended = fork_main(str(tmp_path / "slow.py"), *flags, kill=kill)
    assert ended.returncode == 130 and 5 < ended.seconds < 15, ended
    assert "slow" in ended.stdout and "Traceback" not in ended.stderr


@linux_only
def test_sigterm_while_data_are_loaded_ends_at_once_with_75(
    fork_main: Callable, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW.format(where="train_mnist.load_data"))
    flags, kill = ["--run-dir", tmp_path / "run"], [[4, None, signal.SIGTERM]]
    ended = fork_main(str(tmp_path / "slow.py"), *flags, kill=kill)
    assert ended.returncode == 75 and ended.seconds < 15, ended
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: stopped by SIGTERM before the first step")


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (signal.SIGTERM, Stopped),
        (signal.SIGUSR1, Stopped),
        (signal.SIGHUP, Stopped),
        (signal.SIGINT, KeyboardInterrupt),
    ],
)
def test_before_the_first_step_a_signal_ends_at_once_and_later_it_waits_for_the_step(
    number: int, kind: type, accelerator: Accelerator, request: pytest.FixtureRequest
) -> None:
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started these tests
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, hangup))
    signals = Signals(accelerator, timedelta(seconds=9))
    try:
        with pytest.raises(kind):
            os.kill(os.getpid(), number)
    finally:
        signals.restore()
    signals = Signals(accelerator, timedelta(seconds=9))
    try:
        assert not signals.requested()
        os.kill(os.getpid(), number)
        assert signals.requested()
    finally:
        signals.restore()


def test_under_nohup_a_run_goes_on_without_its_terminal(accelerator: Accelerator) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    signals = Signals(accelerator, timedelta(seconds=9))
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not signals.requested()
    finally:
        signals.restore()
        assert signal.signal(signal.SIGHUP, previous) == signal.SIG_IGN


@linux_only  # elsewhere nothing tells a process that its launcher died
@pytest.mark.parametrize(
    ("config", "number"),
    [
        ("1cpu_bf16", signal.SIGKILL),
        pytest.param("2cpu", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("2cpu", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("1cpu_bf16", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_dead_launcher_leaves_a_saved_run_and_no_process(
    started: Callable, tmp_path: Path, config: str, number: int
) -> None:
    process = started(config=config)
    assert len(ranks(process)) == int(config[0])
    process.send_signal(number)
    assert gone(process, 6)
    output, errors = process.communicate()
    assert "at step" in output and "saved: start the same command" in output, errors
    assert output.count("stopped by") == 1


@pytest.mark.slow
def test_a_killed_worker_comes_back_into_the_same_run(tmp_path: Path, arguments: dict) -> None:
    args = [*arguments["train_mnist"], "--model", "compact", "--epochs", 20, "--run-dir"]
    whole = run("train_mnist.py", *args, tmp_path / "whole", config="2cpu")
    assert whole.returncode == 0, whole.stderr
    line = command("train_mnist.py", *args, tmp_path / "run", "--resume", "auto", config="2cpu")
    # Not the default rendezvous: its store outlives a restart, and with it the dead addresses.
    at = line.index(str(ROOT / "train_mnist.py"))
    line[at:at] = ["--max_restarts", "2", "--rdzv_backend", "c10d"]
    process = subprocess.Popen(
        line,
        env={
            **os.environ,
            "TEST_RUN": tmp_path.name,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.mark = tmp_path.name
    try:
        wait_until(lambda: list((tmp_path / "run").glob("checkpoints/step-*")), 60, process)
        killed = ranks(process)[1]
        killed.kill()
        output, errors = process.communicate(timeout=100)
    finally:
        kill_all(process)
    assert process.returncode == 0, errors
    assert "resuming from" in output
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")


@linux_only
def test_a_killed_peer_ends_the_job_within_seconds(
    fork_main: Callable, tiny_mnist: Path, tmp_path: Path
) -> None:
    flags = ["--dataset", tiny_mnist, "--run-dir", tmp_path / "run", *ENDLESS]
    fault = {"rank": 1, "signal": [6, signal.SIGKILL]}
    ended = fork_main("train_mnist.py", *flags, world=2, fault=fault)
    assert ended.codes == [1, -signal.SIGKILL] and ended.seconds < 20, ended
    assert "error: process 0 lost contact with another process of this run" in ended.stderr


@pytest.mark.slow
def test_a_frozen_peer_ends_the_job_within_the_timeout(started: Callable) -> None:
    process = started("--timeout", 4, config="2cpu")
    ranks(process)[1].send_signal(signal.SIGSTOP)
    at = time.monotonic()
    _output, errors = process.communicate(timeout=60)
    seconds = time.monotonic() - at
    assert process.returncode == 1
    assert "error: process 0 lost contact with another process of this run" in errors
    assert seconds < 4 + 35, seconds  # torchrun waits 30 s before it kills a frozen process
    assert not processes(process)
