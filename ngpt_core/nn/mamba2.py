"""How does a Mamba-2 layer live on the sphere?

The layer (section 3.2, around the scan of ``ssd.py``), for an input h [b, T, d]:

    z, x, B, C, dt = W_in (s_mamba h)                one projection; s_mamba sets the size of SiLU's inputs (item 6)
    x, B, C <- SiLU(conv(x, B, C))                   causal and depthwise, with ``conv`` taps and a bias
    dt <- softplus(dt + dt_bias),  A = -exp(A_log)
    y = scan(x, dt, A, B, C) + D x
    out = (y * SiLU(z)) W_out

nGPT: the rows of W_in and W_out are unit vectors, and there is no norm inside. GPT: no s_mamba, and RMSNorm of y * SiLU(z)
over each of the G groups with a trained weight, as in Nemotron-H.

Shapes: b batch, T tokens, d = d_model, H heads of P channels (d_inner = H P), G groups, N state, K taps;
channels = d_inner + 2 G N. The rows of in_proj are ordered z, x, B, C, dt (as in mamba-ssm and Nemotron-H).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..config import ModelConfig
from . import fused, mamba2_cpu
from .documents import Packed, segments
from .product import linear, times
from .scale import Scale
from .ssd import has_kernel, ssd
from .unit import init_rows_, rows

__all__ = ["Mamba2", "Mamba2Cache", "causal_conv", "conv", "conv_kernel", "group_rms_norm", "inside"]


def _slide(padded: Tensor, taps: Sequence[Tensor], length: int, y: Tensor | None = None) -> Tensor:
    """y_t + sum_k taps_k padded_{t+k} for t < length, separately for each channel."""
    for k, tap in enumerate(taps):
        window = padded[:, k : k + length]
        y = window * tap if y is None else torch.addcmul(y, window, tap)
    assert y is not None  # there is at least one tap
    return y


class _ConvSiLU(torch.autograd.Function):
    """SiLU(bias + sum_k weight_k padded_{t+k}), where ``keep`` [K, b, T, 1] can switch off a tap at a token.

    The backward pass is written by hand: autograd's would copy and mask a whole tensor per tap and take twice as long.
    """

    @staticmethod
    def forward(padded: Tensor, weight: Tensor, bias: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        taps = weight.unbind() if keep is None else (weight[:, None, None] * keep).unbind()
        y = _slide(padded, taps, padded.shape[1] - len(taps) + 1, bias)
        return F.silu(y), y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        padded, weight, bias, keep = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(padded, weight, bias, output[1], keep)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        padded, weight, bias, y, keep = ctx.saved_tensors
        (b, T, channels), K = grad.shape, weight.shape[0]
        if torch.is_grad_enabled():  # for a second derivative y has to depend on the inputs
            y = _slide(padded, weight.unbind() if keep is None else (weight[:, None, None] * keep).unbind(), T, bias)
            s = torch.sigmoid(y)
            grad = grad * (s * (1 + y * (1 - s)))
        else:
            grad = torch.ops.aten.silu_backward(grad, y)
        border = grad.new_zeros(b, K - 1, channels)
        taps = list(weight.flip(0).unbind())  # the gradient is the same sliding sum with the taps reversed
        if keep is not None:
            around = F.pad(keep, (0, 0, K - 1, K - 1)).flip(0)
            taps = [tap * around[k, :, k : k + T + K - 1] for k, tap in enumerate(taps)]
        d_padded = _slide(torch.cat([border, grad, border], 1), taps, T + K - 1)
        seen = [grad] * K if keep is None else (grad * keep).unbind()
        d_weight = torch.stack([(seen[k] * padded[:, k : k + T]).sum((0, 1)) for k in range(K)])
        return d_padded, d_weight, grad.sum((0, 1)), None


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor, past: Tensor | None = None, documents: Tensor | Packed | None = None
) -> Tensor:
    """SiLU(bias + sum_k weight_k x_{t-K+1+k}), separately for each channel: x [b, T, channels], weight [K, channels].

    ``past`` [b, K-1, channels] holds the inputs before x (zeros if None). A tap that would reach into a previous document of
    ``documents`` [b, T] reads zero. Computed in float32 or float64.
    """
    (b, T, channels), K, wide = x.shape, weight.shape[0], torch.promote_types(x.dtype, torch.float32)
    past = x.new_zeros(b, K - 1, channels) if past is None else past.to(x.dtype)
    keep = None
    if documents is not None:
        segment = segments(documents)
        before = F.pad(segment, (K - 1, 0), value=-1)
        keep = torch.stack([before[:, k : k + T] == segment for k in range(K)])[..., None].to(wide)
    return _ConvSiLU.apply(torch.cat([past, x], 1).to(wide), weight.to(wide), bias.to(wide), keep)[0].to(x.dtype)


# causal-conv1d's kernels as custom operators, which have shapes without a GPU.
@torch.library.custom_op("ngpt_core::conv_kernel", mutates_args=())
def _conv_kernel(x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None) -> Tensor:
    from causal_conv1d import causal_conv1d_fn

    return causal_conv1d_fn(_aligned(x).mT, weight.mT, bias, seq_idx=seq_idx, activation="silu").mT


@torch.library.custom_op("ngpt_core::conv_kernel_backward", mutates_args=())
def _conv_kernel_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    from causal_conv1d.cpp_functions import causal_conv1d_bwd_function as backward

    dx, d_weight, d_bias, *_ = backward(_aligned(x).mT, weight.mT, bias, grad.mT, seq_idx, None, None, None, False, True)
    return dx.mT, d_weight.mT.contiguous().to(weight.dtype), d_bias.to(bias.dtype)


def _aligned(x: Tensor) -> Tensor:
    """x with channels last in memory, and rows that begin at multiples of 8 numbers: the kernel loads 16 bytes at once."""
    return x if all(n % 8 == 0 for n in (x.stride(0), x.stride(1), x.storage_offset())) else x.contiguous()


@_conv_kernel.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


@_conv_kernel_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _conv_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_conv_kernel_backward(grad.contiguous(), *ctx.saved_tensors), None


_conv_kernel.register_autograd(_conv_gradients, setup_context=_save)


def conv_kernel(x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor | Packed | None = None) -> Tensor:
    """``causal_conv`` by causal-conv1d's kernel (CUDA)."""
    return _conv_kernel(x, weight, bias, None if documents is None else segments(documents))


