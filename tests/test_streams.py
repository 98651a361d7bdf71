"""What is printed costs no work, whatever becomes of the reader, the disk and the encoding."""

import os

import pytest
from conftest import ROOT, linux_only

# It prints in each of the ways in which libraries print.
PRINTING = """
import io, logging, os, subprocess, sys, warnings
from trainkit.launch import startup

reader, writer = os.pipe()
counting = None
if where == "nobody":
    os.close(reader)
elif where == "a terminal that does not wait":
    os.set_blocking(writer, False)
    counting = subprocess.Popen(["wc", "-c"], stdin=reader, stdout=subprocess.PIPE)
    os.close(reader)
else:
    writer = os.open(where, os.O_RDONLY if where == os.devnull else os.O_WRONLY | os.O_CREAT)
for number, name in enumerate(("stdout", "stderr"), 1):
    os.dup2(writer, number)
    raw = io.FileIO(number, "w", closefd=False)
    buffer = raw if unbuffered else io.BufferedWriter(raw)
    setattr(sys, name, io.TextIOWrapper(buffer, encoding="cp1252", write_through=unbuffered))
os.close(writer)
startup.keep_printing()
startup.keep_printing()  # of Run, a second time
for _ in range(3):
    print("caf\\xe9 \\u4e2d", flush=True)
    print(end="x" * 100_000)
    sys.stderr.write("\\u4e2d\\n")
    warnings.warn("careful", stacklevel=1)
    logging.warning("careful")
sys.stdout.buffer.write(b"bytes")
sys.stdout.flush()
assert type(startup.LOST.get("stdout")).__name__ == lost, startup.LOST
if counting:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    assert int(counting.communicate()[0]) > 3 * 100_000 + len("bytes")
"""


@linux_only
@pytest.mark.parametrize(
    "where, lost, unbuffered",
    [
        ("/dev/full", "OSError", False),
        (os.devnull, "OSError", True),  # opened to be read
        ("nobody", "BrokenPipeError", True),
        ("a terminal that does not wait", "NoneType", False),
    ],
)
def test_a_program_outlives_the_loss_of_its_output(where, lost, unbuffered, in_fresh_process):
    in_fresh_process(PRINTING, where=where, lost=lost, unbuffered=unbuffered)


@linux_only
def test_letters_that_an_encoding_lacks_are_escaped(tmp_path, in_fresh_process):
    path = tmp_path / "said"
    in_fresh_process(PRINTING, where=str(path), lost="NoneType", unbuffered=False)
    assert path.read_bytes().startswith(b"caf\xe9 \\u4e2d\n")


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
