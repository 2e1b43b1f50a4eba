"""Which library multiplies two matrices on a CPU?

torch asks MKL. On an AMD processor with AVX-512, MKL is about half as fast as oneDNN, which torch contains as well (114 and 250
GFLOP/s on one core). So there large products of activations with a weight go to oneDNN, forward and backward.

The plain forms are ``F.linear(x, W)`` and ``x @ W``. The choice depends only on the processor and the sizes, never on a timing:
the same run on the same machine has the same bits.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import fused

__all__ = ["linear", "times"]

_LEAST = 1 << 24  # multiplications: below, MKL is as fast, or faster


def linear(x: Tensor, W: Tensor) -> Tensor:
    """x W^T for x [..., d] and W [n, d]."""
    # ngpt_core only: begin
    if _takes(x, W):
        return _product(x.reshape(-1, x.shape[-1]), W, True).view(*x.shape[:-1], len(W))
    # ngpt_core only: end
    return F.linear(x, W)


def times(x: Tensor, W: Tensor) -> Tensor:
    """x W for x [..., n] and W [n, d]."""
    # ngpt_core only: begin
    if _takes(x, W):
        return _product(x.reshape(-1, x.shape[-1]), W, False).view(*x.shape[:-1], W.shape[1])
    # ngpt_core only: end
    return x @ W


# ngpt_core only: begin
@cache
def _prefers_onednn() -> bool:
    try:
        amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    libraries = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not (amd and libraries and torch.backends.cpu.get_cpu_capability() == "AVX512"):
        return False
    try:
        return bool(_multiply(torch.ones(1, 1), torch.ones(1, 1), True) == 1)
    except (AttributeError, RuntimeError, TypeError):  # an operator that torch keeps for itself: another version may change it
        return False


@torch.compiler.assume_constant_result
def _asked() -> bool:
    return _prefers_onednn()


def _takes(x: Tensor, W: Tensor) -> bool:
    return x.ndim > 1 and x.numel() * W.numel() >= _LEAST * x.shape[-1] and fused.fits(x, W) and _asked()


def _multiply(a: Tensor, b: Tensor, transpose: bool) -> Tensor:
    """a b, or a b^T with ``transpose``, for two matrices."""
    return torch.ops.mkldnn._linear_pointwise(a, b if transpose else b.T, None, "none", [], "")


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, ctx.transpose = inputs
    ctx.save_for_backward(a, b)


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    (a, b), (for_a, for_b, _) = ctx.saved_tensors, ctx.needs_input_grad
    d_a = _product(g, b, not ctx.transpose) if for_a else None
    d_b = None
    if for_b:
        d_b = _product(g.T, a, False) if ctx.transpose else _product(a.T, g, False)
    return d_a, d_b, None


class _Product(torch.autograd.Function):
    forward = staticmethod(_multiply)
    setup_context = staticmethod(_save)
    backward = staticmethod(_gradients)


# For the compiler. Elsewhere a function is used, which takes torch less time to call.
_node = torch.library.custom_op("ngpt_core::product", _multiply, mutates_args=())
_node.register_fake(lambda a, b, transpose: a.new_empty(len(a), len(b) if transpose else b.shape[1]))
_node.register_autograd(_gradients, setup_context=_save)


def _product(a: Tensor, b: Tensor, transpose: bool) -> Tensor:
    return _node(a, b, transpose) if torch.compiler.is_compiling() else _Product.apply(a, b, transpose)


# ngpt_core only: end
