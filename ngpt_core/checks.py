"""Is this value a number, and is it in range?

A configuration file easily turns 1e-8 into the string "1e-8" (YAML does, without a dot). The error should then state the rule
and not be a traceback from a comparison.
"""

import math
from numbers import Integral, Real
from typing import TypeGuard

import torch
from torch import Tensor

LEAST_DIVISOR = 1e-30  # the smallest constant that the update may divide by: float32 holds d / 1e-30 up to d = 3e8


def is_number(x: object) -> TypeGuard[float | Tensor]:
    """Whether x is a real number that a float can hold (nan and infinities included), or a tensor with one number."""
    if isinstance(x, int):
        return not isinstance(x, bool) and x.bit_length() <= 1023  # JSON's integers may be larger than every float
    return isinstance(x, Real) or (isinstance(x, Tensor) and x.numel() == 1 and not x.is_complex() and x.dtype != torch.bool)


def is_integer(x: object) -> bool:
    """Whether x is of an integer type (numpy's included)."""
    return isinstance(x, Integral) and not isinstance(x, bool)


def is_within(x: object, low: float, *, open: bool = False) -> bool:
    """Whether x is a finite number >= low (``open``: > low)."""
    try:
        return is_number(x) and low <= float(x) < math.inf and not (open and float(x) == low)
    except OverflowError:  # an integer beyond every float
        return False


def check_tensors(function: str, **values: object) -> None:
    """ValueError unless each of these arguments of a public function is a tensor."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{function}: {name} must be a tensor; got {type(value).__name__}.")


def is_count(x: object, least: int) -> bool:
    """Whether x is a whole number >= least; 500.0 counts."""
    return is_number(x) and (isinstance(x, Integral) or float(x).is_integer()) and bool(x >= least)
