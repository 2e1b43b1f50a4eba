"""How does the model call its CPU kernels for rows, ``rows_cpu.cpp``? Each operator in one pass forward and one backward.

    step     sphere.step(h, sphere.unit(f), alpha)          norm    F.rms_norm(x, ...), or sphere.unit(x) * scale
    relu2    mlp.relu2(s * u)                                experts  moe.MoE.route: dispatch, two products, combine
    swiglu   mlp.swiglu(u, v)                                few_experts  the same for a few tokens, without gradients
    rotate   attention.rotate(x, theta, start)

The plain form is the function in the right column: the caller chooses with ``takes``. Inside ``torch.compile`` it is the plain
form, which the compiler fuses itself; only ``experts`` is a node there. Second derivatives are those of the plain form;
``experts`` has none.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import sphere
from . import fused

__all__ = ["experts", "few_experts", "norm", "off_sphere", "relu2", "rotate", "step", "swiglu", "takes"]

SOURCE = str(Path(__file__).with_suffix(".cpp"))
_TYPES = {"i": ctypes.c_int64, "n": ctypes.c_int32, "f": ctypes.c_float, "p": ctypes.c_void_p}
_FUNCTIONS = {  # as in rows_cpu.cpp: i int64, n int32, f float, p pointer
    "step_forward": "iippppppn", "norms": "iippn",
    "step_backward": "iipppppppppn", "norm_forward": "iinfppppn", "norm_backward": "iinppppppn",
    "relu2_forward": "iipppn", "relu2_backward": "iipppppn", "swiglu_forward": "iipppn", "swiglu_backward": "iipppppn",
    "rotate": "iiiifpppn", "gather": "iippp", "scatter": "iippp",
    "expert_forward": "iipppp", "expert_backward": "iippppppp", "few": "iiiiippppppp",
}  # fmt: skip


@cache
def _kernels() -> Any:
    library = fused.library(SOURCE)
    for name, letters in _FUNCTIONS.items():
        function = getattr(library, f"ngpt_{name}")
        function.argtypes, function.restype = [_TYPES[x] for x in letters], None
    return library


def takes(*tensors: Tensor | None) -> bool:
    """May these operators take these tensors?"""
    return not torch.compiler.is_compiling() and fused.takes(SOURCE, *tensors)


def _gradients(plain: Callable[..., Tensor], inputs: tuple[Tensor | None, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of the plain form, for someone who will differentiate them again."""
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(plain(*inputs), wanted, grad, create_graph=True))
    return tuple(next(found) if x is not None and x.requires_grad else None for x in inputs)


def _step(h: Tensor, f: Tensor, alpha: Tensor, off: Tensor | None) -> tuple[Tensor, Tensor]:
    x, y, d = h.contiguous(), f.contiguous(), h.shape[-1]
    out, norms = torch.empty_like(x), x.new_empty(x.numel() // d, 2)
    pointers = (t.data_ptr() for t in (x, y, alpha, out, norms))
    _kernels().ngpt_step_forward(len(norms), d, *pointers, fused.pointer(off), torch.get_num_threads())
    return out, norms


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, f: Tensor, alpha: Tensor, off: Tensor | None) -> Tensor:
        out, norms = _step(h, f, alpha, off)
        ctx.save_for_backward(h, f, alpha, out, norms)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, f, alpha, out, norms = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_gradients(lambda h, f, alpha: sphere.step(h, sphere.unit(f), alpha), (h, f, alpha), grad), None
        h, f, grad = h.contiguous(), f.contiguous(), grad.contiguous()
        d_h, d_f, d_alpha = torch.empty_like(h), torch.empty_like(f), torch.empty_like(alpha)
        tensors = (grad, out, h, f, alpha, norms, d_h, d_f, d_alpha)
        _kernels().ngpt_step_backward(len(norms), h.shape[-1], *(x.data_ptr() for x in tensors), torch.get_num_threads())
        return d_h, d_f, d_alpha, None


