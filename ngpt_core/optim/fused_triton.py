"""What is the whole step on a GPU? One Triton program per row: a row is read once, written once, and nothing else is stored.
One launch takes all tensors of a group that have one shape (launches.py).

The same step as ``algorithm.update``, in the same order. All of a row lives in registers, so the sums that fused_cpu.cpp takes
in sweeps are plain reductions here. The numbers of a step (t, lr, the decay factor, cap) may be tensors on the device, and so
can the mask of the non-finite check: then the host waits for nothing and a CUDA graph can hold the step. PMEN's signs are the
counter-based ones of ``pmen.signs``, bit for bit.

Checked in Triton's interpreter against the readable path, and compiled ahead of time for sm_80, sm_90 and sm_100. The
interpreter checks only the algebra: these kernels have not been timed on a GPU yet, and no speed is claimed for them.

Symbols: those of algorithm.py. Also
    delta  the displacement with PMEN's noise, without weight decay      k    its component along w, <w, delta> / <w, w>
    u      the part of delta that is tangent to w                        x    the gradient after projection and SMGC
"""

import math
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .algorithm import Rule, Slot
from .launches import here, launches

MAX_ROW = 16384  # coordinates of a row that fit in one program's registers
_CHUNK = 1024  # coordinates of a program where there are no rows
_HALF, _ONE, _POWER = 0, 1, 2  # the gate: a = 1/2, a = 1, any other
_WORDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
_WAYS = (None, "project", "parallel")  # Rule.transport, by number


@triton.jit
def _scatter(x):  # type: ignore[no-untyped-def]  # Triton types it, and reads annotations its own way
    """``pmen._mix`` in 32 bits."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _correction(t, log_beta):  # type: ignore[no-untyped-def]  # Triton types it, and reads annotations its own way
    """1 - beta^t, in float64: float32 would lose digits for beta near 1."""
    return (1.0 - tl.exp(t.to(tl.float64) * log_beta)).to(tl.float32)


@triton.jit
def _moments(  # type: ignore[no-untyped-def]  # Triton types it, and reads annotations its own way
    x, m, v, bc1, bc2, clipping, floor, rest1, beta2, rest2, C_R, EPS, eps_num, one_a,
    CLIP: tl.constexpr, GATE: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """SMGC, the moments and the gate: (gamma m_hat / d, m, v)."""
    if CLIP:
        bound = C_R * tl.maximum(tl.sqrt_rn(v), floor)  # app. C, eqs. v_bar and C_R
        clipped = tl.where(x > bound, bound, tl.where(x < -bound, -bound, x))  # app. C, eq. g_i; NaN stays NaN
        x = tl.where(clipping, clipped, x)
    m = tl.where(rest1 < 0.5, m + rest1 * (x - m), x - (1 - rest1) * (x - m))  # alg. 1, line 4: the larger part as it is
    v = beta2 * v + rest2 * (x * x)  # alg. 1, line 5
    d = tl.sqrt_rn(v / bc2) + eps_num  # alg. 1, lines 7 and 8
    eps_gate = tl.load(EPS).to(tl.float32) if OWN else EPS
    if GATE == 1:
        whole = d + eps_gate  # app. A: d + eps_gate (d / eps_gate)^(1-a)
    elif GATE == 0:
        whole = d + tl.sqrt_rn(d * eps_gate)
    else:
        whole = d + eps_gate * tl.exp2(one_a * tl.log2(d / eps_gate))
    return tl.where(whole != 0, m / bc1 / whole, 0.0), m, v  # at d = 0 the limit; NaN goes on


@triton.jit
def _numbers(T, t, BC1, BC2, FLOOR, log_beta1, log_beta2, s_min, smgc_start, COUNTER: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton types it, and reads annotations its own way
    """(t, 1 - beta1^t, 1 - beta2^t, whether SMGC acts, sqrt(1 - beta2^k) s_min): the host's, or from the device's t."""
    if COUNTER:
        t = tl.load(T)
        k = t - 1
        floor = tl.sqrt_rn(_correction(k, log_beta2)) * s_min
        return t.to(tl.int32), _correction(t, log_beta1), _correction(t, log_beta2), k >= smgc_start, floor
    else:
        return t, BC1, BC2, True, FLOOR


@triton.jit
def _tensor(TABLE, column: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton types it, and reads annotations its own way
    """The address of this program's tensor, from its row of the table."""
    at = tl.load(TABLE + tl.program_id(1) * 8 + column).to(tl.pointer_type(dtype))
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    return at


