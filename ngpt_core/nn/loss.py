"""How is a cross-entropy over a large vocabulary computed without ever holding [tokens, vocabulary]?

In chunks of tokens: the logits of a chunk are computed, turned into its loss and gradients, and overwritten by the next chunk.
The gradients are therefore computed in the forward pass, while the logits exist; the backward pass multiplies them by the
gradient of the loss, one number. At any time only one chunk of logits exists, and nothing else has that width. All chunks have
the same length, give or take one token.

On a GPU one kernel (``loss_triton.py``) does everything between the products: it reads the logits twice and writes b * dz once,
in the precision of the products. That one matrix serves both: b * dz times W is dh, and its transpose times h is b * G, which
is dW and, divided by b, gives ds.

This file is the arithmetic, with any forward scale s and any backward scale b; ``nn/head.py`` chooses b (LGP).

Symbols (N tokens, V vocabulary, d d_model):
    h [N, d]  hidden states     W [V, d]  output embedding     u = h W^T     z = s * u, the logits (eq. sz)
    p = softmax(z)              dz = dL/dz = p - onehot(target), for the sum over tokens
    G = dz^T h [V, d]           gives both gradients of the vocabulary: dW = b * G and ds_i = <w_i, G_i>, by row
"""

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..rehearsal import has_values, on_gpu, rehearsing
from .ssd import has_kernel
from .transforms import differentiable, transformed

__all__ = ["check_targets", "chunk_length", "chunks", "cross_entropy_sum", "wide"]

_OP = "ngpt_core::cross_entropy_sum"
_SCHEMA = (
    "(Tensor h, Tensor weight, Tensor targets, Tensor? s, Tensor? b, int ignore_index, int chunk, "
    "bool need_h, bool need_weight, bool need_s) -> (Tensor, Tensor, Tensor, Tensor)"
)
_HALVES = (torch.bfloat16, torch.float16)
_SMALLEST = 1e-12  # the kernel's b is at least this: b * G is divided by b again


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of logits, sums and the loss: float32 for the half precisions, else the dtype itself."""
    return torch.float32 if dtype in _HALVES else dtype


def _multiplies_halves(x: Tensor) -> bool:
    """Can this device multiply half precisions and accumulate in float32? CUDA can, if torch exposes it; elsewhere they are
    converted first (which is also faster on a CPU without half-precision units)."""
    return on_gpu(x) and x.dtype in _HALVES and (rehearsing() or _accumulates(x.dtype, x.device))


@cache
def _accumulates(dtype: torch.dtype, device: torch.device) -> bool:
    """Does torch add a product of this half precision to numbers in float32? CUDA's does; asked once."""
    out = torch.zeros(16, 16, device=device)
    try:
        _addmm_(out, out.to(dtype), out.to(dtype), beta=1)
    except (RuntimeError, TypeError) as error:
        why = f"torch {torch.__version__} does not add products of {dtype} to float32 on this device ({error})"
        warnings.warn(f"The loss multiplies in float32, which is several times slower: {why}.", stacklevel=2)
        return False
    return True


def _addmm_(out: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """out <- beta * out + a @ b in the precision of ``out``, whatever that of a and b. (beta = 0 does not read out.)"""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, out=out)


