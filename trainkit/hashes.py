"""Hashes that say whether two things are the same: xxh3_128 in hexadecimal, 12 GB a second.

They find damage and differences. They cannot find forgery.
"""

import hashlib
from pathlib import Path

import xxhash

KIND = "xxh3_128"


def digest(content: bytes | bytearray | memoryview | str) -> str:
    """Hash bytes, or a text in UTF-8."""
    if isinstance(content, str):
        content = content.encode("utf-8", "surrogatepass")
    return xxhash.xxh3_128_hexdigest(content)


def digest_file(path: Path) -> str:
    """Hash the content of a file, which is read in parts."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
