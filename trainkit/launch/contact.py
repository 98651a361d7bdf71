"""What processes leave for each other: where they are, and why the first of them has ended."""

import os
import re
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from trainkit.repairs.private_names import store_of_processes
from trainkit.text import first_sentence, shorten

FAILED = "trainkit/failed"
BEAT_SECONDS = 1.0
# There is no store with a single process, and it ends with the process that has made it.
NO_STORE = RuntimeError, ValueError
TIMED_OUT = re.compile(r"Timed out waiting (\d+)ms")
# Folders of files that are not the user's.
OF_OTHERS = (str(Path(__file__).parents[1]), str(Path(os.__file__).parent), "site-packages", "<")


def place_in(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Where these frames, the outermost first, are in the user's code, for a sentence."""
    place = "no line of the script"
    for frame, line in frames:
        path = frame.f_code.co_filename
        if not any(each in path for each in OF_OTHERS):
            place = f"{frame.f_code.co_name.strip('<>')}, line {line} of {Path(path).name}"
    return place


def life_of(store: Any, rank: int) -> str:
    """What a process shows each second: a number that grows, and where it is; empty at first."""
    key = f"trainkit/life/{rank}"
    return store.get(key).decode() if store.check([key]) else ""


def place_of(life: str) -> str:
    """Where a process is, of what it shows."""
    return life.partition(" ")[2]


def cause_of(error: BaseException, text: str, is_lost: bool) -> str:
    """The sentence that this process ends with: `text`, which the others are then told.

    is_lost: it has only lost contact; the cause is then what another process has told or, after
    --timeout, where they are. Without a text the others are told the error, and where it was.
    """
    place = place_in(traceback.walk_tb(error.__traceback__))
    if is_lost:
        found, said = TIMED_OUT.search(str(error)), first_failure()
        if said or not found:
            return said or text
        text = waited(int(found[1]) / 1000, place)
    said = text or f"process {own_rank()} failed first, in {place}: {first_sentence(error)}"
    with suppress(*NO_STORE):
        store_of_processes().compare_set(FAILED, "", said)
    return text


def first_failure() -> str:
    """Why the first process has ended that could tell; empty if none has."""
    with suppress(*NO_STORE):
        store = store_of_processes()
        return store.get(FAILED).decode() if store.check([FAILED]) else ""
    return ""


def waited(seconds: float, place: str) -> str:
    """Say where the other processes are, and which show in the next seconds that they live."""
    lost, others = "lost contact with another process of this run: it ", []
    with suppress(*NO_STORE):
        store, num = store_of_processes(), torch.distributed.get_world_size()
        before = [life_of(store, rank) for rank in range(num)]
        time.sleep(2.5 * BEAT_SECONDS)
        for rank in {*range(num)} - {int(own_rank())}:
            life = life_of(store, rank)
            is_alive = life != before[rank]
            lost = "" if is_alive else lost
            verb = "is alive" if is_alive else "was last seen"
            others.append(f"process {rank} {verb}, in {place_of(life)}")
    return (
        f"process {own_rank()} {lost}waited for --timeout {seconds:g} s in {place}, while "
        f"{shorten(others)}: let all processes make the same calls and, if one may take so long, "
        "raise --timeout"
    )


def say_who_is_missing(store: Any, missing: Iterable[int]) -> None:
    """Print where this process waits, and where those are that it waits for."""
    own, *others = (
        f"process {rank} in {place_of(life_of(store, rank))}"
        for rank in (int(own_rank()), *sorted(missing))
    )
    text = f"{own} still waits for {shorten(others)}: stop the run if they wait for each other"
    print(text, file=sys.stderr, flush=True)


def own_rank() -> str:
    """The number of this process, for a sentence."""
    return os.environ.get("RANK", "0")
