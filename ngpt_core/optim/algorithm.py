"""What happens to one parameter tensor in one optimizer step? Algorithm 1 and everything around it, in the paper's order.

    tangent projection -> SMGC -> moments -> gate and update -> PMEN -> ASC -> Norm (-> transport of the first moment)

``update`` is the whole listing. It is pure: old values in, new values out. Where it needs a sum over a whole vector, it
*yields* the part that this rank holds and receives the sum over the vector: ``run`` answers for vectors that are whole on a
rank, ``sharding.run_split`` answers with one all-reduce for many tensors at once.

Symbols (section 2.3, Algorithm 1):
    theta, w   the parameters (w: a unit vector)     g       the gradient
    m, v       first and second moment               m_hat, v_hat   the same, bias-corrected
    t, k       this step counted from 1, and the completed steps k = t - 1
    d          sqrt(v_hat) + eps_num                 gamma   the gate
    lr         alpha_t = alpha eta_t                 decay   what multiplies theta: lr lambda, or the paper's eta_t lambda
    delta      the displacement theta_t - theta_{t-1} before cap and Norm; u its part tangent to w
"""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import sphere
from ..checks import LEAST_DIVISOR, is_within
from ..rehearsal import has_values
from . import pmen as noise
from .pmen import PMEN
from .smgc import SMGC, clipped

__all__ = ["Rule", "Slot", "adaptive", "bias_correction", "gate", "gate_power", "gated", "run", "update"]


def _check(a: float, eps_gate: float) -> None:
    if not is_within(a, 0, open=True):
        raise ValueError(f"The gate's a must be finite and > 0, got {a!r}. The paper uses 0.5.")
    if not is_within(eps_gate, LEAST_DIVISOR):
        raise ValueError(f"The gate's eps_gate must be finite and >= {LEAST_DIVISOR}, got {eps_gate!r}. The paper uses 1e-8.")


def gate(d: Tensor, a: float = 0.5, eps_gate: float = 1e-8) -> Tensor:
    """gamma = sigma(a log(d / eps_gate)): 0 at d = 0, 1/2 at eps_gate, toward 1 above.

    d: sqrt(v_hat) + eps_num, of any shape.
    a: the gate's sharpness; 1 is Adam's.
    eps_gate: the gate's threshold.

    >>> d = torch.tensor([0.0, 1e-10, 1e-8, 1e-6])
    >>> gate(d, a=0.5)
    tensor([0.0000, 0.0909, 0.5000, 0.9091])
    """
    _check(a, eps_gate)
    return gate_of(torch.as_tensor(d), a, eps_gate)


def gate_of(d: Tensor, a: float, eps_gate: float | Tensor) -> Tensor:
    """``gate`` as the optimizer calls it: nothing is checked."""
    gamma = torch.sigmoid(a * torch.log(sphere.widen(d) / eps_gate))  # alg. 1, line 9
    return gamma.to(torch.result_type(d, 1.0))


def gate_power(d: Tensor, a: float = 0.5, eps_gate: float = 1e-8) -> Tensor:
    """The same gate without a sigmoid: d^a / (d^a + eps_gate^a) (appendix A).

    Divided through by d^a, because eps_gate^a leaves float32's range for a sharp gate (a > 4.7 at 1e-8).
    """
    _check(a, eps_gate)
    d = torch.as_tensor(d)
    gamma = 1 / (1 + (eps_gate / sphere.widen(d)) ** a)  # app. A
    return gamma.to(torch.result_type(d, 1.0))


def gated(m_hat: Tensor, d: Tensor, a: float, eps_gate: float | Tensor) -> Tensor:
    """gamma * m_hat / d, finite everywhere.

    gamma / d = 1 / (d + eps_gate (d/eps_gate)^(1-a)): with a = 1 the denominator is
    d + eps_gate to the bit, AdamW's own, and nothing is 0/0 there. At d = 0 the limit of
    the gate is taken: m_hat / eps_gate for a = 1; for a > 1 zero; for a < 1 the
    denominator is zero too, but v = 0 means that no gradient was ever seen (or only
    gradients with squares below the precision), so the direction is zero.
    """
    return _quotient(m_hat, d + eps_gate * (d / eps_gate) ** (1 - a))  # app. A


# torch's operations on booleans take as long as ten others. On a CPU, where a look at the numbers is free, they are left out
# when there is nothing to decide, and only the exceptional vectors are copied. No bit changes.


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    """x / y for y >= 0, and 0 where y is 0."""
    # ngpt_core only: begin
    if has_values(y) and y.numel() and bool(y.amin() > 0):
        return x / y
    # ngpt_core only: end
    return torch.where(y == 0, 0.0, x / y)


