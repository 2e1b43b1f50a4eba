"""How does a state-space layer read a whole sequence without going through it token by token?

The Mamba-2 recurrence (section 3.2 builds on it) is linear in its state, so a chunk of Q tokens can be computed like masked
attention, and only the states at the chunk boundaries need a sequential pass. This file has the same function twice:

    ssd_recurrent   the recurrence itself, the definition of the layer
    ssd_chunked     the fast form in plain torch: chunks, batched matrix products
    ssd             what the model calls: mamba-ssm's kernels on CUDA, otherwise ssd_chunked

For each head, with the state S [P, N] and a_t = exp(dt_t A) in (0, 1):

    S_t = a_t S_{t-1} + dt_t x_t B_t^T          y_t = S_t C_t + D x_t

Symbols (Mamba-2's letters):
    b batch    T tokens    H heads      P channels of a head     N state of a channel     G groups of heads that share B, C
    r = H / G heads per group           Q chunk length           c chunks                 q, s positions in a chunk (s <= q)
    x  [b, T, H, P] input               dt [b, T, H] > 0 step    A [H] < 0 decay          D [H] skip
    B  [b, T, G, N] into the state      C  [b, T, G, N] out of it
    documents [b, T]: ids of packed documents (or ``Packed``); no state passes from one to the next. An initial state belongs to
                      the first.

States are computed in float32 (float64 stays float64), even under autocast. Every decay is exp of a difference of cumulative
sums, clamped to at most 0 *before* exp (a decay is at most 1, since dt > 0 and A < 0). Otherwise the entries above the diagonal
would overflow, and 0 * inf in the backward pass is NaN.
"""

import importlib.util
import warnings
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ..rehearsal import on_gpu, rehearsing
from .documents import Packed, segments
from .precision import full_precision

__all__ = ["kernel_missing", "ssd", "ssd_chunked", "ssd_kernels", "ssd_recurrent"]


def _check(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial_state: Tensor | None,
    documents: Tensor | Packed | None,
) -> None:  # fmt: skip
    """Check the shapes, so that a mistake is reported here and not inside a matrix product."""
    (b, T, H, P), (G, N) = x.shape, B.shape[2:]
    wanted: dict[str, tuple] = {"dt": (dt, (b, T, H)), "A": (A, (H,)), "B": (B, (b, T, G, N)), "C": (C, (b, T, G, N))}
    ids = documents.ids if isinstance(documents, Packed) else documents
    wanted |= {"D": (D, (H,)), "initial_state": (initial_state, (b, H, P, N)), "documents": (ids, (b, T))}
    for name, (value, shape) in wanted.items():
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(f"{name} must have shape {shape} for x of shape {tuple(x.shape)}; got {tuple(value.shape)}.")