def chunk_length(h: Tensor) -> int:
    """Tokens of a chunk: as many as make its logits about as large as the gradient of the weight. On a GPU half of that: the
    logits in float32 and their gradients in bfloat16 together stay below it."""
    return max(256, h.shape[-1] // 2 if on_gpu(h) else h.shape[-1])


def chunks(N: int, most: int) -> list[slice]:
    """Slices of N rows, at most ``most`` each, as few as possible and of equal length, give or take one row. If a few more
    slices divide N evenly, that many."""
    fewest = -(-N // most)
    count = next((n for n in range(fewest, fewest + fewest // 4 + 1) if n and N % n == 0), fewest)
    ends = [N * (i + 1) // count for i in range(count)]
    return [slice(a, b) for a, b in zip([0, *ends], ends)]


def check_targets(targets: Tensor, vocab_size: int, ignore_index: int) -> None:
    """ValueError for a target outside the vocabulary. Only on the CPU: elsewhere the check would stall the device. There the
    kernel makes the loss NaN, and torch's operators trigger a device-side assertion, as in torch's cross-entropy."""
    if not has_values(targets):
        return
    bad = (targets != ignore_index) & ((targets < 0) | (targets >= vocab_size))
    if bad.any():
        i = int(bad.nonzero()[0])
        raise ValueError(
            f"A target must be in [0, vocab_size) = [0, {vocab_size}), or ignore_index = {ignore_index} to be ignored; "
            f"got {int(targets[i])} at token {i} of {len(targets)} (flattened; {int(bad.sum())} invalid targets in total)."
        )


def _cross_entropy_sum(
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    s: Tensor | None,
    b: Tensor | None,
    ignore_index: int,
    chunk: int,
    need_h: bool,
    need_weight: bool,
    need_s: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (N, d), (V, _), acc = h.shape, weight.shape, wide(h.dtype)
    check_targets(targets, V, ignore_index)
    # ngpt_core only: begin
    if _takes_kernel(h):
        return _by_kernel(h, weight, targets, s, b, ignore_index, chunk, need_h, need_weight, need_s)
    # ngpt_core only: end
    valid = targets != ignore_index
    index = torch.where(valid, targets, 0).unsqueeze(1)

    W = weight if _multiplies_halves(h) else weight.to(acc)
    losses = torch.empty(N, dtype=acc, device=h.device)
    dh = torch.empty_like(h) if need_h else h.new_empty(0)
    G = torch.zeros(V, d, dtype=acc, device=h.device) if need_weight or need_s else h.new_empty(0)
    parts = chunks(N, chunk)
    logits = torch.empty(max((x.stop - x.start for x in parts), default=0), V, dtype=acc, device=h.device)

    for rows in parts:
        x, t, ok = h[rows].to(W.dtype), index[rows], valid[rows].unsqueeze(1)
        z = logits[: len(x)]
        _addmm_(z, x, W.T, beta=0)  # u
        if s is not None:
            z.mul_(s)  # eq. sz
        z.sub_(z.amax(1, keepdim=True))
        z_t = z.gather(1, t)
        total = z.exp_().sum(1, keepdim=True)
        losses[rows] = torch.where(ok, total.log() - z_t, 0.0).squeeze(1)
        if not (need_h or need_weight or need_s):
            continue
        z.scatter_(1, t, z_t.exp() - total)  # total * (p - onehot)
        z.mul_(torch.where(ok, 1.0 / total, 0.0))  # dz
        if need_weight or need_s:
            _addmm_(G, z.to(W.dtype).T, x, beta=1)
        if need_h:
            du = z if b is None else z.mul_(b)  # section 2.1, LGP, when b is LGP's
            out = dh[rows] if dh.dtype == acc else torch.empty(len(x), d, dtype=acc, device=h.device)
            _addmm_(out, du.to(W.dtype), W, beta=0)
            dh[rows] = out

    ds = torch.empty(V if need_s else 0, dtype=acc, device=h.device)
    if need_s:
        for i in range(0, V, 4096):  # in blocks: the full G * W would be another [V, d]
            r = slice(i, i + 4096)
            torch.sum(G[r] * W[r], -1, out=ds[r])  # the exact gradient: sum over tokens of dz * u
    if need_weight and b is not None:
        G.mul_(b.unsqueeze(1))  # section 2.1, LGP for the path to W
    return losses.sum(), dh, G if need_weight else h.new_empty(0), ds


# ngpt_core only: begin
def _takes_kernel(h: Tensor) -> bool:
    """On CUDA in float32, or in bfloat16 if torch multiplies it with float32 results."""
    return (h.dtype == torch.float32 or (h.dtype == torch.bfloat16 and _multiplies_halves(h))) and has_kernel(h, "triton")


def _by_kernel(
    h: Tensor, weight: Tensor, targets: Tensor, s: Tensor | None, b: Tensor | None, ignore_index: int, chunk: int,
    need_h: bool, need_weight: bool, need_s: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``_cross_entropy_sum`` with one kernel between the products. Here G is b * G."""
    (N, d), V, wanted = h.shape, weight.shape[0], need_h or need_weight or need_s
    weight, targets = weight.contiguous(), targets.contiguous()
    s, b = (x if x is None else x.contiguous() for x in (s, b))
    if b is not None:  # a scale of 0 has b = 0, and its ds would be 0 / 0; in dh and dW so small a b vanishes
        b = torch.where(b.abs() < _SMALLEST, _SMALLEST, b)
    parts = chunks(N, chunk)
    longest = max((x.stop - x.start for x in parts), default=0)
    losses = torch.zeros(N, dtype=torch.float32, device=h.device)
    dh = torch.empty_like(h) if need_h else h.new_empty(0)
    G = torch.zeros(V, d, dtype=torch.float32, device=h.device) if need_weight or need_s else h.new_empty(0)
    logits = torch.empty(longest, V, dtype=torch.float32, device=h.device)
    scaled = logits if h.dtype == torch.float32 or not wanted else torch.empty_like(logits, dtype=h.dtype)
    for rows in parts:
        x = h[rows]
        u, du = logits[: len(x)], scaled[: len(x)]
        _addmm_(u, x, weight.T, beta=0)
        loss_rows(u, s, b, targets[rows], ignore_index, losses[rows], du if wanted else None)
        if need_weight or need_s:
            _addmm_(G, du.T, x, beta=1)
        if need_h:
            torch.mm(du, weight, out=dh[rows])
    ds = torch.empty(V if need_s else 0, dtype=torch.float32, device=h.device)
    if need_s:
        loss_dots(G, weight, b, ds)
    return losses.sum(), dh, G if need_weight else h.new_empty(0), ds


@torch.library.custom_op("ngpt_core::loss_rows", mutates_args=("losses", "du"))
def loss_rows(
    u: Tensor, s: Tensor | None, b: Tensor | None, targets: Tensor, ignore: int, losses: Tensor, du: Tensor | None
) -> None:
    """``loss_triton.rows`` as an operator, so that a rehearsal counts it."""
    from .loss_triton import rows

    rows(u, s, b, targets, ignore, losses, du)


@torch.library.custom_op("ngpt_core::loss_dots", mutates_args=("out",))
def loss_dots(G: Tensor, W: Tensor, b: Tensor, out: Tensor) -> None:
    """``loss_triton.dots`` as an operator."""
    from .loss_triton import dots

    dots(G, W, b, out)


@loss_rows.register_fake
def _(*inputs: Any) -> None:
    pass


@loss_dots.register_fake
def _(*inputs: Any) -> None:
    pass


# ngpt_core only: end
def _shapes(h: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """What the compiler needs to know about the operation: the shapes and dtypes of its results."""
    acc, (need_h, need_weight, need_s) = wide(h.dtype), others[-3:]
    return (
        h.new_empty((), dtype=acc),
        torch.empty_like(h) if need_h else h.new_empty(0),
        weight.new_empty(weight.shape, dtype=acc) if need_weight else h.new_empty(0),
        h.new_empty(weight.shape[0] if need_s else 0, dtype=acc),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.needs, ctx.weight_dtype = inputs[-3:], inputs[1].dtype


def _backward(ctx: Any, g: Tensor | None, *second: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(x is not None for x in second):
        raise RuntimeError(
            "The chunked cross-entropy has no second derivative: its gradients are computed in the forward pass. "
            "For gradients of gradients use the full logits: F.cross_entropy(logit_scale(F.linear(h, weight), s_z), targets)."
        )
    if g is None:
        return (None,) * 10
    dh, dW, ds = ctx.saved_tensors
    need_h, need_weight, need_s = ctx.needs
    return (
        _times(dh, g) if need_h else None,
        _times(dW, g, ctx.weight_dtype) if need_weight else None,
        None,
        _times(ds, g) if need_s else None,
        *(None,) * 6,
    )


def _times(x: Tensor, g: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x * g in this precision (None: that of x): in one pass, and in place (x is as large as the weight) unless the precision
    changes, or the graph is kept and x may be needed again.

    Torch can report whether a backward pass keeps its graph (retain_graph, create_graph); if this version cannot, assume that
    it does. ``detach``: x is an output of this operation, and a gradient must not hold its graph.
    """
    dtype = x.dtype if dtype is None else dtype
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or transformed():
        return (x * g).to(dtype)
    if dtype != x.dtype:
        return torch.mul(x, g, out=torch.empty_like(x, dtype=dtype))
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    if ask is None or ask():
        return x * g
    return x.detach().mul_(g)


# A custom operator, so that torch.compile does not trace the loop (fullgraph=True works).
_operator = torch.library.custom_op(_OP, _cross_entropy_sum, mutates_args=(), schema=_SCHEMA)
_operator.register_fake(_shapes)
cross_entropy_sum = differentiable(_operator, _backward, _save)
