"""What else a script meets on a machine with cards: torch.cuda, NCCL, DDP, files of tensors."""

import functools
import os
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from emulate import Card, cards, is_pinned, ledger, pin, unwrap
from torch import nn
from torch.optim.optimizer import _foreach_supported_types as optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as foreach_types
from torch.utils._pytree import tree_leaves, tree_map

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor")
REAL = nn.parallel.DistributedDataParallel
OBJECT_COLLECTIVES = ("all_gather_object", "gather_object", "broadcast_object_list")


def install():
    """Put every stand-in in its place. Call before the script imports anything."""
    without_a_driver()
    install_cuda()
    install_tensors()
    install_nccl()
    install_files()


def without_a_driver():
    """Make torch's own C++ (autograd, pinned memory) leave the driver alone."""
    number = torch._C._cuda_getDeviceCount()
    os.environ["EMULATED_CARDS_INSIDE"] = "0"
    torch._C._ensureCUDADeviceGuardSet()  # as there is no card, a guard that does nothing
    os.environ["EMULATED_CARDS_INSIDE"] = "8"  # as many as that guard speaks of
    for module in (torch.cuda, torch.accelerator):
        module.device_count, module.is_available = lambda: number, lambda: number > 0
    # The backward pass stays in this thread, where the emulation sees it.
    torch.autograd.set_multithreading_enabled(False).__enter__()


class Event:
    """An event; work on an emulated card is done before the next line runs."""

    def __init__(self, **_):
        pass

    def record(self, *_):
        pass

    def synchronize(self):
        ledger.wait("event")


def install_cuda():
    """torch.cuda and torch.accelerator, as far as they would ask the driver."""

    # A function of its own for each name: torch's compiler keeps a table of them.
    def gives(value):
        return lambda *_, **__: value

    def set_device(device):
        cards.current = device if isinstance(device, int) else torch.device(device).index or 0

    def seed(number):
        torch.default_generator.manual_seed(number)  # it makes the cards' random numbers too

    cuda, torch.Event = torch.cuda, Event
    cuda.set_device = torch.accelerator.set_device_index = set_device
    cuda.current_device = lambda: cards.current
    cuda._lazy_init, cuda.set_rng_state_all = gives(None), gives(None)
    cuda.is_bf16_supported = gives(True)
    cuda.get_device_name = gives("emulated card")
    cuda.manual_seed = cuda.manual_seed_all = seed
    cuda.get_rng_state_all = lambda: [torch.default_generator.get_state()] * cuda.device_count()
    cuda.get_rng_state = lambda _=None: torch.default_generator.get_state()
    torch.compile = lambda model=None, **_: (lambda f: f) if model is None else model
    torch.compiler.cudagraph_mark_step_begin = lambda: None  # no graphs


