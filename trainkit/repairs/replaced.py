"""What the kit repairs or replaces in torch, Accelerate and Python.

Each function says what would go wrong without it. tests/test_private.py fails if another module
replaces a name of another package, apart from the exceptions that it lists.
"""

import argparse
import atexit
import functools
import importlib.util
import inspect
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import accelerate.accelerator
import accelerate.data_loader
import torch
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    convert_outputs_to_fp32,
    prepare_simple_launcher_cmd_env,
)
from torch import nn
from torch.utils.data import DataLoader

from trainkit.repairs.private_names import (
    is_trained,
    mesh_groups,
    plain_name,
    prepared_loaders,
    without_compiler,
)


def end_workers(accelerator: Accelerator) -> None:
    """End the loader workers; otherwise a notebook waits 5 s for each at garbage collection."""
    for loader in prepared_loaders(accelerator):
        loader.base_dataloader._iterator = None


def fix_bucket_order(*models: nn.Module) -> None:
    """Make DistributedDataParallel sum gradients in the same order from the first step on.

    It rebuilds its buckets after its first backward pass, which changes the last bit of a sum of
    three or more. So this makes one, of the sum of all parameters. Every process must call this.
    """
    for parallel in map(without_compiler, models):
        if not isinstance(parallel, nn.parallel.DistributedDataParallel):
            continue
        module, forward = parallel.module, parallel.module.forward
        ignored, named = parallel.parameters_to_ignore, parallel.module.named_parameters()
        parameters = [p for n, p in named if p.requires_grad and n not in ignored]
        module.forward = lambda own=parameters: sum(parameter.sum() for parameter in own)
        try:
            parallel().backward()
        finally:
            module.forward = forward
        for parameter in parameters:
            parameter.grad = None


def share_frozen_weights(
    accelerator: Accelerator, frozen: Callable[[nn.Module], dict[str, torch.Tensor]]
) -> None:
    """Keep frozen weights memory-mapped as from_pretrained loads them, once per machine.

    Accelerate moves a model to cpu:0, which is not the same as cpu, and DistributedDataParallel
    overwrites weights. Those with sparse gradients are left to clip_gradients: beside them torch
    2.14 halves the gradients of some other weights, in two processes with gloo.
    """
    prepare = accelerator.prepare_model

    def prepare_model(model: nn.Module, **options: Any) -> nn.Module:
        if accelerator.device.type == "cpu":
            options["device_placement"] = False
        parallel = nn.parallel.DistributedDataParallel
        layers = model.named_modules()
        sparse = [f"{n}.weight".lstrip(".") for n, x in layers if getattr(x, "sparse", False)]
        parallel._set_params_and_buffers_to_ignore_for_model(model, [*frozen(model), *sparse])
        if not is_trained(model):  # DistributedDataParallel refuses it; on GPUs Accelerate knows
            options["evaluation_mode"] = True
        return prepare(model, **options)

    accelerator.prepare_model = prepare_model


def shard_models(
    accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin, dtype: torch.dtype | None
) -> None:
    """Make accelerator.prepare(...) shard models with this plugin, and compute in this type.

    Accelerate does not shard on CPUs, and under bf16 it sums gradients and rounds inputs in bf16.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    plugin.mixed_precision_policy = policy
    accelerator.state.fsdp_plugin = plugin
    for state in (PartialState(), accelerator.state):
        state.distributed_type = DistributedType.FSDP


def copy_shards(accelerator: Accelerator, num_copies: int) -> None:
    """Make accelerator.prepare(...) keep this number of copies of each model, each sharded.

    Accelerate does so on GPUs alone, and torch would wait for half an hour, whatever --timeout is.
    """
    num_shards = accelerator.num_processes // num_copies
    config = ParallelismConfig(dp_replicate_size=num_copies, dp_shard_size=num_shards)
    accelerator.state.parallelism_config = config
    warnings.filterwarnings("ignore", "Slicing a flattened dim")  # as Accelerate does
    accelerator.state.device_mesh = config.get_device_mesh(accelerator.device.type)
    for group in mesh_groups(accelerator).values():
        backend = group._get_backend(torch.device(accelerator.device.type))
        backend._set_default_timeout(accelerator.init_handler.timeout)


def end_with_this_batch(loader: DataLoader, is_last: bool) -> None:
    """Let accelerator.accumulate end the step with the next batch, also if more are read ahead."""
    loader.end_of_dataloader = is_last


def watch(owner: Any, name: str, before: Callable[..., object]) -> None:
    """Call before(...) ahead of each call of owner.name(...), with its arguments."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def watched(*args: Any, **options: Any) -> Any:
        before(*args, **options)
        return method(*args, **options)

    setattr(owner, name, watched)


