"""Without what other platforms lack: fcntl, resource, SIGUSR1, setpgid, folders to be synced."""

import os

import pytest
from conftest import NUM_TEST, ROOT, posix_only, rows, run
from PIL import Image

# In one process, because each start takes seconds.
STOP_RESUME_AND_USE = """
import multiprocessing, os, signal, sys
from pathlib import Path

for name in ("fcntl", "resource"):
    assert sys.modules[name] is None
assert not hasattr(signal, "SIGHUP") and not hasattr(os, "setpgid")


def ended(main, flags):
    conftest.forget_accelerator()
    try:
        main(flags)
        return 0
    except SystemExit as end:
        return end.code


if __name__ == "__main__":  # what follows is not imported in the loader workers
    folders = os.environ["PYTHONPATH"]
    import conftest, predict, train_mnist
    os.environ["PYTHONPATH"] = folders  # for the loader workers: conftest has changed it
    from trainkit.checkpoints.save import Checkpoints
    from trainkit.store.atomic import sync

    multiprocessing.set_start_method("spawn")  # loader workers
    sync(Path("."))  # opens no folder, and does not mind
    run_dir, picture, *flags = sys.argv[1:]
    save = Checkpoints.save

    def interrupted(*args):
        Checkpoints.save = save
        save(*args)
        signal.raise_signal(signal.SIGINT)

    Checkpoints.save = interrupted
    assert ended(train_mnist.main, flags) == 75
    flags += ["--resume", "auto", "--num-workers", "1", "--stop-after-steps", "9"]
    assert ended(train_mnist.main, flags) == 0
    predict.main([run_dir, picture])
"""


@pytest.mark.slow
@posix_only  # Windows has nothing that could be taken away
def test_a_run_trains_stops_resumes_and_predicts_without_what_platforms_lack(small_mnist, tmp_path):
    run_dir, picture, program = (tmp_path / name for name in ("run", "black.png", "program.py"))
    Image.new("L", (28, 28)).save(picture)
    program.write_text(STOP_RESUME_AND_USE)
    flags = "--batch-size 48 --log-every 1 --save-every 3 --epochs 60 --no-pictures"
    flags = f"{flags} --dataset {small_mnist} --run-dir {run_dir}".split()
    folders = (ROOT / "tests" / "platform_without", ROOT, ROOT / "tests")
    # A cache of its own: without fcntl a file that a kernel lock left behind counts as locked.
    env = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "HF_HOME": str(tmp_path / "hf")}
    done = run(program, run_dir, picture, *flags, env=env, cwd=ROOT, timeout=300)
    assert "stopped by SIGINT at step " in done.stdout and "resuming from" in done.stdout
    assert f"{picture}: " in done.stdout
    assert [row["step"] for row in rows(run_dir, "steps")] == [*range(1, 10)]
    assert rows(run_dir)[-1]["eval_samples"] == NUM_TEST
