"""Standard output and standard error that cost no work: what cannot be printed is dropped.

The reader of the output may go away (`| head`, tee, ssh, a log collector), the disk below a log may
be full, a stream may be closed, or have an encoding that lacks the letters of a class.
"""

import contextlib
import io
import os
import select
import sys
from typing import Any

# By stream, stdout or stderr, why something that was printed there was lost first.
LOST: dict[str, str] = {}


class Unfailing(io.RawIOBase):
    """A raw stream that drops what it cannot write, and notes the first time in LOST."""

    def __init__(self, what: str, stream: io.TextIOWrapper):
        self.what = what
        self.name = stream.name
        self.stream = stream  # keeps it open: others may hold it, and its end closes the raw one
        self.raw = raw_of(stream)

    def write(self, data: Any) -> int:
        """Write the data; return how many bytes they were."""
        rest = memoryview(data).cast("B")
        try:
            while rest:
                num_bytes = self.raw.write(rest)
                if num_bytes is None:  # another process has made this terminal one that never waits
                    select.select([], [self.raw], [])
                rest = rest[num_bytes or 0 :]
        except OSError as problem:
            LOST.setdefault(self.what, f"{type(problem).__name__}: {problem}")
        return memoryview(data).nbytes

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.raw.fileno()

    def isatty(self) -> bool:
        return self.raw.isatty()


def keep_standard_files() -> None:
    """Open the null device where standard input, output or error is closed.

    Otherwise the next file that is opened would get its number, and what other libraries print
    would be written into that file. Call this before anything else opens files.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free
            os.set_inheritable(null, True)


def keep_printing() -> None:
    """Let no failure of printing reach the caller, in sys.stdout and sys.stderr from here on.

    Letters that an encoding lacks are printed as escapes. Streams of another kind than Python's
    own, such as those of a notebook, are left as they are.
    """
    sys.stdout = _unfailing("stdout", sys.stdout)
    sys.stderr = _unfailing("stderr", sys.stderr)


def _unfailing(name: str, stream: Any) -> Any:
    if stream is None:  # it was closed when Python started
        return open(os.devnull, "w", encoding="utf-8")
    if type(stream) is not io.TextIOWrapper or isinstance(raw_of(stream), Unfailing):
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    below = Unfailing(name, stream)
    is_buffered = raw_of(stream) is not stream.buffer  # it is not under python -u
    return io.TextIOWrapper(
        io.BufferedWriter(below) if is_buffered else below,  # type: ignore[arg-type]
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def lost_results() -> str:
    """Why not all of standard output was written; "" if it was, or if its reader has gone away."""
    with contextlib.suppress(OSError, ValueError):  # a stream of another kind, or closed
        sys.stdout.flush()
    reason = LOST.get("stdout", "")
    return "" if reason.startswith("BrokenPipeError") else reason


def raw_of(stream: io.TextIOWrapper) -> Any:
    """What a text stream of Python writes to, below its buffer if it has one."""
    return getattr(stream.buffer, "raw", stream.buffer)
