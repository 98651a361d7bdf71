"""The text of a file: in what its byte order mark says, in the given encoding, or in UTF-8."""

import codecs

from trainkit.errors import UsageError

# UTF-32 comes first, because its mark begins with that of UTF-16.
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


def read_text(path: str, given: str | None = None) -> tuple[str, str]:
    """Return the text of a file, which may be compressed, and a note, "" if it is as given.

    A byte order mark decides. A file without one that is valid UTF-8 beyond ASCII is read as UTF-8
    whatever is given, because text in an older encoding hardly ever is. Raises LookupError for an
    encoding that does not exist, UsageError for a file that is not in it.

    given: None means UTF-8.
    """
    import fsspec  # here: a run on synthetic data starts without it

    with fsspec.open(path, "rb", compression="infer") as file:
        content = file.read()
    wanted = codecs.lookup(given or "utf-8").name
    for mark, name in MARKS.items():
        if content.startswith(mark):
            note = f"read as {name[:6].upper()}, not as {given}: its byte order mark says so"
            return content[len(mark) :].decode(name), "" if name.startswith(wanted) else note
    is_wide = wanted.startswith(("utf-16", "utf-32"))  # which have zeros where UTF-8 has none
    if wanted == "utf-8" or (b"\0" not in content if is_wide else not content.isascii()):
        try:
            text = content.decode()
        except UnicodeDecodeError:
            pass
        else:
            note = f"read as UTF-8, which it is, not as {given}"
            return text, "" if wanted.startswith("utf-8") else note
    try:
        return content.decode(given or "utf-8"), ""
    except UnicodeDecodeError:
        raise UsageError(
            f"{path} is not in UTF-8, or not in the given --encoding: try --encoding cp1252 or "
            "utf-16"
        ) from None
