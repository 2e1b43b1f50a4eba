"""Is this the whole optimizer? Yes: GatedAdamW of "Training nGPT" in one file that needs only torch, to copy.

Generated from ngpt_core by ``python -m ngpt_core.optim.single_file.make``: edit the package instead. Apache-2.0, as ngpt_core.
The class is at the end; ``update`` is Algorithm 1 and everything around it, in the paper's order.
"""

import math
import torch
from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from numbers import Integral
from numbers import Real
from operator import index
from torch import Tensor
from typing import Any
from typing import NamedTuple
from typing import TypeGuard
from typing import overload


# ---- ngpt_core/sphere.py --------------------------------------------------------------------------------------------
def widen(x: Tensor) -> Tensor:
    """x in the precision for squares and sums: float32 for half precisions; float32 and float64 are returned unchanged."""
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"Vectors must be tensors of floating-point numbers, such as torch.tensor([3.0, 4.0]); got {got}.")
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _dot(a: Tensor, b: Tensor, dim: int) -> Tensor:
    return (a * b).sum(dim, keepdim=True)


def unit(x: Tensor, dim: int = -1) -> Tensor:
    """Norm(x) = x / ||x||: the point on the sphere in the direction of x.

    A zero vector has no direction: it stays zero, and its gradient passes through
    unchanged and finite (x / max(||x||, eps) would multiply that gradient by 1/eps). In
    float32, and in half precisions, which are computed in float32, ||x|| may range from
    about 1e-18 to 1e19; outside that range its square over- or underflows.

    >>> unit(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    y = widen(x)
    # The root of a sum of squares compiles to one reduction. Root and reciprocal are two
    # steps: the gradient of rsqrt overflows in float32 at a norm of 1e-13.
    square = _dot(y, y, dim)
    return (y * torch.where(square > 0, square, 1.0).sqrt().reciprocal()).to(x.dtype)


def project(x: Tensor, w: Tensor, wx: Tensor, ww: Tensor, eps: float) -> Tensor:
    """x without its part along w, given wx = <w, x> and ww = <w, w>."""
    return x - w * (wx / ww.clamp_min(eps))  # app. B


def polar(ww: Tensor, wd: Tensor, dd: Tensor, uu: Tensor) -> tuple[Tensor, Tensor]:
    """(||u||, <w/||w||, w + delta>) from <w, w>, <w, delta>, <delta, delta>, <u, u>.

    A u that is only a few rounding errors of delta has no meaningful direction and
    counts as zero.
    """
    length = uu.sqrt()
    length = torch.where(length > 4 * torch.finfo(uu.dtype).eps * dd.sqrt(), length, 0.0)
    norm = ww.sqrt()
    return length, norm + wd / norm


def turn(w: Tensor, u: Tensor, ww: Tensor, length: Tensor, theta: float | Tensor) -> Tensor:
    """The point at angle theta from w in the direction of u, where ||u|| = length > 0.

    If length is 0, the result is finite but is not that point. theta is capped at pi.
    """
    tool, theta = (
        (torch, theta.clamp(max=math.pi))
        if isinstance(theta, Tensor)
        # a number stays on the host: copying it to the device would make the host wait
        else (math, min(theta, math.pi))
    )
    safe = torch.where(length > 0, length, 1.0)
    along = tool.cos(theta) * torch.rsqrt(ww)
    return along * w + (tool.sin(theta) / safe) * u  # section 2.3, ASC


# ---- ngpt_core/checks.py --------------------------------------------------------------------------------------------
LEAST_DIVISOR = 1e-30  # the smallest constant that the update may divide by: float32 holds d / 1e-30 up to d = 3e8


def is_number(x: object) -> TypeGuard[float | Tensor]:
    """Whether x is a real number that a float can hold (nan and infinities included), or a tensor with one number."""
    if isinstance(x, int):
        return not isinstance(x, bool) and x.bit_length() <= 1023  # JSON's integers may be larger than every float
    return isinstance(x, Real) or (isinstance(x, Tensor) and x.numel() == 1 and not x.is_complex() and x.dtype != torch.bool)


def is_within(x: object, low: float, *, open: bool = False) -> bool:
    """Whether x is a finite number >= low (``open``: > low)."""
    try:
        return is_number(x) and low <= float(x) < math.inf and not (open and float(x) == low)
    except OverflowError:  # an integer beyond every float
        return False


def is_count(x: object, least: int) -> bool:
    """Whether x is a whole number >= least; 500.0 counts."""
    return is_number(x) and (isinstance(x, Integral) or float(x).is_integer()) and bool(x >= least)


# ---- ngpt_core/optim/pmen.py ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PMEN:
    """Settings of Post-Moment Exploration Noise, as ``GatedAdamW``'s ``pmen`` keyword and group key take them.

    s = sqrt(v) is a coordinate's activity, v its second moment after this step's update, not bias-corrected. The step of
    a perturbed coordinate is lr * strength * c, times psi(s), with a random sign.

    strength: lambda_noise.
    tau: tau_v, the threshold of s.
    profile: psi. "step": 1 where s <= tau, else 0; with tau = 0 it acts where v is exactly zero. "smooth": 1 / (1 + (s/tau)^b).
    b: the sharpness of the smooth profile.
    reference: c. "row": 1/sqrt(d_j), d_j the length of the vector. "adam": sqrt((1-beta1)/(1+beta1)).
    start, every: it acts at the steps t = start, start + every, start + 2 every, ..., t counted from 1.
    seed: decides the signs.

    The defaults are item 9 of the paper's summary, which does not give b and seed.
    """

    strength: float = 10.0
    tau: float = 1e-10
    profile: str = "step"
    b: float = 2.0
    reference: str = "row"
    start: int = 1
    every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        def rule(holds: bool, text: str) -> None:
            if not holds:
                raise ValueError(f"PMEN: {text}")

        rule(is_within(self.strength, 0), f"strength is lambda_noise, finite and >= 0; got {self.strength!r}. Paper: 10.")
        rule(is_within(self.tau, 0), f"tau is a threshold of sqrt(v), finite and >= 0; got {self.tau!r}. Paper: 1e-10.")
        rule(self.profile in ("step", "smooth"), f"profile must be 'step' or 'smooth', got {self.profile!r}.")
        rule(
            self.profile == "step" or (self.tau >= LEAST_DIVISOR and is_within(self.b, 0, open=True)),
            f"the smooth profile 1/(1 + (s/tau)^b) needs tau >= {LEAST_DIVISOR} and b > 0, got tau={self.tau}, b={self.b!r}. "
            "For tau = 0 use profile='step'.",
        )
        rule(is_within(self.b, 0, open=True), f"b is the sharpness of the smooth profile, finite and > 0; got {self.b!r}.")
        rule(self.reference in ("row", "adam"), f"reference must be 'row' (1/sqrt(d_j)) or 'adam', got {self.reference!r}.")
        rule(isinstance(self.seed, Integral), f"seed must be an integer, got {self.seed!r}.")
        object.__setattr__(self, "seed", index(self.seed))  # a state with numpy's integers could not be loaded
        for name in ("start", "every"):
            value = getattr(self, name)
            rule(is_count(value, 1), f"{name} counts steps from 1: an integer >= 1, got {value!r}.")

    @overload
    def due(self, t: int) -> bool: ...
    @overload
    def due(self, t: Tensor) -> Tensor: ...
    def due(self, t: int | Tensor) -> bool | Tensor:
        """Whether step t is one of the selected steps; a tensor t (a counter on the device) gives a tensor."""
        return (t >= self.start) & ((t - self.start) % self.every == 0)


def profile(s: Tensor, setting: PMEN) -> Tensor:
    """psi(s; tau), in the dtype of s: non-increasing, 1 at s = 0."""
    if setting.profile == "step":
        return (s <= setting.tau).to(s.dtype)  # app. D, eq. psi_step
    return 1 / (1 + (s / setting.tau) ** setting.b)  # app. D, eq. psi_b


def amplitude(setting: PMEN, lr: float | Tensor, length: int, beta1: float) -> float | Tensor:
    """alpha_{j,t} lambda_noise c: how far a coordinate with psi = 1 is moved.

    ``length``: d_j, of the coordinate's vector.
    """
    if setting.reference == "row":
        c = 1 / math.sqrt(length)  # app. D, eq. c_j
    else:
        c = math.sqrt((1 - beta1) / (1 + beta1))  # app. D, eq. c_j, Adam's
    return lr * setting.strength * c


@lru_cache(maxsize=65536)
def key(seed: int, name: str) -> int:
    """The 32-bit key of one parameter's noise."""
    return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "little")


