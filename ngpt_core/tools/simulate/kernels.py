"""What would CUDA run where the CPU runs something else, and what do kernels without operators inside launch and allocate?

    opened       our custom operators that are made of torch's operators: their bodies run on the fake tensors
    SHAPES       the kernels of mamba-ssm, causal-conv1d, torch's attention over documents and our optimizer: launches, FLOPs
                 and workspace, read from their source (mamba-ssm 2.3, causal-conv1d 1.6, flash attention 2)
    attention    the kernel that torch chooses for attention on CUDA: flash, or plain products if there is a mask

Symbols: b batch, T tokens, H heads of P channels, G groups, N state, Q chunk, c chunks.
"""

import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...nn import attention as attention_module
from ...nn import grouped, loss

__all__ = ["SHAPES", "Shape", "attention", "opened"]

ours = torch.ops.ngpt_core
aten = torch.ops.aten


def opened(func: Any) -> Callable | None:
    """The body of one of our custom operators, if it consists of operators."""
    return _BODIES.get(func)


_BODIES: dict[Any, Callable] = {
    ours.cross_entropy_sum.default: loss._cross_entropy_sum,
    ours.expert_mm.default: grouped._mm._init_fn,
    ours.expert_outer.default: grouped._outer._init_fn,
    ours.rope_table.default: attention_module.rope_table._init_fn,
}


class Shape(NamedTuple):
    """What a kernel does, as far as shapes tell."""

    launches: int
    flops: Callable[..., int]
    workspace: Callable[..., Any] = lambda *args: None


def _scan_sizes(x: Tensor, B: Tensor, chunk: int) -> tuple[int, int, int, int, int, int, int]:
    b, T, H, P = x.shape
    return b, T, H, P, B.shape[2], B.shape[3], chunk


def _scan_flops(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any, S: Any, seq: Any, chunk: int) -> int:
    b, T, H, P, G, N, Q = _scan_sizes(x, B, chunk)
    return 2 * b * T * (Q * G * N + Q * H * P + 2 * H * P * N)  # C B^T; its product with x; states in and out


def _scan_workspace(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any, S: Any, seq: Any, chunk: int) -> Any:
    b, T, H, P, G, N, Q = _scan_sizes(x, B, chunk)
    c = math.ceil(T / Q)
    kept = [x.new_empty(b, H, c, Q, dtype=torch.float32) for _ in range(2)]  # dt and the cumulative sums of dt A
    states = x.new_empty(b, c, H, P, N, dtype=torch.float32)
    kept.append(x.new_empty(b, c, H, P, N))  # the states at the starts of the chunks
    del states
    kept.append(x.new_empty(b, c, G, Q, Q, dtype=torch.float32))  # C B^T
    return kept


def _scan_backward_flops(dy: Tensor, dS: Tensor, y: Tensor, *inputs: Any) -> int:
    x, _, _, B, *_, chunk = inputs
    b, T, H, P, G, N, Q = _scan_sizes(x, B, chunk)
    again = Q * G * N + H * P * N  # C B^T and the states are computed again
    return 2 * b * T * (again + 4 * H * P * N + 2 * Q * H * P + 2 * Q * G * N)  # dstates, dx, dB, dC; dx, dCB; dB, dC


def _scan_backward_workspace(dy: Tensor, dS: Tensor, y: Tensor, *inputs: Any) -> Any:
    x, dt, _, B, *_, chunk = inputs
    b, T, H, P, G, N, Q = _scan_sizes(x, B, chunk)
    c = math.ceil(T / Q)
    kept = [torch.empty_like(B), torch.empty_like(B), torch.empty_like(dt), torch.empty_like(dt)]  # as the source makes them
    kept += [x.new_empty(b, H, c, Q, dtype=torch.float32) for _ in range(2)]
    kept.append(x.new_empty(b, c, G, Q, Q, dtype=torch.float32))
    states = [x.new_empty(b, c, H, P, N, dtype=torch.float32) for _ in range(2)]  # and their gradients
    kept += [x.new_empty(b, c, H, P, N) for _ in range(2)]  # both in the precision of x
    del states
    kept += [x.new_empty(b, T, G, N, dtype=torch.float32) for _ in range(2)]  # dB, dC
    kept.append(x.new_empty(b, c, G, Q, Q, dtype=torch.float32))  # d(C B^T)
    return kept


SHAPES: dict[Any, Shape] = {
    ours.ssd_kernels.default: Shape(5, _scan_flops, _scan_workspace),
    ours.ssd_kernels_backward.default: Shape(15, _scan_backward_flops, _scan_backward_workspace),
    ours.conv_kernel.default: Shape(1, lambda x, w, *_: 2 * x.numel() * w.shape[0]),
    ours.conv_kernel_backward.default: Shape(1, lambda g, x, w, *_: 4 * x.numel() * w.shape[0]),
    ours.loss_rows.default: Shape(1, lambda *_: 0),
    ours.loss_dots.default: Shape(1, lambda *_: 0),
    ours.optimizer_kernel.default: Shape(1, lambda *_: 0),
}


def _packed_flops(products: int) -> Callable[..., int]:
    """Of attention over documents. Their lengths are values, which a rehearsal does not have: all as long as their mean. As
    torch counts for flash attention, a causal product counts whole."""

    def flops(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> int:
        (tokens, H, d), documents = q.shape, len(offsets) - 1
        return products * 2 * H * d * tokens * tokens // documents

    return flops


def _packed_workspace(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
    """dq in float32, the sums of the softmax, and dk and dv per query head before they are summed over a group."""
    kept = [torch.empty_like(q, dtype=torch.float32), q.new_empty(q.shape[:2], dtype=torch.float32)]
    return kept + ([torch.empty_like(q) for _ in range(2)] if q.shape[1] != k.shape[1] else [])


if importlib.util.find_spec("torch.nn.attention.varlen"):  # torch 2.10
    import torch.nn.attention.varlen  # it registers the operators

    _forward, _backward = _packed_flops(2), _packed_flops(5)
    SHAPES[torch.ops.torch_attn._varlen_attn.default] = Shape(1, lambda q, k, v, offsets, *_: _forward(q, k, v, offsets))
    SHAPES[torch.ops.torch_attn._varlen_attn_backward.default] = Shape(
        4, lambda grad, q, k, v, out, sums, offsets, *_: _backward(q, k, v, offsets), _packed_workspace
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention by the kernel that torch takes on CUDA. Flash refuses masks and float32; the
    memory-efficient one refuses fewer key heads than query heads, and padding of odd lengths is left out."""
    if attn_mask is None and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    if not enable_gqa and attn_mask is None:
        needs = any(x.requires_grad for x in (q, k, v))
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, needs, dropout_p, is_causal, scale=scale)[0]
    wide = (x.float() for x in (q, k, v)) if q.dtype in (torch.bfloat16, torch.float16) else (q, k, v)
    out = aten._scaled_dot_product_attention_math(*wide, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    return out.to(q.dtype)
