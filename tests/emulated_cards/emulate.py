"""Run a script on CUDA cards that do not exist: tensors say cuda:N, CPU kernels make their numbers.

    gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 tests/emulated_cards/libcuda.c
    LD_PRELOAD=./libcuda.so.1 python tests/emulated_cards/emulate.py SCRIPT ARGS

`accelerate launch --config_file YAML` goes before emulate.py as before any script, and the script
is not told. What is seen here is where each tensor lies, how often the host waits for the device or
copies to it, scaling of the loss, saving, loading with map_location, and what each process decides.

An emulated run is not a run on a GPU. It cannot show NCCL (gloo stands in), DDP's C++ buckets (an
all-reduce per gradient stands in), streams and their races, CUDA's own numbers, its random numbers
(the CPU's generator makes them), torch.compile, CUDA graphs, or how fast anything is.

A tensor on the wrong device is refused as CUDA would refuse it, and so is a second card in one
process. With EMULATED_CARDS_REPORT=PATH each process leaves PATH.RANK.json at its exit:

    steps   one entry per optimizer step that was made, each with
              waits      {file:line and text: times the host waited for the device}
              copies     {the same: copies from the host to the device}
            since the step before it (the first: since the process began)
    card    the card that the process used
"""

import atexit
import json
import linecache
import os
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
LIBRARIES = (str(Path(torch.__file__).parents[1]), str(Path(os.__file__).parent))
NOT_THE_SCRIPT = (*LIBRARIES, str(Path(__file__).parent), "<")
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
JOINING = (aten.cat.default, aten.stack.default)  # the operators that take no CPU scalar
MASK_BACKWARD = aten.masked_scatter_backward.default  # it selects by a mask, and no tag says so
HOST_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Ledger:
    """What happened since the last optimizer step, and before it."""

    def __init__(self):
        self.steps: list[dict[str, Any]] = []
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()

    def wait(self, what: str):
        """The host waits until the device has done all its work so far."""
        self.waits[f"{where()} [{what}]"] += 1

    def copy_to_card(self, source: torch.Tensor, non_blocking: bool):
        """Count a copy, which is waited for unless it is non_blocking and from pinned memory."""
        self.copies[where()] += 1
        if not (non_blocking and is_pinned(source)):
            self.wait("blocking copy to the card")

    def end_step(self, *_):
        self.steps.append({"waits": self.waits, "copies": self.copies})
        self.waits, self.copies = Counter(), Counter()

    def write(self, path: str):
        card = None if cards.home is None else f"cuda:{cards.home}"
        report = json.dumps({"card": card, "steps": self.steps}, indent=1)
        Path(f"{path}.{os.environ.get('RANK', '0')}.json").write_text(report)


class Cards:
    """The cards as this process sees them. Like a training process it may use one of them."""

    def __init__(self):
        self.current = 0  # torch.cuda.set_device
        self.home: int | None = None  # the one that it uses
        self.forked = False
        self.pinned: dict[int, StorageWeakRef] = {}

    def use(self, device: torch.device | str) -> torch.device:
        """The card that `device` means, which the caller puts a tensor on."""
        index = torch.device(device).index
        index = self.current if index is None else index
        if self.home is None:
            self.home = index
        if index != self.home:
            raise RuntimeError(
                f"a tensor on cuda:{index} in a process that uses cuda:{self.home} ({where()})"
            )
        return torch.device("cuda", index)


ledger, cards = Ledger(), Cards()


def where() -> str:
    """The line of the script or its packages that is running."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(NOT_THE_SCRIPT):
        frame = frame.f_back
    name, line = frame.f_code.co_filename, frame.f_lineno
    return f"{os.path.relpath(name)}:{line} {linecache.getline(name, line).strip()}"


class Card(torch.Tensor):
    """A tensor that says it is on a card; `elem`, on the CPU, holds its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, elem, device="cuda"):
        card = torch.Tensor._make_wrapper_subclass(
            cls,
            elem.shape,
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            layout=elem.layout,
            device=cards.use(device),
        )
        card.elem = elem
        return card

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return execute(func, args, kwargs or {})

    def tolist(self):
        ledger.wait("tolist")
        return self.elem.tolist()

    def numpy(self, **_):
        raise TypeError(f"can't convert {self.device} device type tensor to numpy ({where()})")

    def untyped_storage(self):
        return self.elem.untyped_storage()

    def data_ptr(self):
        return self.elem.data_ptr()


def unwrap(value: Any) -> Any:
    return value.elem if isinstance(value, Card) else value


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Remember that this storage is pinned memory, until it is freed."""
    storage = tensor.untyped_storage()
    cards.pinned[storage._cdata] = StorageWeakRef(storage)  # keeps the address from being reused
    return tensor


def is_pinned(tensor: torch.Tensor, *_: Any) -> bool:
    return not isinstance(tensor, Card) and tensor.untyped_storage()._cdata in cards.pinned


def execute(func, args, kwargs):
    """Run one operator as a machine with cards would: refuse it, count it, compute it."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        # Inference mode, and what it made, leave to us what autograd would have taken apart.
        with Emulation():
            return func.decompose(*args, **kwargs)
    device = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    to_card = device is not None and device.type == "cuda"
    leaves = tree_leaves((args, kwargs))
    on_card = [leaf for leaf in leaves if isinstance(leaf, Card)]
    pinned = kwargs.pop("pin_memory", False)
    if not on_card and not to_card:
        result = func(*args, **kwargs)
        return pin(result) if pinned else result
    if cards.forked:
        raise RuntimeError(f"Cannot re-initialize CUDA in forked subprocess ({where()})")
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    if func is aten._to_copy.default:
        return _convert(func, args, kwargs, device)
    if not on_card:
        return Card(func(*args, **kwargs), device)
    _check(func, args, kwargs, leaves)
    result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    known = {id(card.elem): card for card in on_card}

    def wrap(value):
        if not isinstance(value, torch.Tensor) or (device is not None and not to_card):
            return value
        if id(value) in known:
            return known[id(value)]
        of_training = func.is_view and not on_card[0].is_inference()  # in any mode
        with torch.inference_mode(False) if of_training else nullcontext():
            return Card(value, on_card[0].device)

    return tree_map(wrap, result)


def _convert(func, args, kwargs, device):
    """Tensor.to in all its forms."""
    source = args[0]
    result = func(unwrap(source), *args[1:], **kwargs)
    if device is not None and device.type != "cuda":
        if not kwargs.get("non_blocking"):
            ledger.wait("copy to the host")
        return pin(result) if kwargs.get("non_blocking") else result
    if not isinstance(source, Card):
        ledger.copy_to_card(source, kwargs.get("non_blocking", False))
    return Card(result, source.device if device is None else device)


def _check(func, args, kwargs, leaves):
    """Refuse what CUDA refuses, count waits and copies, of an operator with a tensor on a card."""
    on_host = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, Card)]
    if func is aten.copy_.default:
        target, source = args[:2]
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        if not isinstance(source, Card):
            ledger.copy_to_card(source, non_blocking)
        elif not isinstance(target, Card) and not (non_blocking and is_pinned(target)):
            ledger.wait("copy to the host")
        return
    if func in INDEXING:
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            ledger.wait("index with a mask")
        movable = [x for x in on_host if isinstance(args[0], Card) and x is not args[0]]
        values = args[2:3]
        if len(movable) == len(on_host) and all(isinstance(v, Card) or not v.dim() for v in values):
            for moved in movable:  # indices, or one number: torch copies them
                ledger.copy_to_card(moved, non_blocking=False)
            return
    elif func is MASK_BACKWARD or any(tag in func.tags for tag in HOST_READS):
        ledger.wait(func.name().removeprefix("aten::"))
    written = {id(x) for x in tree_leaves(_written(func, args, kwargs))}
    for tensor in on_host:  # a number without dimensions may come from the host, nothing else
        if tensor.dim() or id(tensor) in written or func in JOINING:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:{cards.home} and cpu: {func} at {where()}"
            )


def _written(func, args, kwargs):
    """The arguments that an operator writes to."""
    known = func._schema.arguments
    given = {argument.name: value for argument, value in zip(known, args, strict=False)} | kwargs
    written = [a.name for a in known if a.alias_info is not None and a.alias_info.is_write]
    return [given.get(name) for name in written]


class Emulation(TorchDispatchMode):
    """Sees the operators that make a card's first tensors: factories, and copies from the host."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # else torch imports its compiler, which takes over a second

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return execute(func, args, kwargs or {})


def main(arguments: list[str], install: Callable[[], None]):
    """Run arguments[0] as __main__, with the others as its arguments."""
    install()
    os.register_at_fork(after_in_child=lambda: setattr(cards, "forked", True))
    register_optimizer_step_post_hook(ledger.end_step)
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    if path := os.environ.get("EMULATED_CARDS_REPORT"):
        atexit.register(ledger.write, path)  # trainkit ends a process without returning here
    with Emulation():
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    # Under their own names: what stubs.py imports from here must be what runs here.
    import emulate
    import stubs

    emulate.main(sys.argv[1:], stubs.install)
