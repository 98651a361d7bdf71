"""Prints the world that a YAML makes, as a Run finds it."""

import json
import tempfile
from pathlib import Path

from trainkit import Run, arguments, startup


def main() -> None:
    parser = arguments.Parser()
    arguments.add_training_arguments(parser)
    arguments.add_run_arguments(parser, str(Path(tempfile.gettempdir(), "probe")))
    with Run(parser.parse_args([]), "probe") as run:
        accelerator = run.accelerator
        accelerator.print(
            json.dumps(
                {
                    "num_processes": accelerator.num_processes,
                    "mixed_precision": accelerator.mixed_precision,
                    "device": accelerator.device.type,
                    "sharded": accelerator.is_fsdp2,
                }
            )
        )
        accelerator.wait_for_everyone()  # one that left would break the other's connections
        run.stage = "over"


if __name__ == "__main__":
    startup.run(main)
