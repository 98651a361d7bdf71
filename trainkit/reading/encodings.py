"""Which encoding a text file is in: what its byte order mark says, the given one, or UTF-8."""

import codecs
from typing import IO, NamedTuple

# UTF-32 comes first, because its mark begins with that of UTF-16.
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
# The names under which Python takes off a mark as it reads, and writes one unasked.
MARKED = {"utf-8": "utf-8-sig", "utf-16-le": "utf-16", "utf-16-be": "utf-16"}
MARKED |= {"utf-32-le": "utf-32", "utf-32-be": "utf-32"}
PLAIN = {"utf-8-sig": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}
CHUNK = 2**20  # bytes that are looked at at once


class Encoding(NamedTuple):
    """How a text file is read, and how one like it is written.

    reader: the encoding to open it with, which takes off the mark. writer: that of the text after
    the mark. note: why it is another encoding than the given one, "" if it is not.
    """

    reader: str
    writer: str
    mark: bytes = b""
    note: str = ""


def to_utf8(content: bytes) -> bytes:
    """Return the content of a file as UTF-8, if it begins with a byte order mark; else as it is."""
    for mark, name in MARKS.items():
        if content.startswith(mark):
            return content[len(mark) :].decode(name, "surrogatepass").encode("utf-8", "replace")
    return content


def find_encoding(path: str, given: str | None = None) -> Encoding:
    """Return the encoding of a file, which may be compressed. Raises LookupError.

    A byte order mark decides. A file without one that is valid UTF-8 beyond ASCII is read as UTF-8
    whatever is given, because text in an older encoding hardly ever is.

    given: None means UTF-8.
    """
    import fsspec  # here: a run on synthetic data starts without it

    name = codecs.lookup(given or "utf-8").name
    name = PLAIN.get(name, name)
    source = fsspec.open(path, "rb", compression="infer")
    with source as file:
        start = file.read(4)
    for mark, marked in MARKS.items():
        if start.startswith(mark):
            note = ""
            if given and MARKED[marked] != MARKED.get(name):
                note = f"read as {MARKED[marked].removesuffix('-sig').upper()}, not as {given}: "
                note += "its byte order mark says so"
            return Encoding(MARKED[marked], marked, mark, note)
    if name == "utf-8":
        return Encoding(name, name)
    with source as file:
        if _is_utf8(file, is_wide=name in MARKED):
            return Encoding("utf-8", "utf-8", note=f"read as UTF-8, which it is, not as {given}")
    return Encoding(name, name)


def _is_utf8(file: IO[bytes], is_wide: bool) -> bool:
    """Return whether a file can be nothing but UTF-8: valid, and not ASCII alone.

    is_wide: the other encoding is UTF-16 or UTF-32, which has zeros where UTF-8 has none.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    is_more = is_wide
    try:
        while chunk := file.read(CHUNK):
            if 0 in chunk:
                return False
            is_more = is_more or not chunk.isascii()
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return is_more