@triton.jit(do_not_specialize=["t", "smgc_start", "pmen_start", "pmen_every"])
def row_kernel(  # type: ignore[no-untyped-def]  # Triton types it, and reads annotations its own way
    TABLE, t, LR, DECAY, COS, SIN, MASK,  # LR to SIN: numbers, or pointers to one (DEVICE); t: the host's, or 0 (COUNTER)
    BC1, BC2, FLOOR, log_beta1, log_beta2, rest1, beta2, rest2, eps_gate, eps_num, one_a, C_R, s_min, smgc_start,
    noise, tau, b, pmen_start, pmen_every, d,
    BLOCK: tl.constexpr, WORD: tl.constexpr, ALIGNED: tl.constexpr, COUNTER: tl.constexpr, DEVICE: tl.constexpr,
    MASKED: tl.constexpr, TANGENT: tl.constexpr, CLIP: tl.constexpr, GATE: tl.constexpr, OWN: tl.constexpr,
    NOISE: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr, TRANSPORT: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * d
    W, G = _tensor(TABLE, 0, WORD, ALIGNED) + first, _tensor(TABLE, 1, WORD, ALIGNED) + first
    M, V = _tensor(TABLE, 2, tl.float32, ALIGNED) + first, _tensor(TABLE, 3, tl.float32, ALIGNED) + first
    T, EPS = _tensor(TABLE, 4, tl.float32, False), _tensor(TABLE, 5, tl.float32, False)
    at = tl.arange(0, BLOCK)
    inside = at < d
    w = tl.load(W + at, inside, 0.0).to(tl.float32)
    x = tl.load(G + at, inside, 0.0).to(tl.float32)
    m = tl.load(M + at, inside, 0.0)
    v = tl.load(V + at, inside, 0.0)
    lr = tl.load(LR).to(tl.float32) if DEVICE else LR
    decay = tl.load(DECAY).to(tl.float32) if DEVICE else DECAY
    t, bc1, bc2, clipping, floor = _numbers(T, t, BC1, BC2, FLOOR, log_beta1, log_beta2, s_min, smgc_start, COUNTER)

    if MAXIMIZE:
        x = -x
    ww = tl.sum(w * w, 0)
    if TANGENT:
        x = x - w * (tl.sum(w * x, 0) / tl.maximum(ww, 1e-12))  # app. B
    direction, m, v = _moments(
        x, m, v, bc1, bc2, clipping, floor, rest1, beta2, rest2, C_R, EPS if OWN else eps_gate, eps_num, one_a, CLIP, GATE, OWN
    )
    delta = -lr * direction  # alg. 1, line 10

    if NOISE:
        key = tl.load(TABLE + tl.program_id(1) * 8 + 6)
        index = tl.load(TABLE + tl.program_id(1) * 8 + 7) + first
        base = (index & 0xFFFFFFFF).to(tl.uint32)
        low = base + at.to(tl.uint32)
        high = (index >> 32).to(tl.uint32) + tl.where(low < base, 1, 0).to(tl.uint32)  # the carry: two halves, fewer registers
        k32 = _scatter(key.to(tl.uint32) ^ _scatter(t.to(tl.uint32)))
        bit = _scatter(_scatter(low ^ k32) ^ high) >> 31  # app. D, eq. xi
        s = tl.sqrt_rn(v)
        if SMOOTH:
            psi = 1 / (1 + tl.exp2(b * tl.log2(s / tau)))  # app. D, eq. psi_b
        else:
            psi = tl.where(s <= tau, 1.0, 0.0)  # app. D, eq. psi_step
        size = lr * noise
        if COUNTER:
            size = tl.where((t >= pmen_start) & ((t - pmen_start) % pmen_every == 0), size, 0.0)
        delta += tl.where(inside, size * psi * tl.where(bit == 0, 1.0, -1.0), 0.0)

    whole = delta - decay * w
    norm = tl.sqrt_rn(ww)
    k = tl.sum(w * delta, 0) / ww
    u = delta - k * w
    across = tl.sqrt_rn(tl.sum(u * u, 0))
    along = norm * (1 + k - decay)
    length = tl.sqrt_rn(across * across + along * along)
    new = (w + whole) / length  # Norm
    if CAP:
        cos = tl.load(COS).to(tl.float32) if DEVICE else COS
        sin = tl.load(SIN).to(tl.float32) if DEVICE else SIN
        far = across > 4 * 1.1920929e-07 * tl.sqrt_rn(tl.sum(whole * whole, 0))  # more than rounding errors of delta
        over = far & (across * cos > along * sin)  # phi > theta_max, both in [0, pi]
        new = tl.where(over, (cos / norm) * w + (sin / across) * u, new)  # section 2.3, ASC
    new = tl.where(tl.sum(tl.abs(whole), 0) * length == 0, w, new)  # what did not move keeps its bits; zero has no direction
    new = tl.where((ww == 0) | (length == float("inf")), w, new)
    if TRANSPORT == 1:  # algorithm.carried
        m = m - new * tl.sum(new * m, 0)
    if TRANSPORT == 2:
        c = tl.sum(w * new, 0) / norm
        r = tl.sum(w * m, 0) / norm
        share = (r + tl.sum(new * m, 0)) / (1 + c)
        moved = (tl.sum(tl.abs(whole), 0) * length != 0) & (ww > 0) & (length != float("inf")) & (1 + c > 1e-6)
        m = tl.where(moved, m - share * (w / norm) + (2 * r - share) * new, m)
    go = inside
    if MASKED:
        go = at < tl.where(tl.load(MASK) != 0, d, 0)
    tl.store(W + at, new.to(W.dtype.element_ty), go)
    tl.store(M + at, m, go)
    tl.store(V + at, v, go)


@triton.jit(do_not_specialize=["t", "smgc_start"])
def flat_kernel(  # type: ignore[no-untyped-def]  # Triton types it, and reads annotations its own way
    TABLE, t, LR, DECAY, MASK,
    BC1, BC2, FLOOR, log_beta1, log_beta2, rest1, beta2, rest2, eps_gate, eps_num, one_a, C_R, s_min, smgc_start, n,
    BLOCK: tl.constexpr, WORD: tl.constexpr, ALIGNED: tl.constexpr, COUNTER: tl.constexpr, DEVICE: tl.constexpr,
    MASKED: tl.constexpr, CLIP: tl.constexpr, GATE: tl.constexpr, OWN: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    W, G = _tensor(TABLE, 0, WORD, ALIGNED), _tensor(TABLE, 1, WORD, ALIGNED)
    M, V = _tensor(TABLE, 2, tl.float32, ALIGNED), _tensor(TABLE, 3, tl.float32, ALIGNED)
    T, EPS = _tensor(TABLE, 4, tl.float32, False), _tensor(TABLE, 5, tl.float32, False)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    w = tl.load(W + at, inside, 0.0).to(tl.float32)
    x = tl.load(G + at, inside, 0.0).to(tl.float32)
    m = tl.load(M + at, inside, 0.0)
    v = tl.load(V + at, inside, 0.0)
    lr = tl.load(LR).to(tl.float32) if DEVICE else LR
    decay = tl.load(DECAY).to(tl.float32) if DEVICE else DECAY
    _t, bc1, bc2, clipping, floor = _numbers(T, t, BC1, BC2, FLOOR, log_beta1, log_beta2, s_min, smgc_start, COUNTER)
    if MAXIMIZE:
        x = -x
    direction, m, v = _moments(
        x, m, v, bc1, bc2, clipping, floor, rest1, beta2, rest2, C_R, EPS if OWN else eps_gate, eps_num, one_a, CLIP, GATE, OWN
    )
    delta = -(lr * direction + decay * w)  # alg. 1, line 10
    go = inside
    if MASKED:
        go = at < tl.where(tl.load(MASK) != 0, n, 0)
    tl.store(W + at, (w + delta).to(W.dtype.element_ty), go & (delta != 0))  # adding a zero would turn -0.0 into 0.0
    tl.store(M + at, m, go)
    tl.store(V + at, v, go)


def usable(p: Tensor, unit_dim: int | None) -> str | None:
    """None, or why a CUDA tensor cannot take these kernels."""
    if unit_dim is not None and p.shape[-1] > MAX_ROW:
        return f"the CUDA kernel holds a row in registers, at most {MAX_ROW} coordinates, and these rows have {p.shape[-1]}."
    if torch.cuda.get_device_capability(p.device) < (7, 0):
        return "Triton needs a GPU of compute capability 7.0 or newer."
    return None


def warps(block: int) -> int:
    """Warps of a program: eight coordinates per thread, up to 32 warps; more would spill registers."""
    return min(32, max(1, block // 256))


def step(slots: list[Slot], rule: Rule, mask: Tensor | None = None) -> None:
    """One step of one group, in place: ``fused.fused_step`` for tensors on one GPU."""
    device, beta1, beta2, smgc, cap = slots[0].w.device, rule.beta1, rule.beta2, rule.smgc, here(rule.cap, slots[0].w.device)
    numbers: list[float | Tensor] = [here(rule.lr, device), here(rule.decay, device), 1.0, 0.0]
    if isinstance(cap, Tensor):
        cap = cap.clamp(max=math.pi)
        numbers[2:] = cap.cos(), cap.sin()
    elif cap is not None:
        numbers[2:] = math.cos(min(cap, math.pi)), math.sin(min(cap, math.pi))
    on_device = any(isinstance(x, Tensor) for x in numbers)
    if on_device:  # all of them, then; a fill is queued like any kernel, nothing waits
        numbers = [x if isinstance(x, Tensor) else torch.full((), x, device=device) for x in numbers]
    logs = [math.log(x) if x > 0 else -1e4 for x in (beta1, beta2)]  # a finite one: 0^0 is 1
    C_R = math.sqrt((smgc.R - beta2) / (1 - beta2)) if smgc else 0.0
    s_min = smgc.s_min if smgc else 0.0
    limits = C_R, s_min, smgc.start if smgc else 0
    gate = _HALF if rule.a == 0.5 else _ONE if rule.a == 1 else _POWER
    common = dict(DEVICE=on_device, MASKED=mask is not None, GATE=gate, MAXIMIZE=rule.maximize)

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for one in launches(slots, device):
            w, eps_gate, pmen, clip, counter = (
                one.slots[0].w,
                one.eps_gate,
                rule.pmen,
                smgc is not None,
                isinstance(one.t, Tensor),
            )
            bc1, bc2, floor, t = 1.0, 1.0, 0.0, 0 if counter else int(one.t)
            if not counter:  # the host counts: it decides what is due, and makes the numbers that depend on t
                bc1, bc2 = 1 - beta1**t, 1 - beta2**t
                clip, pmen = smgc is not None and t - 1 >= smgc.start, pmen if pmen and pmen.due(t) else None
                floor = math.sqrt(1 - beta2 ** (t - 1)) * s_min
            own = isinstance(eps_gate, Tensor)
            threshold: Any = 0.0 if own else rule.eps_gate if eps_gate is None else eps_gate
            shared = (bc1, bc2, floor, *logs, 1 - beta1, beta2, 1 - beta2, threshold, rule.eps_num, 1 - rule.a, *limits)
            flags = dict(COUNTER=counter, CLIP=clip, OWN=own, WORD=_WORDS[w.dtype], ALIGNED=one.aligned, **common)
            if rule.dim is None:
                grid = (triton.cdiv(w.numel(), _CHUNK), len(one.slots))
                flat_kernel[grid](one.table, t, *numbers[:2], mask, *shared, w.numel(), BLOCK=_CHUNK, **flags)
                continue
            d = w.shape[-1]
            noise, tau, b, start, every, smooth = 0.0, 1.0, 1.0, 1, 1, False
            if pmen is not None:
                c = 1 / math.sqrt(d) if pmen.reference == "row" else math.sqrt((1 - beta1) / (1 + beta1))  # app. D, eq. c_j
                noise, tau, b, start, every = pmen.strength * c, pmen.tau, pmen.b, pmen.start, pmen.every
                smooth = pmen.profile == "smooth"
            BLOCK = triton.next_power_of_2(d)
            row_kernel[(w.numel() // d, len(one.slots))](
                one.table, t, *numbers, mask, *shared, noise, tau, b, start, every, d, BLOCK=BLOCK, TANGENT=rule.tangent,
                NOISE=pmen is not None, SMOOTH=smooth, CAP=cap is not None, TRANSPORT=_WAYS.index(rule.transport),
                num_warps=warps(BLOCK), **flags,
            )  # fmt: skip
