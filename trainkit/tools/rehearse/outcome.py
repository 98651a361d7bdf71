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

    @property
    def run_dirs(self) -> list[Path]:
        """The folder of its run, or of its runs in the order of the script."""
        found = [path.parent for path in self.folder.glob("run*/run.json")]
        return sorted(found, key=lambda path: (len(path.name), path.name))

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Those of metrics.jsonl."""
        texts = [(run_dir / "metrics.jsonl").read_text() for run_dir in self.run_dirs]
        return [json.loads(line) for text in texts for line in text.splitlines()]

    @functools.cached_property
    def weights(self) -> dict[str, Any]:
        """The tensors of model.safetensors."""
        from safetensors.torch import load_file

        files = [load_file(run_dir / "model.safetensors") for run_dir in self.run_dirs]
        return {name: tensor for tensors in files for name, tensor in tensors.items()}

    def bytes_of(self, *patterns: str) -> dict[str, bytes]:
        """The content of the files of these names in the run folders."""
        paths = [path for run_dir in self.run_dirs for p in patterns for path in run_dir.glob(p)]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}

    def noted(self, name: str) -> Any:
        """What the first process of this world wrote down."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}


def why_not(
    folder: Path, codes: Sequence[int | None], script: str, limit: float
) -> tuple[str, bool]:
    """Why a world did not come to its end, in one sentence, and whether that is a refusal."""
    texts = [written_in(folder / f"stderr-{rank}") for rank in range(len(codes))]
    for text, code in zip(texts, codes, strict=True):
        said = [line[7:] for line in text.splitlines() if line.startswith("error: ")]
        if said and code != 0:
            return said[-1], code == 2
    for text in texts:
        if "Traceback (most recent call last)" in text:
            return of_traceback(text, script)
    if None in codes:
        where = place_of(folder, codes.index(None), script)
        return f"it did not end within {limit:.0f} s, and was ended{where}", False
    code = next(code for code in codes if code)
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"it ended with {name}, and said nothing", False


def written_in(path: Path) -> str:
    """What a process wrote; nothing if it was ended before it began."""
    return path.read_text(errors="replace") if path.exists() else ""


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


def place_of(folder: Path, rank: int, script: str) -> str:
    """Where a process that did not end was, in the script."""
    path = folder / f"stacks-{rank}"
    found = re.findall(
        rf'File "{re.escape(str(Path(script).resolve()))}", line (\d+)', written_in(path)
    )
    return f": process {rank} was in line {found[0]} of {Path(script).name}" if found else ""
