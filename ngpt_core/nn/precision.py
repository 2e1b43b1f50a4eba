"""Where must autocast not round, and where does it need help?

It must not round a router's scores, which choose experts, nor the state of a scan, which accumulates. There the code chooses
the precision and disables autocast. And autocast does not see into our custom operators (experts, cross-entropy), so their
inputs are cast first, as autocast does for ``F.linear``.
"""

import torch
from torch import Tensor

__all__ = ["autocast", "full_precision"]


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as autocast would pass them to ``F.linear``. float64 is kept; without autocast they are unchanged."""
    kind = "cpu" if tensors[0].is_meta else tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)


def full_precision(x: Tensor) -> torch.autocast:
    """A context that disables autocast on the device of x; without autocast it does nothing."""
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)
