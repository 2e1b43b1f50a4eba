"""How does a Mamba-2 layer call its CPU kernel, ``mamba2_cpu.cpp``? As one operator, from in_proj's output to out_proj's input.

``inside`` is ``mamba2.inside`` without a cache, in one pass over memory forward and one backward. It is a custom operator, so
``torch.compile`` and activation checkpointing treat it as one node. Second derivatives take the plain form. ``token`` is the
same for one token after a cache, as in generation.

Shapes: those of ``mamba2.py``; p [b, T, 2 d_inner + 2 G N + H] is in_proj's output, segment [b, T] int32 numbers documents.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import fused
from .fused import contiguous, pointer

__all__ = ["SOURCE", "inside", "token"]

SOURCE = str(Path(__file__).with_suffix(".cpp"))
_INTEGERS, _FLOATS = "batch T G r P N K Q".split(), "dt_min eps".split()
_POINTERS = "p conv_weight conv_bias dt_bias A D norm_weight segment out y states d_out d_p sums".split()


class _Layer(ctypes.Structure):  # the same list as in mamba2_cpu.cpp
    _fields_ = [
        *((name, ctypes.c_int64) for name in _INTEGERS),
        *((name, ctypes.c_double) for name in _FLOATS),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]


@cache
def _kernel() -> tuple[Any, Any, int]:
    """The two functions, and how many floats a vector of this processor holds."""
    library = fused.library(SOURCE)
    assert library is not None  # ``takes`` was asked
    library.ngpt_mamba2.argtypes = (ctypes.POINTER(_Layer), ctypes.c_int32, ctypes.c_int32)
    library.ngpt_mamba2_token.argtypes = (ctypes.POINTER(_Layer), ctypes.c_void_p, ctypes.c_void_p)
    library.ngpt_mamba2.restype = library.ngpt_mamba2_token.restype = None
    return library.ngpt_mamba2, library.ngpt_mamba2_token, int(library.ngpt_mamba2_lanes())


def _states_shape(
    p: Tensor, D: Tensor, conv_weight: Tensor, groups: int, state: int, chunk: int, lanes: int
) -> tuple[int, ...]:
    """[b, G, chunks, r, N, P]: the states at the starts of the chunks, N and P rounded up to whole vectors."""
    (b, T), H, up = p.shape[:2], D.shape[0], lambda n: -(-n // lanes) * lanes
    P = (conv_weight.shape[1] - 2 * groups * state) // H
    return b, groups, -(-T // min(chunk, T)), H // groups, up(state), up(P)


_ARGUMENTS = (
    "Tensor p, Tensor conv_weight, Tensor conv_bias, Tensor dt_bias, Tensor A, Tensor D, Tensor? norm_weight, Tensor? segment, "
    "int groups, int state, int chunk, float dt_min, float eps"
)


def _layer(tensors: list[Any], groups: int, state: int, chunk: int, dt_min: float, eps: float, **others: Tensor) -> _Layer:
    """``tensors`` are p, conv_weight, conv_bias, dt_bias, A, D, norm_weight and segment; the caller holds them all."""
    (b, T), (K, channels), H = tensors[0].shape[:2], tensors[1].shape, len(tensors[5])
    P = (channels - 2 * groups * state) // H
    named = dict(zip(_POINTERS, tensors)) | others
    sizes = (b, T, groups, H // groups, P, state, K, min(chunk, T), dt_min, eps)
    return _Layer(*sizes, **{name: pointer(x) for name, x in named.items()})


def token(
    p: Tensor, conv_weight: Tensor, conv_bias: Tensor, dt_bias: Tensor, A: Tensor, D: Tensor, norm_weight: Tensor | None,
    groups: int, state: int, chunk: int, dt_min: float, eps: float, past: Tensor, before: Tensor,
) -> Tensor:  # fmt: skip
    """``mamba2.inside`` for one token, p [b, 1, ...], without gradients: it writes ``past`` and ``before`` in place."""
    _, call, _ = _kernel()
    tensors, channels = contiguous(p, conv_weight, conv_bias, dt_bias, A, D, norm_weight, None), len(conv_bias)
    out = p.new_empty(len(p), 1, channels - 2 * groups * state)
    scratch = p.new_empty(len(p), out.shape[-1] + channels)
    layer = _layer(tensors, groups, state, chunk, dt_min, eps, out=out, y=scratch)
    call(layer, pointer(past), pointer(before))
    return out


@torch.library.custom_op("ngpt_core::mamba2", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
def inside(
    p: Tensor, conv_weight: Tensor, conv_bias: Tensor, dt_bias: Tensor, A: Tensor, D: Tensor, norm_weight: Tensor | None,
    segment: Tensor | None, groups: int, state: int, chunk: int, dt_min: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(the input of out_proj [b, T, d_inner]; y before the gate and the states, which the backward pass needs)."""
    (call, _, lanes), d_inner = _kernel(), conv_weight.shape[1] - 2 * groups * state
    tensors = contiguous(p, conv_weight, conv_bias, dt_bias, A, D, norm_weight, segment)
    out, y = p.new_empty(*p.shape[:2], d_inner), p.new_empty(*p.shape[:2], d_inner)
    states = p.new_empty(_states_shape(p, D, conv_weight, groups, state, chunk, lanes))
    call(_layer(tensors, groups, state, chunk, dt_min, eps, out=out, y=y, states=states), 0, torch.get_num_threads())
    return out, y, states


