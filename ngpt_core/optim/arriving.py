"""How do numbers travel between host and device without making the host wait?

To the host they are copied into pinned memory while the device goes on, and read later, when they have arrived. Constants are
copied to the device once. On a CPU there is nothing to do.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ..rehearsal import rehearsing

__all__ = ["Arriving", "constant"]


class Arriving:
    """A tensor on its way to the host. ``read`` waits only if it has not arrived."""

    def __init__(self, x: Tensor):
        self._x, self._event = x, None
        if x.device.type == "cuda":
            self._x = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._x.copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[float]:
        """Its numbers."""
        if self._event is not None:
            self._event.synchronize()
        return self._x.tolist()


def constant(numbers: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """These numbers on the device. Asked for again, they are there."""
    return (_constant.__wrapped__ if rehearsing() else _constant)(numbers, dtype, device)  # a rehearsal's tensors end with it


@lru_cache(maxsize=64)
def _constant(numbers: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype).to(device)
