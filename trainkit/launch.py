"""What this process was started as, and whether it can become that.

Launchers tell a process their wishes by variables. Accelerate drops some of them without a word.
"""

import contextlib
import difflib
import inspect
import os
import re
import sys
from types import FrameType

import torch
from accelerate import notebook_launcher

from trainkit.arguments import SLIPS
from trainkit.errors import UsageError, count

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI_RANKS = (  # the same four, as Open MPI, MVAPICH and MPICH (with Intel MPI) name them
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
     "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)  # fmt: skip

TRUE, FALSE = "(?i:y|yes|t|true|on|1)", "(?i:n|no|f|false|off|0)"
TRUTH = (f"{TRUE}|{FALSE}", "use true or false")
NO_SHARDS = (f"{FALSE}|", "these scripts keep the whole model on each card: start them without it, "
             "with distributed_type: MULTI_GPU as in accelerate_configs/4gpu.yaml")  # fmt: skip
# The variables by which Accelerate 1.15 takes wishes: the values that a run follows, and the remedy
# for all others. From Accelerate's launchers.py, commands/launch.py, utils/launch.py, state.py,
# accelerator.py and utils/dataclasses.py. It reads FSDP_*, MEGATRON_LM_*, PARALLELISM_CONFIG_*,
# ACCELERATE_DEEPSPEED_* and ACCELERATE_FP8_* only where one of these asks for it.
WISHES = {
    "ACCELERATE_MIXED_PRECISION": ("no|fp16|bf16", "use bf16, fp16 or no"),
    "ACCELERATE_USE_CPU": TRUTH,
    "ACCELERATE_CPU_AFFINITY": TRUTH,
    "ACCELERATE_DEBUG_MODE": TRUTH,
    "ACCELERATE_DYNAMO_BACKEND": ("(?i:no|eager|aot_eager|inductor|cudagraphs)",
                                  "use inductor, or no to train uncompiled"),
    "ACCELERATE_DYNAMO_MODE": ("default|reduce-overhead|max-autotune",
                               "use default, reduce-overhead or max-autotune"),
    "ACCELERATE_DYNAMO_USE_DYNAMIC": TRUTH,
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": TRUTH,
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": TRUTH,
    "ACCELERATE_USE_FSDP": NO_SHARDS,
    "ACCELERATE_USE_DEEPSPEED": NO_SHARDS,
    "ACCELERATE_USE_MEGATRON_LM": NO_SHARDS,
    "ACCELERATE_USE_PARALLELISM_CONFIG": NO_SHARDS,
    "ACCELERATE_USE_SAGEMAKER": (f"{FALSE}|", "SageMaker is not supported: use accelerate launch"),
    "ACCELERATE_USE_IPEX": (f"{FALSE}|", "Accelerate 1.15 no longer knows it"),
    "ACCELERATE_USE_XPU": (f"{FALSE}|", "Accelerate 1.15 no longer knows it"),
    "ACCELERATE_TORCH_DEVICE": ("", "choose cards by gpu_ids in the YAML"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("(?!)", "it would override --accumulate: use that"),
    "ACCELERATE_GRADIENT_CLIPPING": ("(?!)", "only DeepSpeed reads it: use --clip-norm"),
}  # fmt: skip
# Flags that its launcher hands on only together with what NO_SHARDS refuses, or on a TPU.
UNHEARD = ("--gradient-", "--zero", "--offload-", "--deepspeed-", "--fsdp-", "--megatron-lm-",
           "--parallelism-config-", "--fp8-", "--downcast-")  # fmt: skip


def adopt_ranks() -> None:
    """Put the ranks that mpirun or debug_launcher gave this process where all others put them.

    Raises UsageError for ranks that are none.
    """
    env = os.environ
    for name in (*RANKS, *sum(MPI_RANKS, ())):
        if not env.get(name, "0").isdecimal():
            raise UsageError(f"{name}={env.pop(name)} is not a number from 0: unset it")
    if joined() and "RANK" not in env:  # by debug_launcher
        world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        env.update(zip(RANKS, map(str, world * 2), strict=True))
    for names in MPI_RANKS:
        if "RANK" not in env and env.get(names[1], "1") != "1" and env.keys() >= set(names):
            env.update(zip(RANKS, [env[name] for name in names], strict=True))
            if env["LOCAL_WORLD_SIZE"] == env["WORLD_SIZE"]:
                env.setdefault("MASTER_ADDR", "127.0.0.1")
    size = int(env.get("WORLD_SIZE", "1"))
    rank = max(int(env.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    if rank >= size:
        given = [f"{name}={env[name]}" for name in RANKS if name in env]
        for name in ("RANK", "LOCAL_RANK"):
            env.pop(name, None)  # or nobody would say it
        raise UsageError(f"{' '.join(given)}: of {count(size, 'process')} none is number {rank}, "
                         "counted from 0: start with accelerate launch, or unset them")  # fmt: skip


def check_ranks() -> None:
    """Refuse ranks with which this process would wait for ever, or fail to meet the others."""
    adopt_ranks()
    env = os.environ
    size = int(env.get("WORLD_SIZE", "1"))
    if size > 1 or "LOCAL_RANK" in env:
        if not env.setdefault("MASTER_PORT", "29500").isdecimal():
            raise UsageError(f"MASTER_PORT={env['MASTER_PORT']} is not a number: unset it")
        sign = "WORLD_SIZE" if "WORLD_SIZE" in env else "LOCAL_RANK"
        needed = () if joined() else ("RANK", "WORLD_SIZE", "MASTER_ADDR")
        missing = [name for name in needed if name not in env]
    else:  # what Accelerate would take for a launch by MPI
        names = next((n for n in MPI_RANKS if env.get(n[1], "1") != "1"), ("", "", "", ""))
        sign, missing = names[1], [name for name in names if name and name not in env]
        if names[0] in env:
            env["RANK"] = env[names[0]]  # so that one speaks
    if missing:
        raise UsageError(
            f"{sign}={env[sign]}, but no launcher started this process ({missing[0]} is not set): "
            f"start it with accelerate launch or mpirun, or unset {sign}"
        )


def check_launch() -> str:
    """Refuse a launch that cannot become what it asks for. Call before Accelerator(...).

    Returns the mixed precision that it asks for. Raises UsageError on every process alike.
    """
    check_ranks()
    env = os.environ
    for name, (pattern, remedy) in WISHES.items():
        if name in env and not re.fullmatch(pattern, env[name]):
            raise UsageError(f"{name}={env[name]}: {remedy}, or unset it")
    for name in env.keys() - WISHES.keys():
        for near in difflib.get_close_matches(name, WISHES, 1, 0.9):
            raise UsageError(f"{name}={env[name]}: Accelerate reads {near}, so rename or unset it")
    check_launcher_flags()
    # accelerate's one-process launcher exports MASTER_ADDR only if num_processes > 1.
    if "WORLD_SIZE" not in env and "MASTER_ADDR" in env:
        raise UsageError(
            f"MASTER_ADDR={env['MASTER_ADDR']} is set but only this one was started: for several "
            "processes use MULTI_GPU as in accelerate_configs/2cpu.yaml (distributed_type NO and "
            "MULTI_CPU start one), for one unset MASTER_ADDR"
        )
    # A Slurm script or a cloud may set LOCAL_RANK and no LOCAL_WORLD_SIZE.
    at_least = int(env.get("LOCAL_RANK", int(env.get("WORLD_SIZE", "1")) - 1)) + 1
    local_size = int(env.get("LOCAL_WORLD_SIZE", at_least))
    num_devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    # There are two signs of a CPU launch: accelerate's one-process launcher exports
    # ACCELERATE_USE_CPU; the N-process one does not, so its YAML hides all cards with gpu_ids.
    use_cpu = re.fullmatch(TRUE, env.get("ACCELERATE_USE_CPU", "no")) is not None
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
    precision = notebook_precision() or env.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", "fp16", "bf16"):
        raise UsageError(f"mixed_precision {precision} is not supported: use bf16, fp16 or no")
    if precision == "fp16" and (use_cpu or num_devices == 0):
        raise UsageError(
            "fp16 needs a GPU; on a CPU accelerate would silently train in float32: use "
            "mixed_precision: bf16 or no"
        )
    return precision


def joined() -> bool:
    """True if this process has met the others, as debug_launcher sees to."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def by_accelerate() -> bool:
    """True if `accelerate launch` started this process: it sets these, where a person sets one."""
    return {"ACCELERATE_DYNAMO_MODE", "ACCELERATE_MIXED_PRECISION"} <= os.environ.keys()


def check_launcher_flags() -> None:
    """Refuse what was given to the launcher, which told nobody."""
    if not by_accelerate():
        return
    import psutil  # 20 ms

    words: list[str] = []
    with contextlib.suppress(psutil.Error, AttributeError):  # the launcher may be gone
        words = psutil.Process().parent().cmdline()
    if sys.argv[0] in words:
        words = words[: words.index(sys.argv[0])]
    for number, word in enumerate(words):
        flag = word.split("=")[0].replace("_", "-")
        if flag.startswith(UNHEARD):
            given = " ".join(words[number : number + (1 if "=" in word else 2)])
            remedy = f"give {SLIPS[flag]} to the script" if flag in SLIPS else "leave it out"
            raise UsageError(
                f"accelerate launch {given}: the launcher ignores this flag here, {remedy}"
            )


def notebook_precision() -> str | None:
    """What notebook_launcher was asked for; None if that is nothing.

    It sets MIXED_PRECISION, which Accelerate does not read, and with one process nothing at all.
    """
    given = "no"
    frame: FrameType | None = inspect.currentframe()
    if "NPROC" in os.environ:
        given = os.environ.get("MIXED_PRECISION", "no")
    while frame is not None:
        if frame.f_code is notebook_launcher.__code__:
            given = str(frame.f_locals["mixed_precision"])
        frame = frame.f_back
    return None if given == "no" else given
