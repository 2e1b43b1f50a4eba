"""What is a point on the hypersphere, and how does one move there?

The geometry that the forward pass (``nn``), the update (``optim``) and the book share. Every function is pure, acts along
one axis ``dim`` of a tensor of any shape (by default the last: *a row of a matrix is a point on the sphere*), and runs
unchanged in float64, on bfloat16 and on DTensors.

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
    """Half precisions are squared and summed in float32; float32 and float64 stay what they are."""
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"Vectors must be tensors of floating-point numbers, such as torch.tensor([3.0, 4.0]); got {got}.")
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _dot(a: Tensor, b: Tensor, dim: int) -> Tensor:
    return (a * b).sum(dim, keepdim=True)


def unit(x: Tensor, dim: int = -1) -> Tensor:
    """Norm(x) = x / ||x||: the point of the sphere in the direction of x.

    A zero vector has no direction: it stays zero, and its gradient is passed through as
    it is, finite (x / max(||x||, eps) would multiply that gradient by 1/eps). In float32
    (and in the half precisions, computed there) ||x|| may be from about 1e-18 to 1e19:
    beyond, its square leaves the range.

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

    What remains is tangent to the sphere at w, and projecting twice changes nothing.

    g, w: of one shape.
    dim: the axis of the vectors.
    eps: the paper's eps_proj, which a unit w never meets.
    """
    (g, w), dtype = (widen(g), widen(w)), torch.promote_types(g.dtype, w.dtype)
    return project(g, w, _dot(w, g, dim), _dot(w, w, dim), eps).to(dtype)


# The three functions below take the sums over a whole vector as arguments. The optimizer calls them too, with sums that were
# all-reduced where a vector is split across ranks, so one set of lines serves both.


def project(x: Tensor, w: Tensor, wx: Tensor, ww: Tensor, eps: float) -> Tensor:
    """x without its part along w, given wx = <w, x> and ww = <w, w>."""
    return x - w * (wx / ww.clamp_min(eps))  # app. B


def polar(ww: Tensor, wd: Tensor, dd: Tensor, uu: Tensor) -> tuple[Tensor, Tensor]:
    """(||u||, <w/||w||, w + delta>) from <w, w>, <w, delta>, <delta, delta>, <u, u>.

    A u of a few rounding errors of delta is no direction at all and counts as zero.
    """
    length = uu.sqrt()
    length = torch.where(length > 4 * torch.finfo(uu.dtype).eps * dd.sqrt(), length, 0.0)
    norm = ww.sqrt()
    return length, norm + wd / norm


def turn(w: Tensor, u: Tensor, ww: Tensor, length: Tensor, theta: float | Tensor) -> Tensor:
    """The point at the angle theta from w in the direction of u, ||u|| = length > 0.

    At a length of 0 the result is finite, but no such point. A theta beyond pi is pi.
    """
    tool, theta = (
        (torch, theta.clamp(max=math.pi))
        if isinstance(theta, Tensor)
        # a number stays on the host: moving it would make the host wait
        else (math, min(theta, math.pi))
    )
    safe = torch.where(length > 0, length, 1.0)
    along = tool.cos(theta) * torch.rsqrt(ww)
    return along * w + (tool.sin(theta) / safe) * u  # section 2.3, ASC


def _split(w: Tensor, delta: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The candidate w + delta seen from w.

    Returns (tangent part u, its length, component along w / ||w||, <w, w>). u is taken
    from the displacement, not from the candidate as the paper's equation is written:
    both are the same vector, but w + delta has already lost the digits of a small delta
    (in float32 up to half a percent of the angle at 1e-6 rad).
    """
    ww, wd, dd = _dot(w, w, dim), _dot(w, delta, dim), _dot(delta, delta, dim)
    u = project(delta, w, wd, ww, torch.finfo(w.dtype).tiny)
    uu = _dot(u, u, dim)
    length, along = polar(ww, wd, dd, uu.detach())
    # the same length, through a root that has a gradient: that of 0 would be 0 times inf
    length = torch.where(length > 0, torch.where(uu > 0, uu, 1.0).sqrt(), 0.0)
    return u, length, along, ww


def _each(x: float | Tensor, what: str, like: Tensor, dim: int) -> float | Tensor:
    """A number for all vectors or one for each, to be multiplied with ``like``, whose
    axis ``dim`` has the length 1. One for each may come without that axis."""
    if not isinstance(x, Tensor) or x.numel() == 1:
        return x
    axis, shape = dim % like.ndim - like.ndim, list(like.shape)
    del shape[axis]
    if list(x.shape) == shape:
        return x.unsqueeze(dim)
    if x.ndim < -axis or x.shape[axis] != 1:
        raise ValueError(
            f"{what} is one number, or a tensor with one for each vector: {shape}, or {list(like.shape)}; got {list(x.shape)}."
        )
    return x


