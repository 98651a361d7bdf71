"""Prints the world that a YAML makes, after the checks with which the scripts begin."""

import json

import torch
from accelerate import Accelerator

from trainkit import launch, shards, startup, world


def main() -> None:
    plugin = shards.plugin(launch.check_launch())
    accelerator = Accelerator(cpu=not torch.accelerator.is_available(), fsdp_plugin=plugin)
    alone = accelerator.distributed_type.value
    shards.shard(accelerator, plugin)
    world.check_world(accelerator)
    accelerator.print(
        json.dumps(
            {
                "num_processes": accelerator.num_processes,
                "mixed_precision": accelerator.mixed_precision,
                "device": accelerator.device.type,
                "of_accelerate_alone": alone,
                "sharded": accelerator.is_fsdp2,
            }
        )
    )
    accelerator.wait_for_everyone()  # one that left would break the other's connections
    accelerator.end_training()


if __name__ == "__main__":
    startup.run(main)
