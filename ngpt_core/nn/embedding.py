"""Where does the hidden state start?

At the row of its token: h_0 = W[token]. In nGPT every row is a unit vector, so the hidden state is born on the sphere.

Shapes: B batch, T time, V vocabulary, d d_model.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .unit import init_rows_, rows

__all__ = ["Embedding", "check_tokens"]


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """ValueError for tokens that are not integers, or not in [0, V).

    The range is read on the CPU only: on a GPU it would stall the stream, and an index out of range stops there with a
    device-side assertion that says so.
    """
    if tokens.dtype.is_floating_point or tokens.dtype.is_complex or tokens.dtype == torch.bool:
        raise ValueError(f"tokens must be integers (torch.long); got {tokens.dtype}.")
    if tokens.device.type == "cpu" and tokens.numel() and not torch.compiler.is_compiling():
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"tokens must be in [0, vocab_size) = [0, {vocab_size}); got values from {low} to {high}.")


class Embedding(nn.Module):
    """weight [V, d]: tokens [B, T] -> h [B, T, d]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.unit_dims = {"weight": -1} if config.normalized else {}
        self.weight = rows(config.vocab_size, config.d_model)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_rows_(self.weight, self.config)

    def forward(self, tokens: Tensor) -> Tensor:
        """The rows of the tokens."""
        return F.embedding(tokens, self.weight)
