"""Prints what Accelerate makes of a YAML that shards CPU processes, alone and with our help."""

import json
from functools import partial

import torch
from accelerate import Accelerator

from trainkit import launch, shards, startup


def main() -> None:
    plugin = shards.plugin(launch.check_launch())
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    alone = accelerator.distributed_type.value
    shards.shard(accelerator, plugin)
    model = torch.nn.Linear(7, 3)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    found = {"alone": alone, "made": accelerator.distributed_type.value,
             "sharded": accelerator.is_fsdp2}  # fmt: skip
    accelerator.print(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    startup.run(partial(main))