def add(
    delta: Tensor,
    size: float | Tensor,
    v: Tensor,
    setting: PMEN,
    key: int | Tensor,
    t: int | Tensor,
    index: Callable[[], Tensor],
) -> Tensor:
    """delta + size * psi(sqrt(v)) * xi, with vectors in the last dimension; ``index()`` makes the coordinates' positions.

    On a CPU the step profile acts only on the vectors with some noise, and most have none: psi does not increase, so a vector's
    largest psi is that of its smallest v.
    """
    return delta + size * (profile(v.sqrt(), setting) * signs(key, t, index()))  # app. D


_32 = 0xFFFFFFFF


def _mix(x: int | Tensor) -> int | Tensor:
    """A bijection of the 32-bit integers that mixes their bits (shifts and odd multipliers); int, or int64 tensor.

    The product of two 32-bit numbers may pass int64's range: it then wraps modulo 2^64, which leaves the low 32 bits exact.
    """
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _32
    return x ^ (x >> 16)


def signs(key: int | Tensor, t: int | Tensor, index: Tensor) -> Tensor:
    """xi = +1 or -1 for the coordinates ``index`` (int64, positions in the full tensor) at step t.  # app. D, eq. xi

    Every kernel of this package computes the same bits: 32-bit integer arithmetic, no state, no order.
    """
    t = t.to(torch.int64) if isinstance(t, Tensor) else int(t)
    k = _mix(key ^ _mix(t & _32))
    bit = _mix(_mix((index & _32) ^ k) ^ (index >> 32)) >> 31
    return 1 - 2 * bit


