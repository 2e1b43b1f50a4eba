"""Where does the hidden state start?

At the row of its token: h_0 = W[token]. In nGPT every row is a unit vector, so the hidden state starts on the sphere.

Shapes: B batch, T time, V vocabulary, d d_model.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..rehearsal import has_values
from .unit import init_rows_, rows

__all__ = ["Embedding", "check_integers", "check_tokens", "readable"]


def readable(x: Tensor) -> bool:
    """May a check read the values of x? Only on the CPU: on a GPU it would stall the stream; a traced graph has no values."""
    return has_values(x) and not torch.compiler.is_compiling()


def check_integers(name: str, x: object) -> None:
    """ValueError unless x is a tensor [batch, time] of integers, of any width."""
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] == 0:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a tensor of shape [batch, time] with time >= 1; got {got}.")
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ValueError(f"{name} must be integers (torch.long); got {x.dtype}.")


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """ValueError unless tokens are integers [batch, time] in [0, V).

    The range is checked only on the CPU; on a GPU an index out of range triggers a device-side assertion.
    """
    check_integers("tokens", tokens)
    if readable(tokens) and tokens.numel():
        low, high = (int(x) for x in tokens.long().aminmax())
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
        """The rows of the tokens, which may be integers of any width."""
        return F.embedding(tokens.long(), self.weight)
