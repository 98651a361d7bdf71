"""A model spread over the processes (FSDP2): where it is made, gathered, saved and read.

The YAML's fsdp_state_dict_type picks the kind of checkpoint. FULL_STATE_DICT writes the files of an
unsharded run, gathered one tensor at a time. With SHARDED_STATE_DICT every process writes its own
share, as safetensors, and no process ever holds the whole. Any run reads either kind: sharded or
not, at any number of processes.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, convert_outputs_to_fp32
from safetensors.torch import load_file, save_file
from torch import nn

from trainkit.errors import UsageError, as_usage_error
from trainkit.internals import (
    prepared_models,
    prepared_optimizers,
    prepared_schedulers,
    shard_cpu_processes,
    tree_map_only,
)
from trainkit.launch import NOT_SET, shards_wanted
from trainkit.optim import weights_of
from trainkit.text import first_sentence

FILE_BYTES = 2**27  # of a file of a sharded checkpoint, about
# The keys of fsdp_config that change what is trained: the values that a run follows, that of a key
# that is not set, and the remedy for all others.
FOLLOWED = {
    "FSDP_VERSION": ("2", "1", "use fsdp_version: 2"),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": (
        NOT_SET, "false", "only models of transformers can be loaded like that: use false"),
    "FSDP_OFFLOAD_PARAMS": (NOT_SET, "false", "weights stay on their device: use false"),
    "FSDP_ACTIVATION_CHECKPOINTING": (
        NOT_SET, "false", "the second forward pass would draw other dropout masks: use false"),
    "FSDP_IGNORED_MODULES": ("", "", "nobody would add up their gradients: leave it out"),
    "FSDP_AUTO_WRAP_POLICY": (
        "(?i:no_wrap|size_based_wrap|transformer_based_wrap)", "no_wrap",
        "use NO_WRAP, SIZE_BASED_WRAP or TRANSFORMER_BASED_WRAP"),
    "FSDP_STATE_DICT_TYPE": (
        "(?i:full_state_dict|sharded_state_dict)", "sharded_state_dict",
        "use FULL_STATE_DICT or SHARDED_STATE_DICT"),
}  # fmt: skip


def plugin(precision: str) -> FullyShardedDataParallelPlugin | None:
    """What Accelerator(fsdp_plugin=...) needs to shard; None if the launch does not ask for it.

    Raises UsageError for what a run could not follow.
    """
    env = os.environ
    if not shards_wanted():
        return None
    for name, (pattern, default, remedy) in FOLLOWED.items():
        value = env.get(name, default)
        if not re.fullmatch(pattern, value):
            raise UsageError(f"{name.lower()} {value} (of fsdp_config): {remedy}")
    if precision == "fp16":
        raise UsageError("mixed_precision fp16 is not supported with sharded weights: use bf16")
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # Accelerate's own policy adds gradients up in bf16 too, and rounds inputs and outputs to it.
    dtype = torch.bfloat16 if precision == "bf16" else None
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    with as_usage_error("fsdp_config cannot be used"):
        return FullyShardedDataParallelPlugin(mixed_precision_policy=policy)


def shard(accelerator: Accelerator, wanted: FullyShardedDataParallelPlugin | None) -> None:
    """Make sure that accelerator.prepare(...) shards if that is wanted. Call once, before it."""
    if wanted is None:
        return
    shard_cpu_processes(accelerator, wanted)
    if not accelerator.is_fsdp2:
        raise UsageError(
            f"sharding was asked for, and Accelerate would not do it for "
            f"{accelerator.distributed_type.value}: use several processes, as in "
            "accelerate_configs/2cpu_fsdp.yaml and 4gpu_fsdp_bf16.yaml"
        )
    from torch.distributed.fsdp import FSDPModule

    prepare = accelerator.prepare

    def prepare_sharded(*objects: Any, **options: Any) -> Any:
        models = [each for each in objects if isinstance(each, nn.Module)]
        if len(models) + len(prepared_models(accelerator)) > 1:
            raise UsageError(
                "FSDP2 shards one model, and this script trains several: use a YAML without FSDP"
            )
        for model in models:
            _make_ready(accelerator, model)
        try:
            prepared = prepare(*objects, **options)
        except ValueError as problem:  # a scalar; no such class to wrap; a list of layers to wrap
            raise UsageError(
                f"fsdp_config does not fit the model ({first_sentence(problem)}): give a scalar "
                "parameter the shape (1,), use NO_WRAP, or see docs/scaling.md for other policies"
            ) from problem
        for layer in (layer for model in models for layer in model.modules()):
            if isinstance(layer, FSDPModule):
                # Gathered once by now: if an evaluation were first, under torch.inference_mode(),
                # no backward pass could follow.
                layer.unshard()
                layer.reshard()
        return prepared

    accelerator.prepare = prepare_sharded


def _make_ready(accelerator: Accelerator, model: nn.Module) -> None:
    """Change a model so that it can be sharded and computes what it would unsharded."""
    for weight in model.parameters():
        weight.data = weight.data.contiguous()  # FSDP2 takes no channels_last
    model.register_forward_pre_hook(_share_buffers)
    if accelerator.mixed_precision == "bf16":  # else each layer would round all it does to bf16
        forward = torch.autocast(accelerator.device.type, torch.bfloat16)(model.forward)
        model.forward = convert_outputs_to_fp32(forward)


def _share_buffers(model: nn.Module, *_: Any) -> None:
    """Give all processes the buffers of the first, as DDP does, when they are about to be used."""
    if not model.training:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)


def whole(tree: Any, keep: bool = True) -> Any:
    """The tree with whole tensors on the host in place of sharded ones.

    They are gathered one at a time, and None stays of them without `keep`: for processes that do
    not write. Every process must call this.
    """

    def gather(value: torch.Tensor) -> torch.Tensor | None:
        if not hasattr(value, "full_tensor"):
            return value
        full = value.full_tensor()
        return full.cpu() if keep else None

    return tree_map_only(torch.Tensor, gather, tree)


def shared_out(
    tensors: dict[str, torch.Tensor], like: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Whole tensors cut as those of the same names in `like` are, without communication."""
    return {name: _share(value, like[name]) for name, value in tensors.items() if name in like}


