"""What does a block keep for its backward pass, and what does it compute again?

    full         only its input: the block runs again in the backward pass
    selective    also the results of matrix products and of attention, which take most of the time; the rest runs again

Router statistics are outputs of a block, so a block that runs twice counts once.

Compiled code that contains a checkpoint knows all of this. Where the experts are divided among ranks, the checkpoint contains
compiled code instead (``parallelize``), and does not see into it: "selective" keeps the results of the experts' products, and
the router and the shared MLP run again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

__all__ = ["recomputed"]


def recomputed(forward: Callable, how: str) -> Callable:
    """``forward``, computed again in the backward pass; ``how`` is "full" or "selective"."""
    from torch.utils import checkpoint as torch_checkpoint

    once = partial(torch_checkpoint.checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    if how == "full":
        return once

    def policy(context: object, op: object, *args: object, **kwargs: object) -> object:
        policies = torch_checkpoint.CheckpointPolicy
        return policies.MUST_SAVE if _is_product(op) else policies.PREFER_RECOMPUTE

    def contexts() -> tuple[Any, ...]:
        modes = torch_checkpoint.create_selective_checkpoint_contexts(policy)
        # A compiler takes the policy of each operator from these modes, and keeps what has none.
        return modes if torch.compiler.is_compiling() else tuple(map(_only_products, modes))

    return partial(once, context_fn=contexts)


def _is_product(op: object) -> bool:
    aten = torch.ops.aten
    products = (aten.mm.default, aten.addmm.default, aten.bmm.default, torch.ops.ngpt_core.expert_mm.default)
    return op in products or any(
        name in str(op) for name in ("scaled_dot_product", "varlen_attn", "ngpt_core.attention", "_linear_pointwise")
    )


def _only_products(mode: Any) -> Any:
    """torch's modes count every operator, and stop if the second run of a block has another number of them. It may: FSDP
    gathers the experts' weights inside a block, and what that takes depends on what is there already."""
    kind = type(mode)

    def dispatch(self: Any, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return kind.__torch_dispatch__(self, op, types, args, kwargs) if _is_product(op) else op(*args, **(kwargs or {}))

    mode.__class__ = type(kind.__name__, (kind,), {"__torch_dispatch__": dispatch})
    return mode
