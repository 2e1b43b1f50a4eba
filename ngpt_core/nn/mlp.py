"""What does the feed-forward block compute, and how large must its inputs be?

    relu2     f(h) = relu(s_u * u)^2 W_down                        u = W_up h                   (Nemotron-3)
    swiglu    f(h) = (s_u * u) * silu(s_v * sqrt(d) * v) W_down    u = W_up h, v = W_gate h     (the original nGPT)

For unit h and unit rows, u and v are cosines of size 1/sqrt(d). SiLU is nonlinear only for inputs of size 1, hence sqrt(d). The
squared ReLU is homogeneous, so it needs no such factor: the Norm that follows removes the scale.

Symbols: h [B, T, d]; u, v [B, T, ff]; s_u [ff] (eq. mlpscaling1; for swiglu [2, ff], with the rows s_u and s_v).
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from . import rows_cpu
from .documents import Packed
from .product import linear, times
from .scale import Scale
from .unit import init_rows_, rows

__all__ = ["MLP", "relu2", "scaled_linear", "swiglu"]


def scaled_linear(h: Tensor, W: Tensor, s: Tensor | None) -> Tensor:
    """s * (W h) for h [..., d], W [ff, d], s [ff] or None (eq. mlpscaling1).

    The scale multiplies the smaller tensor: the rows of W if there are more tokens than
    d_model, as in training, and otherwise the result, as in generation. The product is
    the same.
    """
    if s is None:
        return linear(h, W)
    if h.shape[:-1].numel() > W.shape[-1]:
        return linear(h, W * s[:, None])
    return linear(h, W) * s


def relu2(u: Tensor) -> Tensor:
    """The squared ReLU of the scaled u."""
    # ngpt_core only: begin
    if rows_cpu.takes(u):
        return rows_cpu.relu2(u)
    # ngpt_core only: end
    u = F.relu(u)
    return u * u


def swiglu(u: Tensor, v: Tensor) -> Tensor:
    """u, gated by SiLU of the scaled v."""
    # ngpt_core only: begin
    if rows_cpu.takes(u, v):
        return rows_cpu.swiglu(u, v)
    # ngpt_core only: end
    return u * F.silu(v)


class MLP(nn.Module):
    """up [ff, d], down [ff, d] and, for swiglu, gate [ff, d]; s_u in nGPT. Also the shared expert of an MoE block."""

    def __init__(self, config: ModelConfig, ff: int | None = None, activation: str | None = None) -> None:
        super().__init__()
        self.config = config
        ff, activation = ff or config.ff, activation or config.activation
        gated = activation == "swiglu"
        self.up, self.down = rows(ff, config.d_model), rows(ff, config.d_model)
        self.gate = rows(ff, config.d_model) if gated else None
        self.s_u = Scale((2, ff) if gated else ff, *config.scale_of("s_u")) if config.normalized else None
        self.unit_dims = {name: -1 for name in ("up", "gate", "down") if gated or name != "gate"} if config.normalized else {}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_rows_(self.up, self.config)
        if self.gate is not None:
            init_rows_(self.gate, self.config)
        init_rows_(self.down, self.config, output=True)

    def forward(
        self,
        h: Tensor,
        documents: Tensor | Packed | None = None,
        cache: object = None,
    ) -> Tensor:
        """h [B, T, d] -> [B, T, d].

        Each token is processed separately, so documents and cache are not used.
        """
        s_u = None if self.s_u is None else self.s_u()
        if self.gate is None:
            return times(relu2(scaled_linear(h, self.up, s_u)), self.down)
        s_v = None
        if s_u is not None:
            s_u, s_v = s_u[0], s_u[1] * math.sqrt(self.config.d_model)
        u, v = scaled_linear(h, self.up, s_u), scaled_linear(h, self.gate, s_v)
        return times(swiglu(u, v), self.down)
