"""A model whose weights are sharded, that is, spread over the processes (FSDP2).

Accelerate shards the model, but accelerator.save_state is not used for its checkpoints: of a
sharded model it writes the files of torch.distributed.checkpoint, and reading those unpickles
.metadata without weights_only, which executes whatever a forged file asks for. So each process
writes the rows that it has with torch.save: shard-00000.bin, shard-00001.bin, ..., which are read
with weights_only. With fsdp_state_dict_type: FULL_STATE_DICT there is one such file, of all rows.

A run continues from either kind of checkpoint, whether it is sharded itself or not. Parameters that
are frozen (requires_grad=False) are in no checkpoint: a resume compares their fingerprint.
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
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from trainkit.errors import UsageError, as_usage_error, failing_together
from trainkit.launch.environment import shards_wanted
from trainkit.optim import weights_of
from trainkit.private import (
    prepared_models,
    prepared_optimizers,
    prepared_schedulers,
    tree_map,
    tree_map_only,
)
from trainkit.run_dir.manifest import sha256_of
from trainkit.run_dir.weights import numbered, read_weights, separate

Tensors = dict[str, torch.Tensor]


def shard(accelerator: Accelerator, fingerprint: dict[str, str]) -> None:
    """Let accelerator.prepare(...) shard the model, if the launch asks for it. Call before that.

    prepare then adds to `fingerprint` that of what is frozen, as it was in this process before.
    """
    if not shards_wanted():
        return
    plugin = FullyShardedDataParallelPlugin()
    silent = plugin.fsdp_version != 2 or plugin.activation_checkpointing or plugin.ignored_modules
    if silent or accelerator.num_processes == 1 or accelerator.mixed_precision == "fp16":
        raise UsageError(
            "sharded weights need fsdp_version: 2, several processes, mixed_precision bf16 or no, "
            "and neither fsdp_activation_checkpointing, whose second forward pass would draw other "
            "dropout masks, nor fsdp_ignored_modules, whose gradients would not be reduced: see "
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
                # Each process keeps some rows: where weights differ, the model would be a mixture.
                models = [*prepared_models(accelerator), model]
                fingerprint.update(fingerprint_frozen(models) | fingerprint)
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


def join_rows(like: Any, *rows: Any) -> Any:
    """The tensor that has these rows; if `like` is sharded, of it the rows of this process.

    Whatever is not a tensor with a shape is the same in all files: it is taken from the first.
    """
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


def start_from(accelerator: Accelerator, path: Path | None, model: nn.Module) -> tuple[str, str]:
    """Load the weights of --start-from; return a line about it, and its SHA-256; "" without one.

    Every process must call this. Raises UsageError on all of them.
    """
    if path is None:
        return "", ""
    with failing_together(accelerator, f"--start-from {path} cannot be read"):
        tensors, line = read_weights(path, model)
        fingerprint = sha256_of(path)
    own = model.state_dict()
    rows = {name: join_rows(own[name], value) for name, value in tensors.items()}
    model.load_state_dict(rows, strict=False)
    return line, fingerprint


def fingerprint_frozen(models: Sequence[nn.Module]) -> dict[str, str]:
    """A hash of all bytes of each frozen weight. Every process must call this; 12 GB a second."""
    found = {}
    for number, model in enumerate(models):
        for name, weight in frozen(model).items():
            rows = gathered(weight, keep=True).contiguous().flatten().view(torch.uint8)
            key = f"the frozen weight {name} of model {number}"
            found[key] = xxhash.xxh3_128_hexdigest(rows.numpy())
    return found


def parts_of(accelerator: Accelerator, averages: Sequence[Tensors]) -> dict[str, Any]:
    """What a checkpoint holds: tensors by name, or an optimizer or a schedule, by file name.

    The names are those that accelerator.save_state gives its files, and average.safetensors. They
    are made from numbers, never sorted: model_10 would come before model_2.
    """
    kinds = {
        "average.safetensors": averages,
        "model.safetensors": [state_of(model) for model in prepared_models(accelerator)],
        "optimizer.bin": prepared_optimizers(accelerator),
        "scheduler.bin": prepared_schedulers(accelerator),
    }
    return {numbered(name, n): part for name, of in kinds.items() for n, part in enumerate(of)}


def before_save(averages: Sequence[Tensors], models: list, weights: list, folder: str) -> None:
    """Leave out what is frozen, save a weight that has two names under both, and the averages.

    A hook of accelerator.save_state, which would leave one name out, and warn of it each time.
    """
    weights[:] = (separate(state_of(model)) for model in models)
    for number, average in enumerate(averages):
        save_file(separate(average), Path(folder, numbered("average.safetensors", number)))


def before_load(
    accelerator: Accelerator, averages: Sequence[Tensors], models: list, folder: str
) -> None:
    """Refuse files that are not those of this run's models and optimizers; load the averages.

    A hook of accelerator.load_state, which would pass over what is missing or left over.
    """
    parts = parts_of(accelerator, averages)
    others = {"scaler.pt", *(path.name for path in Path(folder).glob("random_states_*.pkl"))}
    if wrong := {path.name for path in Path(folder).iterdir()} - others ^ parts.keys():
        raise UsageError(
            f"{folder}: {min(wrong)} is in the checkpoint or in this run, not in both: the script "
            "has prepared other models, optimizers or schedules"
        )
    for name, own in parts.items():
        if name.startswith("average"):
            _load_tensors(own, [load_file(Path(folder, name))])
        elif name.startswith("model"):
            with safe_open(Path(folder, name), "pt") as file:
                saved = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
            for key in own | saved:
                _check_shape(key, own, saved.get(key))


def writer(accelerator: Accelerator, averages: Sequence[Tensors]) -> Callable[[Path], None]:
    """A function that writes the state of a sharded run into a folder.

    It does not communicate, so that it may fail: what it needs is gathered before. Every process
    must call this.
    """
    rank = accelerator.process_index
    state: Any = [
        part if isinstance(part, dict) else part.state_dict()
        for part in parts_of(accelerator, averages).values()
    ]
    full = accelerator.state.fsdp_plugin.state_dict_type.name == "FULL_STATE_DICT"
    if full:
        state = gathered(state, keep=rank == 0)
    else:
        state = tree_map_only(torch.Tensor, lambda x: getattr(x, "to_local", x.cpu)().cpu(), state)

    def write(folder: Path) -> None:
        if rank == 0 or not full:
            torch.save(state, folder / f"shard-{rank:05d}.bin")

    return write


def read(accelerator: Accelerator, averages: Sequence[Tensors], folder: Path) -> None:
    """Load what writer() wrote, or into a sharded run what accelerator.save_state wrote."""
    load = partial(torch.load, map_location="cpu", mmap=True, weights_only=True)
    parts = parts_of(accelerator, averages)
    # Their numbers have five digits, so the order of the names is that of the processes.
    files = [load(path) for path in sorted(folder.glob("shard-*"))]
    if not files:
        files = [[(load_file if ".s" in name else load)(folder / name) for name in parts]]
    for own, *saved in zip(parts.values(), *files, strict=True):
        if isinstance(own, dict):
            _load_tensors(own, saved)
        elif isinstance(own, torch.optim.Optimizer):
            _load_optimizer(own, saved)
        else:
            own.load_state_dict(saved[0])


def _load_tensors(own: Tensors, saved: Sequence[Tensors]) -> None:
    """Copy into `own` tensors of which each file has some rows, one by one."""
    for name in own | saved[0]:
        value = join_rows(own.get(name), *(file[name] for file in saved))
        _check_shape(name, own, value.shape)  # copy_ would repeat a shorter one
        own[name].copy_(value)


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: Sequence[dict[str, Any]]) -> None:
    weights, states = weights_of(optimizer), [file["state"] for file in saved]
    like = {i: dict.fromkeys(state, weights[i]) for i, state in states[0].items()}
    optimizer.load_state_dict(saved[0] | {"state": tree_map(join_rows, like, *states)})


def _check_shape(name: str, own: Tensors, shape: Sequence[int] | None) -> None:
    if name not in own or shape is None or own[name].shape != torch.Size(shape):
        raise UsageError(f"the weight {name} of the checkpoint is not the one of this run")
