"""How is every token multiplied by the matrices of its own experts, without a loop that autograd sees?

Each token is copied k times, once per chosen expert, and the copies are sorted by expert. Their outputs are summed per token:

    dispatch       x [n, p] -> [n k, p]                   row ``order[i] // k`` of x goes to place i
    combine        y [n k, p] -> [n, p]                   the sum of the k rows of each token

Each is the other's gradient. In between, expert e owns the rows ends[e-1] : ends[e], and each product is one multiplication:

    expert_mm      y_e = x_e w_e^T  or  x_e w_e          the forward pass, and the gradient to x
    expert_outer   g_e = a_e^T b_e                        the gradient to w

On CUDA in bfloat16, each is one kernel, torch's grouped matrix multiplication, which reads ``ends`` on the device, so the host
never waits. Elsewhere, each is a plain loop of ``mm`` into preallocated memory. Both are custom operators, opaque to
``torch.compile``, and each is the other's gradient: indexing w[e] under autograd would build a full-size gradient per expert.

Symbols: n tokens, N = n k rows of all experts, E experts, w [E, ff, d], ends [E] int32 (cumulative counts);
order [N] sorts the rows (token, choice) by expert and place [N] undoes it: place[order] = 0, 1, 2, ...
"""

from typing import Any

import torch
from torch import Tensor

from ..rehearsal import on_gpu
from .transforms import differentiable

__all__ = ["combine", "dispatch", "expert_mm", "expert_outer", "sort_by_expert"]


def sort_by_expert(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(order, place) of the choices [n, k]. The sort is stable: tokens of the same expert keep their order."""
    order = chosen.flatten().argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return order, place


def _spread(x: Tensor, order: Tensor, k: int) -> Tensor:
    return x.index_select(0, order // k)


def _gather(y: Tensor, place: Tensor, k: int) -> Tensor:
    return y.index_select(0, place).view(-1, k, y.shape[-1]).sum(1)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, place, ctx.k = inputs
    ctx.save_for_backward(order, place)


class _Dispatch(torch.autograd.Function):
    setup_context = staticmethod(_keep)

    @staticmethod
    def forward(x: Tensor, order: Tensor, place: Tensor, k: int) -> Tensor:
        return _spread(x, order, k)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        order, place = ctx.saved_tensors
        return combine(g, order, place, ctx.k), None, None, None


class _Combine(torch.autograd.Function):
    setup_context = staticmethod(_keep)

    @staticmethod
    def forward(y: Tensor, order: Tensor, place: Tensor, k: int) -> Tensor:
        return _gather(y, place, k)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        order, place = ctx.saved_tensors
        return dispatch(g, order, place, ctx.k), None, None, None


def dispatch(x: Tensor, order: Tensor, place: Tensor, k: int) -> Tensor:
    """x [n, p] -> [n k, p], sorted by expert. Its gradient is ``combine``; autograd's own would scatter row by row."""
    return _Dispatch.apply(x, order, place, k)


def combine(y: Tensor, order: Tensor, place: Tensor, k: int) -> Tensor:
    """y [n k, p], sorted by expert -> [n, p], summed over each token's k rows. Its gradient is ``dispatch``."""
    return _Combine.apply(y, order, place, k)


def _one_kernel(x: Tensor, *sizes: int) -> bool:
    """Whether torch's grouped kernel supports this: bfloat16 on CUDA, sm_80 or newer, rows of a multiple of 16 bytes."""
    return (
        on_gpu(x)
        and x.dtype == torch.bfloat16
        and hasattr(torch, "_grouped_mm")
        and (not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 0))
        and all(size % 8 == 0 for size in sizes)
    )


def _slices(ends: Tensor) -> list[tuple[int, int]]:
    stops = ends.tolist()  # on a GPU the host waits here; on the CPU it costs nothing
    return list(zip([0, *stops[:-1]], stops))


@torch.library.custom_op("ngpt_core::expert_mm", mutates_args=())
def _mm(x: Tensor, w: Tensor, ends: Tensor, transpose: bool) -> Tensor:
    """[N, p] by [E, ff, d] -> [N, ff] with ``transpose`` (p = d: x_e w_e^T), else [N, d] (p = ff: x_e w_e)."""
    if _one_kernel(x, *w.shape[1:]) and len(x):
        return torch._grouped_mm(x, w.transpose(-2, -1) if transpose else w, offs=ends)
    y = x.new_empty(len(x), w.shape[1 if transpose else 2])
    for w_e, (a, b) in zip(w.unbind(0), _slices(ends)):
        if b > a:
            torch.mm(x[a:b], w_e.T if transpose else w_e, out=y[a:b])
    return y


@torch.library.custom_op("ngpt_core::expert_outer", mutates_args=())
def _outer(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """[N, p], [N, r] -> [E, p, r]: a_e^T b_e. An expert without tokens gets zeros."""
    if _one_kernel(a, a.shape[1], b.shape[1]) and len(a):
        out = torch._grouped_mm(a.T, b, offs=ends)
        # On some GPUs the kernel leaves the product of an empty group uninitialized; its gradient must be zero.
        empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        return torch.where(empty[:, None, None], 0.0, out)
    out = a.new_empty(len(ends), a.shape[1], b.shape[1])
    for out_e, (start, end) in zip(out.unbind(0), _slices(ends)):
        if end > start:
            torch.mm(a[start:end].T, b[start:end], out=out_e)
        else:
            out_e.zero_()
    return out


@_mm.register_fake
def _(x: Tensor, w: Tensor, ends: Tensor, transpose: bool) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1 if transpose else 2])


@_outer.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty(ends.shape[0], a.shape[1], b.shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, ends, ctx.transpose = inputs
    ctx.save_for_backward(x, w, ends)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, w, ends = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = expert_mm(grad, w, ends, not ctx.transpose) if ctx.needs_input_grad[0] else None
    grad_w = None
    if ctx.needs_input_grad[1]:
        grad_w = expert_outer(grad, x, ends) if ctx.transpose else expert_outer(x, grad, ends)
    return grad_x, grad_w, None, None


def _setup_outer(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_outer(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b, ends = ctx.saved_tensors
    grad = grad.contiguous()
    grad_a = expert_mm(b, grad, ends, True) if ctx.needs_input_grad[0] else None
    return grad_a, expert_mm(a, grad, ends, False) if ctx.needs_input_grad[1] else None, None


expert_mm = differentiable(_mm, _backward, _setup)
expert_outer = differentiable(_outer, _backward_outer, _setup_outer)
