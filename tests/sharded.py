"""Runs of models that are sharded over their processes."""

from pathlib import Path
from typing import Any

import yaml
from conftest import CONFIGS
from faults import Nursery, Outcome

SHARDED = "sharded"


def env(kind: str | None, copies: int = 1, **changes: str) -> dict[str, str]:
    """What the launcher hands on of 4cpu_hsdp.yaml; kind None: DDP.

    The launcher gives a size of 1 for one that the YAML does not have.
    """
    if kind is None:
        return changes
    config = yaml.safe_load((CONFIGS / "4cpu_hsdp.yaml").read_text())
    config = config["fsdp_config"] | config["parallelism_config"]
    config |= {"parallelism_config_dp_shard_size": 1}
    config |= {"parallelism_config_dp_replicate_size": copies}
    found = {name.upper(): str(value).lower() for name, value in config.items()}
    both = dict.fromkeys(("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"), "true")
    return {**both, **found, **changes}


def train(
    nursery: Nursery,
    where: Path,
    *args: object,
    kind: str | None = None,
    world: int = 2,
    copies: int = 1,
    script: str = "train_regression",
    codes: list[int] | None = None,
    **plan: Any,
) -> Outcome:
    variables = env(kind, copies, **plan.pop("env", {}))
    plan = {"timeout": 200, **plan}  # on a busy machine a run may take a minute
    outcome = nursery.run(script, *args, "--run-dir", where, world=world, env=variables, **plan)
    assert outcome.codes == (codes or [0] * world), outcome.output
    world_line = outcome.output.splitlines()[0]
    if not world_line.startswith("error: the processes of this run differ"):  # before the plan
        assert f"{world} process" in world_line and ("sharded" in world_line) == (kind is not None)
    assert (f", {copies} copies, each sharded over 2" in world_line) == (copies > 1)
    return outcome