def _share(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not hasattr(like, "device_mesh") or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(like.device).contiguous()
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def writer(
    accelerator: Accelerator, average: Sequence[dict[str, torch.Tensor]]
) -> Callable[[Path], None]:
    """A function that saves a sharded run's state into a folder. Every process must call this.

    With FULL_STATE_DICT the function does not communicate: what it needs is gathered before. With
    SHARDED_STATE_DICT it fails on all processes if it fails on one.
    """
    main = accelerator.is_main_process
    model = accelerator.unwrap_model(prepared_models(accelerator)[0], keep_torch_compile=False)
    optimizers = [wrapped.optimizer.state_dict() for wrapped in prepared_optimizers(accelerator)]
    full = accelerator.state.fsdp_plugin.state_dict_type.name == "FULL_STATE_DICT"
    for buffer in model.buffers():
        torch.distributed.broadcast(buffer, 0)
    tensors = _named(model, average)
    shares: dict[str, torch.Tensor] = {}
    if full:
        tensors, optimizers = whole((tensors, optimizers), main)
    else:
        shares = _flat(tensors)
        optimizers = [
            _without_moments(saved, number, shares) for number, saved in enumerate(optimizers)
        ]

    # A file is made in memory, so there are several: what each tensor goes into, from 1.
    sizes = itertools.accumulate(value.nbytes for value in shares.values())
    limit = FILE_BYTES * accelerator.num_processes
    files = {name: 1 + size // limit for name, size in zip(shares, sizes, strict=True)}

    def write(folder: Path) -> None:
        if not full:
            from torch.distributed import checkpoint as dcp

            storage = dcp.HuggingFaceStorageWriter(str(folder), files, save_distributed=True)
            with _own_errors():
                dcp.save(shares, storage_writer=storage)
        if main:
            for kind, values in tensors.items() if full else ():
                save_file(values, folder / f"{kind}.safetensors", {"format": "pt"})
            for number, saved in enumerate(optimizers):
                torch.save(saved, _path(folder, "optimizer", number))
            for number, scheduler in enumerate(prepared_schedulers(accelerator)):
                torch.save(scheduler.state_dict(), _path(folder, "scheduler", number))

    return write


def is_sharded(folder: Path) -> bool:
    """True for the state of a run that had fsdp_state_dict_type SHARDED_STATE_DICT."""
    return not (folder / "model.safetensors").exists()


def read(
    accelerator: Accelerator, average: Sequence[dict[str, torch.Tensor]], folder: Path
) -> None:
    """Load what writer() or accelerator.save_state wrote, into weights that are sharded or not.

    Every process must call this.
    """
    model = accelerator.unwrap_model(prepared_models(accelerator)[0], keep_torch_compile=False)
    own = _named(model, average)
    shares: dict[str, torch.Tensor] = {}
    for kind, tensors in own.items():
        if is_sharded(folder):
            shares |= {f"{kind}.{name}": value for name, value in tensors.items()}
            continue
        for name, value in shared_out(load_file(folder / f"{kind}.safetensors"), tensors).items():
            tensors[name].copy_(value)
    loaded = []
    for number, wrapped in enumerate(prepared_optimizers(accelerator)):
        path, weights = _path(folder, "optimizer", number), weights_of(wrapped.optimizer)
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        for index, state in saved["state"].items():
            for name, value in state.items():
                if value is None:
                    value = shares[f"optimizer_{number}.{index}.{name}"] = torch.zeros_like(
                        weights[index]
                    )
                if isinstance(value, torch.Tensor):
                    state[name] = _share(value, weights[index])
        loaded.append(saved)
    if shares:
        from torch.distributed import checkpoint as dcp

        storage = dcp.HuggingFaceStorageReader(str(folder))
        for name, kept in storage.read_metadata().state_dict_metadata.items():
            num = sum(chunk.sizes.numel() for chunk in getattr(kept, "chunks", ()))
            if hasattr(kept, "chunks") and num != kept.size.numel():
                raise UsageError(f"{folder}: a part of {name} is missing")
        with _own_errors():
            dcp.load(shares, storage_reader=storage, no_dist=accelerator.num_processes == 1)
    for wrapped, saved in zip(prepared_optimizers(accelerator), loaded, strict=True):
        wrapped.optimizer.load_state_dict(saved)
    for number, scheduler in enumerate(prepared_schedulers(accelerator)):
        path = _path(folder, "scheduler", number)
        scheduler.load_state_dict(torch.load(path, weights_only=True))


def _named(
    model: nn.Module, average: Sequence[dict[str, torch.Tensor]]
) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a run by the kind of file that holds them, and by name."""
    return {"model": model.state_dict(), **({"average": average[0]} if average else {})}


def _flat(tensors: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All of them as KIND.NAME; a second name of one memory, a tied weight's, gets a copy.

    safetensors would refuse it.
    """
    flat: dict[str, torch.Tensor] = {}
    seen = set()
    for kind, named in tensors.items():
        for name, value in named.items():
            memory = (value.to_local() if hasattr(value, "to_local") else value).data_ptr()
            flat[f"{kind}.{name}"] = value.clone() if memory in seen else value
            seen.add(memory)
    return flat


def _without_moments(
    saved: dict[str, Any], number: int, shares: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """The state of an optimizer with None in place of sharded tensors, which go into `shares`."""
    states: dict[int, dict[str, Any]] = {}
    for index, state in saved["state"].items():
        states[index] = dict(state)
        for name, value in state.items():
            if hasattr(value, "full_tensor"):
                shares[f"optimizer_{number}.{index}.{name}"], states[index][name] = value, None
    return {**saved, "state": states}


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise what went wrong in a process: torch's CheckpointException is no Exception."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as problem:
        raise next(iter(problem.failures.values()))[0] from None


def _path(folder: Path, kind: str, number: int) -> Path:
    return folder / (f"{kind}_{number}.bin" if number else f"{kind}.bin")


def describe_shards(accelerator: Accelerator, model: nn.Module) -> str:
    """How many bytes of weights and of an optimizer's moments each process holds."""
    num_moments: dict[int, int] = {}
    for wrapped in prepared_optimizers(accelerator):
        for group in wrapped.param_groups:
            num = 2 if "betas" in group else int(group.get("momentum", 0) > 0)
            num_moments |= {id(weight): num for weight in group["params"]}
    weights = list(model.parameters())
    sizes = [weight.to_local().nbytes for weight in weights]
    moments = sum(num_moments.get(id(w), 0) * size for w, size in zip(weights, sizes, strict=True))
    return f"{sum(sizes) / 2**20:,.1f} MiB of weights, {moments / 2**20:,.1f} MiB of moments"
