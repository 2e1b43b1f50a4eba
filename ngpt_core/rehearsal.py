"""Does a tensor take the branches for a GPU or for a CPU? Its device decides, except in a rehearsal.

A rehearsal (``ngpt simulate``) runs the real program on tensors that have shapes but no memory. They are on the device "cpu",
since there may be no GPU, and take the branches of the simulated machine. A branch that depends on the device asks
``on_gpu``; a check that reads values asks ``has_values``.
"""

import contextlib
from collections.abc import Iterator

from torch import Tensor

__all__ = ["has_values", "on_cpu", "on_gpu", "rehearse", "rehearsing"]

_rehearsed: str | None = None  # the kind of the simulated machine, "cpu" or "cuda"


@contextlib.contextmanager
def rehearse(kind: str) -> Iterator[None]:
    """Tensors on the CPU stand for tensors of a machine of this kind, "cpu" or "cuda"."""
    global _rehearsed
    before, _rehearsed = _rehearsed, kind
    try:
        yield
    finally:
        _rehearsed = before


def rehearsing() -> bool:
    """Whether a rehearsal is running: tensors have no values, and kernels need not be installed."""
    return _rehearsed is not None


def on_gpu(x: Tensor) -> bool:
    """Whether x takes the branches of CUDA."""
    return x.is_cuda or _rehearsed == "cuda"


def on_cpu(x: Tensor) -> bool:
    """Whether x takes the branches of a CPU."""
    return x.device.type == "cpu" and _rehearsed != "cuda"


def has_values(x: Tensor) -> bool:
    """May a check read the values of x? Only on the CPU (a GPU's stream would stall), and not in a rehearsal."""
    return x.device.type == "cpu" and _rehearsed is None
