"""Which experts does a token see, and how are they kept busy?

    x = s_moe * h                                        section 3.2: one scale for the block's input
    s = sigmoid(W_r x)            in float32             scores of the E experts; unit rows W_r, so logits are s_moe * cosine
    chosen = top-k of s + b                              the bias b affects only the choice
    weight_i = routed_scaling * s_i / sum_chosen s       from the scores without bias
    f(h) = sum_chosen weight_i * expert_i(x) + shared(x)

Two mechanisms balance the load. After each step, the bias of each expert moves by ``router_bias_rate`` toward equal load
(``Router.update``), without gradients. And a small loss looks at each sequence separately, as in DeepSeek-V3:

    balance = mean over sequences of sum_i f_i P_i,   f_i = E/(k T) * (tokens of the sequence sent to i),
                                                      P_i = mean over its T tokens of s_i / sum_j s_j

It is 1 at perfect balance. Gradients flow only through P. No token is dropped, and no token depends on another: tokens are
sorted by expert, each expert is one matrix multiplication, and the rows of a batch do not affect each other.

Squared-ReLU experts are positively homogeneous and the block's output is normalized, so in nGPT s_moe affects only the router.

Shapes: B batch, T time, d d_model, E experts, k chosen experts per token, N = B T k rows after dispatch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from . import fused, rows_cpu
from .documents import Packed
from .grouped import combine, dispatch, expert_mm, sort_by_expert
from .mlp import MLP, relu2
from .precision import autocast, full_precision
from .residual import Aux
from .scale import Scale
from .unit import init_rows_, rows

__all__ = ["Experts", "MoE", "Router", "balance_loss", "expert_mlp"]

TINY = 1e-18  # lower bound of sums of scores, which can underflow to 0. Its gradient contains 1 / TINY^2, which fits float32


def balance_loss(scores: Tensor, load: Tensor, top_k: int, real: Tensor | None = None) -> Tensor:
    """The sequence-wise balance loss (see the module's docstring).

    scores: [B, T, E]; load: [B, E], how often each expert was chosen.
    real: [B, T], 0 for padding, which is not counted (``load`` is without it already); None: no padding.
    """
    T, E = scores.shape[1:]
    shares = scores / scores.sum(-1, keepdim=True).clamp_min(TINY)
    if real is None:
        f, P = load * (E / (top_k * T)), shares.mean(1)
    else:
        counted = real.sum(1, keepdim=True).clamp_min(1).to(scores.dtype)
        f, P = load * (E / (top_k * counted)), (shares * real[..., None]).sum(1) / counted
    return (f * P).sum(-1).mean() if len(scores) else scores.sum()  # 0 for an empty batch


class Router(nn.Module):
    """weight [E, d]; bias [E], a buffer that only ``update`` changes."""

    bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = rows(config.n_experts, config.d_model)
        self.unit_dims = {"weight": -1} if config.normalized else {}
        self.register_buffer("bias", torch.zeros(config.n_experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_rows_(self.weight, self.config)
        self.bias.zero_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, d] -> scores [B, T, E], chosen [B, T, k], weights [B, T, k].

        chosen and weights are in no particular order.
        """
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        with full_precision(x):
            scores = F.linear(x.to(wide), self.weight.to(wide)).sigmoid()
        biased = scores.detach() + self.bias  # the bias is only for the selection
        chosen = biased.topk(self.config.top_k, -1, sorted=False).indices
        weights = scores.gather(-1, chosen)
        total = weights.sum(-1, keepdim=True).clamp_min(TINY)
        return scores, chosen, weights * (self.config.routed_scaling / total)

    @torch.no_grad()
    def update(self, load: Tensor) -> None:
        """Move each expert's bias by the rate: up if its load [E] is below the mean,
        down if above.
        """
        load = load.to(self.bias.device, torch.float64)
        direction = torch.sign(load.mean() - load).to(self.bias.dtype)
        self.bias.add_(direction, alpha=self.config.router_bias_rate)


class Experts(nn.Module):
    """up and down [E, ff, d]; s_u [ff] (or [E, ff]) in nGPT. Self-contained, so that expert parallelism can wrap it and
    exchange tokens before and after without changes elsewhere."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        E, ff, d = config.n_experts, config.expert_ff, config.d_model
        self.up, self.down = rows(E, ff, d), rows(E, ff, d)
        self.s_u = Scale((E, ff) if config.s_u_per_expert else ff, *config.scale_of("s_u")) if config.normalized else None
        self.unit_dims = {"up": -1, "down": -1} if config.normalized else {}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_rows_(self.up, self.config)
        init_rows_(self.down, self.config, output=True)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [N, d], sorted by expert; counts [E] long: the first counts[0] rows belong to expert 0, and so on. -> [N, d]."""
        return expert_mlp(x, counts, self.up, self.down, None if self.s_u is None else self.s_u())


def expert_mlp(x: Tensor, counts: Tensor, up: Tensor, down: Tensor, s_u: Tensor | None) -> Tensor:
    """What ``Experts`` computes, with the matrices up and down [E, ff, d] and the scale s_u [ff] or [E, ff] of some experts."""
    ends = counts.cumsum(0).to(torch.int32)
    if s_u is not None and s_u.ndim == 2:  # for each token the row of its expert
        s_u = s_u.repeat_interleave(counts, 0, output_size=len(x))
    u = expert_mm(*autocast(x, up), ends, True)
    u = relu2(u if s_u is None else u * s_u)  # eq. mlpscaling1
    return expert_mm(*autocast(u, down), ends, False)


class MoE(nn.Module):
    """router, experts, shared (an MLP, or None) and s_moe: h [B, T, d] -> ([B, T, d], Aux)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        shape = config.d_model if config.vector_s_moe else 1
        self.s_moe = Scale(shape, *config.scale_of("s_moe")) if config.normalized else None
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = MLP(config, config.shared_ff, "relu2") if config.shared_ff else None

    def forward(self, h: Tensor, documents: Tensor | Packed | None = None, cache: object = None) -> tuple[Tensor, Aux]:
        """Each token is processed separately, so documents and cache are not used."""
        x = h if self.s_moe is None else h * self.s_moe()  # sec. 3.2
        scores, chosen, weights = self.router(x)
        load = torch.zeros_like(scores[:, 0]).scatter_add_(1, chosen.flatten(1), torch.ones_like(weights).flatten(1))
        total = load.sum(0)
        y = self.route(x.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1), total.long()).view_as(x)
        if self.shared is not None:
            y = y + self.shared(x)
        asked = self.training or torch.is_grad_enabled()
        return y, Aux(balance_loss(scores, load, self.top_k) if asked else y.new_zeros(()), total)

    def route(self, x: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Send x [n, d] to its chosen experts [n, k] and sum their outputs with the weights [n, k]."""
        e = self.experts
        hooked = e._forward_hooks or e._forward_pre_hooks  # they want the module to be called
        own = not hooked and fused.takes(rows_cpu.SOURCE, x, weights, e.up, e.down)
        if own and len(x) <= rows_cpu.FEW and fused.infers(x, weights, e.up, e.down):
            return rows_cpu.few_experts(x, weights, e.up, e.down, None if e.s_u is None else e.s_u(), chosen)
        order, place = sort_by_expert(chosen)
        if own:
            return rows_cpu.experts(x, weights, e.up, e.down, None if e.s_u is None else e.s_u(), order, counts)
        y = self.experts(dispatch(x, order, place, self.top_k), counts)
        return combine(y * weights.flatten()[order, None].to(y.dtype), order, place, self.top_k)
