"""Files behind URLs: opened by fsspec, tried again if a call fails, shown without passwords."""

import os
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from trainkit.errors import LoneFailure, UsageError
from trainkit.text import first_sentence

T = TypeVar("T")

WAITS = (1, 2, 4)  # seconds before a call is tried again


def trying(what: str, call: Callable[..., T], *args: Any) -> T:
    """Return call(*args); try again if it fails. Raises LoneFailure, which begins with `what`."""
    waits = iter(WAITS)
    while True:
        try:
            return call(*args)
        except LoneFailure:
            raise
        except Exception as problem:  # each store raises its own kinds: not all are OSError
            cause = problem.__cause__ or problem  # fsspec calls each failure "not found"
            missing = isinstance(cause, FileNotFoundError) or getattr(cause, "status", 0) == 404
            wait = None if missing else next(waits, None)
            if wait is None:
                raise LoneFailure(shown(f"{what}: {first_sentence(cause)}")) from None
            time.sleep(wait)


def shown(text: str) -> str:
    """Return the text without the passwords and signatures of URLs."""
    return re.sub(r"(?<=//)[^/\s]*@|\?[^\s'\"]*", "", text)


def find_secret(url: str) -> str:
    """Return a sentence if a password or signature is in a URL, else nothing."""
    secrets = re.findall(r"(?<=//)[^/\s]*:([^/\s]*)@|\?(.*)", url)  # a password, a query
    return (
        f"{shown(url)}: a password or signature in it would be saved with the run: "
        "write $NAME in its place, and set the environment variable NAME"
    ) * any("$" not in "".join(secret) for secret in secrets)


def open_store(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL and the path in it; $NAME is taken from the environment.

    Not from fsspec's cache, which takes a second in a fork to close what was inherited. Raises
    UsageError if such a variable is not set.
    """
    import fsspec  # imported late for a faster start

    expanded = os.path.expandvars(url)
    if unset := [name for name in re.findall(r"\$\{?(\w+)", url) if name not in os.environ]:
        raise UsageError(f"{shown(url)}: the environment variable {unset[0]} is not set: set it")
    return fsspec.url_to_fs(expanded, skip_instance_cache=True)
