"""Build a model without filling its large weights, and fill them later, one at a time.

Linux takes no memory for a tensor of torch.empty until it is written. In the body of Deferred such
tensors stay unwritten: what would fill them is recorded with the state of the random generator, and
values() repeats it elsewhere. Each random number is also drawn once in the body and thrown away, so
that all later numbers are those of a model that was built as usual.
"""

from collections.abc import Iterable
from typing import Any

import torch

from trainkit.private import TorchDispatchMode, tree_leaves

MIN_BYTES = 2**20  # of a tensor that is left unwritten
# Operations that can be put off: they write their first argument, and read nothing but it.
WRITES = {"normal_", "uniform_", "fill_", "zero_", "mul_", "div_", "add_", "sub_", "clamp_"}
REPLACES = {"normal_", "uniform_", "fill_", "zero_"}  # what was written before is lost


class Deferred(TorchDispatchMode):
    """A context manager. A tensor that is read in the body in any other way is filled at once.

    Attributes:
        unwritten: by its address, each tensor that was not filled, and its recorded operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unwritten: dict[int, tuple[torch.Tensor, list[tuple]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        found = [x for x in given if x in self]
        if found and name in WRITES and len(given) == 1:
            return self._record(func, name, args, kwargs)
        if found and name == "clone":  # deepcopy, with which layers are repeated
            whole, writes = self.unwritten[_address(found[0])]
            if found[0].shape == whole.shape and found[0].stride() == whole.stride():
                copy = torch.empty_like(whole)
                self.unwritten[_address(copy)] = copy, [*writes]
                return copy
        if not func.is_view:
            for tensor in found:
                if tensor in self:  # it may have come twice
                    self.fill(tensor)
        result = func(*args, **kwargs)
        if name == "empty" and result.device.type == "cpu" and result.nbytes >= MIN_BYTES:
            self.unwritten[_address(result)] = result, []
        return result

    def _record(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        tensor, *others = args
        whole, writes = self.unwritten[_address(tensor)]
        place, state = (tensor.size(), tensor.stride(), tensor.storage_offset()), None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = (kwargs.get("generator") or torch.default_generator).get_state()
            func(torch.empty_strided(*place[:2], dtype=tensor.dtype), *others, **kwargs)
        if name in REPLACES and tensor.numel() == whole.numel():
            writes.clear()
        writes.append((func, place, others, kwargs, state))
        return tensor

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return _address(tensor) in self.unwritten

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new tensor with the values that were put off."""
        whole, writes = self.unwritten[_address(tensor)]
        return _write(torch.empty_like(whole), writes).as_strided(
            tensor.size(), tensor.stride(), tensor.storage_offset()
        )

    def fill(self, tensor: torch.Tensor) -> None:
        """Fill a tensor where it lies."""
        _write(*self.unwritten.pop(_address(tensor)))

    def fill_all_but(self, tensors: Iterable[torch.Tensor]) -> None:
        """Fill every tensor that is still unwritten and is none of these."""
        left = {*map(_address, tensors)}
        for whole, _ in [pair for key, pair in self.unwritten.items() if key not in left]:
            self.fill(whole)


def _write(whole: torch.Tensor, writes: list[tuple]) -> torch.Tensor:
    for func, place, others, kwargs, state in writes:
        if state is not None:
            kwargs = kwargs | {"generator": torch.Generator().set_state(state)}
        func(whole.as_strided(*place), *others, **kwargs)
    return whole


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
