"""The worlds that a script is run in, what each has left, and why it did not come to its end."""

import functools
import json
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit.errors import RunFailure, UsageError, advise, explain

ENV = {"WANDB_MODE": "disabled", "CUDA_VISIBLE_DEVICES": "-1", "ACCELERATE_USE_CPU": "true"}
SHARDED = {  # as in accelerate_configs/2cpu_fsdp.yaml
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
SETTINGS: dict[str, Any] = {
    "resume": None,
    "keep": 99,
    "pictures": False,
    "tracker": None,
    "mirror": None,
    "mirror_must": False,
    "stop_after_steps": None,
    "num_workers": 0,
    "accumulate": 1,
    "timeout": 60,
}


@dataclass
class World:
    """One way to run the script.

    Attributes:
        settings: values for fields of its config.
        env: variables, beside ENV and those that make several processes one world.
        is_exact: it must give the bytes of the first run.
        resumed_after: the step of the checkpoint of the first run that it begins with; 0: none.
        is_looked_at: see what its samples and operations are like.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    num_processes: int = 1
    is_exact: bool = False
    resumed_after: int = 0
    is_looked_at: bool = False


FIRST = World("the first run", is_looked_at=True)
AGAIN = World("the same again", is_exact=True)


def worlds_of(folder: Path) -> list[World]:
    """The worlds to compare with the first run, which is in this folder."""
    saved = sorted((folder / "run/checkpoints").glob("step-*"))
    steps = [int(path.name[5:]) for path in saved][:-1]
    resumed = [
        World(f"resumed after step {n}", {"resume": "auto"}, is_exact=True, resumed_after=n)
        for n in steps
    ]
    return [
        AGAIN,
        *resumed,
        World("2 loader workers", {"num_workers": 2}),
        World("--accumulate 2", {"accumulate": 2}),
        World("2 processes", num_processes=2),
        World("sharded over 2", env=SHARDED, num_processes=2),
    ]


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


def why_not(outcome: Outcome, codes: Sequence[int | None], limit: float) -> tuple[str, bool]:
    """Why a world did not come to its end, in one sentence, and whether that is a refusal."""
    if said := [end for rank in range(len(codes)) if (end := outcome.noted(f"ended-{rank}"))]:
        text, is_refusal = min(said, key=lambda end: "lost contact" in end[0])
        return text, is_refusal
    if None in codes:
        return f"it did not end within {limit:.0f} s, and was ended", False
    code = next(code for code in codes if code)
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"it ended with {name}, and said nothing", False


def why(error: BaseException, script: Path) -> tuple[str, bool]:
    """What ended a script, with its line, and whether that is a refusal of the kit."""
    if isinstance(error, UsageError | RunFailure):
        return str(error), isinstance(error, UsageError)
    if isinstance(error, Exception) and (said := advise(error) or explain(error)):
        return said, False
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(script)]
    where = f" ({script.name}, line {lines[-1]})" if lines else ""
    by_kit = type(error) is RuntimeError and "/trainkit/" in Path(frames[-1].filename).as_posix()
    sentence = str(error) if by_kit else "".join(traceback.format_exception_only(error)).strip()
    return " ".join(sentence.splitlines()[:1]) + where, by_kit