# ---- ngpt_core/optim/smgc.py ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SMGC:
    """Settings of Second-Moment Growth Clipping, as ``GatedAdamW``'s ``smgc`` keyword and group key take them.

    R: the largest factor by which one step may multiply a second moment, >= 1.
    s_min: a floor for coordinates with little history, in units of the bias-corrected sqrt(v_hat).
    start: it acts once k >= start, where k counts the completed steps: with 500, the first 500 steps are not clipped. At
        k = 0 the rule would clip every gradient to zero; the paper waits for the second moments to fill.

    The defaults are item 10 of the paper's summary.
    """

    R: float = 100.0
    s_min: float = 1e-10
    start: int = 500

    def __post_init__(self) -> None:
        def rule(holds: bool, text: str) -> None:
            if not holds:
                raise ValueError(f"SMGC: {text}")

        rule(is_within(self.R, 1), f"R is the largest growth of v in one step, finite and >= 1; got {self.R!r}. Paper: 100.")
        rule(is_within(self.s_min, 0), f"s_min is a floor of sqrt(v_hat), finite and >= 0; got {self.s_min!r}. Paper: 1e-10.")
        rule(is_count(self.start, 0), f"start counts completed steps, an integer >= 0; got {self.start!r}. Paper: 500.")


def clipped(g: Tensor, v: Tensor, k: int | Tensor, beta2: float, setting: SMGC) -> Tensor:
    """``growth_clip`` as the optimizer calls it: nothing is checked."""
    R, s_min = setting.R, setting.s_min
    # The square roots are taken before the maximum: s_min^2 would leave float32's range for
    # a small s_min. A k on the device is float32, where 1 - beta2^k would lose digits.
    if isinstance(k, Tensor):
        log = math.log(beta2) if beta2 > 0 else -1e4  # a finite one: 0^0 is 1
        floor: float | Tensor = torch.sqrt(-torch.expm1(k * log)) * s_min
    else:
        floor = math.sqrt(1 - beta2**k) * s_min
    root = torch.clamp_min(v.sqrt(), floor)  # app. C, eq. v_bar, as sqrt(v_bar)
    bound = math.sqrt((R - beta2) / (1 - beta2)) * root  # app. C, eq. C_R
    return torch.clamp(g, -bound, bound)  # app. C, eq. g_i


# ---- ngpt_core/optim/algorithm.py -----------------------------------------------------------------------------------
def gated(m_hat: Tensor, d: Tensor, a: float, eps_gate: float | Tensor) -> Tensor:
    """gamma * m_hat / d, finite everywhere.

    gamma / d = 1 / (d + eps_gate (d/eps_gate)^(1-a)): with a = 1 the denominator is
    d + eps_gate to the bit, AdamW's own, and nothing is 0/0 there. At d = 0 the limit of
    the gate is taken: m_hat / eps_gate for a = 1; for a > 1 zero; for a < 1 the
    denominator is zero too, but v = 0 means that no gradient was ever seen (or only
    gradients with squares below the precision), so the direction is zero.
    """
    return _quotient(m_hat, d + eps_gate * (d / eps_gate) ** (1 - a))  # app. A


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    """x / y for y >= 0, and 0 where y is 0."""
    return torch.where(y == 0, 0.0, x / y)


