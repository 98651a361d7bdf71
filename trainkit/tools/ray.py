"""Train any script of this repository on a Ray cluster (pip install "ray[train]").

python -m trainkit.tools.ray --workers 2 runs/mnist train_mnist.py --epochs 20

--cpus and --gpus are per worker. RAY_ADDRESS says where the cluster is; without it Ray starts one
on this machine. The repository and the run folder, the first argument, must have the same path on
all nodes. A run that stops or fails is restarted up to --retries times and continues from its
newest checkpoint; exit codes 0, 2 (refused) and 3 (--target missed) are final.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from accelerate.utils.other import get_free_port

from trainkit.errors import EXIT_USAGE
from trainkit.store.records import read_evaluations

try:
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero
    from ray.train.torch import TorchTrainer
except ImportError:
    print('error: this needs `pip install "ray[train]"`', file=sys.stderr)
    sys.exit(EXIT_USAGE)

folder = Path.cwd()
parser = argparse.ArgumentParser()
for name, number in {"workers": 1, "cpus": 1, "gpus": 0, "retries": 3}.items():
    parser.add_argument(f"--{name}", type=int, default=number)
parser.add_argument("run_dir", type=folder.joinpath)
parser.add_argument("script", nargs="...")
args = parser.parse_args()


def work() -> int:
    """Run one process of the script and report its evaluations to Ray.

    Ray calls this in a thread, where Python receives no signals, so the script has a process of its
    own. When Ray's worker dies, that process gets SIGTERM and saves, because TORCHELASTIC_RUN_ID is
    set.
    """
    env = os.environ | {
        "MASTER_PORT": broadcast_from_rank_zero(str(get_free_port())),  # Ray itself uses the other
        "TORCHELASTIC_RUN_ID": "ray",
    }
    del env["ACCELERATE_TORCH_DEVICE"]  # a run uses LOCAL_RANK instead
    command = [sys.executable, *args.script, "--run-dir", args.run_dir, "--resume=auto"]
    script = subprocess.Popen(command, env=env, cwd=folder)
    num, is_over = 0, False
    with tempfile.TemporaryDirectory() as empty:  # Ray keeps no metrics without a checkpoint
        while not is_over:
            time.sleep(2)  # each turn reads the whole file, which grows
            is_over = script.poll() is not None
            evaluations = read_evaluations(args.run_dir)
            for metrics in evaluations[num:]:
                train.report(metrics, train.Checkpoint(empty))
            num = max(num, len(evaluations))  # one that a resume repeats is reported once
    # The exit code of rank 0, for which all wait: it may still save when the others have ended.
    code = broadcast_from_rank_zero(script.returncode)
    if code not in (0, 2, 3):
        raise RuntimeError(f"exit code {code}: a restart continues from the newest checkpoint")
    return code


sys.exit(
    TorchTrainer(
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
    .fit()
    .return_value
)
