"""Shard a model, that is, spread its weights over the processes (FSDP2), and save and load it.

Accelerate shards the model, but accelerator.save_state is not used for its checkpoints. For a
sharded model it writes files of torch.distributed.checkpoint, and reading them unpickles .metadata
without weights_only, so a forged file could execute code. Instead each process writes its rows with
torch.save to shard-00000.bin, shard-00001.bin, ..., which are read with weights_only. With
fsdp_state_dict_type: FULL_STATE_DICT there is one such file, with all rows.

A sharded run and one that is not sharded can each continue from either kind of checkpoint. Frozen
parameters (requires_grad=False) are not in checkpoints; a resume compares their fingerprint.
"""

from collections.abc import Callable, Container, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, broadcast
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from trainkit.checks.content import hash_tensor
from trainkit.deferred import Deferred
from trainkit.errors import UsageError, as_usage_error, failing_together
from trainkit.launch.environment import shards_wanted
from trainkit.optim import weights_of
from trainkit.private import (
    compute_in,
    make_contiguous,
    named_weights,
    prepared_models,
    prepared_optimizers,
    prepared_schedulers,
    recompute_layers,
    shard_models,
    tree_map,
    tree_map_only,
    wrap_prepare,
)
from trainkit.rng import Dropout
from trainkit.run_dir.manifest import hash_of
from trainkit.run_dir.weights import numbered, read_weights, separate

Tensors = dict[str, torch.Tensor]


def shard(accelerator: Accelerator, fingerprint: dict[str, str]) -> None:
    """Make accelerator.prepare(...) shard the model, if the launch asks for it. Call this first.

    prepare then adds the hashes of this process's frozen weights before sharding to `fingerprint`.
    """
    if not shards_wanted():
        return
    plugin = FullyShardedDataParallelPlugin()
    silent = (
        plugin.fsdp_version != 2
        or plugin.ignored_modules
        or hasattr(plugin.cpu_offload, "pin_memory")
    )
    if silent or accelerator.num_processes == 1 or accelerator.mixed_precision == "fp16":
        raise UsageError(
            "sharded weights need fsdp_version: 2, several processes, mixed_precision bf16 or no, "
            "and neither fsdp_ignored_modules, whose gradients would not be reduced, nor "
            "fsdp_offload_params: see accelerate_configs/2cpu_fsdp.yaml"
        )
    bf16 = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None
    plugin.activation_checkpointing = False  # get_ready does it

    def prepare_sharded(prepare: Callable[..., Any], *objects: Any) -> Any:
        models, prepared = owners(objects), dict[int, Any]()
        for number in sorted(set(models)):  # Accelerate shards one model in a call
            own = [n for n, of in enumerate(models) if of == number]
            weights: list[tuple[dict[str, Any], list]] = []
            for each in (objects[n] for n in own):
                if isinstance(each, nn.Module) and not is_sharded(each):
                    get_ready(accelerator, each, fingerprint)
                elif isinstance(each, torch.optim.Optimizer):
                    weights += ((group, [*group["params"]]) for group in each.param_groups)
            with as_usage_error("the model cannot be sharded"):
                made = prepare(*(objects[n] for n in own))
            for group, params in weights:
                # Accelerate confuses those of which this process has no row.
                if any(hasattr(param, "full_tensor") for param in params):
                    group["params"] = params
            prepared |= zip(own, made if len(own) > 1 else [made], strict=True)
        result = tuple(prepared[n] for n in range(len(objects)))
        return result if len(objects) > 1 else result[0]

    shard_models(accelerator, plugin, bf16)
    wrap_prepare(accelerator, prepare_sharded)


def make(accelerator: Accelerator, build: Callable[[], nn.Module]) -> nn.Module:
    """Return build(). If the run is sharded, each process only keeps its rows of the weights.

    The numbers are those of the whole model, as build() makes it on the CPU. A weight is made on
    the first process when its turn comes, sent to all, and freed, so that this takes the memory of
    the share and of the largest weight; of the whole model, if something in it is frozen. Weights
    that build() reads are whole until the end. It must not write them by numpy, which torch does
    not see. Every process must call this.
    """
    if not accelerator.is_fsdp2:
        return build()
    with Deferred() as deferred:
        model = build()
    deferred.fill_all_but(() if frozen(model) else model.parameters())
    if not deferred.unwritten:
        return model  # accelerator.prepare shards it
    get_ready(accelerator, model, {}, deferred)
    later = {name: w.detach() for name, w in model.named_parameters() if w in deferred}
    with as_usage_error("the model cannot be sharded"):
        fsdp2_prepare_model(accelerator, model)
    main = accelerator.is_main_process
    for name, rows in model.named_parameters():
        if name in later:
            whole = later.pop(name)
            value = deferred.values(whole) if main else torch.empty_like(whole)
            value = broadcast(value.to(accelerator.device.type))
            rows.detach().copy_(join_rows(rows, value))
    return model


