"""How does attention call its CPU kernel, ``attention_cpu.cpp``? As one operator, forward and backward.

``causal`` is ``attention.causal``: softmax(scale q k^T) v, where a token looks at itself and at earlier tokens of its document.
It is a custom operator, so ``torch.compile`` and activation checkpointing treat it as one node. Second derivatives take the
plain form.

Shapes: q [B, H, T, d_k], k and v [B, G, T, d_k], where G divides H; segment [B, T] int32 numbers documents.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import fused

__all__ = ["SOURCE", "causal"]

SOURCE = str(Path(__file__).with_suffix(".cpp"))


class _Heads(ctypes.Structure):  # the same list as in attention_cpu.cpp
    _fields_ = [
        *((name, ctypes.c_int64) for name in "batch T H G d".split()),
        ("at", ctypes.c_int64 * 3 * 5),
        *((name, ctypes.c_void_p) for name in "q k v segment out log_sum d_out d_q d_k d_v".split()),
        ("scale", ctypes.c_double),
    ]


@cache
def _kernel() -> Any:
    library = fused.library(SOURCE)
    assert library is not None  # ``takes`` was asked
    library.ngpt_attention.argtypes = (ctypes.POINTER(_Heads), ctypes.c_int32, ctypes.c_int32)
    library.ngpt_attention.restype = None
    return library.ngpt_attention


def _call(back: bool, scale: float, **tensors: Tensor | None) -> None:
    """The tensors by their names in ``_Heads``."""
    q, k = tensors["q"], tensors["k"]
    assert q is not None and k is not None
    heads = _Heads(len(q), *(q.shape[i] for i in (2, 1)), *k.shape[1::2], scale=scale)
    for name, x in tensors.items():
        setattr(heads, name, None if x is None else x.data_ptr())
    for i, name in enumerate(("q", "k", "v", "out", "d_out")):
        if (x := tensors.get(name)) is not None:
            heads.at[i][:] = x.stride()[:3]
    _kernel()(heads, back, torch.get_num_threads())


def _tokens_first(x: Tensor) -> Tensor:
    """An empty tensor [B, H, T, d_k] whose memory is [B, T, H, d_k]."""
    B, H, T, d = x.shape
    return x.new_empty(B, T, H, d).transpose(1, 2)


def _dense(*tensors: Tensor) -> list[Tensor]:
    """With the floats of a head side by side."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


@torch.library.custom_op("ngpt_core::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, segment: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """(the result, for each query the logarithm of the sum under its softmax [B, H, T])."""
    out, log_sum = _tokens_first(q), q.new_empty(q.shape[:3])
    q, k, v = _dense(q, k, v)
    segment = None if segment is None else segment.contiguous()
    _call(False, scale, q=q, k=k, v=v, segment=segment, out=out, log_sum=log_sum)
    return out, log_sum


@torch.library.custom_op("ngpt_core::attention_backward", mutates_args=())
def _attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, segment: Tensor | None, out: Tensor, log_sum: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    d_q, d_k, d_v = (_tokens_first(x) for x in (q, k, v))
    d_out, q, k, v, out = _dense(d_out, q, k, v, out)
    segment, log_sum = None if segment is None else segment.contiguous(), log_sum.contiguous()
    _call(True, scale, q=q, k=k, v=v, segment=segment, out=out, log_sum=log_sum, d_out=d_out, d_q=d_q, d_k=d_k, d_v=d_v)
    return d_q, d_k, d_v


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _tokens_first(q), q.new_empty(q.shape[:3])


@_attention_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return tuple(_tokens_first(x) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_out: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if d_out is None:
        return (None,) * 5
    q, k, v, segment, out, log_sum = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # someone will differentiate the gradient itself
        from .attention import causal as plain

        with fused.plain(), sdpa_kernel(SDPBackend.MATH):
            y = plain(q, k, v, ctx.scale, segment)
        wanted = [x for x in (q, k, v) if x.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, d_out, create_graph=True))
        return (*(next(found) if x.requires_grad else None for x in (q, k, v)), None, None)
    return (*torch.ops.ngpt_core.attention_backward(d_out, q, k, v, segment, out, log_sum, ctx.scale), None, None)


_attention.register_autograd(_gradients, setup_context=_save)


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float, segment: Tensor | None = None) -> Tensor:
    """``attention.causal``: [B, H, T, d_k]."""
    return _attention(q, k, v, segment, scale)[0]
