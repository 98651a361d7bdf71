"""Files behind URLs: opened by fsspec, tried again if a call fails, shown without passwords."""

import os
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from trainkit.errors import LoneFailure, UsageError

T = TypeVar("T")

OPENED: set[str] = set()  # what was secret in the URLs that this process has opened
CLOUD = re.compile(r"\b(s3a?|gs|gcs|az|abfss?|adl|hf)://")  # their keys are in the environment
WAITS = (1, 2, 4)  # seconds before a call is tried again


class Missing(LoneFailure):
    """There is no such file."""


def trying(what: str, call: Callable[..., T], *args: Any) -> T:
    """Return call(*args); try again if it fails. Raises LoneFailure, which begins with `what`.

    It is a Missing, without another try, if there is no such file.
    """
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
    """Return the text without what may be secret in URLs: all before the last @, and queries.

    A secret may have a slash in it, as those of AWS do, and the message of a store may repeat it
    without its URL: what open_store has opened is left out wherever it stands.
    """
    for secret in sorted(OPENED, key=len, reverse=True):
        text = text.replace(secret, "...")
    return re.sub(r"(?<=://)\S*@|\?[^\s'\"]*", "", text)


def shown_url(url: str) -> str:
    """Return a URL without what may be secret in it, even if there are blanks in that."""
    return re.sub(r"(?<=://).*@|\?.*", "", url, flags=re.DOTALL)


def secrets_of(url: str) -> list[str]:
    """Return what is before the last @ of each URL of a chain (cache::s3://...), and the queries.

    A user without a password, as in abfs://container@account, is not a secret.
    """
    links = [link.partition("://")[2] for link in re.split(r"::(?=\w+://)", url)]
    users = [link.rpartition("@")[0] for link in links]
    queries = [link.partition("?")[2] for link in links]
    return [user for user in users if ":" in user] + [query for query in queries if query]


def find_secret(url: str) -> str:
    """Return a sentence if a password or signature is in a URL, else nothing."""
    secrets, in_cloud = secrets_of(url), CLOUD.search(url)
    if not in_cloud and all("$" in secret for secret in secrets):
        return ""
    remedy = "write $NAME in its place, and set the environment variable NAME"
    if in_cloud:  # s3fs reads no keys of a URL, not even those of variables
        remedy = "remove it, and set the variables of this store, such as AWS_SECRET_ACCESS_KEY"
    said = f"{shown_url(url)}: a password or key in it would be saved with the run: {remedy}"
    return said if secrets else ""


def open_store(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL and the path in it; $NAME is taken from the environment.

    Not from fsspec's cache, which takes a second in a fork to close what was inherited. Raises
    UsageError if such a variable is not set.
    """
    import fsspec  # imported late for a faster start

    expanded = os.path.expandvars(url)
    if unset := [name for name in re.findall(r"\$\{?(\w+)", url) if name not in os.environ]:
        raise UsageError(
            f"{shown_url(url)}: the environment variable {unset[0]} is not set: set it"
        )
    for secret in secrets_of(expanded):
        OPENED.update(part for part in (secret, secret.partition(":")[2]) if len(part) > 3)
    return fsspec.url_to_fs(expanded, skip_instance_cache=True)
