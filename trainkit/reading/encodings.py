"""The text of a file: in what its byte order mark says, in the given encoding, or in UTF-8."""

import codecs

from trainkit.errors import UsageError

MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def read_text(path: str, given: str | None = None) -> str:
    """Return the text of a file, which may be compressed.

    A byte order mark decides. A file without one that is valid UTF-8 beyond ASCII is read as UTF-8
    whatever is given, because text in an older encoding hardly ever is. Raises LookupError for an
    encoding that does not exist, UsageError for a file that is not in it. given: None means UTF-8.
    """
    import fsspec  # here: a run on synthetic data starts without it

    with fsspec.open(path, "rb", compression="infer") as file:
        content = file.read()
    marked = [name for mark, name in MARKS.items() if content.startswith(mark)]
    # ASCII is asked as it is given, because UTF-16 without a mark may look like it.
    tried = marked or ([given] if given and content.isascii() else ["utf-8", given or "utf-8"])
    for encoding in tried:
        try:
            return content.decode(encoding)
        except UnicodeDecodeError:
            continue
    raise UsageError(
        f"{path} is not in UTF-8, or not in the given --encoding: try --encoding cp1252 or utf-16"
    )