def install_tensors():
    """What reaches the device, or pinned memory, without an operator that could be seen."""

    def through_the_host(make):
        @functools.wraps(make)
        def made(*args, device=None, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor if device is None else tensor.to(device)

        return made

    # `with torch.device(...)` looks up the functions that make tensors at its first use. It must
    # find those of torch, which the stand-ins call.
    with torch.device("cpu"):
        torch.empty(0)
    torch.tensor = through_the_host(torch.tensor)
    torch.as_tensor = through_the_host(torch.as_tensor)

    def new_tensor(self, data):
        return torch.tensor(data, dtype=self.dtype, device=self.device)

    torch.Tensor.new_tensor = new_tensor
    torch.Tensor.is_pinned = is_pinned

    def pin_memory(self, *_):
        if isinstance(self, Card):
            raise RuntimeError(
                "cannot pin a tensor on a card: only dense CPU tensors can be pinned"
            )
        return self if is_pinned(self) else pin(self.clone())

    torch.Tensor.pin_memory = pin_memory
    for types in (optimizer_types, foreach_types):
        types.append(Card)  # as on a card, one operator for all tensors where there is one
    # Attention by plain operators: the fused kernels ask the driver what the card can do.
    for kernel in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
    apply = nn.Module._apply

    def keeping_parameters(self, *args, **kwargs):
        # Module.to: the same Parameter, on a card now. Not for load_state_dict: hooks would go.
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(self, *args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)  # a parent goes on

    nn.Module._apply = keeping_parameters


def install_nccl():
    """gloo in NCCL's place: it takes what NCCL takes, and computes on the CPU."""
    others: set[Any] = set()  # process groups that NCCL does not serve
    init, new_group, get_backend = dist.init_process_group, dist.new_group, dist.get_backend
    world = SimpleNamespace(is_nccl=False)

    def is_nccl(group):
        return world.is_nccl and group not in others

    def init_process_group(backend=None, **kwargs):
        world.is_nccl = backend == "nccl"
        kwargs.pop("device_id", None)
        init("gloo" if world.is_nccl else backend, **kwargs)

    def make_group(*args, backend=None, **kwargs):
        as_world = backend in (None, "nccl")
        group = new_group(*args, backend="gloo" if as_world else backend, **kwargs)
        if not as_world:
            others.add(group)
        return group

    def group_of(args, kwargs):
        given = [*args, kwargs.get("group")]
        return next((x for x in given if isinstance(x, dist.ProcessGroup)), None)

    def of_tensors(collective):
        @functools.wraps(collective)
        def checked(*args, **kwargs):
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if is_nccl(group_of(args, kwargs)) and not all(isinstance(x, Card) for x in tensors):
                raise RuntimeError("No backend type associated with device type cpu")
            if "all_gather_into" in collective.__name__:
                args = tuple(unwrap(x).view(-1) for x in args[:2]) + args[2:]  # as gloo wants them
            return collective(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))

        return checked

    def of_objects(collective):
        @functools.wraps(collective)
        def counted(*args, **kwargs):
            if is_nccl(group_of(args, kwargs)):
                ledger.wait(collective.__name__)  # pickled, copied to the card and back
            return collective(*args, **kwargs)

        return counted

    dist.init_process_group, dist.new_group = init_process_group, make_group
    dist.get_backend = lambda group=None: "nccl" if is_nccl(group) else get_backend(group)
    for name in COLLECTIVES:
        setattr(dist, name, of_tensors(getattr(dist, name)))
    for name in OBJECT_COLLECTIVES:
        setattr(dist, name, of_objects(getattr(dist, name)))
    nn.parallel.DistributedDataParallel = DistributedDataParallel


class DistributedDataParallel(nn.Module):
    """What a script sees of DDP: equal weights at the start, averaged gradients."""

    _set_params_and_buffers_to_ignore_for_model = REAL._set_params_and_buffers_to_ignore_for_model

    def __init__(self, module, find_unused_parameters=False, static_graph=False, **_):
        super().__init__()
        self.module = module
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, 0)  # refuses a model that is not on a card
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(average)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def average(parameter):
    """Make a gradient the mean of those of all processes."""
    parameter.grad.div_(dist.get_world_size())
    dist.all_reduce(parameter.grad)


def install_files():
    """safetensors and torch.save/load: the bytes, location tags included, that cards would give."""
    load_file, save, load = safetensors.torch.load_file, torch.save, torch.load
    locations: dict[int, str] = {}  # of the storages of one save or load

    def to_host(value):
        if not isinstance(value, Card):
            return value
        ledger.wait("copy to the host")
        locations[value.elem.untyped_storage()._cdata] = str(value.device)
        return value.elem

    def restore(storage, location):
        if not location.startswith("cuda"):
            return None
        locations[storage._cdata] = location
        return storage

    def from_host(value):
        if not isinstance(value, torch.Tensor):
            return value
        location = locations.get(value.untyped_storage()._cdata)
        return value if location is None else value.to(location)

    def save_to_host(function):
        @functools.wraps(function)
        def saved(content, *args, **kwargs):
            locations.clear()
            return function(tree_map(to_host, content), *args, **kwargs)

        return saved

    def load_to_card(*args, **kwargs):
        locations.clear()
        return tree_map(from_host, load(*args, **kwargs))

    def load_file_to_card(filename, device="cpu", **kwargs):
        return {name: value.to(device) for name, value in load_file(filename, **kwargs).items()}

    torch.serialization.register_package(0, lambda storage: locations.get(storage._cdata), restore)
    torch.save, torch.load = save_to_host(save), load_to_card
    safetensors.torch.save_file = save_to_host(safetensors.torch.save_file)
    safetensors.torch.load_file = load_file_to_card
