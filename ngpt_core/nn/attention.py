"""How do tokens look at each other on the sphere?

    q <- Norm(q) * s_qk,   k <- Norm(k) * s_qk        per head (eqs. qkscaling1, qkscaling2)
    f(h) = softmax(sqrt(d_k) q k^T) v W_o             item 3 of the summary; GPT: no Norm, no s_qk, 1/sqrt(d_k)

The dot product of two unit vectors is a cosine. To be sharp, the softmax needs the factor sqrt(d_k), not 1/sqrt(d_k).
Queries outnumber keys (GQA): each of the G key heads serves H/G query heads.

There is no positional embedding by default, as in Nemotron-3. With ``rope_theta``, q and k are rotated in the last step: only
then do dot products depend only on the difference of positions. (The original nGPT code rotates before s_qk, which then weights
the two coordinates of a plane differently at every position. The two agree while s_qk is equal on both, as at initialization.)

Shapes: B batch, T new tokens, S all tokens that can be seen, H query heads, G key and value heads, d_k head dimension.
"""

import warnings
from functools import cache as once

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .. import sphere
from ..config import ModelConfig
from ..rehearsal import rehearsing
from . import attention_cpu, fused, rows_cpu
from .documents import Packed, pack
from .precision import autocast
from .product import linear, times
from .scale import Scale
from .unit import init_rows_, rows

__all__ = ["Attention", "KVCache", "document_mask", "rotate", "varlen"]


@torch.library.custom_op("ngpt_core::rope_table", mutates_args=())
def rope_table(like: Tensor, theta: float, start: int) -> Tensor:
    """[2, T, d_k/2]: cos and sin of the angles for ``like`` [..., T, d_k], where the first token is at position ``start``.

    Angles are computed in float32 (float64 for float64), whatever the precision of ``like``. This is a custom operator so that
    a compiler computes the table once; if it were fused into its users, every head of every row would compute the sines again.
    """
    (T, d_k), dtype = like.shape[-2:], torch.float64 if like.dtype == torch.float64 else torch.float32
    frequency = theta ** (-torch.arange(0, d_k, 2, device=like.device, dtype=dtype) / d_k)
    phi = torch.arange(start, start + T, device=like.device, dtype=dtype)[:, None] * frequency
    return torch.stack((phi.cos(), phi.sin())).to(like.dtype)


