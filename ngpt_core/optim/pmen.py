"""How does a coordinate that receives no gradient get another chance? Post-Moment Exploration Noise (PMEN), appendix D.

After the adaptive update, coordinates whose second moment is (nearly) zero receive a small random step. It enters neither
moment. The signs are a function of seed, parameter name, step, and position of the coordinate in the full tensor only: one
rank and N ranks draw the same noise, and a resumed run repeats it.

Symbols (appendix D):
    s       the activity sqrt(v) of a coordinate: raw second moment, after this step's moment update
    tau     the threshold tau_v                      psi     the profile: how much noise at the activity s
    c       the reference scale of a coordinate      xi      the sign of a coordinate, -1 or +1
    lr      the current learning rate alpha_{j,t} of the parameter group
    t       the step, counted from 1                 i       row-major index of a coordinate in the full tensor
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from numbers import Integral
from operator import index
from typing import overload

import torch
from torch import Tensor

from ..checks import LEAST_DIVISOR, is_count, is_within
from ..rehearsal import has_values

__all__ = ["PMEN", "add", "amplitude", "key", "profile", "signs"]


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
    # ngpt_core only: begin
    if has_values(v) and setting.profile == "step" and not isinstance(key, Tensor) and v.numel() and v.ndim > 1:
        noisy = (profile(v.amin(-1).sqrt(), setting) > 0).nonzero(as_tuple=True)
        if not noisy[0].numel():
            return delta
        here = profile(v[noisy].sqrt(), setting) * signs(key, t, index()[noisy])
        return delta.index_put(noisy, delta[noisy] + size * here)
    # ngpt_core only: end
    return delta + size * (profile(v.sqrt(), setting) * signs(key, t, index()))  # app. D


_32 = 0xFFFFFFFF


@overload
def _mix(x: int) -> int: ...
@overload
def _mix(x: Tensor) -> Tensor: ...
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