def ssd_recurrent(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    documents: Tensor | Packed | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token: (y [b, T, H, P], final state [b, H, P, N]).

    x: [b, T, H, P] input, H heads of P channels.
    dt: [b, T, H] > 0, the length of each step.
    A: [H] < 0, the decay rate: each token multiplies the state by exp(dt A).
    B, C: [b, T, G, N], into the state of N columns and out of it, shared by the H / G heads
        of a group.
    D: [H], the skip connection, or None.
    initial_state: [b, H, P, N], or None for zeros; it belongs to the first document.
    documents: [b, T] ids of packed documents, or None; no state passes from one to the next.
    """
    _check(x, dt, A, B, C, D, initial_state, documents)
    segment = None if documents is None else segments(documents)
    wide, r = torch.promote_types(x.dtype, torch.float32), x.shape[2] // B.shape[2]
    xs, dt, A = x.to(wide), dt.to(wide), A.to(wide)
    # each head uses its group's B and C
    B, C = (part.to(wide).repeat_interleave(r, dim=2) for part in (B, C))
    if initial_state is None:
        S = xs.new_zeros(*xs[:, 0].shape, B.shape[-1])
    else:
        S = initial_state.to(wide)
    ys = []
    for t in range(x.shape[1]):
        if segment is not None and t > 0:
            same = segment[:, t] == segment[:, t - 1]
            S = torch.where(same[:, None, None, None], S, 0.0)
        a = torch.exp(dt[:, t] * A)[..., None, None]
        S = a * S + (dt[:, t, :, None] * xs[:, t])[..., None] * B[:, t, :, None]  # S_t
        ys.append((S * C[:, t, :, None]).sum(-1))  # y_t
    y = torch.stack(ys, 1)
    return (y if D is None else y + D.to(wide)[:, None] * xs).to(x.dtype), S


def ssd_chunked(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    documents: Tensor | Packed | None = None,
    chunk: int = 128,
) -> tuple[Tensor, Tensor]:
    """The same function in chunks of Q = ``chunk`` tokens: matrix products inside a chunk, a short recurrence between chunks.

    Arguments and results are those of ``ssd_recurrent``; ``chunk`` changes only the speed.
    """
    _check(x, dt, A, B, C, D, initial_state, documents)
    with full_precision(x):
        return _chunked(x, dt, A, B, C, D, initial_state, documents, chunk)


def _chunked(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    documents: Tensor | Packed | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    T = len(range(x.shape[1]))  # a plain int: torch.compile makes one graph per length; a symbolic one would take minutes
    dtype, G = x.dtype, B.shape[2]
    wide, Q, r = torch.promote_types(dtype, torch.float32), min(chunk, T), x.shape[2] // G
    x, dt, A, B, C = (part.to(wide) for part in (x, dt, A, B, C))
    skip = None if D is None else D.to(wide)[:, None] * x
    segment = None if documents is None else segments(documents)
    if pad := -T % Q:  # tokens with dt = 0 neither decay the state nor write to it
        x, dt, B, C = (F.pad(part, (0, 0) * (part.ndim - 2) + (0, pad)) for part in (x, dt, B, C))
        segment = None if segment is None else torch.cat([segment, segment[:, -1:].expand(-1, pad)], 1)

    # The heads of a group share B and C, which are never repeated: a group's heads are stored side by side as columns (r P).
    xs = rearrange(x, "b (c q) (g r) p -> b c g q r p", q=Q, g=G)
    ds = rearrange(dt, "b (c q) (g r) -> b c g q r", q=Q, g=G)
    B, C = (rearrange(part, "b (c q) g n -> b c g q n", q=Q) for part in (B, C))
    each = rearrange(dt * A, "b (c q) (g r) -> b c g r q", q=Q, g=G)  # log a_q
    log_a = each.cumsum(-1)  # log(a_1 ... a_q), from the start of the chunk
    to_end = F.pad(each[..., 1:].flip(-1).cumsum(-1).flip(-1), (0, 1))  # log(a_{q+1} ... a_Q)

    # 1. Inside a chunk: attention with the decays L_qs = a_{s+1} ... a_q for s < q, and each token's own term. That term has no
    #    decay: if it were part of L, the largest terms in the gradients of the decays would cancel and leave rounding errors.
    u = xs * ds[..., None]
    own = (C * B).sum(-1)[..., None, None] * u
    CB = (C @ B.mT).tril(-1)  # b c g q s
    if segment is not None:
        of = rearrange(segment, "b (c q) -> b c 1 1 q", q=Q)
        CB = torch.where(of[:, :, 0, :, :, None] == of[:, :, 0, :, None], CB, 0.0)
    L = torch.exp((log_a[..., :, None] - log_a[..., None, :]).clamp_max(0.0))  # b c g r q s
    y = (CB[:, :, :, None] * L) @ rearrange(u, "b c g q r p -> b c g r q p")
    y = rearrange(y, "b c g r q p -> b c g q r p") + own

    # 2. What a chunk adds to the state at its end.
    from_start, through = log_a, log_a[..., -1:]
    if segment is not None:  # only the last document writes to the end, only the first reads from the start
        first = F.pad(of[:, :-1, ..., -1:], (0, 0, 0, 0, 0, 0, 1, 0))  # the segment that the incoming state belongs to
        to_end = to_end.masked_fill(of != of[..., -1:], -torch.inf)
        from_start = log_a.masked_fill(of != first, -torch.inf)
        through = through.masked_fill(of[..., -1:] != first, -torch.inf)
    w = ds * torch.exp(to_end).mT
    added = B.mT @ rearrange(xs * w[..., None], "b c g q r p -> b c g q (r p)")  # b c g n (r p)

    # 3. Between chunks: the recurrence again, on whole states.
    added = rearrange(added, "b c g n (r p) -> b c g n r p", r=r)
    S = torch.zeros_like(added[:, 0])
    if initial_state is not None:
        S = rearrange(initial_state.to(wide), "b (g r) p n -> b g n r p", g=G)
    a, at_start = torch.exp(rearrange(through, "b c g r 1 -> b c g 1 r 1")), []
    for a_c, added_c in zip(a.unbind(1), added.unbind(1)):
        at_start.append(S)
        S = a_c * S + added_c
    states = rearrange(torch.stack(at_start, 1), "b c g n r p -> b c g n (r p)")

    # 4. What the state at the start of a chunk contributes to its tokens.
    y = y + rearrange(C @ states, "b c g q (r p) -> b c g q r p", r=r) * torch.exp(from_start).mT[..., None]
    y = rearrange(y, "b c g q r p -> b (c q) (g r) p")[:, :T]
    return (y if skip is None else y + skip).to(dtype), rearrange(S, "b g n r p -> b (g r) p n")


def has_kernel(x: Tensor, package: str) -> bool:
    """Whether x is on a GPU with this package of CUDA kernels; a rehearsal assumes that it is installed."""
    return on_gpu(x) and (rehearsing() or not kernel_missing(package))


@torch.compiler.assume_constant_result  # of a plain function: a compiler would look through a cached one, and trace the search
def kernel_missing(package: str) -> bool:
    """Whether a package of CUDA kernels is missing. Warns once: plain torch on a GPU is several times slower."""
    return _missing(package)


@cache
def _missing(package: str) -> bool:
    missing = importlib.util.find_spec(package) is None
    if missing:
        what = "triton" if package == "triton" else '"ngpt-core[gpu]"'
        how = f"{package} is not installed, so slower plain torch code runs instead. Install it: pip install {what}"
        warnings.warn(how, stacklevel=4)
    return missing


# mamba-ssm's kernels as custom operators, so that torch.compile treats the scan as one node.
_ARGUMENTS = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? initial_state, Tensor? seq_idx, int chunk"


@torch.library.custom_op("ngpt_core::ssd_kernels", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)")
def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial_state: Tensor | None,
    seq_idx: Tensor | None, chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    options = {"D": D, "initial_states": initial_state, "seq_idx": seq_idx, "return_final_states": True}
    return mamba_chunk_scan_combined(x, dt, A, B, C, chunk, **options)


@torch.library.custom_op(
    "ngpt_core::ssd_kernels_backward", mutates_args=(), schema=f"(Tensor dy, Tensor dS, Tensor y, {_ARGUMENTS}) -> Tensor[]"
)
def _scan_backward(
    dy: Tensor, dS: Tensor, y: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    initial_state: Tensor | None, seq_idx: Tensor | None, chunk: int,
) -> list[Tensor]:  # fmt: skip
    """The gradients of those among x, dt, A, B, C, D, initial_state that are not None."""
    from mamba_ssm.ops.triton.ssd_combined import _mamba_chunk_scan_combined_bwd as backward

    options = {"D": D, "initial_states": initial_state, "seq_idx": seq_idx, "dfinal_states": dS}
    *grads, dD, _, _, d_initial = backward(dy, x, dt, A, B, C, y, chunk, **options)
    inputs = (x, dt, A, B, C, D, initial_state)
    return [g.to(v.dtype).contiguous() for g, v in zip([*grads, dD, d_initial], inputs) if v is not None]


@_scan.register_fake
def _(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    state = x.new_empty(x.shape[0], *x.shape[2:], B.shape[-1], dtype=torch.float32)
    return x.new_empty(x.shape), state


@_scan_backward.register_fake
def _(dy: Tensor, dS: Tensor, y: Tensor, *inputs: Any) -> list[Tensor]:
    return [v.new_empty(v.shape) for v in inputs[:-2] if v is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.chunk = inputs
    ctx.save_for_backward(output[0], *tensors)


def _scan_gradients(ctx: Any, dy: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
    y, *tensors = ctx.saved_tensors
    found = iter(torch.ops.ngpt_core.ssd_kernels_backward(dy.contiguous(), dS, y, *tensors, ctx.chunk))
    return *(None if v is None else next(found) for v in tensors[:-1]), None, None  # seq_idx and chunk have none


_scan.register_autograd(_scan_gradients, setup_context=_save)


def ssd_kernels(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    documents: Tensor | Packed | None = None,
    chunk: int = 128,
) -> tuple[Tensor, Tensor]:
    """The same function by mamba-ssm's kernels (CUDA). There, the initial state belongs to sequence 0."""
    return _scan(x, dt, A, B, C, D, initial_state, None if documents is None else segments(documents), chunk)


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    documents: Tensor | Packed | None = None,
    chunk: int = 128,
) -> tuple[Tensor, Tensor]:
    """The scan by the fastest form for these tensors: (y [b, T, H, P], final state [b, H, P, N])."""
    if x.shape[1] == 1:  # one token: the recurrence is fastest
        return ssd_recurrent(x, dt, A, B, C, D, initial_state, documents)
    form = ssd_kernels if has_kernel(x, "mamba_ssm") else ssd_chunked
    return form(x, dt, A, B, C, D, initial_state, documents, chunk)
