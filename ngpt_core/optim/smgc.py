"""How much may one gradient change what Adam remembers? Second-Moment Growth Clipping (SMGC), appendix C.

Each scalar gradient is clipped by its own history only, so that one step multiplies the second moment by at most R.

Symbols (appendix C):
    g      a gradient coordinate (already projected, where projection is on)
    v      its second moment *before* this step, not bias-corrected
    k      the number of completed optimizer steps
    R      the largest growth factor of v allowed in one step, R >= 1
    s_min  a floor, in units of the bias-corrected sqrt(v_hat), for coordinates with little history
    C_R    the clipping threshold in units of sqrt(v_bar): sqrt((R - beta2) / (1 - beta2))
    v_bar  v, but at least (1 - beta2^k) s_min^2
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_tensors, is_count, is_within

__all__ = ["SMGC", "growth_clip"]


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


def growth_clip(
    g: Tensor,
    v: Tensor,
    k: int | Tensor,
    beta2: float,
    R: float = 100.0,
    s_min: float = 1e-10,
) -> Tensor:
    """sign(g) min(|g|, C_R sqrt(v_bar)), coordinate by coordinate (appendix C).

    Afterwards the new second moment beta2 v + (1 - beta2) g^2 is at most R v_bar.

    g, v: the gradient, and the second moment before this step; of one shape (v may be one number).
    k: completed steps, an integer or a tensor.
    beta2: the second moment's, in [0, 1).
    R, s_min: as in ``SMGC``.

    >>> v = torch.tensor([1.0, 1.0, 0.0])
    >>> g = torch.tensor([5.0, -50.0, 1.0])
    >>> growth_clip(g, v, k=1000, beta2=0.975, R=2.0)
    tensor([ 5.0000e+00, -6.4031e+00,  6.4031e-10])
    """
    setting = SMGC(R, s_min)  # checks both
    if not (is_within(beta2, 0) and beta2 < 1):
        raise ValueError(f"growth_clip: beta2 must be in [0, 1); got {beta2!r}.")
    if not isinstance(k, Tensor) and not is_count(k, 0):
        raise ValueError(f"growth_clip: k is an integer >= 0, completed steps; got {k!r}.")
    check_tensors("growth_clip", g=g, v=v)
    if v.ndim and g.shape != v.shape:
        raise ValueError(f"growth_clip: g and v must have one shape; got {list(g.shape)}, {list(v.shape)}.")
    return clipped(g, v, k, beta2, setting)