def is_sharded(model: nn.Module) -> bool:
    """Is this a model from make()?"""
    return any(hasattr(weight, "full_tensor") for weight in model.parameters())


def get_ready(
    accelerator: Accelerator,
    model: nn.Module,
    fingerprint: dict[str, str],
    unwritten: Container[torch.Tensor] = (),
) -> None:
    """Do what must be done to a model before Accelerate shards it: see shard.

    Weights in `unwritten` get their values later.
    """
    model.register_forward_hook(_share_buffers)
    make_contiguous(model)  # FSDP2 does not support channels_last
    plugin = accelerator.state.fsdp_plugin
    if not plugin.cpu_ram_efficient_loading:  # else only the first process has weights
        # Each process keeps some rows: if weights differed, the model would be a mixture.
        models = [*prepared_models(accelerator), model]
        fingerprint.update(fingerprint_frozen(models) | fingerprint)
        for value in state_of(model).values():  # as DDP does
            if value not in unwritten:
                value.copy_(broadcast(value.to(accelerator.device.type)))
    if FullyShardedDataParallelPlugin().activation_checkpointing:
        if any(isinstance(layer, Dropout) for layer in model.modules()):
            raise UsageError(
                "fsdp_activation_checkpointing: true computes layers twice, and "
                "trainkit.rng.Dropout draws once for each batch: use nn.Dropout in this model"
            )
        if recompute_layers(plugin, model) == 0:
            raise UsageError(
                "fsdp_activation_checkpointing: true finds no layer to compute twice: let "
                "fsdp_auto_wrap_policy name the classes of the layers (docs/scaling.md)"
            )
    # Otherwise each layer would compute everything in bf16.
    if accelerator.mixed_precision == "bf16":
        compute_in(torch.bfloat16, accelerator.device.type, model)


def owners(objects: Sequence[Any]) -> list[int]:
    """For each object the number of the model that it belongs to; the last for data loaders.

    Raises UsageError if optimizers or schedules are not in the order of their models: their files
    in a checkpoint would have other numbers than without sharding.
    """
    found, models = [], [each for each in objects if isinstance(each, nn.Module)]
    of = {id(weight): n for n, model in enumerate(models) for weight in model.parameters()}
    for each in objects:
        groups = getattr(getattr(each, "optimizer", each), "param_groups", None)
        if isinstance(each, nn.Module):
            found.append(models.index(each))
        else:
            found.append(of.get(id(groups[0]["params"][0]), 0) if groups else len(models) - 1)
    for kind in (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler):
        numbers = [n for n, each in zip(found, objects, strict=True) if isinstance(each, kind)]
        if numbers != sorted(numbers):
            raise UsageError(
                "sharded weights need optimizers and schedules in the order of their models in "
                "accelerator.prepare(...)"
            )
    return found


def _share_buffers(model: nn.Module, *_: Any) -> None:
    """Copy the buffers of the first process to all, because DDP evaluates and saves those."""
    for buffer in model.buffers() if model.training else ():
        torch.distributed.broadcast(buffer, 0)


def gathered(tree: Any, keep: bool) -> Any:
    """Return the tree with all rows of its tensors, on the CPU; None for them without `keep`.

    Every process must call this. A process that does not write the rows need not keep them.
    """

    def gather(value: torch.Tensor) -> torch.Tensor | None:
        rows = getattr(value, "full_tensor", value.detach)()
        return rows.cpu() if keep else None

    return tree_map_only(torch.Tensor, gather, tree)


