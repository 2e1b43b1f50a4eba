"""Which models are there, and how large are they?

A preset is a complete ``ModelConfig``: ``preset("30B")`` is nGPT, ``preset("30B", normalized=False)`` its GPT twin, and any
field can be overridden. Three families:

**The ladder** 1B ... 30B of section 4.1. Only 30B is public (Nemotron-3 Nano). For the others the paper gives only total and
active counts; our rungs are proposals that match the active counts to 1% and the rounded totals to 3%. C, tokens and the
baseline's learning rate are the paper's.

**The dense 8B** ``8B-dense``. The paper's figure of s_z is of a dense 8B nGPT trained on 4T tokens, and it gives no other
number. Ours is a proposal of that size: a Transformer with the shape of the usual 8B models, the ladder's vocabulary, and the
original nGPT's SwiGLU and rotary embedding. Its C is the ladder's smallest, and GPT's peak learning rate is the usual one.

**Laptop models** ``pico``, ``micro``, ``mini``, on bytes: the vocabulary is the 256 byte values, and byte 0, which never occurs
in text, separates documents. They are small versions of the ladder: Mamba-2, attention and a mixture of experts. Their
``-dense`` variants resemble the original nGPT: Transformers of attention and MLP blocks with rotary embeddings and about the
same number of parameters, for experiments that do not need routers and scans.

Symbols: M, E, * are the numbers of Mamba-2, MoE and attention blocks; "active" counts the parameters that one token uses,
without the input embedding, of which it reads one row.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from .config import FORMAT, ModelConfig

__all__ = ["PRESETS", "Parameters", "count_parameters", "preset"]


def ladder_pattern(pairs: int, attention: int) -> str:
    """ME pairs, with * before the E of pairs 3, 6, 9, ... until there are ``attention`` of them."""
    return "".join("M*E" if i % 3 == 0 and i // 3 <= attention else "ME" for i in range(1, pairs + 1))


NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"  # Nemotron-3 Nano's

# rung: d_model, pattern, expert ff, shared ff, Mamba heads, query heads, C, billions of tokens, GPT's peak lr
LADDER = {
    "1B": (768, ladder_pattern(10, 3), 384, 768, 24, 12, 0.24, 88, 2.2e-3),
    "2B": (960, ladder_pattern(14, 4), 448, 896, 40, 12, 0.24, 140, 2.0e-3),
    "4B": (1152, ladder_pattern(20, 5), 576, 1152, 40, 12, 0.24, 215, 1.8e-3),
    "7B": (1280, ladder_pattern(22, 6), 864, 1728, 48, 16, 0.22, 310, 1.6e-3),
    "14B": (1920, NANO, 1120, 2240, 64, 20, 0.18, 560, 1.4e-3),
    "30B": (2688, NANO, 1856, 3712, 64, 32, 0.12, 1000, 1.2e-3),
}


def _ladder(name: str) -> dict[str, object]:
    d_model, pattern, expert_ff, shared_ff, mamba_heads, n_heads, C, tokens, gpt_lr = LADDER[name]
    return dict(
        vocab_size=131072, d_model=d_model, pattern=pattern,
        n_heads=n_heads, n_kv_heads=2, head_dim=128,
        mamba_heads=mamba_heads, mamba_head_dim=64, state=128, groups=8, conv=4, chunk=128,
        n_experts=128, top_k=6, expert_ff=expert_ff, shared_ff=shared_ff,
        C=C, tokens=tokens * 10**9, gpt_lr=gpt_lr,
    )  # fmt: skip


# name: d_model, pattern, expert ff (shared: twice that), experts, top-k, Mamba heads x head dim, state, groups, query heads
_LAPTOP = {
    "pico": (64, ladder_pattern(3, 1), 48, 8, 2, 4, 32, 16, 2, 4),
    "micro": (160, ladder_pattern(5, 1), 72, 16, 4, 8, 32, 32, 2, 4),
    "mini": (320, ladder_pattern(7, 2), 96, 16, 4, 12, 64, 64, 4, 10),
}
_DENSE = {"pico": (64, 5, 4), "micro": (192, 6, 6), "mini": (384, 8, 6)}  # d_model, layers, heads


def _laptop(name: str) -> dict[str, object]:
    d_model, pattern, ff, experts, top_k, mamba_heads, mamba_head_dim, state, groups, n_heads = _LAPTOP[name]
    return dict(
        vocab_size=256, d_model=d_model, pattern=pattern,
        n_heads=n_heads, n_kv_heads=2,
        mamba_heads=mamba_heads, mamba_head_dim=mamba_head_dim, state=state, groups=groups, conv=4, chunk=64,
        n_experts=experts, top_k=top_k, expert_ff=ff, shared_ff=2 * ff,
    )  # fmt: skip


def _dense(name: str) -> dict[str, object]:
    d_model, layers, n_heads = _DENSE[name]
    return dict(vocab_size=256, d_model=d_model, pattern="*-" * layers, n_heads=n_heads, rope_theta=1e4, ff=4 * d_model)


def _dense_8b() -> dict[str, object]:
    """Published: dense, 8B, 4T tokens (section 2.1). Everything else is our choice."""
    return dict(
        vocab_size=131072, d_model=4096, pattern="*-" * 32, n_heads=32, n_kv_heads=8, rope_theta=5e5, ff=14336,
        activation="swiglu", C=0.12, tokens=4 * 10**12, gpt_lr=3e-4,
    )  # fmt: skip


FULL_SIZE = (*LADDER, "8B-dense")  # trained with the paper's numbers, not those of a small run

PRESETS: dict[str, Callable[[], dict[str, object]]] = {
    **{name: partial(_laptop, name) for name in _LAPTOP},
    **{f"{name}-dense": partial(_dense, name) for name in _DENSE},
    **{name: partial(_ladder, name) for name in LADDER},
    "8B-dense": _dense_8b,
}


def preset(name: str, normalized: bool = True, **overrides: object) -> ModelConfig:
    """The preset config of that name: nGPT, or its GPT twin with ``normalized=False``. ``overrides`` are fields of ModelConfig.

    For a laptop, on bytes: "pico" (0.3M parameters), "micro" (3M), "mini" (15M), each a hybrid with a mixture of experts, and
    "pico-dense", "micro-dense", "mini-dense", Transformers with rotary embeddings. The paper's ladder: "1B", "2B", "4B", "7B",
    "14B", "30B". Only 30B is public; the shapes of the others are proposals that match the published active counts
    to 1% and the rounded totals to 3%. "8B-dense" is our dense Transformer of 8B parameters for 4T tokens.

    >>> preset("30B").d_model
    2688
    >>> preset("pico", d_model=96).d_model
    96
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"There is no preset {name!r}. Choose one of: {', '.join(PRESETS)}.")
    return ModelConfig.from_dict({"format": FORMAT, "name": name, "normalized": normalized, **PRESETS[name](), **overrides})


