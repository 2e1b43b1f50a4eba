"""How do matrix products run in float8 if the modules are not ``nn.Linear``?

torchao multiplies two high-precision tensors by casting each to float8 with its own scale, in the forward pass and for both
gradients. During the forward pass of a block, a torch function mode replaces ``F.linear(x, W)`` and ``u @ W`` by that product.
The modules do not know about it.

Replaced: products of bfloat16 activations with a bfloat16 matrix, if all sides are multiples of 16, as the hardware requires.
Unchanged: the router (it computes in float32), the grouped products of the experts, attention and the scan, embedding and head.
Master weights, optimizer state and reductions stay in float32.
"""

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Float8Products", "in_float8"]

_MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


def _fits(x: Tensor, w: Tensor) -> bool:
    """bfloat16 activations [..., n] and a matrix, with every side (also the number of tokens) a multiple of 16."""
    halves = x.dtype == w.dtype == torch.bfloat16
    return halves and w.ndim == 2 and x.ndim > 1 and all(n % 16 == 0 for n in (*w.shape, x.numel() // x.shape[-1]))


class Float8Products(TorchFunctionMode):
    """A mode in which torchao computes the products that fit (see above). ``count``: how many ran uncompiled."""

    def __init__(self, emulate: bool = False):
        try:
            from torchao.float8.config import Float8LinearConfig
            from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
            from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig
        except ImportError as error:
            if find_spec("torchao") is None:
                raise ValueError("--float8 needs the package torchao: pip install torchao, or leave the flag out.") from None
            raise ValueError(
                f"--float8: the installed torchao does not fit torch {torch.__version__} ({error}). Install one that does, "
                "or leave the flag out."
            ) from None
        super().__init__()
        self.config = Float8LinearConfig(emulate=emulate)
        gemms = (self.config.gemm_config_output, self.config.gemm_config_grad_input, self.config.gemm_config_grad_weight)
        self.mm_config = LinearMMConfig(*(ScaledMMConfig(emulate, gemm.use_fast_accum, False, False) for gemm in gemms))
        self.multiply, self.count = matmul_with_hp_or_float8_args.apply, 0

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is F.linear and len(args) == 2 and not kwargs and _fits(*args):
            return self._product(args[0], args[1].t())
        if func in _MATMULS and len(args) == 2 and _fits(*args):
            return self._product(*args)
        return func(*args, **(kwargs or {}))

    def _product(self, x: Tensor, w: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():  # compiled code would be specialized to each value
            self.count += 1
        return self.multiply(x, w, self.mm_config, self.config)


def in_float8(forward: Callable, mode: Float8Products) -> Callable:
    """``forward`` with its products in float8."""

    @wraps(forward)
    def wrapped(*args: object, **kwargs: object) -> object:
        with mode:
            return forward(*args, **kwargs)

    return wrapped
