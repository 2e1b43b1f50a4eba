"""How is a cross-entropy over a large vocabulary computed without ever holding [tokens, vocabulary]?

In chunks of tokens: the logits of a chunk are computed, turned into its loss and gradients, and overwritten by the next chunk.
The gradients are therefore computed in the forward pass, while the logits exist; the backward pass multiplies them by the
gradient of the loss, one number. At any time only one chunk of logits exists, and nothing else has that width.

This file is the arithmetic, with any forward scale s and any backward scale b; ``nn/head.py`` chooses b (LGP).

Symbols (N tokens, V vocabulary, d d_model):
    h [N, d]  hidden states     W [V, d]  output embedding     u = h W^T     z = s * u, the logits (eq. sz)
    p = softmax(z)              dz = dL/dz = p - onehot(target), for the sum over tokens
    G = dz^T h [V, d]           gives both gradients of the vocabulary: dW = b * G and ds_i = <w_i, G_i>, by row
"""

from typing import Any

import torch
from torch import Tensor

from ..rehearsal import has_values, on_gpu
from .transforms import differentiable

__all__ = ["check_targets", "cross_entropy_sum", "wide"]

_OP = "ngpt_core::cross_entropy_sum"
_SCHEMA = (
    "(Tensor h, Tensor weight, Tensor targets, Tensor? s, Tensor? b, int ignore_index, int chunk, "
    "bool need_h, bool need_weight, bool need_s) -> (Tensor, Tensor, Tensor, Tensor)"
)
_HALVES = (torch.bfloat16, torch.float16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of logits, sums and the loss: float32 for the half precisions, else the dtype itself."""
    return torch.float32 if dtype in _HALVES else dtype


def _multiplies_halves(x: Tensor) -> bool:
    """Can this device multiply half precisions and accumulate in float32? CUDA can, if torch exposes it; elsewhere they are
    converted first (which is also faster on a CPU without half-precision units)."""
    return on_gpu(x) and x.dtype in _HALVES and "dtype_out" in torch.ops.aten.addmm.overloads()


def _addmm_(out: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """out <- beta * out + a @ b in the precision of ``out``, whatever that of a and b. (beta = 0 does not read out.)"""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, out=out)


def check_targets(targets: Tensor, vocab_size: int, ignore_index: int) -> None:
    """ValueError for a target outside the vocabulary. Only on the CPU: elsewhere the check would stall the device, and an
    index out of range triggers a device-side assertion, as in torch's cross-entropy."""
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
    valid = targets != ignore_index
    check_targets(targets, V, ignore_index)
    index = torch.where(valid, targets, 0).unsqueeze(1)

    W = weight if _multiplies_halves(h) else weight.to(acc)
    losses = torch.empty(N, dtype=acc, device=h.device)
    dh = torch.empty_like(h) if need_h else h.new_empty(0)
    G = torch.zeros(V, d, dtype=acc, device=h.device) if need_weight or need_s else h.new_empty(0)
    logits = torch.empty(min(chunk, N), V, dtype=acc, device=h.device)

    for i in range(0, N, chunk):
        rows = slice(i, i + chunk)
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
        _times(dW, g).to(ctx.weight_dtype) if need_weight else None,
        None,
        _times(ds, g) if need_s else None,
        *(None,) * 6,
    )


def _times(x: Tensor, g: Tensor) -> Tensor:
    """x * g, in place (x is as large as the weight) unless the graph is kept and x may be needed again.

    Torch can report whether a backward pass keeps its graph (retain_graph, create_graph); if this version cannot, assume that
    it does. ``detach``: x is an output of this operation, and a gradient must not hold its graph.
    """
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    if torch.compiler.is_compiling() or ask is None or ask():
        return x * g
    return x.detach().mul_(g)


# A custom operator, so that torch.compile does not trace the loop (fullgraph=True works).
_operator = torch.library.custom_op(_OP, _cross_entropy_sum, mutates_args=(), schema=_SCHEMA)
_operator.register_fake(_shapes)
cross_entropy_sum = differentiable(_operator, _backward, _save)