def conv(
    x: Tensor, weight: Tensor, bias: Tensor, past: Tensor | None = None, documents: Tensor | Packed | None = None
) -> Tensor:
    """``causal_conv`` in the fastest available way: with causal-conv1d's kernel on CUDA, if it supports these sizes."""
    fits = past is None and 2 <= weight.shape[0] <= 4 and x.shape[-1] % 8 == 0
    if fits and has_kernel(x, "causal_conv1d"):
        return conv_kernel(x, weight, bias, documents)
    return causal_conv(x, weight, bias, past, documents)


def group_rms_norm(y: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """RMSNorm of each group of the last axis, in float32, times one weight per channel."""
    parts = rearrange(y, "... (g w) -> ... g w", g=groups)
    parts = F.rms_norm(parts.to(torch.promote_types(y.dtype, torch.float32)), parts.shape[-1:], eps=eps)
    return rearrange(parts, "... g w -> ... (g w)").to(y.dtype) * weight


def inside(
    p: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    norm_weight: Tensor | None,
    documents: Tensor | Packed | None,
    groups: int,
    state: int,
    chunk: int = 128,
    dt_min: float = 0.0,
    eps: float = 1e-5,
    past: Tensor | None = None,
    before: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the layer does between its two projections: p = W_in (s_mamba h) -> (y * SiLU(z), last inputs of the conv, state).

    p [b, T, 2 d_inner + 2 G N + H] holds z, x, B, C, dt. ``past`` and ``before`` are the inputs of the convolution and the
    state before the first token; None is zeros. ``mamba2_cpu.inside`` is the same function as one operator.
    """
    H, BC = len(D), groups * state
    z, xBC, dt = p.split((conv_weight.shape[1] - 2 * BC, conv_weight.shape[1], H), -1)
    last = xBC if past is None else torch.cat([past, xBC], 1)[:, xBC.shape[1] :]  # what the taps of the next tokens read
    xBC = conv(xBC, conv_weight, conv_bias, past, documents)
    x, B, C = xBC.split((z.shape[-1], BC, BC), -1)
    x = rearrange(x, "b t (h p) -> b t h p", h=H)
    B, C = (rearrange(part, "b t (g n) -> b t g n", n=state) for part in (B, C))
    dt = F.softplus(dt.to(dt_bias.dtype) + dt_bias)
    if dt_min > 0:
        dt = dt.clamp_min(dt_min)
    y, after = ssd(x, dt, A, B, C, D, before, documents, chunk)
    y = rearrange(y, "b t h p -> b t (h p)") * F.silu(z)
    if norm_weight is not None:  # GPT: after the gate, group by group
        y = group_rms_norm(y, norm_weight, groups, eps)
    return y, last, after


class Mamba2Cache:
    """What the layer remembers: the last inputs of the convolution [b, K-1, channels] and the state [b, H, P, N] in float32."""

    def __init__(self, batch: int, config: ModelConfig, device: torch.device | None, dtype: torch.dtype | None) -> None:
        channels = config.d_inner + 2 * config.groups * config.state
        wide = torch.promote_types(dtype or torch.float32, torch.float32)
        self.conv = torch.zeros(batch, config.conv - 1, channels, device=device, dtype=dtype)
        self.state = torch.zeros(batch, config.mamba_heads, config.mamba_head_dim, config.state, device=device, dtype=wide)


class Mamba2(nn.Module):
    """in_proj [2 d_inner + 2 G N + H, d], out_proj [d_inner, d], conv_weight [K, channels], conv_bias [channels], and A_log, D,
    dt_bias [H]; nGPT: s_mamba, a scalar or a vector of d; GPT: norm_weight [d_inner].

    The convolution's weight is stored with taps first, so that the K products read contiguous rows.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        d, H, BC = config.d_model, config.mamba_heads, config.groups * config.state
        self.widths = (config.d_inner, config.d_inner + 2 * BC, H)  # z; x, B, C; dt
        self.in_proj, self.out_proj = rows(sum(self.widths), d), rows(config.d_inner, d)
        self.conv_weight = nn.Parameter(torch.empty(config.conv, self.widths[1]))
        self.conv_bias = nn.Parameter(torch.empty(self.widths[1]))
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.empty(H)) for _ in range(3))
        shape = d if config.vector_s_mamba else 1
        self.s_mamba = Scale(shape, *config.scale_of("s_mamba")) if config.normalized else None  # item 6
        self.norm_weight = None if config.normalized else nn.Parameter(torch.empty(config.d_inner))
        self.unit_dims = {"in_proj": -1, "out_proj": -1} if config.normalized else {}
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init_rows_(self.in_proj, self.config)
        init_rows_(self.out_proj, self.config, output=True)
        bound = self.config.conv**-0.5  # torch's default for a convolution with K inputs
        self.conv_weight.uniform_(-bound, bound)
        self.conv_bias.uniform_(-bound, bound)
        self.A_log.uniform_(*self.config.A_range).log_()
        low, high = map(math.log, self.config.dt_range)
        dt = self.dt_bias.uniform_(low, high).exp_()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
        self.D.fill_(1.0)
        if self.norm_weight is not None:
            self.norm_weight.fill_(1.0)

    def forward(
        self,
        h: Tensor,
        documents: Tensor | Packed | None = None,
        cache: Mamba2Cache | None = None,
    ) -> Tensor:
        """h [b, T, d] -> [b, T, d]. With a cache, the T tokens follow those it has seen."""
        config = self.config
        unscaled = h
        if self.s_mamba is not None:
            # scale the input so that SiLU and softplus see values of the right size
            h = h * self.s_mamba()  # sec. 3.2
        if config.scale_dt or self.s_mamba is None:
            p = linear(h, self.in_proj)
        else:
            rest = self.in_proj.shape[0] - config.mamba_heads
            p = torch.cat([linear(h, self.in_proj[:rest]), linear(unscaled, self.in_proj[rest:])], -1)
        # A_log, D and dt_bias are computed in float32, whatever the precision of the rest
        wide = torch.promote_types(h.dtype, torch.float32)
        A, D, dt_bias = -torch.exp(self.A_log.to(wide)), self.D.to(wide), self.dt_bias.to(wide)
        packed = None if documents is None else Packed(segments(documents))
        tensors = (p, self.conv_weight, self.conv_bias, dt_bias, A, D, self.norm_weight)
        numbers = (config.groups, config.state, config.chunk, config.dt_min, config.norm_eps)
        if cache is None and fused.takes(mamba2_cpu.SOURCE, *tensors):
            y = mamba2_cpu.inside(*tensors, None if packed is None else packed.ids, *numbers)[0]
        elif cache is None:
            y, _, _ = inside(*tensors, packed, *numbers)
        elif p.shape[1] == 1 and fused.infers(*tensors) and fused.takes(mamba2_cpu.SOURCE, *tensors, cache.conv, cache.state):
            y = mamba2_cpu.token(*tensors, *numbers, cache.conv, cache.state)
        else:
            y, conv_inputs, state = inside(*tensors, packed, *numbers, cache.conv.clone(), cache.state)
            cache.conv.copy_(conv_inputs)
            cache.state.copy_(state)
        return times(y, self.out_proj)

    def new_cache(
        self, batch: int, max_len: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Mamba2Cache:
        """An empty cache for ``batch`` sequences; its size does not depend on ``max_len``."""
        return Mamba2Cache(batch, self.config, device, dtype)