def angle(w: Tensor, delta: Tensor, dim: int = -1) -> Tensor:
    """phi = atan2(||u||, <w/||w||, w + delta>): the angle between w and w + delta, in radians (section 2.3, ASC).

    u is the part of delta that is tangent to w. ``dim`` is reduced. Accurate to a few rounding errors of the angle itself, down
    to 1e-18 in float32, and up to pi.
    """
    _, length, along, _ = _split(widen(w), widen(delta), dim)
    return torch.atan2(length, along).squeeze(dim)


def cap_angle(w: Tensor, delta: Tensor, max_angle: float | Tensor, dim: int = -1) -> Tensor:
    """The Angular Step Cap (section 2.3): w + delta, at most ``max_angle`` from w.

    A candidate w + delta within the cap is returned as it is (not normalized: the
    retraction Norm comes afterwards). Beyond it, the unit vector at ``max_angle`` from
    w in the same tangent direction. Where the tangent part is zero there is no
    direction to keep and the candidate is left alone. Otherwise a ``max_angle`` of 0
    returns w / ||w||.

    w, delta: of one shape.
    max_angle: theta_max in radians; the recipe's 1 degree is ``math.radians(1)``, and
        ``math.inf`` is no cap. A tensor with one for each vector has their shape
        without ``dim`` (as ``angle`` returns), or with a 1 there.
    dim: the axis of the vectors.
    """
    if not isinstance(max_angle, Tensor) and not max_angle >= 0:
        raise ValueError(f"cap_angle: max_angle, in radians, must be >= 0; got {max_angle!r}.")
    (w, delta), dtype = (widen(w), widen(delta)), w.dtype
    u, length, along, ww = _split(w, delta, dim)
    max_angle = _each(max_angle, "cap_angle: max_angle", ww, dim)
    over = (torch.atan2(length, along) > max_angle) & (length > 0)
    return torch.where(over, turn(w, u, ww, length, max_angle), w + delta).to(dtype)


def step(h: Tensor, suggestion: Tensor, alpha: float | Tensor, dim: int = -1) -> Tensor:
    """Norm(h + alpha * (suggestion - h)): one learned step of the hidden state.

    Section 3.1 (eqs. ATTNnew2 and MLPnew2). A LERP followed by Norm: for a scalar alpha
    the result lies on the same great circle as ``slerp``, in general at another place
    along it.

    h, suggestion: unit vectors: the hidden state, and the normalized output of a block.
    alpha: a number, or a vector of eigen learning rates, one for each coordinate.
    dim: the axis of the vectors.
    """
    return unit(h + alpha * (suggestion - h), dim)


def slerp(a: Tensor, b: Tensor, t: float | Tensor, dim: int = -1) -> Tensor:
    """The point at the fraction t, from 0 to 1, of the great-circle arc from a to b, both unit vectors.

    The arc between antipodes is not unique: one fixed perpendicular direction is taken, so the result is always a point of
    the sphere, with slerp(a, b, 0) = a and slerp(a, b, 1) = b. A tensor t with one number for each vector has their shape
    without ``dim``, or with a 1 there.
    """
    (a, b), dtype = (widen(a), widen(b)), torch.promote_types(a.dtype, b.dtype)
    a, b = unit(a, dim), unit(b, dim)  # a half precision's are unit only to its own rounding
    phi = 2 * torch.atan2(
        torch.linalg.vector_norm(b - a, dim=dim, keepdim=True), torch.linalg.vector_norm(b + a, dim=dim, keepdim=True)
    )
    t = _each(t, "slerp: t", phi, dim)
    # Projected twice: near the antipode the rounding errors of b - a, along a too, are no longer small beside u.
    u = tangent(tangent(b - a, a, dim), a, dim)
    axis = torch.zeros_like(a).scatter_(dim, a.abs().argmin(dim, keepdim=True), 1.0)
    u = torch.where((math.pi - phi) < 4 * torch.finfo(a.dtype).eps, tangent(axis, a, dim), u)
    return unit(torch.cos(t * phi) * a + torch.sin(t * phi) * unit(u, dim), dim).to(dtype)


def random(*shape: int, generator: torch.Generator | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Points drawn uniformly from the sphere of the last dimension: Gaussian, then Norm.

    >>> random(5, 3).shape  # five points of a sphere
    torch.Size([5, 3])
    """
    return unit(torch.randn(*shape, generator=generator, dtype=dtype))
