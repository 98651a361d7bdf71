"""Files behind URLs: opened by fsspec, tried again if a call fails, shown without passwords."""

import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from trainkit.errors import LoneFailure

T = TypeVar("T")

WAITS = (1, 2, 4)  # seconds before a call is tried again


class Missing(LoneFailure):
    """There is no such file."""


def trying(what: str, call: Callable[..., T], *args: Any) -> T:
    """Return call(*args), tried again if it fails. Raises LoneFailure, or Missing at once."""
    waits = iter(WAITS)
    while True:
        try:
            return call(*args)
        except LoneFailure:  # of a call within this one, which was tried again there
            raise
        except Exception as problem:  # each store raises its own kinds: not all are OSError
            cause = problem.__cause__ or problem  # fsspec calls each failure "not found"
            missing = isinstance(cause, FileNotFoundError) or getattr(cause, "status", 0) == 404
            wait = None if missing else next(waits, None)
            if wait is None:
                reason = " ".join(f"{type(cause).__name__}: {cause}".split())
                raise (Missing if missing else LoneFailure)(shown(f"{what}: {reason}")) from None
            time.sleep(wait)


def shown(text: str) -> str:
    """Return the text without what may be secret in URLs: all before the last @, and queries."""
    return re.sub(r"(?<=://)\S*@|\?[^\s'\"]*", "", text)


def find_secret(url: str) -> str:
    """Return a sentence if a password or signature is in a URL, which may be a chain, else nothing.

    A user alone, as in abfs://container@account, is no secret; one may have a slash in it.
    """
    links = re.split(r"::(?=\w+://)", url)
    if not any(re.search(r"://(.*:.*@|.*\?.)", link, re.DOTALL) for link in links):
        return ""
    return (
        f"{re.sub(r'(?<=://).*@|[?].*', '', url, flags=re.DOTALL)}: a password or key in it would "
        "be saved with the run: set the variables of this store, such as AWS_SECRET_ACCESS_KEY, or "
        "those of fsspec, such as FSSPEC_SFTP_PASSWORD"
    )


def open_store(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL and the path in it."""
    import fsspec  # imported late for a faster start

    # In a fork fsspec's cache takes a second to close what was inherited.
    return fsspec.url_to_fs(url, skip_instance_cache=True)
