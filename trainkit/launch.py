"""What this process was started as, and whether it can become that.

Launchers configure a process by environment variables. Accelerate ignores some of them silently.
"""

import contextlib
import difflib
import inspect
import os
import re
import sys
import threading
from itertools import takewhile

import torch
from accelerate import notebook_launcher
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import str_to_bool

from trainkit.errors import UsageError
from trainkit.text import count

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI_RANKS = (  # the same four, as Open MPI, MVAPICH and MPICH (with Intel MPI) name them
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
     "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)  # fmt: skip

TRUE, NOT_SET = "(?i:y|yes|t|true|on|1)", "(?i:n|no|f|false|off|0|)"
NEVER = "(?!)"  # matches no value
YES_OR_NO = (f"{TRUE}|(?!$){NOT_SET}", "use true or false")
A_NUMBER = (r"\d+", "give a number")
NO_SHARDS = (
    NOT_SET,
    "these scripts keep the whole model on each card: start them without it, with "
    "distributed_type: MULTI_GPU as in accelerate_configs/4gpu.yaml",
)
# Environment variables that would silently change what is trained: the values that are allowed, and
# the remedy for all others. Accelerate 1.15 reads FSDP_*, MEGATRON_LM_*, PARALLELISM_CONFIG_*,
# ACCELERATE_DEEPSPEED_* and ACCELERATE_FP8_* only where one of these asks for it.
VARIABLES = {
    "ACCELERATE_MIXED_PRECISION": ("no|fp16|bf16", "use bf16, fp16 or no"),
    "ACCELERATE_USE_FSDP": (f"{TRUE}|{NOT_SET}", "use true or false"),
    "ACCELERATE_USE_DEEPSPEED": NO_SHARDS,
    "ACCELERATE_USE_MEGATRON_LM": NO_SHARDS,
    "ACCELERATE_USE_PARALLELISM_CONFIG": NO_SHARDS,
    "ACCELERATE_USE_TP": NO_SHARDS,
    "ACCELERATE_TORCH_DEVICE": ("", "choose cards by gpu_ids in the YAML"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (NEVER, "it would override --accumulate: use that"),
    "ACCELERATE_GRADIENT_CLIPPING": (NEVER, "only DeepSpeed reads it: use --clip-norm"),
    # These are read as they are, and a wrong value would end in a traceback.
    "ACCELERATE_DEBUG_MODE": YES_OR_NO,
    "LOCAL_RANK": A_NUMBER,
    "LOCAL_WORLD_SIZE": A_NUMBER,
    # These are here to be found when they are misspelt.
    "ACCELERATE_USE_CPU": YES_OR_NO,
    "ACCELERATE_DYNAMO_BACKEND": ("(?i:no|eager|aot_eager|inductor|cudagraphs)", "use inductor"),
}
# Flags that accelerate launch passes on only with what NO_SHARDS refuses, or on a TPU.
IGNORED_FLAGS = re.compile(
    "--(gradient|zero|offload|deepspeed|fsdp|megatron-lm|parallelism-config|fp8|downcast)"
)


def adopt_ranks() -> None:
    """Copy the ranks that mpirun or debug_launcher gave to the variables that torchrun sets."""
    env = os.environ
    if joined() and "RANK" not in env:  # by debug_launcher
        world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        env.update(zip(RANKS, map(str, world * 2), strict=True))
    for names in MPI_RANKS:
        if "RANK" not in env and env.get(names[1], "1") != "1" and env.keys() >= set(names):
            env.update(zip(RANKS, [env[name] for name in names], strict=True))
            if env["LOCAL_WORLD_SIZE"] == env["WORLD_SIZE"]:
                env.setdefault("MASTER_ADDR", "127.0.0.1")


def check_ranks() -> None:
    """Refuse a process that no launcher started although it is one of several."""
    adopt_ranks()
    env = os.environ
    numbers = [env.get("RANK", "0"), env.get("WORLD_SIZE", "1")]
    good = all(map(str.isdecimal, numbers)) and int(numbers[0]) < int(numbers[1])
    if "WORLD_SIZE" in env and not good:
        del env["WORLD_SIZE"]  # or it would leave the sentence to a process 0
        raise UsageError(
            f"RANK={numbers[0]} WORLD_SIZE={numbers[1]}: there is no such process: unset both"
        )
    several = [name for _, name, *_ in (RANKS, *MPI_RANKS) if env.get(name, "1") != "1"]
    several += env.keys() & {"RANK", "LOCAL_RANK"}
    # A step of srun says how many tasks it has. Without that this is the script of sbatch, whose
    # SLURM_NTASKS is what it may start.
    in_batch = "1" if env.get("ENVIRONMENT") == "BATCH" else env.get("SLURM_NTASKS", "1")
    num_tasks = env.get("SLURM_STEP_NUM_TASKS", in_batch) if "SLURM_PROCID" in env else "1"
    if num_tasks != "1":
        several.append("SLURM_PROCID")
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in env]
    if several and missing and not joined():
        raise UsageError(
            f"{several[0]}={env[several[0]]}, but no launcher started this process ({missing[0]} "
            "is not set): start it with accelerate launch or mpirun, under Slurm with `srun ... "
            f"accelerate launch` as in docs/slurm/train.sbatch, or unset {several[0]}"
        )
    sizes = {size: env.get(size, "1") for _, size, *_ in MPI_RANKS} | {"SLURM_PROCID": num_tasks}
    for name, size in sizes.items():
        if size.isdecimal() and int(size) > int(numbers[1]):
            raise UsageError(
                f"{size} tasks were started, and the launcher of this one made a world of "
                f"{numbers[1]}: let one launcher reach all, as in docs/slurm/train.sbatch, or, if "
                f"they are separate runs, unset {name}"
            )
    port = env.setdefault("MASTER_PORT", "29500") if several else "1"
    if not port.isdecimal() or int(port) >= 2**16:
        raise UsageError(f"MASTER_PORT={port} is not the number of a port: unset it")


def check_launch() -> str:
    """Refuse a launch that cannot become what it asks for. Call before Accelerator(...).

    Returns the mixed precision that it asks for. Raises UsageError on every process alike.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "a run needs the main thread, because only there Python can handle SIGTERM"
        )
    check_ranks()
    check_launcher_flags()
    precision = check_variables()
    check_devices(precision)
    if is_initialized() and (before := AcceleratorState().mixed_precision) != precision:
        raise UsageError(
            f"this process has trained with mixed_precision {before}, which Accelerate keeps: for "
            f"{precision} start a new process, or restart the notebook's kernel"
        )
    return precision


def check_variables() -> str:
    """Refuse variables that would silently change what is trained; return the mixed precision."""
    env = {**os.environ, **notebook_precision()}
    for name, value in env.items():
        allowed, remedy = VARIABLES.get(name, (".*", ""))
        if not re.fullmatch(allowed, value):
            raise UsageError(f"{name}={value}: {remedy}, or unset it")
        if name not in VARIABLES and (near := difflib.get_close_matches(name, VARIABLES, 1, 0.9)):
            raise UsageError(
                f"{name}={value}: Accelerate reads only {near[0]}, so rename or unset it"
            )
    restarts = env.get("TORCHELASTIC_MAX_RESTARTS", "0")
    shared = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts != "0" and shared and env.get("WORLD_SIZE") != "1":
        raise UsageError(
            f"--max_restarts {restarts}: the launcher would give the addresses of dead processes "
            "to new ones (pytorch issue 135712): add --rdzv_backend c10d, and start it with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
    # accelerate's one-process launcher exports MASTER_ADDR only if num_processes > 1.
    if "WORLD_SIZE" not in env and "MASTER_ADDR" in env:
        raise UsageError(
            f"MASTER_ADDR={env['MASTER_ADDR']} is set but only this one was started: for several "
            "processes use MULTI_GPU as in accelerate_configs/2cpu.yaml (distributed_type NO and "
            "MULTI_CPU start one), for one unset MASTER_ADDR"
        )
    return env.get("ACCELERATE_MIXED_PRECISION", "no")


def check_devices(precision: str) -> None:
    """Refuse more GPUs than torch sees, and a precision that needs one."""
    env = os.environ
    # A Slurm script or a cloud may set LOCAL_RANK and no LOCAL_WORLD_SIZE.
    local_size = int(env.get("LOCAL_WORLD_SIZE", int(env.get("LOCAL_RANK", "0")) + 1))
    num_devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    # There are two signs of a CPU launch: accelerate's one-process launcher exports
    # ACCELERATE_USE_CPU; the N-process one does not, so its YAML hides all cards with gpu_ids.
    use_cpu = str_to_bool(env.get("ACCELERATE_USE_CPU", "no")) == 1
    use_cpu = use_cpu or env.get("CUDA_VISIBLE_DEVICES", "").startswith("-1")
    if by_accelerate() and not use_cpu and num_devices == 0:
        raise UsageError(
            f"this launch asks for {count(local_size, 'GPU')} and torch sees none here: repair the "
            "driver (nvidia-smi), or use the CPU: start with `python` and no launcher, with "
            "accelerate launch --cpu, or with accelerate_configs/2cpu.yaml or 1cpu_bf16.yaml"
        )
    if not use_cpu and 0 < num_devices < local_size:
        raise UsageError(
            f"{local_size} processes were started on this machine, which has "
            f"{count(num_devices, 'GPU')}: use a YAML with num_processes: {num_devices}, or check "
            "gpu_ids and CUDA_VISIBLE_DEVICES"
        )
    if precision == "fp16" and (use_cpu or num_devices == 0):
        raise UsageError(
            "fp16 needs a GPU; on a CPU accelerate would silently train in float32: use "
            "mixed_precision: bf16 or no"
        )


def joined() -> bool:
    """True if the process group exists already: debug_launcher creates it."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def by_accelerate() -> bool:
    """True if `accelerate launch` started this process: it sets these, where a person sets one."""
    return {"ACCELERATE_DYNAMO_MODE", "ACCELERATE_MIXED_PRECISION"} <= os.environ.keys()


def check_launcher_flags() -> None:
    """Refuse flags of the launcher that it does not pass on."""
    if not by_accelerate():
        return
    import psutil  # 20 ms

    words: list[str] = []
    with contextlib.suppress(psutil.Error, AttributeError):  # the launcher may be gone
        words = psutil.Process().parent().cmdline()
    for word in takewhile(lambda word: word != sys.argv[0], words):
        flag = word.replace("_", "-")
        if IGNORED_FLAGS.match(flag) and not (flag.startswith("--fsdp-") and shards_wanted()):
            raise UsageError(
                f"accelerate launch {word}: the launcher ignores this flag here: leave it out, or "
                "give --accumulate or --clip-norm to the script"
            )


def shards_wanted() -> bool:
    """True if the launcher asked for sharded weights."""
    return re.fullmatch(TRUE, os.environ.get("ACCELERATE_USE_FSDP", "")) is not None


def notebook_precision() -> dict[str, str]:
    """The variable that notebook_launcher should have set, if it was asked for a precision.

    It sets MIXED_PRECISION, which Accelerate does not read, and with one process nothing at all.
    """
    given = os.environ.get("MIXED_PRECISION", "no") if "NPROC" in os.environ else "no"
    for caller in inspect.stack(0):
        if caller.frame.f_code is notebook_launcher.__code__:
            given = str(caller.frame.f_locals["mixed_precision"])
    return {} if given == "no" else {"ACCELERATE_MIXED_PRECISION": given}
