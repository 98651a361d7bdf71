"""The worlds that a script is run in."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
