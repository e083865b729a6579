"""`HostCopy`: a tensor on its way from a device to the host, while the device goes on computing."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """The copy of a tensor as it is after what its device was told so far; what it is told later is not waited for.

    On other devices than CUDA's it is there at once.
    """

    def __init__(self, x: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if x.device.type != "cuda":
            self._copy = x.cpu()
            return
        self._copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._copy.copy_(x, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(x.device))

    def wait(self) -> Tensor:
        """The copy, once it is whole; other threads run meanwhile."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy
