"""Shard a model, that is, spread its weights over the processes (FSDP2).

Accelerate shards the model; parts.py says how its checkpoints are written and read. Frozen
parameters (requires_grad=False) are not in them while they are as at the start; a resume compares
their fingerprint.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from accelerate import Accelerator, init_empty_weights
from accelerate.utils import FullyShardedDataParallelPlugin, broadcast, broadcast_object_list
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn

from trainkit.checkpoints.hashing import hash_tensor
from trainkit.errors import UsageError, as_usage_error
from trainkit.launch.environment import num_copies, shards_wanted
from trainkit.launch.nodes import check_same
from trainkit.launch.processes import deadline, failing_together
from trainkit.numbers.randoms import Dropout
from trainkit.repairs.private_names import (
    is_trained,
    named_weights,
    prepared_optimizers,
    prepared_schedulers,
    tree_leaves,
    tree_map_only,
)
from trainkit.repairs.replaced import (
    compute_in,
    copy_shards,
    prepare_untrained,
    recompute_layers,
    shard_models,
    wrap_method,
)

Tensors = dict[str, torch.Tensor]


def shard(accelerator: Accelerator) -> None:
    """Make accelerator.prepare(...) shard the model, if the launch asks for it. Call this first."""
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

    plugin.activation_checkpointing = False  # get_ready does it
    bf16 = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None
    shard_models(accelerator, plugin, bf16)
    if (copies := num_copies(accelerator.num_processes)) > 1:
        others = f"the others of {copies} copies of the model, to make the groups of its mesh,"
        with deadline(accelerator.init_handler.timeout, others):
            copy_shards(accelerator, copies)
    wrap_method(accelerator, "prepare", partial(_prepare_sharded, accelerator))


def _prepare_sharded(accelerator: Accelerator, prepare: Callable, *objects: Any) -> Any:
    """accelerator.prepare, model by model, because Accelerate shards one in a call."""
    models = owners(objects)
    prepared = dict[int, Any]()
    for number in sorted(set(models)):
        numbers = [n for n, of in enumerate(models) if of == number]
        weights: list[tuple[torch.optim.Optimizer, int, list]] = []
        for item in (objects[n] for n in numbers):
            if isinstance(item, nn.Module) and not is_sharded(item):
                get_ready(accelerator, item)
            elif isinstance(item, torch.optim.Optimizer):
                weights += ((item, n, [*g["params"]]) for n, g in enumerate(item.param_groups))
        with as_usage_error("the model cannot be sharded"):
            for n in numbers:
                if isinstance(objects[n], nn.Module) and not is_trained(objects[n]):
                    prepared[n] = prepare_untrained(accelerator, objects[n])
            numbers = [n for n in numbers if n not in prepared]
            made = prepare(*(objects[n] for n in numbers)) if numbers else []
        for optimizer, n, params in weights:
            # Accelerate mixes up weights whose part on this process is empty.
            if any(hasattr(param, "full_tensor") for param in params):
                optimizer.param_groups[n]["params"] = params
            _move_state(optimizer, params, optimizer.param_groups[n]["params"])
        prepared |= zip(numbers, made if len(numbers) != 1 else [made], strict=True)
    result = tuple(prepared[n] for n in range(len(objects)))
    # In the order of the call, by which a checkpoint numbers them.
    order = {id(item): n for n, item in enumerate(result)}
    for known in (prepared_optimizers(accelerator), prepared_schedulers(accelerator)):
        known.sort(key=lambda item: order.get(id(item), -1))
    return result if len(objects) > 1 else result[0]


def _move_state(
    optimizer: torch.optim.Optimizer, whole: Sequence[torch.Tensor], sharded: Sequence[torch.Tensor]
) -> None:
    """Give sharded weights their rows of the state that Adagrad and others make at once."""
    for old, new in zip(whole, sharded, strict=True):
        if old is not new and old in optimizer.state:
            state = optimizer.state.pop(old)
            optimizer.state[new] = {name: rows_of(new, value) for name, value in state.items()}


def make(accelerator: Accelerator, build: Callable[[], nn.Module]) -> nn.Module:
    """Return build(). If the run is sharded, each process only keeps its rows of the weights.

    The first process builds the whole model on the CPU and sends it to the others, which build it
    on the meta device. Every process must call this. Raises UsageError if build() fails there.
    """
    if not accelerator.is_fsdp2:
        return build()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    main = accelerator.is_main_process
    device = accelerator.device.type
    what = "shards.make(...) cannot build this model, of which only the first process has weights"
    with failing_together(accelerator, what), nullcontext() if main else init_empty_weights():
        model = build()
    (names,) = broadcast_object_list([_names_of_weights(model)])
    if not main:
        _take_memory(model, names)
    for value in _values_beside_weights(model):
        value.copy_(broadcast(value.to(device)))
    torch.set_rng_state(broadcast(torch.get_rng_state().to(device)).cpu())  # build() drew numbers
    get_ready(accelerator, model, is_whole=False)
    whole = model.state_dict() if main else {}
    with as_usage_error("the model cannot be sharded"):
        fsdp2_prepare_model(accelerator, model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    return model


def _names_of_weights(model: nn.Module) -> dict[str, str]:
    """For each name of a weight the first name of the same weight, which may be tied."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(weight), name) for name, weight in named}