def step(h: Tensor, f: Tensor, alpha: Tensor, off: Tensor | None = None) -> Tensor:
    """Norm(h + alpha (Norm(f) - h)) for h, f [..., d] and alpha [d] (eqs. ATTNnew2, MLPnew2).

    off [1]: becomes the largest | ||h|| - 1 |, if that is larger.
    """
    alpha = alpha.contiguous()
    return _step(h, f, alpha, off)[0] if fused.infers(h, f, alpha) else _Step.apply(h, f, alpha, off)


def off_sphere(h: Tensor, off: Tensor) -> None:
    """off [1] becomes the largest | ||h|| - 1 | of h [..., d], if that is larger."""
    x = h.detach().contiguous()
    _kernels().ngpt_norms(x.numel() // x.shape[-1], x.shape[-1], x.data_ptr(), off.data_ptr(), torch.get_num_threads())


def _norm(x: Tensor, weight: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    y, d = x.contiguous(), x.shape[-1]
    out, norms = torch.empty_like(y), y.new_empty(y.numel() // d)
    pointers = (t.data_ptr() for t in (y, weight, out, norms))
    _kernels().ngpt_norm_forward(len(norms), d, eps is not None, eps or 0.0, *pointers, torch.get_num_threads())
    return out, norms


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
        out, norms = _norm(x, weight, eps)
        ctx.eps = eps
        ctx.save_for_backward(x, weight, norms)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, norms), eps = ctx.saved_tensors, ctx.eps
        if torch.is_grad_enabled():

            def plain(x: Tensor, weight: Tensor) -> Tensor:
                return sphere.unit(x) * weight if eps is None else F.rms_norm(x, x.shape[-1:], weight, eps)

            return *_gradients(plain, (x, weight), grad), None
        x, grad = x.contiguous(), grad.contiguous()
        d_x, d_weight = torch.empty_like(x), torch.empty_like(weight)
        tensors = (grad, x, weight, norms, d_x, d_weight)
        threads = torch.get_num_threads()
        _kernels().ngpt_norm_backward(len(norms), x.shape[-1], eps is not None, *(t.data_ptr() for t in tensors), threads)
        return d_x, d_weight, None


def norm(x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
    """RMSNorm of x [..., d] times weight [d]; without eps, Norm(x) times it."""
    weight = weight.contiguous()
    return _norm(x, weight, eps)[0] if fused.infers(x, weight) else _Norm.apply(x, weight, eps)


def _relu2(u: Tensor) -> Tensor:
    x = u.contiguous()
    out, d = torch.empty_like(x), x.shape[-1]
    _kernels().ngpt_relu2_forward(x.numel() // d, d, x.data_ptr(), None, out.data_ptr(), torch.get_num_threads())
    return out


class _Relu2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return _relu2(u)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (u,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _gradients(lambda u: F.relu(u).square(), (u,), grad)
        u, grad, d = u.contiguous(), grad.contiguous(), u.shape[-1]
        d_u = torch.empty_like(u)
        _kernels().ngpt_relu2_backward(u.numel() // d, d, grad.data_ptr(), u.data_ptr(), None, d_u.data_ptr(), None,
                                       torch.get_num_threads())  # fmt: skip
        return (d_u,)


def relu2(u: Tensor) -> Tensor:
    """relu(u)^2."""
    return _relu2(u) if fused.infers(u) else _Relu2.apply(u)


def _swiglu(u: Tensor, v: Tensor) -> Tensor:
    x, y, d = u.contiguous(), v.contiguous(), u.shape[-1]
    out = torch.empty_like(x)
    _kernels().ngpt_swiglu_forward(x.numel() // d, d, x.data_ptr(), y.data_ptr(), out.data_ptr(), torch.get_num_threads())
    return out


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(u, v)
        return _swiglu(u, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _gradients(lambda u, v: u * F.silu(v), ctx.saved_tensors, grad)
        grad, u, v = fused.contiguous(grad, *ctx.saved_tensors)
        d, d_u, d_v = u.shape[-1], torch.empty_like(u), torch.empty_like(v)
        pointers = (x.data_ptr() for x in (grad, u, v, d_u, d_v))
        _kernels().ngpt_swiglu_backward(u.numel() // d, d, *pointers, torch.get_num_threads())
        return d_u, d_v


def swiglu(u: Tensor, v: Tensor) -> Tensor:
    """u * silu(v) for u and v of one shape."""
    return _swiglu(u, v) if fused.infers(u, v) else _Swiglu.apply(u, v)


def _rotate(x: Tensor, table: Tensor, sign: float) -> Tensor:
    """The result lies in memory as x does: tokens before heads, or heads before tokens."""
    repeat = x.shape[-3] if x.ndim > 2 and not x.is_contiguous() and x.transpose(-2, -3).is_contiguous() else 1
    x, (_, T, half) = x if repeat > 1 else x.contiguous(), table.shape
    out, d = torch.empty_like(x), 2 * half
    pointers = (t.data_ptr() for t in (x, table, out))
    _kernels().ngpt_rotate(x.numel() // d, d, T, repeat, sign, *pointers, torch.get_num_threads())
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, sign: float) -> Tensor:
        ctx.sign = sign
        ctx.save_for_backward(table)
        return _rotate(x, table, sign)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Rotate.apply(grad, *ctx.saved_tensors, -ctx.sign), None, None  # back; this can be differentiated too


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """x [..., T, d] with its halves turned as planes, by the angles whose cosines and sines are table [2, T, d/2]."""
    return _rotate(x, table, 1.0) if fused.infers(x) else _Rotate.apply(x, table, 1.0)


_EXPERTS = "Tensor x, Tensor weights, Tensor up, Tensor down, Tensor? s_u, Tensor order, Tensor counts"


def _scale_of(expert: int, s: Tensor | None) -> int | None:
    """The address of the expert's own scale, or of the one that all share."""
    return None if s is None else s[expert if s.ndim == 2 else ...].data_ptr()


@torch.library.custom_op("ngpt_core::experts", mutates_args=(), schema=f"({_EXPERTS}) -> (Tensor, Tensor)")
def _experts(
    x: Tensor, weights: Tensor, up: Tensor, down: Tensor, s_u: Tensor | None, order: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """(the sum, u). One expert at a time, so that its rows stay in the cache from the gather to the sum."""
    x, up, down, s_u = fused.contiguous(x, up, down, s_u)
    call, k, (_, ff, d), rows_of = _kernels(), weights.shape[1], up.shape, counts.tolist()
    token, w, most = order // k, weights.flatten()[order], max(rows_of)
    u, out = x.new_empty(len(order), ff), torch.zeros_like(x)
    rows, acts, outs = x.new_empty(most, d), x.new_empty(most, ff), x.new_empty(most, d)
    start = 0
    for e, m in enumerate(rows_of):
        if m == 0:
            continue
        which, u_e = token.data_ptr() + 8 * start, u[start : start + m]
        call.ngpt_gather(m, d, x.data_ptr(), which, rows.data_ptr())
        torch.mm(rows[:m], up[e].T, out=u_e)
        call.ngpt_expert_forward(m, ff, u_e.data_ptr(), _scale_of(e, s_u), w.data_ptr() + 4 * start, acts.data_ptr())
        torch.mm(acts[:m], down[e], out=outs[:m])
        call.ngpt_scatter(m, d, outs.data_ptr(), which, out.data_ptr())
        start += m
    return out, u


@torch.library.custom_op(
    "ngpt_core::experts_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor u, {_EXPERTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _experts_backward(
    grad: Tensor,
    u: Tensor,
    x: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    s_u: Tensor | None,
    order: Tensor,
    counts: Tensor,
) -> tuple[Tensor, ...]:
    """The gradients of x, weights, up, down and s_u (empty where there is none)."""
    grad, x, up, down, s_u = fused.contiguous(grad, x, up, down, s_u)
    call, k, (_, ff, d), rows_of = _kernels(), weights.shape[1], up.shape, counts.tolist()
    token, w, most, start = order // k, weights.flatten()[order], max(rows_of), 0
    d_x, d_up, d_down, d_w = torch.zeros_like(x), torch.empty_like(up), torch.empty_like(down), torch.empty_like(w)
    d_s = None if s_u is None else torch.zeros_like(s_u)
    rows, grads, back = (x.new_empty(most, d) for _ in range(3))
    acts, d_acts = x.new_empty(most, ff), x.new_empty(most, ff)
    for e, m in enumerate(rows_of):
        if m == 0:
            d_up[e].zero_(), d_down[e].zero_()
            continue
        which, own = token.data_ptr() + 8 * start, 4 * start
        call.ngpt_gather(m, d, x.data_ptr(), which, rows.data_ptr())
        call.ngpt_gather(m, d, grad.data_ptr(), which, grads.data_ptr())
        torch.mm(grads[:m], down[e].T, out=d_acts[:m])
        call.ngpt_expert_backward(m, ff, d_acts.data_ptr(), u.data_ptr() + own * ff, _scale_of(e, s_u), w.data_ptr() + own,
                                  acts.data_ptr(), d_w.data_ptr() + own, _scale_of(e, d_s))  # fmt: skip
        torch.mm(acts[:m].T, grads[:m], out=d_down[e])
        torch.mm(d_acts[:m].T, rows[:m], out=d_up[e])
        torch.mm(d_acts[:m], up[e], out=back[:m])
        call.ngpt_scatter(m, d, back.data_ptr(), which, d_x.data_ptr())
        start += m
    d_weights = torch.empty_like(w).index_copy_(0, order, d_w).view_as(weights)
    return d_x, d_weights, d_up, d_down, x.new_empty(0) if d_s is None else d_s


@_experts.register_fake
def _(x: Tensor, weights: Tensor, up: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(weights.numel(), up.shape[1])


@_experts_backward.register_fake
def _(grad: Tensor, u: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(u.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs[:5])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs)
    ctx.set_materialize_grads(False)


def _to_experts(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    u, *inputs = ctx.saved_tensors
    grads = torch.ops.ngpt_core.experts_backward(grad, u, *inputs)
    return (*(None if x is None else g for x, g in zip(inputs, grads)), None, None)


_experts.register_autograd(_to_experts, setup_context=_keep)


def experts(x: Tensor, weights: Tensor, up: Tensor, down: Tensor, s_u: Tensor | None, order: Tensor, counts: Tensor) -> Tensor:
    """sum over a token's experts e of weight_e * relu2(s_u * (up_e x)) down_e: x [n, d], weights [n, k], up, down [E, ff, d].

    order [n k] sorts the rows (token, choice) by expert, and counts [E] says how many each expert has (see ``grouped.py``).
    It is a custom operator, which ``torch.compile`` and activation checkpointing treat as one node.
    """
    return _experts(x, weights, up, down, s_u, order, counts)[0]


FEW = 8  # tokens: with more, experts are chosen more than once, and a product of matrices reads each of them only once


def few_experts(x: Tensor, weights: Tensor, up: Tensor, down: Tensor, s_u: Tensor | None, chosen: Tensor) -> Tensor:
    """``experts`` without gradients for a few tokens, as in generation, which needs no sorting: chosen [n, k]."""
    (n, k), (_, ff, d) = weights.shape, up.shape
    tensors = fused.contiguous(x, chosen, weights, up, down, s_u)
    out, own = x.new_empty(n, d), s_u is not None and s_u.ndim == 2
    _kernels().ngpt_few(n, k, d, ff, own, *(fused.pointer(t) for t in (*tensors, out)))
    return out