def _where(which: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """x for the vectors ``which``, y for the others."""
    # ngpt_core only: begin
    if has_values(which) and which.numel():
        most, rest, others = (x, y, ~which) if 2 * which.sum() > which.numel() else (y, x, which)
        rows = others.squeeze(-1).nonzero(as_tuple=True)
        return most.index_put(rows, rest[rows]) if rows[0].numel() else most
    # ngpt_core only: end
    return torch.where(which, x, y)


def bias_correction(beta: float, t: int | Tensor) -> float | Tensor:
    """1 - beta^t; through expm1 where t lives on the device in float32, which would lose digits for beta near 1."""
    if not isinstance(t, Tensor):
        return 1 - beta**t
    return -torch.expm1(t * math.log(beta)) if beta > 0 else torch.ones_like(t)


def adaptive(
    m: Tensor,
    v: Tensor,
    t: int | Tensor,
    beta1: float,
    beta2: float,
    eps_gate: float | Tensor,
    eps_num: float,
    a: float,
) -> tuple[Tensor, Tensor]:
    """(gamma * m_hat / d, d): GatedAdamW's direction from the moments after step t."""
    m_hat = m / bias_correction(beta1, t)  # alg. 1, line 6
    v_hat = v / bias_correction(beta2, t)  # alg. 1, line 7
    d = v_hat.sqrt() + eps_num  # alg. 1, line 8
    return gated(m_hat, d, a, eps_gate), d  # alg. 1, lines 9 and 10


class Rule(NamedTuple):
    """One group's numbers at one step, for ``update`` and for the kernels. ``dim``: the unit axis from the end, or None."""

    lr: float | Tensor
    decay: float | Tensor
    beta1: float
    beta2: float
    eps_gate: float | Tensor  # a tensor: one number, or a column with one per tensor of a stack
    eps_num: float
    a: float
    dim: int | None = None
    length: int = 1  # d_j, of the whole vector
    tangent: bool = True
    smgc: SMGC | None = None
    pmen: PMEN | None = None
    cap: float | Tensor | None = None
    transport: str | None = None  # of m after the step: None (the paper), "project" or "parallel"
    maximize: bool = False  # the kernels negate g; ``update`` is given a g that already is


LATER = torch.empty(0, device="cpu")  # stands for a tensor that a step fills in


@dataclass(eq=False)
class Slot:
    """One parameter with a gradient. It holds its tensors only during a step, so that their memory can be freed after it."""

    w: Tensor  # this rank's piece of p; g, m, v likewise
    g: Tensor
    m: Tensor = LATER
    v: Tensor = LATER
    t: int | Tensor = 0  # this step, counted from 1: a number, or the counter itself where it is on the device
    key: int = 0  # PMEN's, from the name
    offset: int | None = 0  # PMEN's: position of the piece's first coordinate, None if the piece has gaps
    limit: float = math.inf  # what the gradient's magnitudes must stay below
    eps_gate: float | Tensor | None = None  # its own threshold at this step; None: the group's number
    p: Tensor = LATER  # as the optimizer holds it (a DTensor where sharded)
    name: str = ""
    step: Tensor = LATER  # the counter in the state
    count: Any = None  # the memory of a counter on the host, as a numpy array: adding 1 to a tensor takes thirty times as long
    facts: tuple = ()  # what the plan depends on, as it was made for them
    job: Any = None  # the slot as the CPU kernel reads it
    table: Any = None  # the group's slots as the CUDA kernel finds them (launches.py), kept by the first one
    seal: Any = None  # of its rows (train/seals.py), which the CPU kernel compares and takes as it reads and writes them
    region: tuple[slice, ...] | None = None  # of the local piece, where w, g, m, v are a part of it

    def cut(self, region: tuple[slice, ...]) -> "Slot":
        """A part of it, sharing its memory."""
        return replace(self, w=self.w[region], g=self.g[region], m=self.m[region], v=self.v[region], region=region)


def _sums(dim: int, *products: Tensor) -> Tensor:
    return torch.stack([x.sum(dim, keepdim=True) for x in products])


Update = Generator[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]


def update(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    t: int | Tensor,
    rule: Rule,
    key: int | Tensor = 0,
    index: Callable[[], Tensor] | None = None,
    seen: dict[str, Tensor] | None = None,
) -> Update:
    """(w, m, v) after step t.

    Asks for sums over whole vectors (see above). ``key`` and ``index`` (a function that makes
    the positions of the coordinates in the full tensor) are PMEN's; ``seen``, if given, collects the
    diagnostics. A tensor t is a counter on the device: what depends on it is then masked,
    not branched on.
    """
    raw = g
    if rule.dim is not None:
        ww, wg = yield _sums(rule.dim, w * w, w * g)
        if rule.tangent:
            g = sphere.project(g, w, wg, ww, eps=1e-12)  # app. B
    projected = g
    if rule.smgc is not None:
        on = (k := t - 1) >= rule.smgc.start
        if isinstance(on, Tensor):
            g = torch.where(on, clipped(g, v, k, rule.beta2, rule.smgc), g)  # app. C
        elif on:
            g = clipped(g, v, k, rule.beta2, rule.smgc)  # app. C

    m = torch.lerp(m, g, 1 - rule.beta1)  # alg. 1, line 4
    v = rule.beta2 * v + (1 - rule.beta2) * (g * g)  # alg. 1, line 5
    # alg. 1, lines 6 to 10
    direction, d = adaptive(m, v, t, rule.beta1, rule.beta2, rule.eps_gate, rule.eps_num, rule.a)
    if seen is not None:
        scale = (v / bias_correction(rule.beta2, t)).sqrt()
        seen |= {"raw": raw, "clipped": g != projected, "d": d, "scale": scale}
    delta = -rule.lr * direction  # alg. 1, line 10, the adaptive part
    if rule.dim is None:
        kept = (1 - rule.decay) * w  # the decay, rounded as torch's AdamW rounds it
        # adding a zero would turn -0.0 into 0.0
        return torch.where(delta == 0, kept, kept + delta), m, v

    if isinstance(rule.decay, Tensor) or rule.decay:
        delta = delta - rule.decay * w  # alg. 1, line 10, the decay
    if rule.pmen is not None and (isinstance(due := rule.pmen.due(t), Tensor) or due):
        assert index is not None  # where there is noise, there are positions
        if seen is not None:
            seen["psi"] = noise.profile(v.sqrt(), rule.pmen) * due
        size = noise.amplitude(rule.pmen, rule.lr, rule.length, rule.beta1) * due
        delta = noise.add(delta, size, v, rule.pmen, key, t, index)  # app. D

    wd, dd, moved = yield _sums(rule.dim, w * delta, delta * delta, delta.abs())
    u = sphere.project(delta, w, wd, ww, torch.finfo(w.dtype).tiny)
    (uu,) = yield _sums(rule.dim, u * u)
    length, along = sphere.polar(ww, wd, dd, uu)
    new, size = w + delta, torch.hypot(along, uu.sqrt())
    norm = size
    over = torch.zeros_like(length, dtype=torch.bool)
    if rule.cap is not None:
        over = (torch.atan2(length, along) > rule.cap) & (length > 0)  # section 2.3, ASC
        new = _where(over, sphere.turn(w, u, ww, length, rule.cap), new)
        norm = torch.where(over, 1.0, norm)  # such a point has unit length already
    if seen is not None:
        phi = torch.atan2(length, along)
        phi = phi if rule.cap is None else torch.where(over, rule.cap, phi)
        seen |= {"capped": over, "angle": phi}
    # Norm, the retraction. A vector that did not move keeps its bits: normalizing again
    # would change the last ones. A zero vector has no sphere; a candidate of zero, or one
    # beyond the range, no direction: they stay. (nan equals nothing, and goes on.)
    stays = (moved == 0) | (ww == 0) | (size == 0) | (size == math.inf)
    new = _where(stays, w, new / norm)
    if rule.transport is not None:
        wm, nm, wn = yield _sums(rule.dim, w * m, new * m, w * new)
        m = torch.where(stays & (rule.transport == "parallel"), m, carried(m, w, new, wm, nm, wn, ww, rule.transport))
    return new, m, v


def carried(m: Tensor, w: Tensor, new: Tensor, wm: Tensor, nm: Tensor, wn: Tensor, ww: Tensor, way: str) -> Tensor:
    """The first moment after its vector has moved from w to the unit vector ``new``, given the four products of the three.

    "project": without its part along ``new``. "parallel": turned by the rotation that takes w to ``new`` along their great
    circle, which is the parallel transport of tangent vectors and keeps every length. The paper names it and does neither
    (appendix B). Between antipodes there is no one great circle: m stays.
    """
    if way == "project":
        return m - new * nm
    norm = ww.sqrt()
    c, r = wn / norm, wm / norm  # <w_bar, new> and <w_bar, m> of w_bar = w / ||w||
    share = (r + nm) / (1 + c)
    return torch.where(1 + c > 1e-6, m - share * (w / norm) + (2 * r - share) * new, m)


def run(steps: Update) -> tuple[Tensor, Tensor, Tensor]:
    """Carry out an ``update`` of vectors that are whole here: every sum that it yields is already complete."""
    try:
        sums = next(steps)
        while True:
            sums = steps.send(sums)
    except StopIteration as end:
        return end.value
