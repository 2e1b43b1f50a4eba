"""What are the blocks of our models, in transformers' layout? Attention, Mamba-2, MLP, experts, and the step around them.

Padding: a padded token neither enters the convolution nor changes the state of Mamba-2, and attention does not see it, so
padded and plain sequences have the same logits. Mamba-2 runs in plain torch, also on a GPU.

Shapes: B batch, T new tokens, d hidden_size, H and G query and key heads, E experts; mask [B, T], 1 for a token, 0 for padding.
Matrices have nn.Linear's layout [out, in]: those that write to the hidden state have d first.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..nn.grouped import combine, dispatch, expert_mm, sort_by_expert
from ..nn.mamba2 import causal_conv, group_rms_norm
from ..nn.mlp import relu2
from ..nn.moe import TINY, balance_loss
from ..nn.precision import autocast, full_precision
from ..nn.scale import Scale
from ..nn.ssd import ssd_chunked, ssd_recurrent
from ..sphere import step, unit
from .configuration_ngpt import NGPTConfig

__all__ = ["NGPTMLP", "NGPTAttention", "NGPTBlock", "NGPTExperts", "NGPTMamba2", "NGPTMoE", "NGPTRouter"]

Mixed = tuple[Tensor, Tensor | None, Tensor | None]  # what a mixer returns: its output, its balance loss, its values


def declare(module: nn.Module, config: NGPTConfig, **axes: int) -> nn.Module:
    """Note which axis of a module's own matrices has length d: initialization asks for it, and ``unit_axes`` in nGPT."""
    module.matrices, module.unit_dims = axes, axes if config.normalized else {}  # type: ignore[assignment]  # plain attributes
    return module


def linear(config: NGPTConfig, inputs: int, outputs: int, dim: int = -1) -> nn.Linear:
    """A matrix [outputs, inputs]; ``dim`` is the axis of length d: -1 if it reads the hidden state, 0 if it writes to it."""
    layer = nn.Linear(inputs, outputs, bias=False)
    declare(layer, config, weight=dim)
    return layer


