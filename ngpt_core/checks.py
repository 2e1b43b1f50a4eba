"""Is this value a number at all? What every rule asks first.

A configuration file readily turns 1e-8 into the string "1e-8" (YAML without a dot does): the answer should be the rule, not a
traceback from a comparison.
"""

import math
from numbers import Integral, Real
from typing import TypeGuard

from torch import Tensor

LEAST_DIVISOR = 1e-30  # constants below are refused where the update divides by them: float32 holds d / 1e-30 up to d = 3e8


def is_number(x: object) -> TypeGuard[float | Tensor]:
    """A real number, nan and infinities included; or a tensor that holds one."""
    return (isinstance(x, Real) and not isinstance(x, bool)) or (isinstance(x, Tensor) and x.numel() == 1)


def is_integer(x: object) -> bool:
    """A whole number of an integer type, numpy's too."""
    return isinstance(x, Integral) and not isinstance(x, bool)


def is_within(x: object, low: float, *, open: bool = False) -> bool:
    """A finite number >= low (``open``: > low)."""
    return is_number(x) and low <= float(x) < math.inf and not (open and float(x) == low)


def is_count(x: object, least: int) -> bool:
    """A whole number >= least; 500.0 is one too."""
    return is_number(x) and (isinstance(x, Integral) or float(x).is_integer()) and bool(x >= least)