def _take_memory(model: nn.Module, names: dict[str, str]) -> None:
    """Give each weight memory, and tie those again that init_empty_weights() has untied."""
    for name, first in names.items():
        weight = model.get_parameter(first)
        if first == name:
            values = torch.empty_like(weight, device="cpu")
            weight = nn.Parameter(values, requires_grad=weight.requires_grad)
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner).register_parameter(attribute, weight)


def _values_beside_weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the buffers of a model, and the tensors that its modules hold as plain attributes."""
    for module in model.modules():
        for value in tree_leaves(vars(module)):
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                yield value.detach()


def is_sharded(model: nn.Module) -> bool:
    """Is this a model from make()?"""
    return any(hasattr(weight, "full_tensor") for weight in model.parameters())


def get_ready(accelerator: Accelerator, model: nn.Module, is_whole: bool = True) -> None:
    """Do what must be done to a model before Accelerate shards it: see shard.

    is_whole: every process has the values of the model, not only the first one. Raises UsageError
    if frozen ones differ.
    """
    model.register_forward_hook(_share_buffers)
    for weight in model.parameters():
        weight.data = weight.data.contiguous()  # FSDP2 does not support channels_last
    plugin = accelerator.state.fsdp_plugin
    if is_whole and not plugin.cpu_ram_efficient_loading:
        # Each process keeps some rows: if weights differed, the model would be a mixture.
        check_same(accelerator, hash_frozen(model))
        for value in state_of(model).values():  # as DDP does
            value.copy_(broadcast(value.to(accelerator.device.type)))
    if FullyShardedDataParallelPlugin().activation_checkpointing:
        if any(isinstance(layer, Dropout) for layer in model.modules()):
            raise UsageError(
                "fsdp_activation_checkpointing: true computes layers twice, and "
                "trainkit.Dropout draws once for each batch: use nn.Dropout in this model"
            )
        if recompute_layers(plugin, model) == 0:
            raise UsageError(
                "fsdp_activation_checkpointing: true finds no layer to compute twice: let "
                "fsdp_auto_wrap_policy name the classes of the layers (docs/sharding.md)"
            )
    # Otherwise each layer would compute everything in bf16.
    if accelerator.mixed_precision == "bf16":
        compute_in(torch.bfloat16, accelerator.device.type, model)


def owners(objects: Sequence[Any]) -> list[int]:
    """For each object the number of the model that it belongs to; the last for data loaders."""
    numbers = []
    models = [item for item in objects if isinstance(item, nn.Module)]
    of = {id(weight): n for n, model in enumerate(models) for weight in model.parameters()}
    for item in objects:
        groups = getattr(getattr(item, "optimizer", item), "param_groups", None)
        if isinstance(item, nn.Module):
            numbers.append(models.index(item))
        else:
            numbers.append(of.get(id(groups[0]["params"][0]), 0) if groups else len(models) - 1)
    return numbers


def _share_buffers(model: nn.Module, *_: Any) -> None:
    """Copy the buffers of the first process to all, because DDP evaluates and saves those."""
    for buffer in model.buffers() if model.training else ():
        torch.distributed.broadcast(buffer, 0)


def gathered(tree: Any, keep: bool) -> Any:
    """Return the tree with all rows of its tensors, on the CPU; None for them without `keep`.

    Every process must call this.
    """

    def gather(value: torch.Tensor) -> torch.Tensor | None:
        rows = getattr(value, "full_tensor", value.detach)()
        return rows.cpu() if keep else None

    return tree_map_only(torch.Tensor, gather, tree)


def rows_of(like: Any, value: Any) -> Any:
    """Return this process's rows of a whole tensor if `like` is sharded, otherwise the value."""
    if not hasattr(like, "full_tensor") or not getattr(value, "shape", ()):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def forget_whole_weights(models: Sequence[nn.Module]) -> None:
    """Let the next forward pass of sharded models gather their weights. Call before these change.

    FSDP2 keeps some weights whole after a forward pass without a backward pass, and uses them in
    the next one (https://github.com/pytorch/pytorch/issues/131965).
    """
    for layer in (layer for model in models for layer in model.modules()):
        if hasattr(layer, "reshard"):
            layer.reshard()


def frozen(model: nn.Module) -> Tensors:
    """The parameters of a model that are frozen (requires_grad=False), by name."""
    named = named_weights(model, remove_duplicate=False)
    return {name: weight for name, weight in named if not weight.requires_grad}


def state_of(model: nn.Module, moved: Set[str] = frozenset()) -> Tensors:
    """The state of a model without its frozen parameters but those that are `moved`, by name.

    Scales of quantised weights are left out too: bitsandbytes calls them NAME.absmax and the like.
    """
    left_out = frozen(model).keys() - moved

    def is_kept(name: str) -> bool:
        return left_out.isdisjoint(accumulate(name.split("."), "{}.{}".format))

    return {name: value for name, value in model.state_dict().items() if is_kept(name)}


def hash_frozen(model: nn.Module) -> dict[str, str]:
    """Hash all bytes of each frozen weight, and its scales. Every process must call this."""
    kept = state_of(model)
    state = model.state_dict().items()
    return {f"the frozen weight {n}": hash_tensor(w) for n, w in state if n not in kept}