def join_rows(like: Any, *rows: Any) -> Any:
    """Return the tensor of these rows, or only this process's rows of it if `like` is sharded.

    Scalars and values that are not tensors are the same in all files and are taken from the first.
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


def own_rows(like: Any, rows: Any) -> Any:
    """Return a tensor sharded like `like` that has these rows in this process, without a copy."""
    if not hasattr(like, "full_tensor") or not getattr(rows, "shape", ()):
        return rows
    if rows.shape != like.to_local().shape:
        raise UsageError(f"{tuple(rows.shape)} is not the shape of the rows of this process")
    from torch.distributed.tensor import DTensor

    layout = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    return DTensor.from_local(rows, like.device_mesh, like.placements, **layout)


def forget_whole_weights(models: Sequence[nn.Module]) -> None:
    """Let the next forward pass of sharded models gather their weights. Call before these change.

    FSDP2 keeps some weights whole after a forward pass that no backward pass follows, such as one
    of an evaluation, and uses them in the next one, whatever the rows of the processes are by then
    (https://github.com/pytorch/pytorch/issues/131965).
    """
    for layer in (layer for model in models for layer in model.modules()):
        if hasattr(layer, "reshard"):
            layer.reshard()


def frozen(model: nn.Module) -> Tensors:
    """The parameters of a model that are frozen (requires_grad=False), by name."""
    named = named_weights(model, remove_duplicate=False)
    return {name: weight for name, weight in named if not weight.requires_grad}


def state_of(model: nn.Module) -> Tensors:
    """The state of a model without its frozen parameters, by name."""
    left_out = frozen(model)
    return {name: value for name, value in model.state_dict().items() if name not in left_out}


def start_from(accelerator: Accelerator, path: Path | None, model: nn.Module) -> tuple[str, str]:
    """Load the weights of --start-from; return a line about it and its SHA-256, "" if not given.

    Every process must call this. Raises UsageError on all of them.
    """
    if path is None:
        return "", ""
    with failing_together(accelerator, f"--start-from {path} cannot be read"):
        tensors, line = read_weights(path, model)
        fingerprint = hash_of(path)
    own = model.state_dict()
    rows = {name: join_rows(own[name], value) for name, value in tensors.items()}
    model.load_state_dict(rows, strict=False)
    return line, fingerprint


def fingerprint_frozen(models: Sequence[nn.Module]) -> dict[str, str]:
    """Hash all bytes of each frozen weight. Every process must call this."""
    found = {}
    for number, model in enumerate(models):
        for name, weight in frozen(model).items():
            found[f"the frozen weight {name} of model {number}"] = hash_tensor(weight)
    return found


def parts_of(accelerator: Accelerator, averages: Sequence[Tensors]) -> dict[str, Any]:
    """The parts of a checkpoint by file name: tensors by name, an optimizer or a schedule.

    The names are those that accelerator.save_state gives its files, and average.safetensors. They
    are made from numbers and never sorted, because model_10 would come before model_2.
    """
    kinds = {
        "average.safetensors": averages,
        "model.safetensors": [state_of(model) for model in prepared_models(accelerator)],
        "optimizer.bin": prepared_optimizers(accelerator),
        "scheduler.bin": prepared_schedulers(accelerator),
    }
    return {numbered(name, n): part for name, of in kinds.items() for n, part in enumerate(of)}


def before_save(averages: Sequence[Tensors], models: list, weights: list, folder: str) -> None:
    """Leave out frozen weights, save tied weights under both names, and save the averages.

    This is a hook of accelerator.save_state, which would leave out one of two tied names and warn
    of it each time.
    """
    weights[:] = (separate(state_of(model)) for model in models)
    for number, average in enumerate(averages):
        save_file(separate(average), Path(folder, numbered("average.safetensors", number)))


def before_load(
    accelerator: Accelerator, averages: Sequence[Tensors], models: list, folder: str
) -> None:
    """Refuse files that do not match this run's models and optimizers; load the averages.

    This is a hook of accelerator.load_state, which would ignore missing and extra files.
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
    """Return a function that writes the state of a sharded run into a folder.

    That function does not communicate, so it may fail on one process alone: all data are gathered
    here. Every process must call this.
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
    """Load what writer() wrote, or what accelerator.save_state wrote, into a sharded run."""
    load = partial(torch.load, map_location="cpu", weights_only=True)
    parts = parts_of(accelerator, averages)
    # Their numbers have five digits, so sorting the names gives the order of the processes.
    paths, join = sorted(folder.glob("shard-*")), join_rows
    if accelerator.is_fsdp2 and len(paths) == accelerator.num_processes:
        # The others hold no row of this process.
        paths, join = [paths[accelerator.process_index]], own_rows
    else:  # more than this process keeps
        load = partial(load, mmap=True)
    files = [load(path) for path in paths]
    if not files:
        files = [[(load_file if ".s" in name else load)(folder / name) for name in parts]]
    for own, *saved in zip(parts.values(), *files, strict=True):
        if isinstance(own, dict):
            _load_tensors(own, saved, join)
        elif isinstance(own, torch.optim.Optimizer):
            _load_optimizer(own, saved, join)
        else:
            own.load_state_dict(saved[0])


def _load_tensors(own: Tensors, saved: Sequence[Tensors], join: Callable = join_rows) -> None:
    """Copy tensors into `own`, one by one; each file has some of their rows."""
    for name in own | saved[0]:
        value = join(own.get(name), *(file[name] for file in saved))
        _check_shape(name, own, value.shape)  # copy_ would broadcast a smaller tensor
        own[name].copy_(value)


def _load_optimizer(
    optimizer: torch.optim.Optimizer, saved: Sequence[dict[str, Any]], join: Callable
) -> None:
    weights, states = weights_of(optimizer), [file["state"] for file in saved]
    like = {i: dict.fromkeys(state, weights[i]) for i, state in states[0].items()}
    optimizer.load_state_dict(saved[0] | {"state": tree_map(join, like, *states)})


def _check_shape(name: str, own: Tensors, shape: Sequence[int] | None) -> None:
    if name not in own or shape is None or own[name].shape != torch.Size(shape):
        raise UsageError(f"the weight {name} of the checkpoint does not match this run")