class Parameters(NamedTuple):
    """How many parameters a model has, and how many of them a token uses."""

    total: int
    """Every parameter."""
    active: int
    """The parameters that one token uses: top_k of the routed experts, without the input embedding."""


def count_parameters(config: ModelConfig) -> Parameters:
    """The parameter counts of a config, by arithmetic; they equal those of a model built on the meta device."""
    c, d, nGPT = config, config.d_model, config.normalized
    step = d  # alpha, or RMSNorm's weight
    conv = c.d_inner + 2 * c.groups * c.state
    mamba = (c.d_inner + conv + c.mamba_heads + c.d_inner) * d + conv * (c.conv + 1) + 3 * c.mamba_heads
    mamba += (d if c.vector_s_mamba else 1) if nGPT else c.d_inner
    attention = (2 * c.n_heads + 2 * (c.n_kv_heads or 0)) * (c.head_dim or 0) * d + (c.head_dim or 0) * nGPT
    gate = c.activation == "swiglu"
    mlp = (2 + gate) * c.ff * d + (1 + gate) * c.ff * nGPT
    s_u = c.expert_ff * nGPT
    expert = 2 * c.expert_ff * d + (s_u if c.s_u_per_expert else 0)
    fixed = c.n_experts * d + 2 * c.shared_ff * d + c.shared_ff * nGPT + (0 if c.s_u_per_expert else s_u)
    fixed += (d if c.vector_s_moe else 1) if nGPT else 0
    E = c.pattern.count("E")
    total = 2 * c.vocab_size * d + (c.vocab_size if nGPT else d)  # embeddings; s_z, or the last norm
    for letter, size in {"M": mamba, "*": attention, "-": mlp, "E": fixed + c.n_experts * expert}.items():
        total += c.pattern.count(letter) * (step + size)
    return Parameters(total, total - c.vocab_size * d - E * (c.n_experts - c.top_k) * expert)
