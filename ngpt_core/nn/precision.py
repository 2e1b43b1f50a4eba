"""Where must autocast not round, and where can it not see what it should?

It must not where a number decides or is remembered: a router's scores (which expert?) and the state of a scan. There the code
says in which precision it computes, and switches autocast off around it. And it does not look into operators of our own
(experts, cross-entropy): what they multiply is cast first, as ``F.linear`` would have it.
"""

import torch
from torch import Tensor

__all__ = ["autocast", "full_precision"]


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as autocast hands them to ``F.linear``; float64 stays, and outside of autocast they are what they were."""
    kind = "cpu" if tensors[0].is_meta else tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)


def full_precision(x: Tensor) -> torch.autocast:
    """A context in which autocast leaves the operations on the device of x alone; outside of autocast it does nothing."""
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)
