"""How does a block move the hidden state?

nGPT takes a learned step on the sphere toward the block's suggestion (eqs. ATTNnew2 and MLPnew2). GPT normalizes the block's
input and adds its output to a residual stream of unbounded norm. The two models differ in this file; the blocks themselves are
the same modules.

    nGPT   h <- Norm(h + alpha * (Norm(f(h)) - h))          GPT   h <- h + f(RMSNorm(h))

The step is computed in float32, whatever the precision of h, and rounded once. Over 52 steps at d = 2688, roundings inside it
would turn the state by 15 mrad, one rounding at its end by 10, and a stream in float32 (``ngpt train --stream fp32``) has none.
On a GPU the compiler fuses it.

Symbols: h [B, T, d] the hidden state; f the block (attention, Mamba-2, MLP or MoE); alpha [d] its eigen learning rates.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import sphere
from ..config import ModelConfig
from . import rows_cpu
from .documents import Packed
from .scale import Scale

__all__ = ["Aux", "Residual", "rms_norm"]


class Aux(NamedTuple):
    """What a router reports about a forward pass. It is an output of the block and is not stored on it, so a block that runs
    twice (activation checkpointing) still counts once."""

    balance: Tensor
    """The balance loss of the layer, a scalar with gradients."""
    load: Tensor
    """[E] float: how many tokens each expert received."""


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of the last axis, times a weight for each coordinate."""
    if weight is not None and rows_cpu.takes(x, weight):
        return rows_cpu.norm(x, weight, eps)
    return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)


class Residual(nn.Module):
    """A block and its step: (h, aux) -> (h, aux), where aux is None unless the block routes."""

    off: Tensor | None = None
    """nGPT, for ``--sentinel``: [1], the largest | ||h|| - 1 | among the states h that the fused step has read."""

    def __init__(self, config: ModelConfig, mixer: nn.Module) -> None:
        super().__init__()
        self.eps, self.abs_alpha = config.norm_eps, config.abs_alpha
        self.stream: torch.dtype | None = None  # the precision of h between blocks; None: that of the input
        self.products: torch.dtype | None = None  # the precision of the block itself; None: that of h
        self.mixer = mixer
        self.alpha = Scale(config.d_model, *config.scale_of("alpha")) if config.normalized else None
        self.norm_weight = None if config.normalized else nn.Parameter(torch.empty(config.d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.norm_weight is not None:
            nn.init.ones_(self.norm_weight)

    def forward(
        self,
        h: Tensor,
        documents: Tensor | Packed | None = None,
        cache: object = None,
    ) -> tuple[Tensor, Aux | None]:
        """One step: the state after the block, and its router's Aux, if any."""
        h = h if self.stream is None else h.to(self.stream)
        x = h
        if self.alpha is None:
            x = rms_norm(h, self.norm_weight, self.eps)
        out = self.mixer(x if self.products is None else x.to(self.products), documents, cache)
        out, aux = out if isinstance(out, tuple) else (out, None)
        if self.alpha is None:
            return h + out, aux
        alpha = self.alpha().abs() if self.abs_alpha else self.alpha()  # alpha in R_{>=0}
        if rows_cpu.takes(h, out, alpha):
            return rows_cpu.step(h, out, alpha, self.off), aux
        wide = sphere.step(sphere.widen(h), sphere.unit(sphere.widen(out)), alpha)  # eqs. ATTNnew2, MLPnew2
        return wide.to(h.dtype), aux

    def new_cache(self, batch: int, max_len: int, device: torch.device, dtype: torch.dtype) -> object:
        """The state that the block keeps between tokens; None for MLP and MoE."""
        make = getattr(self.mixer, "new_cache", None)
        return make(batch, max_len, device, dtype) if make else None
