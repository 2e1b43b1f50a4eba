"""What is a point on the hypersphere, and how do you move on it?

The geometry that the forward pass (``nn``), the update (``optim``) and the book share. Every function is pure, works along
one axis ``dim`` of a tensor of any shape (by default the last: *a row of a matrix is a point on the sphere*), and accepts
float64, bfloat16 and DTensors alike.

Symbols (the paper, sections 2.3 and 3.1, appendix B):
    w      a unit parameter vector, w_{t-1}          g      its gradient
    delta  a displacement; the candidate is w~ = w + delta
    u      the part of a displacement that is tangent to w
    phi    the angle between w and the candidate       h      a hidden state
"""

import math

import torch
from torch import Tensor

__all__ = ["angle", "cap_angle", "random", "slerp", "step", "tangent", "unit"]


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


def tangent(g: Tensor, w: Tensor, dim: int = -1, eps: float = 1e-12) -> Tensor:
    """g without its part along w (appendix B, Pre-Moment Tangent Projection).

    The result is tangent to the sphere at w. Projecting twice changes nothing.

    g, w: tensors of the same shape.
    dim: the axis of the vectors.
    eps: the paper's eps_proj. It never matters for a unit w.
    """
    (g, w), dtype = (widen(g), widen(w)), torch.promote_types(g.dtype, w.dtype)
    return project(g, w, _dot(w, g, dim), _dot(w, w, dim), eps).to(dtype)


# The three functions below take the sums over a whole vector as arguments. The optimizer calls them too; where a vector is
# split across ranks, it passes all-reduced sums, so the formulas are written only once.


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