def rotate_at(x: Tensor, theta: float, positions: Tensor, form: str) -> Tensor:
    """The rotary embedding of x [B, H, T, d_k] at the positions [B, T].

    "rotation": coordinates i and i + d_k/2 turn by position * theta^(-2i/d_k). "nvidia": what the original nGPT's code does.
    It makes a table with sines and cosines in alternation and then reads its first half as the sines and its second half as the
    cosines; each half multiplies one coordinate of the pair (2i, 2i + 1), after the two have changed places.
    """
    d_k, dtype = x.shape[-1], torch.promote_types(x.dtype, torch.float32)
    frequency = theta ** (-torch.arange(0, d_k, 2, device=x.device, dtype=dtype) / d_k)
    phi = positions[:, None, :, None].to(dtype) * frequency
    if form == "nvidia":
        sin, cos = torch.stack((phi.sin(), phi.cos()), -1).flatten(-2).to(x.dtype).chunk(2, -1)
        return torch.stack((-x[..., 1::2] * cos, x[..., ::2] * sin), -1).flatten(-2)
    cos, sin = phi.cos().to(x.dtype), phi.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def eager_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """softmax(scaling q k^T + mask) v, for transformers' "eager" implementation: it also returns the weights."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    weights = query @ key.mT * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = weights.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class NGPTAttention(nn.Module):
    """Attention with normalized queries and keys (nGPT), or plain (GPT); grouped key and value heads."""

    def __init__(self, config: NGPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        d, H = config.hidden_size, config.num_attention_heads
        G, d_k = config.num_key_value_heads or H, config.head_dim or d // H
        self.head_dim, self.num_key_value_groups = d_k, H // G
        self.q_proj, self.k_proj, self.v_proj = (linear(config, d, n * d_k) for n in (H, G, G))
        self.o_proj = linear(config, H * d_k, d, 0)
        shape = (H, d_k) if config.s_qk_per_head else d_k
        self.s_qk = Scale(shape, *config.scale_of("s_qk")) if config.normalized else None
        self.scaling = d_k**0.5 if config.normalized else d_k**-0.5  # item 3

    def forward(
        self,
        h: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        first_values: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """h [B, T, d] -> (output [B, T, d], attention weights or None, values [B, G, T, d_k])."""
        c = self.config
        assert position_ids is not None  # the model counts them
        q, k, v = (rearrange(f(h), "b t (h k) -> b h t k", k=self.head_dim) for f in (self.q_proj, self.k_proj, self.v_proj))
        if first_values is not None:
            v = 0.5 * (v + first_values)
        if c.rope_theta is not None and c.rope_first:
            q, k = (rotate_at(x, c.rope_theta, position_ids, c.rope_form) for x in (q, k))
        if self.s_qk is not None:
            s_qk = self.s_qk()
            s_qk = s_qk if s_qk.ndim == 1 else s_qk[:, None]
            q, k = unit(q) * s_qk, unit(k) * s_qk if c.s_qk_on_keys else unit(k)  # eqs. qkscaling1, qkscaling2
        if c.rope_theta is not None and not c.rope_first:
            q, k = (rotate_at(x, c.rope_theta, position_ids, c.rope_form) for x in (q, k))
        q, k, values = q.to(v.dtype), k.to(v.dtype), v
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(c._attn_implementation, eager_attention)
        out, weights = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*h.shape[:-1], -1)), weights, values


class NGPTMamba2(nn.Module):
    """Mamba-2: s_mamba in nGPT; in GPT a norm over each group after the gate."""

    def __init__(self, config: NGPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        d, H, BC = config.hidden_size, config.mamba_num_heads, config.n_groups * config.ssm_state_size
        inner = H * config.mamba_head_dim
        self.widths, self.parts = (inner, inner + 2 * BC, H), (inner, BC, BC)  # z; x, B, C; dt
        self.in_proj, self.out_proj = linear(config, d, sum(self.widths)), linear(config, inner, d, 0)
        self.conv1d = nn.Conv1d(self.widths[1], self.widths[1], config.conv_kernel, groups=self.widths[1])
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.empty(H)) for _ in range(3))
        shape = d if config.vector_s_mamba else 1
        self.s_mamba = Scale(shape, *config.scale_of("s_mamba")) if config.normalized else None
        self.norm = None if config.normalized else nn.RMSNorm(inner, config.layer_norm_epsilon)

    def forward(
        self,
        h: Tensor,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """h [B, T, d] -> [B, T, d]. ``attention_mask`` [B, T] is 0 for padding, which leaves the state as it is."""
        c, (T, K) = self.config, (h.shape[1], self.config.conv_kernel)
        unscaled = h
        if self.s_mamba is not None:
            h = h * self.s_mamba()  # sec. 3.2
        z, xBC, dt = self.in_proj(h).split(self.widths, -1)
        if not (c.scale_dt or self.s_mamba is None):  # an adapter may wrap in_proj: call it as a whole
            dt = self.in_proj(unscaled).split(self.widths, -1)[2]
        wide_dtype = torch.promote_types(h.dtype, torch.float32)
        dt = F.softplus(dt.to(wide_dtype) + self.dt_bias.to(wide_dtype))
        if c.dt_min > 0:
            dt = dt.clamp_min(c.dt_min)
        if attention_mask is not None:  # dt = 0: the state neither decays nor is written to
            xBC, dt = xBC * attention_mask[..., None].to(xBC.dtype), dt * attention_mask[..., None].to(dt.dtype)
        past = before = None
        if past_key_values is not None:
            before = past_key_values.layers[self.layer_idx].recurrent_states[0]
            seen = past_key_values.update_conv_state(xBC.mT, self.layer_idx, conv_kernel_size=K).mT  # all that the taps reach
            past = F.pad(seen, (0, 0, K - 1, 0))[:, -(T + K - 1) : seen.shape[1] + K - 1 - T]
        assert self.conv1d.bias is not None  # it is made with one
        xBC = causal_conv(xBC, self.conv1d.weight[:, 0].mT, self.conv1d.bias, past, documents)
        x, B, C = xBC.split(self.parts, -1)
        x = rearrange(x, "b t (h p) -> b t h p", p=c.mamba_head_dim)
        B, C = (rearrange(part, "b t (g n) -> b t g n", n=c.ssm_state_size) for part in (B, C))
        A, D = -torch.exp(self.A_log.to(wide_dtype)), self.D.to(wide_dtype)
        if T == 1:
            y, state = ssd_recurrent(x, dt, A, B, C, D, before)
        else:
            y, state = ssd_chunked(x, dt, A, B, C, D, before, documents, c.chunk_size)
        if past_key_values is not None:
            past_key_values.update_recurrent_state(state, self.layer_idx)
        y = rearrange(y, "b t h p -> b t (h p)") * F.silu(z)
        if self.norm is not None:
            y = group_rms_norm(y, self.norm.weight, c.n_groups, c.layer_norm_epsilon)
        return self.out_proj(y)


class NGPTMLP(nn.Module):
    """relu2 or swiglu, with s_u in nGPT. Also the shared expert."""

    def __init__(self, config: NGPTConfig, width: int, activation: str) -> None:
        super().__init__()
        d, gated = config.hidden_size, activation == "swiglu"
        self.up_proj, self.down_proj = linear(config, d, width), linear(config, width, d, 0)
        self.gate_proj = linear(config, d, width) if gated else None
        self.s_u = Scale((2, width) if gated else width, *config.scale_of("s_u")) if config.normalized else None

    def forward(self, x: Tensor) -> Tensor:
        u, s_u = self.up_proj(x), None if self.s_u is None else self.s_u()
        if self.gate_proj is None:
            return self.down_proj(relu2(u if s_u is None else u * s_u))  # eq. mlpscaling1
        v = self.gate_proj(x)
        if s_u is not None:
            u, v = u * s_u[0], v * (s_u[1] * x.shape[-1] ** 0.5)
        return self.down_proj(u * F.silu(v))


class NGPTRouter(nn.Module):
    """Scores of the experts in float32; the bias decides only which are chosen."""

    e_score_correction_bias: Tensor

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        declare(self, config, weight=-1)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, d] -> logits [B, T, E], chosen [B, T, k], weights [B, T, k]."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with full_precision(x):
            logits = F.linear(x.to(dtype), self.weight.to(dtype))
        scores = logits.sigmoid()
        chosen = (
            (scores.detach() + self.e_score_correction_bias).topk(self.config.num_experts_per_tok, -1, sorted=False).indices
        )
        weights = scores.gather(-1, chosen)
        weights = weights * (self.config.routed_scaling_factor / weights.sum(-1, keepdim=True).clamp_min(TINY))
        return logits, chosen, weights


class NGPTExperts(nn.Module):
    """up_proj [E, ff, d] and down_proj [E, d, ff], three-dimensional as in NemotronH; s_u [ff] or [E, ff] in nGPT."""

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__()
        E, ff, d = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.up_proj, self.down_proj = nn.Parameter(torch.empty(E, ff, d)), nn.Parameter(torch.empty(E, d, ff))
        declare(self, config, up_proj=-1, down_proj=-2)
        shape = (E, ff) if config.s_u_per_expert else ff
        self.s_u = Scale(shape, *config.scale_of("s_u")) if config.normalized else None

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [N, d], sorted by expert; counts [E]. -> [N, d]."""
        ends = counts.cumsum(0).to(torch.int32)
        u = expert_mm(*autocast(x, self.up_proj), ends, True)
        if self.s_u is not None:
            s_u = self.s_u()
            u = u * (s_u if s_u.ndim == 1 else s_u.repeat_interleave(counts, 0, output_size=len(x)))
        return expert_mm(*autocast(relu2(u), self.down_proj), ends, True)


