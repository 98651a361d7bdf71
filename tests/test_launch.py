"""The world you asked for is the world you get, or one sentence says what is missing."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import CONFIGS, refused, run
from torch.distributed.launcher.api import ChildFailedError

from trainkit.errors import EXIT_STOPPED, is_main_rank
from trainkit.launch import environment as launch
from trainkit.tools import launch as launcher


def test_every_yaml_explains_each_key():
    for path in CONFIGS.glob("*.yaml"):
        assert f"accelerate_configs/{path.name}" in path.read_text(), path
        for line in path.read_text().splitlines():
            if line.startswith(("distributed_type", "num_processes", "mixed_precision", "gpu_ids")):
                assert "#" in line, f"{path.name}: {line} is not explained"


WORLD = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=2950"
FOUR, FSDP = WORLD.replace("=2 ", "=4 "), "ACCELERATE_USE_FSDP=true"
MESH = "ACCELERATE_USE_PARALLELISM_CONFIG=true PARALLELISM_CONFIG_DP"
ONE = WORLD.replace("=2 ", "=1 ")  # torchrun --nproc-per-node 1
LAUNCHED = "ACCELERATE_DYNAMO_MODE=default ACCELERATE_DYNAMO_BACKEND=NO ACCELERATE_MIXED_PRECISION="
ON_CPU = "ACCELERATE_USE_CPU=True " + LAUNCHED
IN_NOTEBOOK = f"{WORLD} NPROC=2 NODE_RANK=0 MIXED_PRECISION="

# What a process finds, on a machine with so many GPUs: the precision that it trains in.
TRAINS = [
    ("", 8, "no"),
    ("SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_LOCALID=0 ENVIRONMENT=BATCH", 0, "no"),  # sbatch
    (f"{WORLD} SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2", 0, "no"),  # and a launcher
    (ONE, 0, "no"),
    ("WORLD_SIZE=16 RANK=9 LOCAL_RANK=1 MASTER_ADDR=10.0.0.1", 8, "no"),
    ("MASTER_PORT=tcp://10.0.0.1:80", 0, "no"),  # Kubernetes, where a service is called master
    (f"{WORLD} CUDA_VISIBLE_DEVICES=-1,-1 {LAUNCHED}bf16", 0, "bf16"),
    (f"{WORLD} {LAUNCHED}fp16", 2, "fp16"),
    (f"{IN_NOTEBOOK}fp16", 2, "fp16"),
    (f"{IN_NOTEBOOK}no ACCELERATE_MIXED_PRECISION=bf16", 0, "bf16"),
    ("TORCHELASTIC_MAX_RESTARTS=3 TORCHELASTIC_USE_AGENT_STORE=True", 0, "no"),  # torchrun
    ("MIXED_PRECISION=fp16", 0, "no"),  # some other program's
    ("ACCELERATE_USE_FSDP=false ACCELERATE_USE_DEEPSPEED=0 ACCELERATE_USE_TP=False", 0, "no"),
]

# And with what words it is refused: the thing with its value, and the remedy.
REFUSED = [
    ("OMPI_COMM_WORLD_SIZE=2", 0, "one of 1: start the script with .* or, .* unset OMPI_COMM_WOR"),
    ("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2", 0, "_TASKS=2.* docs/slurm/train.sbatch"),
    ("WORLD_SIZE=2 MASTER_ADDR=127.0.0.1", 0, "RANK is not set.* notebook_launcher"),  # debug_laun.
    (f"MASTER_ADDR=127.0.0.1 {ON_CPU}no", 0, "with MULTI_GPU as in accelerate_configs/2cpu.yaml"),
    ("ACCELERATE_USE_FSDP=perhaps", 0, "FSDP=perhaps: use true or false"),
    ("ACCELERATE_USE_DEEPSPEED=true", 0, "DEEPSPEED=true: .*distributed_type: MULTI_GPU"),
    (f"{FOUR} {MESH}_REPLICATE_SIZE=2", 0, "size 2 x dp_shard_size 2 .*: use .*_type: FSDP"),
    (f"{FOUR} {FSDP} {MESH}_SHARD_SIZE=3", 0, "size 1 x .*3 .* product of num_processes 4"),
    (f"{FOUR} {FSDP} {MESH}_REPLICATE_SIZE=4", 0, "at least 2 .* MULTI_GPU"),
    (f"{FOUR} {FSDP} {MESH}_SHARD_SIZE=-1", 0, "dp_shard_size -1 does not fit"),
    ("PARALLELISM_CONFIG_TP_SIZE=2", 0, "TP_SIZE=2: .*use distributed_type: FSDP"),
    ("PARALLELISM_CONFIG_CP_SIZE=2", 0, "CP_SIZE=2: .*fsdp_activation_checkpointing"),
    ("PARALLELISM_CONFIG_SP_SIZE=2", 0, "SP_SIZE=2: .*--accumulate"),
    ("ACCELERATE_TORCH_DEVICE=cuda:1", 2, "DEVICE=cuda:1: .*gpu_ids"),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4", 0, "STEPS=4: .*--accumulate"),
    ("ACCELERATE_MIXED_PRECISION=fp8", 1, "PRECISION=fp8: use bf16, fp16 or no"),
    ("ACCELERATE_DYNAMO_BACKEND=tensorrt", 0, "inductor"),
    (f"{LAUNCHED}fp16", 0, "asks for 1 GPU, but torch sees none here: check"),
    (WORLD, 1, "2 processes.*has 1 GPU: use a YAML with num_processes: 1"),
]


@contextmanager
def environment(variables: str, num_gpus: int = 0) -> Iterator[None]:
    """This process as if it were started with these variables only, on such a machine."""
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ, clear=True):
        os.environ.update(pair.split("=", 1) for pair in variables.split())
        patch.setattr(torch.accelerator, "device_count", lambda: num_gpus)
        yield


@pytest.mark.parametrize("variables, num_gpus, precision", TRAINS)
def test_a_launch_trains_what_its_variables_ask_for(variables, num_gpus, precision):
    with environment(variables, num_gpus):
        assert launch.check_launch() == precision


@pytest.mark.parametrize("variables, num_gpus, words", REFUSED)
def test_a_launch_that_cannot_be_is_refused_in_one_sentence(variables, num_gpus, words):
    with environment(variables, num_gpus):
        with refused(words):
            launch.check_launch()
        assert is_main_rank()  # whose sentence is printed


TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node"
ACCELERATE = "-m accelerate.commands.launch"

# What people type before the script: the first line of the plan, or what it is refused with.
STARTED = [
    ("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2", "", "docs/slurm/train.sbatch"),
    ("ACCELERATE_MIXED_PRECISION=bf16", f"{TORCHRUN} 1", "1 process on cpu, bf16"),
    (
        "",
        "-m torch.distributed.launch --nproc-per-node 1",
        "--local-rank=0 (see train_regression.py --help)",
    ),
    ("", f"{ACCELERATE} --cpu --num_processes 2", "only this process was started"),
    ("HF_HOME={home}", ACCELERATE, "1 process on cpu, bf16"),
    ("", "2cpu --mixed_precision fp16", "on cpu Accelerate trains in float32"),
    ("", "2cpu --dynamo_backend eager", "compiled with eager"),
]


@pytest.mark.slow
@pytest.mark.parametrize("variables, words, outcome", STARTED)
def test_what_is_started_trains_what_it_announces_or_says_one_sentence(
    variables, words, outcome, tmp_path
):
    (tmp_path / "accelerate").mkdir()
    shutil.copy(CONFIGS / "1cpu_bf16.yaml", tmp_path / "accelerate" / "default_config.yaml")
    flags = shlex.split(words)
    config = flags.pop(0) if flags and flags[0][0].isdigit() else None
    given = dict(pair.split("=", 1) for pair in variables.format(home=tmp_path).split())
    args = f"--num-samples 100 --epochs 1 --run-dir {tmp_path}/run"
    how = {"config": config, "launcher_flags": flags, "env": given, "code": None}
    result = run("train_regression.py", args, **how)
    assert_trains_or_refuses(result, outcome, tmp_path / "run")


def assert_trains_or_refuses(result: subprocess.CompletedProcess, outcome: str, run_dir: Path):
    if outcome[0].isdigit() or outcome.startswith("compiled"):
        assert result.returncode == 0, result.stderr
        assert outcome in result.stdout and result.stdout.count("done: ") == 1, result.stdout
        made = json.loads((run_dir / "run.json").read_text())
        assert f"{made['num_processes']} process" in result.stdout
        assert made["mixed_precision"] == ("bf16" if "bf16" in result.stdout else "no")
        return
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert outcome in line, line
    assert result.returncode == 2 or re.search("exit status 2|exitcode  : 2", result.stderr)
    assert "UsageError" not in result.stderr and "/trainkit/" not in result.stderr, result.stderr
    assert not run_dir.exists() and "done" not in result.stdout


def test_wrong_arguments_are_told_once_and_end_with_2(fork_main, tmp_path):
    wrong = "--seed 4294967296", "--epochs 0", "--batch-size 7", "--keep 1"
    result = fork_main("train_mnist.py", f"--dataset x --run-dir {tmp_path}/run", *wrong, world=2)
    line = result.error(2)
    assert all(words in line for words in (*wrong, "2 processes")) and not result.stdout, line
    assert not (tmp_path / "run").exists()


def test_a_process_that_waits_too_long_for_the_others_ends_in_one_sentence(fork_main):
    """gloo waits in C, five times its timeout, and lets no signal through."""
    waiting = fork_main(
        """