def _where(which: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """x for the vectors ``which``, y for the others."""
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
            g = project(g, w, wg, ww, eps=1e-12)  # app. B
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
            seen["psi"] = profile(v.sqrt(), rule.pmen) * due
        size = amplitude(rule.pmen, rule.lr, rule.length, rule.beta1) * due
        delta = add(delta, size, v, rule.pmen, key, t, index)  # app. D

    wd, dd, moved = yield _sums(rule.dim, w * delta, delta * delta, delta.abs())
    u = project(delta, w, wd, ww, torch.finfo(w.dtype).tiny)
    (uu,) = yield _sums(rule.dim, u * u)
    length, along = polar(ww, wd, dd, uu)
    new, size = w + delta, torch.hypot(along, uu.sqrt())
    norm = size
    over = torch.zeros_like(length, dtype=torch.bool)
    if rule.cap is not None:
        over = (torch.atan2(length, along) > rule.cap) & (length > 0)  # section 2.3, ASC
        new = _where(over, turn(w, u, ww, length, rule.cap), new)
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


# ---- ngpt_core/optim/single_file/readable.py ------------------------------------------------------------------------
class GatedAdamW(torch.optim.Optimizer):
    """Algorithm 1 of "Training nGPT", with the mechanisms of section 2.3 and appendices B, C and D.

    Every keyword is also a key of a parameter group:

        rows = {"params": [p for p in model.parameters() if p.ndim > 1], "unit_dim": -1, "cap": 0.0175}
        others = {"params": [p for p in model.parameters() if p.ndim < 2], "a": 1.0}
        optimizer = GatedAdamW([rows, others], lr=0.24 / d**0.5)

    lr: multiply it, at progress r of training, by 1 - log(1 + r / 0.05) / log(1 + 1 / 0.05), the paper's schedule.
    eps_gate, eps_num, a: the gate's threshold, the constant inside d, the gate's sharpness. a=1, eps_num=0 is AdamW's eps.
    weight_decay: multiplied by lr, as in AdamW.
    unit_dim: the axis along which the group's vectors have length one; they are normalized here and after every step. None:
        coordinates; ``tangent``, ``pmen`` and ``cap`` are then not used.
    tangent: project the gradient (appendix B). smgc: ``SMGC(...)`` or None. pmen: ``PMEN(...)`` or None.
    cap: the largest angle of a step in radians, or None. Change it in the groups as you change lr.
    transport: of the first moment: None (the paper's), "project" or "parallel".
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.975, 0.975),
        *,
        eps_gate: float = 1e-8,
        eps_num: float = 1e-14,
        a: float = 0.5,
        weight_decay: float = 0.0,
        unit_dim: int | None = None,
        tangent: bool = True,
        smgc: SMGC | None = None,
        pmen: PMEN | None = None,
        cap: float | None = None,
        transport: str | None = None,
    ) -> None:
        if not (lr >= 0 and a > 0 and eps_gate > 0 and eps_num >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"Out of range: {lr=}, {betas=}, {eps_gate=}, {eps_num=}, {a=}.")
        numbers = dict(lr=lr, betas=betas, eps_gate=eps_gate, eps_num=eps_num, a=a, weight_decay=weight_decay)
        super().__init__(
            params, numbers | dict(unit_dim=unit_dim, tangent=tangent, smgc=smgc, pmen=pmen, cap=cap, transport=transport)
        )

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["unit_dim"] is not None:
            for p in group["params"]:
                p.copy_(unit(p, group["unit_dim"]))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        order = 0
        for group in self.param_groups:
            names = group.get("param_names") or [str(order + i) for i in range(len(group["params"]))]
            order += len(names)
            for name, p in zip(names, group["params"]):
                if p.grad is not None:
                    self._update(name, p, group)
        return loss

    def _update(self, name: str, p: Tensor, group: dict[str, Any]) -> None:
        state, dim = self.state[p], group["unit_dim"]
        if not state:
            zeros = torch.zeros_like(widen(p))
            state |= {"step": torch.zeros(()), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        state["step"] += 1
        rule = Rule(
            lr=group["lr"], decay=group["lr"] * group["weight_decay"], beta1=group["betas"][0], beta2=group["betas"][1],
            eps_gate=group["eps_gate"], eps_num=group["eps_num"], a=group["a"], smgc=group["smgc"], tangent=group["tangent"],
        )  # fmt: skip
        noise, p_grad = 0, p.grad
        assert p_grad is not None
        w, g, m, v = (x.to(state["exp_avg"].dtype) for x in (p, p_grad, state["exp_avg"], state["exp_avg_sq"]))
        if dim is not None:  # vectors last
            rule = rule._replace(dim=-1, length=p.shape[dim], cap=group["cap"], transport=group["transport"])
            w, g, m, v = (x.movedim(dim, -1) for x in (w, g, m, v))
            if group["pmen"] is not None:  # the noise of a coordinate follows from its position
                rule, noise = rule._replace(pmen=group["pmen"]), key(group["pmen"].seed, name)

        def places() -> Tensor:
            return torch.arange(p.numel(), device=p.device).view_as(p).movedim(dim, -1)

        found = run(update(w, g, m, v, int(state["step"]), rule, noise, places))
        for old, new in zip((p, state["exp_avg"], state["exp_avg_sq"]), found):
            old.copy_(new if dim is None else new.movedim(-1, dim))