@torch.library.custom_op(
    "ngpt_core::mamba2_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor y, Tensor states, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _inside_backward(
    d_out: Tensor, y: Tensor, states: Tensor, p: Tensor, conv_weight: Tensor, conv_bias: Tensor, dt_bias: Tensor, A: Tensor,
    D: Tensor, norm_weight: Tensor | None, segment: Tensor | None, groups: int, state: int, chunk: int, dt_min: float,
    eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of p, conv_weight, conv_bias, dt_bias, A, D and norm_weight (empty where there is none)."""
    tensors = contiguous(p, conv_weight, conv_bias, dt_bias, A, D, norm_weight, segment)
    d_out = d_out.contiguous()  # held by name until the call has read it
    (K, channels), H = conv_weight.shape, D.shape[0]
    sizes = (K * channels, channels, H, H, H, y.shape[-1])
    d_p, sums = torch.empty_like(tensors[0]), p.new_empty(len(p), sum(sizes))
    call, *_ = _kernel()
    layer = _layer(tensors, groups, state, chunk, dt_min, eps,
                   y=y, states=states, d_out=d_out, d_p=d_p, sums=sums)  # fmt: skip
    call(layer, 1, torch.get_num_threads())
    d_weight, *others, d_norm = sums.sum(0).split(sizes)  # over the sequences
    return (d_p, *(x.clone() for x in (d_weight.view(K, channels), *others, d_norm[: 0 if norm_weight is None else None])))


@inside.register_fake
def _(
    p: Tensor, conv_weight: Tensor, conv_bias: Tensor, dt_bias: Tensor, A: Tensor, D: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    groups, state, chunk = others[2:5]
    out = p.new_empty(*p.shape[:2], conv_weight.shape[1] - 2 * groups * state)
    return out, torch.empty_like(out), p.new_empty(_states_shape(p, D, conv_weight, groups, state, chunk, _kernel()[2]))


@_inside_backward.register_fake
def _(d_out: Tensor, y: Tensor, states: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(y.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs[:7])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.groups, ctx.state, ctx.chunk, ctx.dt_min, ctx.eps = inputs
    ctx.save_for_backward(*output[1:], *tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    y, states, *tensors = ctx.saved_tensors
    numbers = (ctx.groups, ctx.state, ctx.chunk, ctx.dt_min, ctx.eps)
    if d_out is None:
        return (None,) * 13
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # someone will differentiate the gradient itself
        from .mamba2 import inside as plain

        wanted = [x for x in tensors[:7] if x is not None and x.requires_grad]
        out = plain(*tensors, *numbers)[0]  # type: ignore[call-arg]  # mypy cannot count what was saved
        found = iter(torch.autograd.grad(out, wanted, d_out, create_graph=True))
        return (*(next(found) if x is not None and x.requires_grad else None for x in tensors[:7]), *(None,) * 6)
    grads = torch.ops.ngpt_core.mamba2_backward(d_out, y, states, *tensors, *numbers)
    return (*(None if x is None else g for x, g in zip(tensors[:7], grads)), *(None,) * 6)


inside.register_autograd(_gradients, setup_context=_save)
