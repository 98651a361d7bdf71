"""Train any script of this repository on a Ray cluster (pip install "ray[train]").

python -m launchers.ray --workers 2 runs/mnist train_mnist.py --epochs 20

--cpus and --gpus are those of one worker. RAY_ADDRESS says where the cluster is; without it Ray
starts one on this machine. The repository and the run folder, the first word, have the same path
on all nodes. A run that stops or breaks is started again up to --retries times and goes on from
its newest checkpoint; exit codes 0, 2 (refused) and 3 (--target-accuracy missed) are final.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from accelerate.utils.other import get_free_port
from ray import train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchTrainer


def main() -> None:
    """Do what the command line says and end with the exit code of the script."""
    parser = argparse.ArgumentParser()
    for name, number in {"workers": 1, "cpus": 1, "gpus": 0, "retries": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("run_dir", type=os.path.abspath)
    parser.add_argument("script", nargs="...")
    args = parser.parse_args()
    folder = Path.cwd()

    def work() -> int:
        """Run one process of the script.

        Ray calls this in a thread, where Python gets no signals, hence a process of its own. When
        Ray's worker dies, it gets SIGTERM and saves, because TORCHELASTIC_RUN_ID is set.
        """
        port = broadcast_from_rank_zero(get_free_port())  # Ray itself uses that in MASTER_PORT
        env = os.environ | {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "ray"}
        del env["ACCELERATE_TORCH_DEVICE"]  # a run goes by LOCAL_RANK
        command = [sys.executable, *args.script, "--run-dir", args.run_dir, "--resume", "auto"]
        script = subprocess.run(command, env=env, cwd=folder)
        # That of rank 0, for which all wait: it may still save when the others have ended.
        code = broadcast_from_rank_zero(script.returncode)
        if code not in (0, 2, 3):
            raise RuntimeError(f"exit code {code}")
        return code

    trainer = TorchTrainer(
        work,
        scaling_config=train.ScalingConfig(
            num_workers=args.workers,
            use_gpu=args.gpus > 0,
            resources_per_worker={"CPU": args.cpus, "GPU": args.gpus},
        ),
        run_config=train.RunConfig(
            storage_path=f"{args.run_dir}.ray",
            failure_config=train.FailureConfig(args.retries),
        ),
    )
    try:
        sys.exit(trainer.fit().return_value)
    except train.TrainingFailedError as error:
        sys.exit(f"error: no retries left ({error}): the same command goes on from the checkpoint")


if __name__ == "__main__":
    main()
