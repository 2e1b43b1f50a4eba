"""When does the forward pass take an operator in C++, and when the plain form beside it?

Each fused operator computes what its plain form computes, with fewer passes over memory. It takes plain float32 tensors on the
CPU. Everything else (another device or precision, sharded tensors, ``torch.func``, a machine without a compiler) takes the
plain form, which is what the book shows and what the tests compare with. ``with plain():`` turns all operators off.
"""

import contextlib
import ctypes
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import native
from .transforms import transformed

__all__ = ["contiguous", "fits", "infers", "library", "plain", "pointer", "takes"]

_enabled = True


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Inside this context every operator takes its plain form."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


@cache
def library(source: str) -> ctypes.CDLL | None:
    """The compiled source, or None; the reason is logged once."""
    found = native.library(Path(source))
    return _logged(found) if isinstance(found, str) else found


@cache
def _logged(reason: str) -> None:
    logging.getLogger("ngpt_core").warning("The model takes its plain path on the CPU, which is slower: %s", reason)


@torch.compiler.assume_constant_result
def _built(source: str) -> bool:
    return library(source) is not None


def fits(*tensors: Tensor | None) -> bool:
    """Are operators on, and are these plain float32 tensors on the CPU?"""
    return (
        _enabled
        and not torch.is_autocast_enabled("cpu")
        and all(
            x is None or (type(x) in (Tensor, torch.nn.Parameter) and x.dtype == torch.float32 and x.device.type == "cpu")
            for x in tensors
        )
        and not transformed()
    )


def takes(source: str, *tensors: Tensor | None) -> bool:
    """May the operators of this source take these tensors?"""
    return fits(*tensors) and _built(source)


def infers(*tensors: Tensor | None) -> bool:
    """Are no gradients needed here, and does no compiler trace this call? Then an operator need not keep anything for later."""
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return not grad and not torch.compiler.is_compiling()


def contiguous(*tensors: Tensor | None) -> list[Any]:
    """The tensors without gaps; the caller holds them until the kernel has read them."""
    return [None if x is None else x.contiguous() for x in tensors]


def pointer(x: Tensor | None) -> int | None:
    """The address of a contiguous tensor, for ctypes."""
    assert x is None or x.is_contiguous()
    return None if x is None else x.data_ptr()
