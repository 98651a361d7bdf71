"""Copy numbers from the device to the host without waiting for the device."""

import torch


class HostCopy:
    """A copy of a tensor on the host. Making it does not wait for the device; `read` does."""

    def __init__(self, tensor: torch.Tensor):
        self.values = tensor.detach().to("cpu", non_blocking=True)
        self.copied: torch.Event | None = None
        if tensor.device.type != "cpu":
            self.copied = torch.Event(device=tensor.device)
            self.copied.record()

    def read(self) -> torch.Tensor:
        """Return the copy, when the device has made it."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.values