class NGPTMoE(nn.Module):
    """Routed experts and a shared one."""

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__()
        self.top_k, shared = config.num_experts_per_tok, config.moe_shared_expert_intermediate_size
        shape = config.hidden_size if config.vector_s_moe else 1
        self.s_moe = Scale(shape, *config.scale_of("s_moe")) if config.normalized else None
        self.gate, self.experts = NGPTRouter(config), NGPTExperts(config)
        self.shared_experts = NGPTMLP(config, shared, "relu2") if shared else None

    def forward(self, h: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """h [B, T, d] -> ([B, T, d], balance loss). ``real`` [B, T] is 0 for padding, which the balance does not count."""
        x = h if self.s_moe is None else h * self.s_moe()  # sec. 3.2
        logits, chosen, weights = self.gate(x)
        one = torch.ones_like(weights) if real is None else real[..., None].to(weights.dtype).expand_as(weights)
        load = torch.zeros_like(logits[:, 0]).scatter_add_(1, chosen.flatten(1), one.flatten(1))
        counts = torch.zeros_like(logits[0, 0]).scatter_add_(0, chosen.flatten(), torch.ones_like(weights).flatten()).long()
        order, place = sort_by_expert(chosen.flatten(0, 1))
        y = self.experts(dispatch(x.flatten(0, 1), order, place, self.top_k), counts)
        y = combine(y * weights.flatten()[order, None].to(y.dtype), order, place, self.top_k).view_as(x)
        if self.shared_experts is not None:
            y = y + self.shared_experts(x)
        return y, balance_loss(logits.sigmoid(), load, self.top_k, real)


class NGPTBlock(GradientCheckpointingLayer):
    """One block: nGPT takes a step on the sphere toward the mixer's suggestion, GPT adds the output of a normalized input."""

    def __init__(self, config: NGPTConfig, layer_idx: int) -> None:
        super().__init__()
        assert config.layer_types is not None
        self.kind, self.abs_alpha = config.layer_types[layer_idx], config.abs_alpha
        self.mixer: nn.Module
        if self.kind == "mlp":
            self.mixer = NGPTMLP(config, config.intermediate_size, config.activation)
        elif self.kind == "moe":
            self.mixer = NGPTMoE(config)
        else:
            self.mixer = (NGPTMamba2 if self.kind == "linear_attention" else NGPTAttention)(config, layer_idx)
        self.alpha = Scale(config.hidden_size, *config.scale_of("alpha")) if config.normalized else None
        self.norm = None if config.normalized else nn.RMSNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(self, h: Tensor, real: Tensor | None = None, **kwargs: Any) -> Mixed:
        """(h, balance loss or None, values or None)."""
        x = h if self.norm is None else self.norm(h)
        balance = values = None
        if self.kind == "mlp":
            out = self.mixer(x)
        elif self.kind == "moe":
            out, balance = self.mixer(x, real)
        elif self.kind == "linear_attention":
            out = self.mixer(x, **kwargs)
        else:
            out, _, values = self.mixer(x, **kwargs)
        if self.alpha is None:
            return h + out, balance, values
        alpha = self.alpha().abs() if self.abs_alpha else self.alpha()
        return step(h, unit(out), alpha).to(h.dtype), balance, values  # eqs. ATTNnew2, MLPnew2
