"""Signals, dead launchers and frozen peers, through the real launchers (killed: test_shards.py)."""

import os
import signal
import subprocess
import time
from datetime import timedelta

import psutil
import pytest
from conftest import kill_all, linux_only, processes, start, wait_for_step, wait_until

from trainkit.errors import Stopped
from trainkit.launch.signals import Signals

if os.name != "posix":
    pytest.skip("Windows has no signals but Ctrl-C", allow_module_level=True)

ENDLESS = ["--epochs", 1000, "--batch-size", 60, "--log-every", 1, "--save-every", 5]
ENDLESS += ["--schedule", "constant", "--warmup", 0, "--eval-batch-size", 50]


@pytest.fixture
def started(tiny_mnist, tmp_path):
    """Start an endless run and wait until it trains."""
    running: list[subprocess.Popen] = []

    def call(*args: object, config: str | None = None, **options: object) -> subprocess.Popen:
        folder = tmp_path / "run"
        args = ["--dataset", tiny_mnist, "--run-dir", folder, *ENDLESS, *args]
        process = start("train_mnist.py", *args, config=config, **options)
        running.append(process)
        wait_for_step(folder, 1, process)
        return process

    yield call
    for process in running:
        kill_all(process)
        process.communicate()


def ranks(process: subprocess.Popen) -> list[psutil.Process]:
    """The training processes of a start, by rank."""
    found = {}
    for one in processes(process):
        line = " ".join(one.cmdline())
        if "train_mnist.py" in line and "commands.launch" not in line:
            found.setdefault(int(one.environ().get("RANK", "0")), one)
    return [found[rank] for rank in sorted(found)]


@linux_only
def test_sigterm_to_loader_workers_too_saves_and_a_second_run_is_refused(
    started, fork_main, tiny_mnist, tmp_path
):
    process = started("--num-workers", 2, start_new_session=True)
    second = fork_main("train_mnist.py", "--dataset", tiny_mnist, "--run-dir", tmp_path / "run")
    assert second.returncode == 2
    assert "in use by another process" in second.stderr and "Traceback" not in second.stderr
    wait_until(lambda: len(processes(process)) >= 3, process)
    for each in processes(process)[::-1]:  # workers first, as pkill -f may have it
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
    {where} = slow
    train_mnist.main(argv)
"""


@linux_only
def test_a_second_interrupt_ends_at_once(fork_main, tiny_mnist, tmp_path):
    """(test_resume.py: after a single one the run saves and ends with 75.)"""
    (tmp_path / "slow.py").write_text(SLOW.format(where="Accelerator.save_state"))
    flags = ["--dataset", tiny_mnist, "--run-dir", tmp_path / "run", "--no-pictures", *ENDLESS]
    # The third is of an impatient person, while the process exits.
    kill = [[seconds, None, signal.SIGINT] for seconds in (4, 5.5, 5.55)]
    ended = fork_main(str(tmp_path / "slow.py"), *flags, kill=kill)
    assert ended.returncode == 130 and 5 < ended.seconds < 15, ended
    assert "slow" in ended.stdout and "Traceback" not in ended.stderr


@linux_only
def test_sigterm_while_data_are_loaded_ends_at_once_with_75(fork_main, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW.format(where="train_mnist.load_data"))
    flags, kill = ["--run-dir", tmp_path / "run"], [[4, None, signal.SIGTERM]]
    ended = fork_main(str(tmp_path / "slow.py"), *flags, kill=kill)
    assert ended.returncode == 75 and ended.seconds < 15, ended
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: stopped by SIGTERM before the first step")


@pytest.fixture
def watching(accelerator):
    """Make Signals; in the end what was handled before is handled again."""
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started these tests
    made: list[Signals] = []

    def make() -> Signals:
        made.append(Signals(accelerator, timedelta(seconds=9)))
        return made[-1]

    yield make
    for signals in reversed(made):
        signals.restore()
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
    assert not signals.requested()
    signals.restore()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@linux_only  # elsewhere nothing tells a process that its launcher died
@pytest.mark.parametrize(
    ("config", "number"),
    [
        ("1cpu_bf16", signal.SIGKILL),
        pytest.param("2cpu", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_dead_launcher_leaves_a_saved_run_and_no_process(started, tmp_path, config, number):
    process = started(config=config)
    assert len(ranks(process)) == int(config[0])
    process.send_signal(number)
    wait_until(lambda: not processes(process))
    output, errors = process.communicate()
    assert "at step" in output and "saved: start the same command" in output, errors
    assert output.count("stopped by") == 1


@pytest.mark.slow
def test_a_frozen_peer_ends_the_job_within_the_timeout(started):
    process = started("--timeout", 4, config="2cpu")
    ranks(process)[1].send_signal(signal.SIGSTOP)
    at = time.monotonic()
    _output, errors = process.communicate(timeout=60)
    seconds = time.monotonic() - at
    assert process.returncode == 1
    assert "error: process 0 lost contact with another process of this run" in errors
    assert seconds < 4 + 35, seconds  # torchrun waits 30 s before it kills a frozen process
    assert not processes(process)
