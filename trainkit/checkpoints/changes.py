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
        self.sizes: list[int] = []
        self.first = self._bytes()

    def changed(self) -> set[str]:
        """The names of the tensors that have changed."""
        versions = [version_of(tensor) for tensor in self.tensors.values()]
        pairs = zip(self.tensors, self.versions, versions, strict=True)
        found = {name for name, old, new in pairs if old != new}
        if torch.equal(self.first, now := self._bytes()):
            return found
        parts = zip(self.tensors, self.first.split(self.sizes), now.split(self.sizes), strict=True)
        return found | {name for name, old, new in parts if not torch.equal(old, new)}

    def hash(self) -> str:
        """A hash of the bytes that are compared, as they were."""
        return digest(self.first.numpy())

    def _bytes(self) -> torch.Tensor:
        samples = [sample_of(tensor) for tensor in self.tensors.values()]
        self.sizes = [len(sample) for sample in samples]
        if len({sample.device for sample in samples}) == 1:  # one copy from the device
            return torch.cat(samples).cpu()
        none = torch.empty(0, dtype=torch.uint8)
        return torch.cat([none, *(sample.cpu() for sample in samples)])


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes spread over a tensor, of a sharded one over the rows of this process."""
    rows = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
    if rows.layout is not torch.strided or rows.is_meta:
        return torch.empty(0, dtype=torch.uint8)
    if rows.dim() == 4 and rows.is_contiguous(memory_format=torch.channels_last):
        rows = rows.permute(0, 2, 3, 1)  # without a copy
    memory = rows.contiguous().flatten().view(torch.uint8)
    # An odd distance: it meets the low bytes of some numbers, which every change moves.
    return memory[:: max(1, len(memory) // NUM_BYTES) | 1]
