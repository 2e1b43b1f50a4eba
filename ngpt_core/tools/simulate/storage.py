"""How much memory is in use, of which kind, and where is the peak?

Every storage that an operator returns is added up until Python and autograd let go of it. Its kind:

    parameters   the shards that this rank keeps, and buffers          moments       the optimizer's
    gradients    the shards that the optimizer reads                   activations   what a forward pass made
    gathered     whole weights of a block, and their whole gradients before they are scattered
    loss         logits of a chunk and the gradients of the head       temporary     everything else
"""

import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .machine import Call, is_view

__all__ = ["KINDS", "SCATTER", "Memory", "Peak"]

KINDS = ("parameters", "gradients", "moments", "gathered", "activations", "loss", "temporary")
_FSDP = "/torch/distributed/fsdp/"
_GATHER = {torch.ops.c10d._allgather_base_.default}
SCATTER = {torch.ops.c10d._reduce_scatter_base_.default}


@dataclass
class Peak:
    """The moment of the largest use."""

    bytes: int = 0
    memory: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    where: str = "?"
    phase: str = ""
    module: str = ""


class Memory:
    """Adds up the storages of a ``Machine``, as an observer of its calls. ``block``: the unit of allocation, in bytes."""

    def __init__(self, block: int, now: Any) -> None:
        self.block, self.now = block, now  # now: the kind of new memory, and the place, as the run sees them
        self.used = dict.fromkeys(KINDS, 0)
        self.highest = dict.fromkeys(KINDS, 0)  # of each kind, at any time
        self.total = 0
        self.peak = Peak()
        self.timeline: list[tuple[float, tuple[int, ...]]] = []
        self._held: dict[int, list] = {}  # storage -> [bytes, kind, weak reference]

    def __call__(self, call: Call) -> None:
        if is_view(call.func):
            return
        for x in call.returned:
            self.add(x)
        if call.func in _GATHER:
            self.move([call.args[0]], "gathered")
        elif call.func in SCATTER:
            self.move([call.args[0]], "gradients")

    def add(self, x: Tensor, kind: str | None = None) -> None:
        """Count the storage of x, if it is new."""
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._held:
            return
        reference = weakref.ref(storage, lambda _: self._free(key))
        self._held[key] = [0, kind or self._kind(), reference]
        self._resize(key, size)

    def move(self, tensors: Iterable[Tensor], kind: str) -> None:
        """These tensors turn out to be of another kind."""
        for x in tensors:
            held = self._held.get(x.untyped_storage()._cdata)
            if held is None:
                self.add(x, kind)
            elif held[1] != "parameters":
                self.used[held[1]] -= held[0]
                self.used[kind] += held[0]
                self.highest[kind] = max(self.highest[kind], self.used[kind])
                held[1] = kind

    def kind_of(self, x: Tensor) -> str:
        """The kind of a tensor's memory; "" if it is not counted."""
        held = self._held.get(x.untyped_storage()._cdata)
        return held[1] if held else ""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP frees gathered weights and makes room for them again by resizing their storage."""
        if (key := storage._cdata) in self._held:
            self._resize(key, storage.nbytes())

    def _kind(self) -> str:
        frame = sys._getframe(2)
        for _ in range(12):
            if frame is None:
                break
            if _FSDP in frame.f_code.co_filename:
                return "gathered"
            frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
        return self.now.kind()

    def _free(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self.used[held[1]] -= held[0]
            self.total -= held[0]
            self._mark()

    def _resize(self, key: int, size: int) -> None:
        held = self._held[key]
        size = -(-size // self.block) * self.block
        self.used[held[1]] += size - held[0]
        self.total += size - held[0]
        held[0] = size
        self.highest[held[1]] = max(self.highest[held[1]], self.used[held[1]])
        if self.total > self.peak.bytes:
            place = self.now.place()
            self.peak = Peak(self.total, dict(self.used), *place)
        self._mark()

    def _mark(self) -> None:
        """A point of the timeline, where the use has changed by more than a 500th of the peak."""
        last = sum(self.timeline[-1][1]) if self.timeline else 0
        if abs(self.total - last) * 500 > self.peak.bytes:
            self.timeline.append((self.now.seconds(), tuple(self.used.values())))
