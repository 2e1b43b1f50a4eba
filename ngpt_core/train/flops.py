"""How much arithmetic does it take to train on one token?"""

from ..config import ModelConfig

__all__ = ["flops_per_token"]


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """FLOPs of training on one token: three times the forward pass (forward, and backward to inputs and to weights).

    Two per matrix entry that the token uses, plus attention's two products with the tokens before it (T/2 on average) and the
    chunked scan's products within its chunk. Embedding lookups and elementwise work are not counted.
    """
    c, d, T = model, model.d_model, seq_len
    E_active = c.top_k * 2 * c.expert_ff * d + c.n_experts * d + 2 * c.shared_ff * d
    attention = (2 * c.n_heads + 2 * (c.n_kv_heads or 0)) * (c.head_dim or 0) * d
    attention += c.n_heads * (c.head_dim or 0) * T  # q k^T and (weights) v: 2 products with T/2 tokens
    Q = min(c.chunk, T)
    scan = Q / 2 * c.groups * c.state + Q / 2 * c.d_inner + 2 * c.d_inner * c.state  # C B^T; times x; states in and out
    mamba = (2 * c.d_inner + 2 * c.groups * c.state + c.mamba_heads + c.d_inner) * d + scan
    mlp = (3 if c.activation == "swiglu" else 2) * c.ff * d
    entries: float = c.vocab_size * d
    for letter, size in {"M": mamba, "*": attention, "-": mlp, "E": E_active}.items():
        entries += c.pattern.count(letter) * size
    return 6.0 * entries
