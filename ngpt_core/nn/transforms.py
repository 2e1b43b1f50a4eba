"""How do our operators work under torch.func (grad, vjp, functional_call), as well as under autograd and torch.compile?

A custom operator of torch.library has a gradient for autograd and for the compiler, but torch.func wants it as an
``autograd.Function`` with ``setup_context``. ``differentiable`` registers one backward pass as both.
"""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["differentiable", "transformed"]


def transformed() -> bool:
    """Is this call inside torch.func? Its tensors have no memory that a kernel could read."""
    ask = getattr(torch._C, "_are_functorch_transforms_active", None)  # private; torch's own error would follow without it
    return ask is not None and not torch.compiler.is_compiling() and bool(ask())


def differentiable(operator: Any, backward: Callable[..., Any], setup_context: Callable[..., None]) -> Callable[..., Any]:
    """The custom operator with this backward pass (see ``register_autograd``), for autograd, torch.compile and torch.func."""
    operator.register_autograd(backward, setup_context=setup_context)
    members = {"forward": staticmethod(lambda *inputs: operator(*inputs)), "backward": staticmethod(backward),
               "setup_context": staticmethod(setup_context)}  # fmt: skip
    function: Any = type(operator._name.replace("::", "_"), (torch.autograd.Function,), members)

    def call(*inputs: Any) -> Any:
        return function.apply(*inputs) if transformed() else operator(*inputs)

    return call
