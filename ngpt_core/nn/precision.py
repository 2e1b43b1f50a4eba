"""Where must autocast not round?

Where a number decides or is remembered: a router's scores (which expert?) and the state of a scan. There the code says in
which precision it computes, and switches autocast off around it.
"""

import torch
from torch import Tensor

__all__ = ["full_precision"]


def full_precision(x: Tensor) -> torch.autocast:
    """A context in which autocast leaves the operations on the device of x alone; outside of autocast it does nothing."""
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)
