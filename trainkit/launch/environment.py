"""Check that the launch asked for can be carried out: Accelerate ignores some variables."""

import contextlib
import os
import re
import sys
from itertools import takewhile

import torch
from accelerate.utils import str_to_bool

from trainkit.errors import UsageError
from trainkit.repairs.private_names import precision_of_notebook_launcher
from trainkit.text import count

# Where mpirun and srun put the number of processes they started. Accelerate does not read these.
NUM_TASKS = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
TRUE, FALSE = "(?i:y|yes|t|true|on|1)", "(?i:n|no|f|false|off|0|)"
NO_SHARDS = FALSE, "use distributed_type: MULTI_GPU or FSDP, as in accelerate_configs/"
NO_SPLIT = (
    "1",
    "these scripts split no layer and no sequence over processes: use distributed_type: FSDP, "
    "fsdp_activation_checkpointing: true, and a larger --accumulate",
)
SIZES = [f"PARALLELISM_CONFIG_DP_{axis}_SIZE" for axis in ("REPLICATE", "SHARD")]
# Environment variables that would silently change what is trained: the allowed values, and the
# remedy for all others.
VARIABLES = {
    "ACCELERATE_MIXED_PRECISION": ("no|fp16|bf16", "use bf16, fp16 or no"),
    "ACCELERATE_USE_FSDP": (f"{TRUE}|{FALSE}", "use true or false"),
    "ACCELERATE_USE_DEEPSPEED": NO_SHARDS,
    "ACCELERATE_USE_MEGATRON_LM": NO_SHARDS,
    **dict.fromkeys([f"PARALLELISM_CONFIG_{axis}_SIZE" for axis in ("TP", "CP", "SP")], NO_SPLIT),
    "ACCELERATE_TORCH_DEVICE": ("", "choose the GPUs with gpu_ids in the YAML"),
    # (?!) matches no value.
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("(?!)", "use --accumulate, which it overrides"),
    "ACCELERATE_DYNAMO_BACKEND": ("(?i:no|eager|aot_eager|inductor|cudagraphs)", "use inductor"),
}
# Flags that accelerate launch passes on only with what NO_SHARDS refuses, or on a TPU.
IGNORED_FLAGS = re.compile(
    "--(gradient|zero|offload|deepspeed|fsdp|megatron-lm|parallelism-config|fp8|downcast)"
)


def check_launch() -> str:
    """Refuse, before Accelerator(...), a launch that cannot be; return its mixed precision."""
    precision = check_variables()
    check_ranks()
    check_launcher_flags()
    check_devices()
    num_copies(int(os.environ.get("WORLD_SIZE") or 1))
    # With it Accelerate would make a mesh by itself, and refuse that on the CPU: see sharded.shard.
    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
    return precision


def check_variables() -> str:
    """Refuse values that VARIABLES does not allow; return the mixed precision."""
    env = dict(os.environ)
    if (precision := precision_of_notebook_launcher()) != "no":
        env["ACCELERATE_MIXED_PRECISION"] = precision
    for name, (allowed, remedy) in VARIABLES.items():
        if name in env and not re.fullmatch(allowed, env[name]):
            raise UsageError(f"{name}={env[name]}: {remedy}, or unset it")
    return env.get("ACCELERATE_MIXED_PRECISION", "no")


def check_ranks() -> None:
    """Refuse a process of mpirun, srun or debug_launcher that would train without the others."""
    env = os.environ
    num_processes = int(env.get("WORLD_SIZE") or 1)
    for name in NUM_TASKS:
        size = env.get(name, "1")
        if size.isdecimal() and int(size) > num_processes:
            raise UsageError(
                f"{name}={size}, but this process is one of {num_processes}: start the script with "
                "accelerate launch or torchrun on each node (under Slurm as in "
                f"docs/slurm/train.sbatch), or, if these are separate runs, unset {name}"
            )
    # accelerate's one-process launcher exports MASTER_ADDR only if num_processes > 1.
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in env]
    is_alone = "MASTER_ADDR" in env and "WORLD_SIZE" not in env
    if missing and (is_alone or num_processes > 1 or env.keys() & {"RANK", "LOCAL_RANK"}):
        raise UsageError(
            f"{missing[0]} is not set, so only this process was started, which MASTER_ADDR, RANK, "
            "LOCAL_RANK or WORLD_SIZE makes one of several: start them with torchrun, "
            "notebook_launcher or accelerate launch, with MULTI_GPU as in accelerate_configs/"
            "2cpu.yaml (distributed_type NO and MULTI_CPU start one), or unset these variables"
        )


