"""The text of a file: in what its byte order mark says, in the given encoding, or in UTF-8."""

import codecs
import zipfile

from trainkit.errors import UsageError
from trainkit.reading.paths import is_read

# UTF-32 comes first, because its mark begins with that of UTF-16.
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


def read_text(path: str, given: str | None = None) -> str:
    """Return the text of a file, which may be compressed.

    A byte order mark decides. A file without one that is valid UTF-8 beyond ASCII is read as UTF-8
    whatever is given, because text in an older encoding hardly ever is. Raises LookupError for an
    encoding that does not exist, UsageError for a file that is not in it. given: None means UTF-8.
    """
    import fsspec  # here: a run on synthetic data starts without it

    if path.lower().endswith(".zip"):
        with zipfile.ZipFile(path) as archive:  # of macOS, it has hidden files too
            names = [n for n in archive.namelist() if is_read(n) and not n.endswith("/")]
            if len(names) != 1:
                raise UsageError(
                    f"{path} is an archive of {len(names)} files: unpack it, and name the folder"
                )
            content = archive.read(names[0])
    else:
        with fsspec.open(path, "rb", compression="infer") as file:
            content = file.read()
    for mark, name in MARKS.items():
        if content.startswith(mark):
            return content[len(mark) :].decode(name)
    # UTF-16 has zeros where UTF-8 has none, and some encodings have nothing but ASCII.
    tried = [given] if content.isascii() or b"\0" in content else ["utf-8", given]
    for encoding in tried:
        try:
            return content.decode(encoding or "utf-8")
        except UnicodeDecodeError:
            continue
    raise UsageError(
        f"{path} is not in UTF-8, or not in the given --encoding: try --encoding cp1252 or utf-16"
    )