def take_modes(optimizer: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return train() and eval() of an optimizer, which do nothing from then on."""
    modes = optimizer.train, optimizer.eval
    optimizer.train = optimizer.eval = lambda: None
    return modes


def complete_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer around another one, as Lookahead is, the hooks that it was made without."""
    torch.optim.Optimizer.__setstate__(optimizer, {})
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "hooked"):  # a schedule has taken it before
        call = torch.optim.Optimizer.profile_hook_step(lambda _, *args: step(*args))
        optimizer.step = functools.wraps(step)(functools.partial(call, optimizer))


def wrap_method(accelerator: Accelerator, name: str, wrapper: Callable[..., Any]) -> None:
    """Make accelerator.NAME(...) call wrapper(method, ...), with what it was before."""
    setattr(accelerator, name, functools.partial(wrapper, getattr(accelerator, name)))


def prepare_untrained(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Shard a model without trainable weights, which Accelerate refuses to without an optimizer."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    model = fsdp2_prepare_model(accelerator, model)
    model.set_reshard_after_forward(True)  # as no backward pass follows
    accelerator._models.append(model)
    return model


def recompute_layers(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> int:
    """Keep only the inputs of the layers that the plugin wraps; return the number of these layers.

    Accelerate's own does not restore the random numbers, so dropout would have other masks in the
    second forward pass.
    """
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plugin.set_auto_wrap_policy(model)
    is_wrapped = fsdp2_prepare_auto_wrap_policy(plugin, model)
    inner_first = [*model.named_modules()][:0:-1]  # without the model itself
    layers = [pair for pair in inner_first if is_wrapped is not None and is_wrapped(pair[1])]
    for name, layer in layers:
        model.set_submodule(name, checkpoint_wrapper(layer))
    return len(layers)


def compute_in(dtype: torch.dtype, device_type: str, model: nn.Module) -> None:
    """Let the forward pass autocast to this type and return float32, as Accelerate does for DDP."""
    forward = torch.autocast(device_type, dtype)(model.forward)
    model.forward = convert_outputs_to_fp32(forward)


def take_loss_scale(
    accelerator: Accelerator, before_step: Callable[..., object]
) -> Callable[[], object]:
    """Return a function that updates the loss scale of fp16, which Accelerate then no longer does.

    It would do so after each optimizer, so that a second one would unscale by a changed scale.
    before_step(optimizer) is called ahead of each step, also of one that the scaler skips.
    """
    scaler = accelerator.scaler
    if scaler is None:
        return lambda: None
    watch(scaler, "step", before_step)
    update = scaler.update
    scaler.update = lambda: None
    return update


@contextmanager
def without_loss_scale(accelerator: Accelerator, hide: bool) -> Iterator[None]:
    """In the body Accelerate has no loss scale if `hide`, so load_state does not look for one."""
    scaler = accelerator.scaler
    accelerator.scaler = None if hide else scaler
    yield
    accelerator.scaler = scaler


def take_registered(accelerator: Accelerator) -> list[Any]:
    """Return what was registered for checkpoints; Accelerate forgets it, and does not pickle it."""
    things = accelerator._custom_objects
    accelerator._custom_objects = []
    return things


def count_micro_batches_anew(accelerator: Accelerator) -> None:
    """Let the next micro-batch be the first of its step, whatever load_state has restored."""
    accelerator.step = 0


def name_without_compiler(model: nn.Module) -> nn.Module:
    """Let weights have one name, whether torch.compile(...) wraps the model, layers, or nothing.

    load_state_dict() accepts both names from here on. Returns the model.
    """

    def after_state_dict(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        for name in [*state]:
            state[plain_name(name)] = state.pop(name)

    def before_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        named = [*module.named_parameters(remove_duplicate=False)]
        named += module.named_buffers(remove_duplicate=False)
        real = {prefix + plain_name(name): prefix + name for name, _ in named}
        for name in [*state]:
            state[real.get(plain_name(name), name)] = state.pop(name)

    model.register_state_dict_post_hook(after_state_dict)
    model.register_load_state_dict_pre_hook(before_load)
    return model


def skip_the_compiler() -> None:
    """Let optimizers and DistributedDataParallel work without importing torch's compiler.

    torch imports it to exempt methods from compilation, 1.1 s of CPU of a start, 3.7 s of two
    processes. Accelerate compiles only the model, so this puts the plain methods in place.
    """
    compiles = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no"
    if compiles or "torch._dynamo" in sys.modules:
        return
    optimizer, parallel = torch.optim.Optimizer, nn.parallel.DistributedDataParallel
    exempted = [getattr(optimizer, n) for n in ("add_param_group", "zero_grad", "state_dict")]
    for method in (*exempted, optimizer.load_state_dict, parallel._inside_ddp_forward):
        plain = inspect.unwrap(method)
        plain.__dynamo_disable = plain  # where torch._compile keeps the exempted method
    for kind in (torch.optim.Adam, torch.optim.SGD):  # AdamW has Adam's step
        if not hasattr(kind.step, "hooked"):  # the first optimizer of a kind wraps step for hooks
            kind.step = torch.no_grad()(inspect.unwrap(kind.step))
    # DistributedDataParallel asks for it when it is made: this is torch's default.
    utils = Later("torch._dynamo.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    torch._dynamo = Later("torch._dynamo", utils=utils)


class Later:
    """A module that is imported when it is asked for anything but what is given here."""

    def __init__(self, module: str, **known: Any):
        self.__dict__ |= {"module": module} | known

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__dict__["module"]), name)


def look_for_lomo_once() -> None:
    """Tell Python that lomo_optim is not installed, for which Accelerate looks in each step."""
    if importlib.util.find_spec("lomo_optim") is None:
        sys.modules["lomo_optim"] = None  # type: ignore[assignment]


def look_only_at_what_is_imported() -> None:
    """Let accelerator.prepare ask for DTensors and sets of `datasets` without importing them.

    With several processes it imports both, 1.1 s of CPU in each. If nothing else has imported them,
    no model or set is one of theirs.
    """
    for module, name, package in (
        (accelerate.accelerator, "model_has_dtensor", "torch.distributed.tensor"),
        (accelerate.data_loader, "is_datasets_available", "datasets"),
    ):
        look = inspect.unwrap(getattr(module, name))  # it may be replaced already

        @functools.wraps(look)
        def is_there(*args: Any, look: Callable = look, package: str = package) -> bool:
            return package in sys.modules and look(*args)

        setattr(module, name, is_there)


def launch_in_own_session() -> None:
    """Let `accelerate launch` start one process as it starts several: in a session of its own.

    Otherwise Ctrl-C reaches it twice, and the second time ends it without saving.
    """
    from accelerate.commands import launch  # half a second, which only a launcher needs

    def launch_alone(args: argparse.Namespace) -> None:
        command, environment = prepare_simple_launcher_cmd_env(args)
        subprocess.run(command, env=environment, start_new_session=True, check=True)

    launch.simple_launcher = launch_alone


def run_exit_functions() -> None:
    """Do what the interpreter does before its teardown: join threads and call exit functions."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
