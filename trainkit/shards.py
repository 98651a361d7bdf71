"""A model spread over the processes (FSDP2), what a checkpoint holds, and how any run reads it.

Accelerate shards. Its own files of shards are pickles that execute what a forged one asks for, so
here each process writes the rows it has: shard-00000.bin, shard-00001.bin, ..., read with
weights_only. With fsdp_state_dict_type: FULL_STATE_DICT there is one such file, of all rows.

Parameters that are frozen (requires_grad=False) are in no checkpoint: their digests are compared.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    broadcast,
    convert_outputs_to_fp32,
)
from safetensors.torch import load_file, save_file
from torch import nn

from trainkit.errors import UsageError, as_usage_error
from trainkit.launch.environment import shards_wanted
from trainkit.optim import weights_of
from trainkit.private import (
    prepared_models,
    prepared_optimizers,
    prepared_schedulers,
    tree_map,
    tree_map_only,
)
from trainkit.run_dir.weights import separate

Tensors = dict[str, torch.Tensor]


def shard(accelerator: Accelerator, hashes: dict[str, str]) -> None:
    """Let accelerator.prepare(...) shard the model, if the launch asks for it. Call before that.

    prepare then adds to `hashes` the digests() of this process's model as it was before.
    """
    if not shards_wanted():
        return
    plugin = FullyShardedDataParallelPlugin()
    silent = plugin.fsdp_version != 2 or plugin.activation_checkpointing or plugin.ignored_modules
    if silent or accelerator.num_processes == 1 or accelerator.mixed_precision == "fp16":
        raise UsageError(
            "sharded weights need fsdp_version: 2, several processes, mixed_precision bf16 or no, "
            "and neither fsdp_activation_checkpointing, whose second forward pass would draw other "
            "dropout masks, nor fsdp_ignored_modules, whose gradients nobody would add up: see "
            "accelerate_configs/2cpu_fsdp.yaml"
        )
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # Accelerate's own policy adds gradients up in bf16 too, and rounds inputs and outputs to it.
    bf16 = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None
    policy = MixedPrecisionPolicy(bf16, torch.float32, cast_forward_inputs=False)
    plugin.mixed_precision_policy, accelerator.state.fsdp_plugin = policy, plugin
    # Set here, because Accelerate does not shard over CPU processes by itself.
    for state in (PartialState(), accelerator.state):
        state.distributed_type = DistributedType.FSDP
    prepare = accelerator.prepare

    def prepare_sharded(*objects: Any) -> Any:
        for model in (each for each in objects if isinstance(each, nn.Module)):
            model.register_forward_hook(_share_buffers)
            for weight in model.parameters():
                weight.data = weight.data.contiguous()  # FSDP2 takes no channels_last
            if not plugin.cpu_ram_efficient_loading:  # else only the first process has weights
                # Each keeps some rows of its own: what differs would be mixed unseen. The models
                # that are prepared already are mixed by now: theirs stay as they are.
                hashes.update(digests([*prepared_models(accelerator), model]) | hashes)
                for value in state_of(model).values():  # as DDP does
                    value.copy_(broadcast(value.to(accelerator.device.type)))
            if bf16:  # else each layer would round all it does to bf16
                forward = torch.autocast(accelerator.device.type, bf16)(model.forward)
                model.forward = convert_outputs_to_fp32(forward)
        with as_usage_error("the model cannot be sharded"):
            return prepare(*objects)

    accelerator.prepare = prepare_sharded


def _share_buffers(model: nn.Module, *_: Any) -> None:
    """Give all processes the buffers of the first, which are what DDP evaluates and saves."""
    for buffer in model.buffers() if model.training else ():
        torch.distributed.broadcast(buffer, 0)


def gathered(tree: Any, keep: bool) -> Any:
    """The tree with all rows of its tensors, on the host; without `keep` with None for them.

    Every process must call this. Those that do not write need not keep what comes.
    """

    def gather(value: torch.Tensor) -> torch.Tensor | None:
        rows = getattr(value, "full_tensor", value.detach)()
        return rows.cpu() if keep else None

    return tree_map_only(torch.Tensor, gather, tree)


def share(like: Any, *rows: Any) -> Any:
    """The tensor that has these rows; if `like` is sharded, of it the rows of this process."""
    value = rows[0]
    if not getattr(value, "shape", ()):
        return value
    if value.shape != getattr(like, "shape", value.shape):
        value = torch.cat(rows)
    if hasattr(like, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value


def frozen(model: nn.Module) -> Tensors:
    """Its parameters that no step changes."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: weight for name, weight in named if not weight.requires_grad}