@rope_table.register_fake
def _(like: Tensor, theta: float, start: int) -> Tensor:
    return like.new_empty(2, like.shape[-2], like.shape[-1] // 2)


def rotate(x: Tensor, theta: float, start: int = 0) -> Tensor:
    """The rotary embedding of x [..., T, d_k] at the positions start, start + 1, ...

    Coordinates i and i + d_k/2 form a plane that is rotated by position * theta^(-2i/d_k). A rotation keeps norms, and the dot
    product of two rotated vectors depends only on the difference of their positions.
    """
    table = rope_table(x.detach(), theta, start)
    # ngpt_core only: begin
    if rows_cpu.takes(x, table):
        return rows_cpu.rotate(x, table)
    # ngpt_core only: end
    cos, sin = table
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def scaled_unit(x: Tensor, scale: Tensor) -> Tensor:
    """Norm(x) * scale along the last axis."""
    # ngpt_core only: begin
    if rows_cpu.takes(x, scale):
        return rows_cpu.norm(x, scale)
    # ngpt_core only: end
    return sphere.unit(x) * scale


def document_mask(documents: Tensor) -> Tensor:
    """documents [B, T] -> [B, 1, T, T], True where a token may look: at itself and earlier tokens of the same document."""
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float, ids: Tensor | None = None) -> Tensor:
    """softmax(scale q k^T) v for q [B, H, T, d_k], k and v [B, G, T, d_k]: a token looks at itself and at earlier ones, with
    ``ids`` [B, T] only at those of its document."""
    # ngpt_core only: begin
    if fused.takes(attention_cpu.SOURCE, q, k, v):
        return attention_cpu.causal(q, k, v, scale, ids)
    # ngpt_core only: end
    mask = None if ids is None else document_mask(ids)
    return F.scaled_dot_product_attention(
        *(q, k, v, mask), is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def varlen(q: Tensor, k: Tensor, v: Tensor, documents: Packed, scale: float) -> Tensor:
    """Causal attention within each document by torch's kernel for sequences of several lengths: [B, T, H, d_k], without a mask.

    q [B, T, H, d_k], k and v [B, T, G, d_k] in half precision. The same as ``scaled_dot_product_attention`` with
    ``document_mask``, in time and memory of the documents' own lengths.
    """
    from torch.nn.attention.varlen import varlen_attn

    (B, T, H, _), offsets, longest = q.shape, documents.offsets, documents.longest
    assert offsets is not None  # on a GPU there are some
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    out = varlen_attn(
        *(q, k, v, offsets, offsets, longest, longest),
        scale=scale,
        window_size=(-1, 0),  # all tokens before, none after
        enable_gqa=H != k.shape[1],
    )
    assert isinstance(out, Tensor)  # nothing else was asked for
    return out.view(B, T, H, -1)


@torch.compiler.assume_constant_result
def _takes_varlen(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Can documents on this GPU do without a mask? Warns once if not: a mask of T x T takes much more memory and time."""
    reason = None
    if dtype not in (torch.bfloat16, torch.float16):
        reason = f"flash attention needs a half precision, and this is {dtype}: train with --precision bf16"
    elif head_dim > 256 or head_dim % 8:
        reason = f"flash attention takes heads of up to 256 dimensions, a multiple of 8, and these have {head_dim}"
    elif not rehearsing() and torch.cuda.get_device_capability(device) < (8, 0):
        reason = "flash attention needs a GPU of compute capability 8.0 or newer"
    if reason is not None:
        _warn(reason)
    return reason is None


@once
def _warn(reason: str) -> None:
    warnings.warn(
        f"Attention over packed documents takes a dense mask [T, T], which is slow and large: {reason}.", stacklevel=4
    )


class KVCache:
    """The past keys and values of a layer: two tensors with room for ``max_len`` tokens, and how many are filled."""

    def __init__(self, batch: int, heads: int, max_len: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self.k = torch.empty(batch, heads, max_len, head_dim, device=device, dtype=dtype)
        self.v = torch.empty_like(self.k)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new k, v [B, G, T, d_k]; return everything stored, [B, G, S, d_k]."""
        start, end = self.length, self.length + k.shape[-2]  # the model has checked that they fit
        self.k[:, :, start:end], self.v[:, :, start:end] = k, v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]


class Attention(nn.Module):
    """q_proj [H d_k, d], k_proj and v_proj [G d_k, d], o_proj [H d_k, d]; s_qk [d_k] in nGPT, shared by the layer's heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        H, G, d, d_k = config.n_heads, config.n_kv_heads, config.d_model, config.head_dim
        assert G is not None and d_k is not None  # a config with attention has both
        self.kv_heads, self.head_dim = G, d_k
        self.q_proj, self.o_proj, self.k_proj, self.v_proj = (rows(n * d_k, d) for n in (H, H, G, G))
        self.s_qk = Scale(d_k, *config.scale_of("s_qk")) if config.normalized else None
        self.softmax_scale = d_k**0.5 if config.normalized else d_k**-0.5  # item 3
        self.unit_dims = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), -1) if config.normalized else {}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for w in (self.q_proj, self.k_proj, self.v_proj):
            init_rows_(w, self.config)
        init_rows_(self.o_proj, self.config, output=True)

    def forward(
        self,
        h: Tensor,
        documents: Tensor | Packed | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """h [B, T, d] -> [B, T, d]. With a cache, the T tokens follow those it holds."""
        q, k, v = (
            rearrange(linear(h, W), "b t (h k) -> b t h k", k=self.config.head_dim)
            for W in (self.q_proj, self.k_proj, self.v_proj)
        )
        start = cache.length if cache is not None else 0
        if self.s_qk is not None:
            s_qk = self.s_qk()
            q, k = scaled_unit(q, s_qk), scaled_unit(k, s_qk)  # eqs. qkscaling1, qkscaling2
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # heads before tokens
        if self.config.rope_theta is not None:
            q, k = (rotate(x, self.config.rope_theta, start) for x in (q, k))
        if cache is not None:  # under autocast the cache keeps the precision of the weights
            k, v = (x.to(q.dtype) for x in cache.append(k, v))
        if documents is not None:
            documents = pack(documents)
            if documents.offsets is not None:  # on a GPU
                q, k, v = autocast(q, k, v)
                if _takes_varlen(q.dtype, q.shape[-1], q.device):
                    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
                    out = varlen(q, k, v, documents, self.softmax_scale)
                    return out.flatten(2) @ self.o_proj
        if not start:
            out = causal(q, k, v, self.softmax_scale, None if documents is None else documents.ids)
        else:
            mask = None
            if q.shape[-2] > 1:
                # several tokens after a filled cache: row i sees the past and itself
                size = (q.shape[-2], k.shape[-2])
                mask = torch.ones(size, dtype=torch.bool, device=h.device).tril(start)
            out = F.scaled_dot_product_attention(
                *(q, k, v, mask), scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return times(rearrange(out, "b h t k -> b t (h k)"), self.o_proj)

    def new_cache(self, batch: int, max_len: int, device: torch.device, dtype: torch.dtype) -> KVCache:
        return KVCache(batch, self.kv_heads, max_len, self.head_dim, device, dtype)