import time
from datetime import timedelta
from trainkit.launch.processes import deadline

def main(argv):
    with deadline(timedelta(seconds=-4.9)):
        pass
    time.sleep(0.5)
    with deadline(timedelta(seconds=-4.9)):
        time.sleep(30)
""",
        timeout=25,
    )
    sentence = "error: process 0 could not reach the other processes within"
    assert waiting.error(1).startswith(sentence)


@pytest.mark.parametrize(
    ("raised", "heard", "code", "said"),
    [
        (
            lambda: failed(-9),
            set(),
            -9,
            "1 was ended by SIGKILL, probably because the memory is full",
        ),
        (lambda: failed(-11), set(), -11, "1 was ended by SIGSEGV; the checkpoints are intact"),
        (lambda: subprocess.CalledProcessError(2, "x"), set(), 2, ""),
        (
            lambda: subprocess.CalledProcessError(-signal.SIGTERM, "x"),
            {signal.SIGTERM},
            EXIT_STOPPED,
            "process 0 was ended by SIGTERM; the checkpoints",
        ),
    ],
)
def test_the_launcher_ends_with_the_code_of_a_process_and_names_its_signal(
    raised, heard, code, said, monkeypatch, capsys
):
    def ends(*_):
        raise raised()

    monkeypatch.setattr("trainkit.repairs.replaced.launch_in_own_session", lambda: None)
    monkeypatch.setattr("accelerate.commands.launch.main", ends)
    monkeypatch.setattr(launcher, "HEARD", heard)
    assert launcher.main() == code
    told = capsys.readouterr().err
    assert said in told if said else not told


def failed(code: int) -> ChildFailedError:
    """Of process 1, as torchelastic raises it."""
    error = ChildFailedError.__new__(ChildFailedError)
    error.failures = {1: SimpleNamespace(exitcode=code, timestamp=0)}
    error.get_first_failure = lambda: (1, error.failures[1])
    return error


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--gradient-clipping=1.0", "clipping=1.0: .* give .*--clip-norm to the script"),
        ("--num_processes 2 --mixed_precision bf16 --same_network", None),
    ],
)
def test_a_flag_that_the_launcher_keeps_to_itself_is_refused(flags, words, monkeypatch):
    # What the script itself was given, here --zero-x, is the script's.
    line = ["python", "accelerate", "launch", *flags.split(), sys.argv[0], "--zero-x", "3"]
    monkeypatch.setattr("psutil.Process.cmdline", lambda self: line)
    refusal = refused(words) if words else nullcontext()
    with environment(f"{ON_CPU}no"), refusal:
        assert launch.check_launch() == "no"
