"""What a world has left: the files of its run, and why it did not come to its end."""

import functools
import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.tools.rehearse.worlds import World


@dataclass
class Outcome:
    """Where the files of a world are, and its problem, if it did not come to its end."""

    world: World
    folder: Path
    problem: str = ""
    is_refusal: bool = False
    seconds: float = 0.0

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Those of metrics.jsonl."""
        text = (self.folder / "run/metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def bytes_of(self, *patterns: str) -> dict[str, bytes]:
        """The content of the files of these names in the run folder."""
        paths = [path for pattern in patterns for path in (self.folder / "run").glob(pattern)]
        return {path.name: path.read_bytes() for path in paths}

    def noted(self, name: str) -> Any:
        """What the first process of this world wrote down."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}


def why_not(
    folder: Path, codes: Sequence[int | None], script: str, limit: float
) -> tuple[str, bool]:
    """Why a world did not come to its end, in one sentence, and whether that is a refusal."""
    paths = [folder / f"stderr-{rank}" for rank in range(len(codes))]
    texts = [path.read_text(errors="replace") if path.exists() else "" for path in paths]
    for text, code in zip(texts, codes, strict=True):
        said = [line[7:] for line in text.splitlines() if line.startswith("error: ")]
        if said and code != 0:
            return said[-1], code == 2
    for text in texts:
        if "Traceback (most recent call last)" in text:
            return of_traceback(text, script)
    if None in codes:
        return f"it did not end within {limit:.0f} s, and was ended", False
    code = next(code for code in codes if code)
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"it ended with {name}, and said nothing", False


def of_traceback(text: str, script: str) -> tuple[str, bool]:
    """The error of the last traceback, with the line of the script; a refusal if the kit raised."""
    last = text.rpartition("Traceback (most recent call last)")[2]
    places = re.findall(r'^ *File "([^"]+)", line (\d+)', last, re.M)
    errors = re.findall(
        r"^(?!\s)[\w.]+(?:Error|Exception|Interrupt|Exit|Warning|Failure)?: .*", last, re.M
    )
    error = errors[-1] if errors else last.strip().splitlines()[-1]
    name, _, sentence = error.partition(": ")
    path = str(Path(script).resolve())
    lines = [number for place, number in places if place == path]
    where = f" ({Path(script).name}, line {lines[-1]})" if lines else ""
    is_refusal = name.endswith(".UsageError") or (
        name == "RuntimeError" and "/trainkit/" in Path(places[-1][0]).as_posix()
    )
    return (sentence if is_refusal else error) + where, is_refusal