def _split(w: Tensor, delta: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the candidate w + delta into parts tangent to w and along w.

    Returns (tangent part u, its length, component along w / ||w||, <w, w>). The paper's
    equation computes u from the candidate; we use the displacement. Both give the same
    vector, but w + delta has already lost digits of a small delta (in float32, up to
    half a percent of the angle at 1e-6 rad).
    """
    ww, wd, dd = _dot(w, w, dim), _dot(w, delta, dim), _dot(delta, delta, dim)
    u = project(delta, w, wd, ww, torch.finfo(w.dtype).tiny)
    uu = _dot(u, u, dim)
    length, along = polar(ww, wd, dd, uu.detach())
    # the same length, from a root with a finite gradient: at 0 it would be 0 * inf
    length = torch.where(length > 0, torch.where(uu > 0, uu, 1.0).sqrt(), 0.0)
    return u, length, along, ww


def _each(x: float | Tensor, what: str, like: Tensor, dim: int) -> float | Tensor:
    """x in a shape that multiplies ``like``, where axis ``dim`` has length 1.

    x is one number for all vectors, or a tensor with one for each, with or without that axis."""
    if not isinstance(x, Tensor) or x.numel() == 1:
        return x
    axis, shape = dim % like.ndim - like.ndim, list(like.shape)
    del shape[axis]
    if list(x.shape) == shape:
        return x.unsqueeze(dim)
    if x.ndim < -axis or x.shape[axis] != 1:
        raise ValueError(
            f"{what} must be one number, or a tensor with one per vector: {shape} or {list(like.shape)}; got {list(x.shape)}."
        )
    return x


def angle(w: Tensor, delta: Tensor, dim: int = -1) -> Tensor:
    """phi = atan2(||u||, <w/||w||, w + delta>): the angle between w and w + delta, in radians (section 2.3, ASC).

    u is the part of delta that is tangent to w. ``dim`` is reduced. The result is accurate to a few rounding errors of the
    angle itself, from 1e-18 (in float32) up to pi.
    """
    _, length, along, _ = _split(widen(w), widen(delta), dim)
    return torch.atan2(length, along).squeeze(dim)


def cap_angle(w: Tensor, delta: Tensor, max_angle: float | Tensor, dim: int = -1) -> Tensor:
    """The Angular Step Cap (section 2.3): w + delta, at most ``max_angle`` from w.

    A candidate w + delta within the cap is returned unchanged (not normalized: the
    retraction Norm comes afterwards). Beyond the cap, the result is the unit vector at
    ``max_angle`` from w in the same tangent direction. If the tangent part is zero,
    there is no direction to keep, and the candidate is returned unchanged. Otherwise a
    ``max_angle`` of 0 returns w / ||w||.

    w, delta: tensors of the same shape.
    max_angle: theta_max in radians. The recipe's 1 degree is ``math.radians(1)``;
        ``math.inf`` means no cap. A tensor with one value per vector has their shape
        without ``dim`` (as ``angle`` returns it), or with a 1 there.
    dim: the axis of the vectors.
    """
    if not isinstance(max_angle, Tensor) and not max_angle >= 0:
        raise ValueError(f"cap_angle: max_angle must be an angle >= 0, in radians; got {max_angle!r}.")
    (w, delta), dtype = (widen(w), widen(delta)), w.dtype
    u, length, along, ww = _split(w, delta, dim)
    max_angle = _each(max_angle, "cap_angle: max_angle", ww, dim)
    over = (torch.atan2(length, along) > max_angle) & (length > 0)
    return torch.where(over, turn(w, u, ww, length, max_angle), w + delta).to(dtype)


def step(h: Tensor, suggestion: Tensor, alpha: float | Tensor, dim: int = -1) -> Tensor:
    """Norm(h + alpha * (suggestion - h)): one learned step of the hidden state.

    Section 3.1 (eqs. ATTNnew2 and MLPnew2). A LERP followed by Norm. For a scalar alpha
    the result lies on the same great circle as ``slerp``'s, but in general not at the
    same point.

    h, suggestion: unit vectors: the hidden state, and the normalized output of a block.
        Half precisions are computed in float32 and rounded once, at the end.
    alpha: a number, or a vector of eigen learning rates, one per coordinate.
    dim: the axis of the vectors.
    """
    (a, b), dtype = (widen(h), widen(suggestion)), torch.promote_types(h.dtype, suggestion.dtype)
    return unit(a + alpha * (b - a), dim).to(dtype)


def slerp(a: Tensor, b: Tensor, t: float | Tensor, dim: int = -1) -> Tensor:
    """The point at fraction t, from 0 to 1, of the great-circle arc between the unit vectors a and b.

    The arc between antipodes is not unique. There, a fixed perpendicular direction is used, so the result is always on the
    sphere, with slerp(a, b, 0) = a and slerp(a, b, 1) = b. A tensor t with one number per vector has their shape without
    ``dim``, or with a 1 there.
    """
    (a, b), dtype = (widen(a), widen(b)), torch.promote_types(a.dtype, b.dtype)
    a, b = unit(a, dim), unit(b, dim)  # vectors in half precision are unit only up to its rounding
    phi = 2 * torch.atan2(
        torch.linalg.vector_norm(b - a, dim=dim, keepdim=True), torch.linalg.vector_norm(b + a, dim=dim, keepdim=True)
    )
    t = _each(t, "slerp: t", phi, dim)
    # Project twice: near the antipode, the rounding errors of b - a along a are no longer small compared with u.
    u = tangent(tangent(b - a, a, dim), a, dim)
    axis = torch.zeros_like(a).scatter_(dim, a.abs().argmin(dim, keepdim=True), 1.0)
    u = torch.where((math.pi - phi) < 4 * torch.finfo(a.dtype).eps, tangent(axis, a, dim), u)
    return unit(torch.cos(t * phi) * a + torch.sin(t * phi) * unit(u, dim), dim).to(dtype)


def random(*shape: int, generator: torch.Generator | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Points drawn uniformly from the sphere in the last dimension: Gaussian, then Norm.

    >>> random(5, 3).shape  # five points on a sphere
    torch.Size([5, 3])
    """
    return unit(torch.randn(*shape, generator=generator, dtype=dtype))
