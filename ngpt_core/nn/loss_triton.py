"""What does the loss do between its matrix products on a GPU? One Triton program per token reads its logits twice.

    rows_kernel   u [c, V] -> the losses [c] and the gradients b * dz [c, V] in the precision of the next products
    dots_kernel   <w_i, G_i> / b_i for each row i of the vocabulary: the gradient of its scale

Everything is computed in float32. The plain form is the loop of ``loss._cross_entropy_sum``.

Checked in Triton's interpreter against that form, and compiled ahead of time for sm_80, sm_90 and sm_100. The interpreter
checks only the algebra: these kernels have not been timed on a GPU yet, and no speed is claimed for them.

Symbols: c tokens of a chunk, V vocabulary; u, z = s * u, p, dz, b, G as in loss.py. lse = log(sum exp z).
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["dots", "rows"]


@triton.jit(do_not_specialize=["ignore"])
def rows_kernel(  # type: ignore[no-untyped-def]  # Triton types it, and reads annotations its own way
    U, S, B, TARGETS, LOSSES, DU, V, ignore, BLOCK: tl.constexpr, SCALED: tl.constexpr, GRADIENT: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    U, DU = U + row * V, DU + row * V
    target = tl.load(TARGETS + row)
    counts = target != ignore
    lanes = tl.arange(0, BLOCK)
    inside = (target >= 0) & (target < V)  # any other target makes the loss NaN
    own = tl.load(U + target, inside, float("nan"))  # before the sums, at which all warps meet: DU may be U
    if SCALED:
        own = own * tl.load(S + target, inside, 0.0)

    top = tl.full([BLOCK], -3e38, tl.float32)  # finite: -inf - -inf would be NaN
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        at = first + lanes
        z = tl.load(U + at, at < V, 0.0)
        if SCALED:
            z = z * tl.load(S + at, at < V, 0.0)  # eq. sz
        z = tl.where(at < V, z, -float("inf"))
        higher = tl.maximum(top, z)
        total = total * tl.exp(top - higher) + tl.exp(z - higher)
        top = higher
    highest = tl.max(top, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))

    tl.store(LOSSES + row, tl.where(counts, lse - own, 0.0))

    if GRADIENT:
        for first in range(0, V, BLOCK):
            at = first + lanes
            z = tl.load(U + at, at < V, 0.0)
            if SCALED:
                z = z * tl.load(S + at, at < V, 0.0)
            du = tl.exp(z - lse) - tl.where(at == target, 1.0, 0.0)  # dz
            if SCALED:
                du = du * tl.load(B + at, at < V, 0.0)  # section 2.1, LGP, when b is LGP's
            tl.store(DU + at, tl.where(counts, du, 0.0).to(DU.dtype.element_ty), at < V)


@triton.jit
def dots_kernel(  # type: ignore[no-untyped-def]  # Triton types it, and reads annotations its own way
    G, W, B, OUT, d, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    G, W = G + row * d, W + row * d
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, d, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(G + at, at < d, 0.0) * tl.load(W + at, at < d, 0.0).to(tl.float32)
    tl.store(OUT + row, tl.sum(total, 0) / tl.load(B + row))


def rows(
    u: Tensor, s: Tensor | None, b: Tensor | None, targets: Tensor, ignore: int, losses: Tensor, du: Tensor | None
) -> None:
    """Write the losses [c] and, if wanted, du = b * dz [c, V] of the logits u [c, V] and the targets [c].

    u: float32, contiguous; ``du`` may be u itself.
    s, b: [V] float32, both or neither.
    """
    c, V = u.shape
    block = min(4096, triton.next_power_of_2(V))
    with _on(u):
        rows_kernel[(c,)](
            *(u, s, b, targets, losses, u if du is None else du, V, ignore),
            BLOCK=block, SCALED=s is not None, GRADIENT=du is not None, num_warps=max(1, block // 512),
        )  # fmt: skip


def dots(G: Tensor, W: Tensor, b: Tensor, out: Tensor) -> None:
    """out_i <- <w_i, G_i> / b_i, for G [V, d] float32, W [V, d], b and out [V]."""
    V, d = G.shape
    block = min(1024, triton.next_power_of_2(d))
    with _on(G):
        dots_kernel[(V,)](G, W, b, out, d, BLOCK=block, num_warps=max(1, block // 256))


def _on(x: Tensor) -> torch.cuda.device | nullcontext[None]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
