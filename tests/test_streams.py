"""What is printed costs no work, whatever becomes of the reader, the disk and the encoding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, linux_only, posix_only

# It prints in each of the ways in which libraries print, and says in a file how that went.
PRINTING = """
import contextlib, logging, os, sys, warnings
from trainkit.launch import streams
out = open("said", "w")  # it must not get the number of a closed stream
streams.keep_printing()
for _ in range(3):
    print("caf\\xe9 \\u4e2d", flush=True)
    sys.stderr.write("caf\\xe9 \\u4e2d\\n")
    warnings.warn("careful", stacklevel=1)
    logging.warning("careful")
    print(end="x" * 100_000)
sys.stdout.buffer.write(b"bytes")
sys.stdout.flush()
with contextlib.suppress(OSError):
    os.write(1, b"of another library")
out.write(f"to the end {streams.lost_results()}")
"""


def printing(folder: Path, redirected: str, encoding="utf-8", unbuffered="", **streams):
    """Run PRINTING with its streams redirected so; what it said in its file comes with it."""
    (folder / "printing.py").write_text(PRINTING)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} printing.py {redirected}"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONIOENCODING": encoding,
            "PYTHONUNBUFFERED": unbuffered,
        },
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
    )
    assert done.returncode == 0, done.stderr
    said = (folder / "said").read_text()
    assert said.startswith("to the end ")
    return done, said.removeprefix("to the end ")


@linux_only
@pytest.mark.parametrize(
    "redirected, lost",
    [
        (">/dev/full 2>&1", "OSError: [Errno 28] No space left on device"),
        ("1</dev/null", "OSError: [Errno 9] Bad file descriptor"),
        ("| head -c 1", ""),  # who reads no further has what he wants
        ("2>/dev/full", ""),
        ("<&- >&- 2>&-", ""),
        ("3>&1 >&- | true", ""),
    ],
)
def test_a_program_outlives_the_loss_of_its_output(tmp_path, redirected, lost):
    assert printing(tmp_path, redirected)[1] == lost


@posix_only
def test_letters_that_an_encoding_lacks_are_escaped(tmp_path):
    said = printing(tmp_path, "", encoding="cp1252")[0].stdout
    assert said.startswith(b"caf\xe9 \\u4e2d\n") and b"xbytes" in said


@posix_only
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_stream_that_does_not_wait_loses_nothing(tmp_path, unbuffered):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    counting = subprocess.Popen(["wc", "-c"], stdin=reader, stdout=subprocess.PIPE)
    os.close(reader)
    printing(tmp_path, "", unbuffered=unbuffered, stdout=writer)
    os.close(writer)
    assert int(counting.communicate()[0]) == 3 * 100_010 + len("bytesof another library")


IN_A_CHILD = """
import os, sys
sys.path.insert(0, root)
from trainkit.launch import startup
child = os.fork()
if child == 0:
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    startup.run(lambda: print("an answer"), **options)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == expected
"""


@linux_only
@pytest.mark.parametrize("options, code", [({"prints_results": True}, 1), ({}, 0)])
def test_only_a_program_whose_output_is_its_work_fails_without_it(options, code, in_fresh_process):
    in_fresh_process(IN_A_CHILD, root=str(ROOT), options=options, expected=code)


WITHOUT_A_READER = '''"""A regression whose reader goes away before its first line."""

import os

import train_regression


def main(argv):
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    train_regression.main(argv)
'''


@linux_only
def test_a_run_that_nobody_reads_trains_to_its_end(tmp_path, fork_main):
    flags = f"--num-samples 64 --epochs 3 --no-pictures --run-dir {tmp_path}/run"
    done = fork_main(WITHOUT_A_READER, flags)
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "run" / "DONE").exists()
