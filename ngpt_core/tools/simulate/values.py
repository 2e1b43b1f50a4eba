"""Which values does a rehearsal know? Those that follow from an assumption about routing, and constants.

How many tokens an expert receives decides shapes (expert parallelism) and loop bounds. So the indices that a router's top-k
returns get values by assumption, and every operator on small tensors whose values are all known is also computed for real.

    balanced    every expert receives the same number of tokens
    skewed      the load falls linearly from twice the mean (expert 0) to zero; rank 0, which is simulated, has the fullest
                experts under expert parallelism

Other ranks are assumed to route as this one does: what a rank receives from each peer is what it sends to itself.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["ROUTING", "Values", "chosen"]

ROUTING = ("balanced", "skewed")
_LIMIT = 1 << 21  # numbers: values of larger tensors are not followed
aten = torch.ops.aten
_CONSTANT = {aten.zeros_like: 0, aten.ones_like: 1, aten.new_zeros: 0, aten.new_ones: 1, aten.zeros: 0, aten.ones: 1}
_FROM_NUMBERS = {aten.arange, aten.full, aten.scalar_tensor}


def chosen(tokens: int, k: int, experts: int, routing: str) -> Tensor:
    """[tokens, k] the experts of each token, by assumption."""
    slots = tokens * k
    if routing == "balanced":
        return torch.arange(slots).remainder(experts).view(tokens, k)
    share = torch.linspace(2, 0, experts, dtype=torch.float64)
    ends = (share.cumsum(0) / share.sum() * slots).round().long()
    counts = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.long))
    return torch.arange(experts).repeat_interleave(counts).view(k, tokens).T.contiguous()


class Values:
    """The known values of small tensors."""

    def __init__(self, routing: str, rank: int = 0) -> None:
        self.routing, self.rank = routing, rank
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # fake tensor -> real tensor
        # by storage: values that were overwritten with unknown ones (kept, so that no address is used twice)
        self._changed: dict[int, Tensor] = {}

    def get(self, x: Tensor) -> Tensor | None:
        """The values of x, if they are known."""
        if not isinstance(x, FakeTensor):
            return x if x.numel() <= _LIMIT else None
        found = self._known.get(x)
        return None if found is None or found.untyped_storage()._cdata in self._changed else found

    def set(self, x: Tensor, value: Tensor) -> None:
        """x has these values."""
        self._known[x] = value

    def before(self, func: Any, args: tuple, kwargs: dict, tensors: list[Tensor]) -> Any:
        """The operator computed on the known values of its inputs; None if one is not known. In-place operators change them."""
        if not tensors or func.namespace != "aten" or func._overloadpacket in _CONSTANT:
            return None
        if any(x.numel() > _LIMIT for x in tensors) or any(self.get(x) is None for x in tensors):
            return None
        with _disable_current_modes():
            args, kwargs = tree_map_only(Tensor, self.get, (args, kwargs))
            return func(*args, **kwargs)

    def after(self, func: Any, args: tuple, kwargs: dict, out: Any, known: Any) -> None:
        """Learn the values of what an operator returned."""
        packet = func._overloadpacket
        if known is not None:
            for x, value in zip(tree_leaves(out), tree_leaves(known)):
                if isinstance(x, FakeTensor) and self._known.get(x) is not value:
                    self.set(x, value)
        elif packet is aten.topk:
            x, k = args[:2]
            with _disable_current_modes():
                value = chosen(x.numel() // x.shape[-1], k, x.shape[-1], self.routing).view(out[1].shape)
            self.set(out[1], value)
        elif packet in _CONSTANT or packet in _FROM_NUMBERS:
            if isinstance(out, FakeTensor) and out.numel() <= _LIMIT:
                with _disable_current_modes():
                    made = (
                        func(*args, **kwargs)
                        if packet in _FROM_NUMBERS
                        else torch.full(out.shape, _CONSTANT[packet], dtype=out.dtype)
                    )
                self.set(out, made)
        elif func in _EXCHANGES:
            self._exchanged(*args[:2])
        else:
            self._forget(func, args, out)

    def _exchanged(self, received: Tensor, sent: Tensor) -> None:
        """Every peer sends what this rank sends to itself. (The counts of an exchange; its tokens have no values.)"""
        if (value := self.get(sent)) is not None:
            with _disable_current_modes():
                ranks = len(value)
                self.set(received, value[self.rank % ranks].expand_as(value).clone())

    def _forget(self, func: Any, args: tuple, out: Any) -> None:
        """An operator that wrote unknown values in place."""
        if not func._schema.is_mutable:
            return
        for argument, x in zip(func._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for one in tree_leaves(x):
                    if isinstance(one, FakeTensor) and (old := self._known.get(one)) is not None:
                        self._changed[old.untyped_storage()._cdata] = old


_EXCHANGES = {torch.ops.c10d.alltoall_base_.default}