def state_of(model: nn.Module) -> Tensors:
    """What a run changes of a model: its state without what is frozen."""
    left_out = frozen(model)
    return {name: value for name, value in model.state_dict().items() if name not in left_out}


def digests(models: Sequence[nn.Module]) -> dict[str, str]:
    """For each frozen weight, in words, a hash of all its bytes. Every process must call this.

    It takes 12 GB a second.
    """
    found = {}
    for number, model in enumerate(models):
        for name, weight in frozen(model).items():
            rows = gathered(weight, keep=True).contiguous().flatten().view(torch.uint8)
            key = f"the frozen weight {name} of model {number}"
            found[key] = xxhash.xxh3_128_hexdigest(rows.numpy())
    return found


def before_save(
    averages: Sequence[Tensors], models: list, weights: list[dict], folder: str
) -> None:
    """Leave out what is frozen, save a weight that has two names under both, and the averages.

    A hook of accelerator.save_state, which would leave one name out, and warn of it each time.
    """
    weights[:] = (separate(state_of(model)) for model in models)
    for number, average in enumerate(averages):
        name = f"average_{number}.safetensors" if number else "average.safetensors"
        save_file(separate(average), Path(folder, name))


def writer(accelerator: Accelerator, tensors: Sequence[Tensors]) -> Callable[[Path], None]:
    """A function that writes the state of a sharded run; `tensors`: of averages, then of models.

    It does not communicate, so that it may fail: what it needs is gathered before. Every process
    must call this.
    """
    others = *prepared_optimizers(accelerator), *prepared_schedulers(accelerator)
    state, rank = [*tensors, *(each.state_dict() for each in others)], accelerator.process_index
    full = accelerator.state.fsdp_plugin.state_dict_type.name == "FULL_STATE_DICT"
    if full:
        state = gathered(state, keep=rank == 0)
    else:
        state = tree_map_only(torch.Tensor, lambda x: getattr(x, "to_local", x.cpu)().cpu(), state)

    def write(folder: Path) -> None:
        if rank == 0 or not full:
            torch.save(state, folder / f"shard-{rank:05d}.bin")

    return write


def read(accelerator: Accelerator, tensors: Sequence[Tensors], folder: Path) -> None:
    """Load what writer() or accelerator.save_state wrote, whether the run is sharded or not."""
    load = partial(torch.load, map_location="cpu", mmap=True, weights_only=True)
    files = [load(path) for path in sorted(folder.glob("shard-*"))]
    if not files:  # average, model, optimizer, scheduler
        plain = map(load_file, sorted(folder.glob("*.safetensors")))
        files = [[*plain, *map(load, sorted(folder.glob("*.bin")))]]
    others = *prepared_optimizers(accelerator), *prepared_schedulers(accelerator)
    for own, *parts in zip((*tensors, *others), *files, strict=True):
        if isinstance(own, dict):
            _copy(own, parts)
            continue
        if isinstance(own, torch.optim.Optimizer):
            weights, states = weights_of(own), [of["state"] for of in parts]
            like = {i: dict.fromkeys(of, weights[i]) for i, of in states[0].items()}
            parts[0]["state"] = tree_map(share, like, *states)
        own.load_state_dict(parts[0])
    loss_scale = folder / "scaler.pt"
    if accelerator.scaler is not None and loss_scale.exists():  # else it begins as a new one
        accelerator.scaler.load_state_dict(load(loss_scale))


def _copy(own: Tensors, parts: Sequence[Tensors]) -> None:
    """Copy into `own` tensors of which each part has some rows."""
    for name in own | parts[0]:
        value = share(own.get(name), *(part[name] for part in parts))
        if name not in own or value.shape != own[name].shape:  # copy_ would repeat a shorter one
            raise UsageError(f"the weight {name} of the checkpoint is not the one of this run")
        own[name].copy_(value)