def check_devices() -> None:
    """Refuse more GPUs than torch sees."""
    env = os.environ
    # A Slurm script or a cloud may set LOCAL_RANK and no LOCAL_WORLD_SIZE.
    local_size = int(env.get("LOCAL_WORLD_SIZE") or int(env.get("LOCAL_RANK") or 0) + 1)
    num_devices = torch.accelerator.device_count()
    # A CPU launch is recognised in two ways: accelerate's one-process launcher exports
    # ACCELERATE_USE_CPU; the N-process one does not, so its YAML hides all GPUs with gpu_ids.
    hidden = env.get("CUDA_VISIBLE_DEVICES", "").startswith("-1")
    use_cpu = hidden or str_to_bool(env.get("ACCELERATE_USE_CPU", "no"))
    if by_accelerate() and not use_cpu and num_devices == 0:
        raise UsageError(
            f"this launch asks for {count(local_size, 'GPU')}, but torch sees none here: check the "
            "driver (nvidia-smi), or train on the CPU: with `python` and no launcher, with "
            "accelerate launch --cpu, or with accelerate_configs/2cpu.yaml or 1cpu_bf16.yaml"
        )
    if not use_cpu and 0 < num_devices < local_size:
        raise UsageError(
            f"{local_size} processes were started on this machine, which has "
            f"{count(num_devices, 'GPU')}: use a YAML with num_processes: {num_devices}, or check "
            "gpu_ids and CUDA_VISIBLE_DEVICES"
        )


def by_accelerate() -> bool:
    """True if `accelerate launch` started this process: it sets both variables, a user sets one."""
    return {"ACCELERATE_DYNAMO_MODE", "ACCELERATE_MIXED_PRECISION"} <= os.environ.keys()


def check_launcher_flags() -> None:
    """Refuse flags of `accelerate launch` that it does not pass on."""
    if not by_accelerate():
        return
    import psutil  # 20 ms

    words: list[str] = []
    with contextlib.suppress(psutil.Error, AttributeError):  # the launcher may be gone
        words = psutil.Process().parent().cmdline()
    for word in takewhile(lambda word: word != sys.argv[0], words):
        flag = word.replace("_", "-")
        is_read = (flag.startswith("--fsdp-") and shards_wanted()) or (
            flag.startswith("--parallelism-config-dp-") and SIZES[0] in os.environ
        )
        if IGNORED_FLAGS.match(flag) and not is_read:
            raise UsageError(
                f"accelerate launch {word}: the launcher ignores this flag here: leave it out, or "
                "give --accumulate or --clip-norm to the script"
            )


def shards_wanted() -> bool:
    """True if the launcher asked for sharded weights."""
    return re.fullmatch(TRUE, os.environ.get("ACCELERATE_USE_FSDP", "")) is not None


def num_copies(num_processes: int) -> int:
    """How many copies of the model the launch asks for; a size of 1 or none is inferred."""
    copies, shards = (int(os.environ.get(name, "1")) for name in SIZES)
    if copies == shards == 1:
        return 1
    if shards == 1:
        shards = num_processes // copies
    elif copies == 1:
        copies = num_processes // shards
    if not shards_wanted() or shards < 2 or copies * shards != num_processes:
        raise UsageError(
            f"parallelism_config_dp_replicate_size {copies} x dp_shard_size {shards} does not fit "
            f"this launch: use distributed_type: FSDP, a product of num_processes {num_processes}, "
            "and a dp_shard_size of at least 2 (for whole copies distributed_type: MULTI_GPU)"
        )
    return copies
