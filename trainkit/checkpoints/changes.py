"""Notice that tensors have changed, for less than a thousandth of what hashing them would cost."""

from collections.abc import Mapping

import torch

from trainkit.hashes import digest
from trainkit.repairs.private_names import version_of

NUM_BYTES = 64  # of each tensor, spread over it


class Marks:
    """What tensors were like when this was made, to find those that have changed since.

    A tensor counts as changed if torch has counted a change in place, or if some of NUM_BYTES bytes
    that are spread over it are others. Of a sharded tensor these are the rows of this process.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.tensors = dict(tensors)
        self.versions = [version_of(tensor) for tensor in self.tensors.values()]
        self.places: list[int | None] = []
        self.samples: list[torch.Tensor] = []
        self.first = self._bytes()

    def changed(self) -> set[str]:
        """The names of the tensors that have changed."""
        versions = [version_of(tensor) for tensor in self.tensors.values()]
        pairs = zip(self.tensors, self.versions, versions, strict=True)
        return {name for name, old, new in pairs if old != new} | self._differing(self._bytes())

    def hash(self) -> str:
        """A hash of the bytes that are compared, as they were."""
        return digest(self.first.numpy())

    def _differing(self, now: torch.Tensor) -> set[str]:
        if torch.equal(self.first, now):
            return set()
        sizes = [len(sample) for sample in self.samples]
        pairs = zip(self.tensors, self.first.split(sizes), now.split(sizes), strict=True)
        return {name for name, old, new in pairs if not torch.equal(old, new)}

    def _bytes(self) -> torch.Tensor:
        rows = [rows_here(tensor) for tensor in self.tensors.values()]
        places = [part.data_ptr() if is_dense(part) else None for part in rows]
        if None in places or places != self.places:  # otherwise the views are of the same memory
            self.places = places
            self.samples = [sample_of(part) for part in rows]
        if len({sample.device for sample in self.samples}) == 1:  # one copy from the device
            return torch.cat(self.samples).cpu()
        none = torch.empty(0, dtype=torch.uint8)
        return torch.cat([none, *(sample.cpu() for sample in self.samples)])


def rows_here(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or of a sharded one the rows of this process."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def is_dense(tensor: torch.Tensor) -> bool:
    """Do the numbers of a tensor lie together in memory, so that a view can have all of them?"""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return tensor.is_contiguous() or is_channels_last(tensor)


def is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes spread over a tensor: a view of them if it is dense."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return torch.empty(0, dtype=torch.uint8)
    if is_channels_last(tensor):
        tensor = tensor.permute(0, 2, 3, 1)
    memory = tensor.contiguous().flatten().view(torch.uint8)
    # An odd distance: it meets the low bytes of some numbers, which every change moves.
    return memory[:: max(1, len(memory) // NUM_BYTES) | 1]
