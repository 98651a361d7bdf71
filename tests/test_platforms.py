"""Without what other platforms lack: fcntl, resource, SIGUSR1, setpgid, folders to be synced."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import NUM_TEST, ROOT, kill_all, posix_only, rows, start
from PIL import Image

# In one process, because each start takes seconds.
RESUME_AND_USE = """
import multiprocessing, os, signal, sys
from pathlib import Path

for name in ("fcntl", "resource"):
    assert sys.modules[name] is None
assert not hasattr(signal, "SIGHUP") and not hasattr(os, "setpgid")

import predict, train_mnist
from trainkit import doctor
from trainkit.rundir import sync

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")  # loader workers
    sync(Path("."))  # opens no folder, and does not mind
    run_dir, picture, *flags = sys.argv[1:]
    train_mnist.main(flags)
    predict.main([run_dir, picture])
    sys.exit(doctor.main(["--run-dir", run_dir, "--json"]))
"""


@posix_only  # Windows has nothing that could be taken away
def test_a_run_trains_stops_resumes_and_predicts_without_what_platforms_lack(
    small_mnist: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    flags = [
        "--dataset",
        small_mnist,
        "--batch-size",
        48,
        "--log-every",
        1,
        "--save-every",
        3,
        "--epochs",
        60,
        "--run-dir",
        run_dir,
    ]
    # A cache of its own: without fcntl a file that a kernel lock left behind counts as locked.
    environment = {
        "PYTHONPATH": f"{ROOT / 'tests' / 'platform_without'}{os.pathsep}{ROOT}",
        "HF_HOME": str(tmp_path / "hf"),
    }
    process = start("train_mnist.py", *flags, env=environment)
    deadline = time.monotonic() + 300
    while not list(run_dir.glob("checkpoints/step-*")) and process.poll() is None:
        if time.monotonic() > deadline:
            kill_all(process)
            pytest.fail(str(process.communicate()))
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 75 and "stopped by SIGINT" in output, errors
    stopped_at = rows(run_dir)[-1]["step"]

    Image.new("L", (28, 28)).save(tmp_path / "black.png")
    program = tmp_path / "resume_and_use.py"
    program.write_text(RESUME_AND_USE)
    again = [
        sys.executable,
        program,
        run_dir,
        tmp_path / "black.png",
        *flags,
        "--resume",
        "auto",
        "--no-pictures",
        "--num-workers",
        1,
        "--stop-after-steps",
        stopped_at + 5,
    ]
    done = subprocess.run(
        [*map(str, again)],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stdout and f"{tmp_path / 'black.png'}: " in done.stdout
    assert rows(run_dir)[-1]["eval_samples"] == NUM_TEST
    assert rows(run_dir)[-1]["step"] == stopped_at + 5
    assert json.loads((run_dir / "run.json").read_text())["num_processes"] == 1
    assert '"problems": []' in done.stdout
