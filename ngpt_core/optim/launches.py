"""Which tensors of a group share a launch on a GPU, and how does the kernel find them?

One launch takes all tensors of one shape: a program finds its tensor in a table of addresses on the device, and its row or
chunk by its place in the grid. The table is copied from pinned memory, without waiting, and only if something in it has
changed: gradients often return to the memory that they had in the step before.
"""

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..rehearsal import rehearsing
from .algorithm import Slot

__all__ = ["COLUMNS", "Launch", "here", "launches"]

COLUMNS = ("w", "g", "m", "v", "t", "eps_gate", "key", "offset")  # of the table, int64: six addresses, then PMEN's numbers
ALIGNED = 16  # bytes: from such addresses a GPU loads four numbers at once


class Launch(NamedTuple):
    """Slots of one shape, with the same step and the same kind of threshold."""

    slots: list[Slot]
    table: Tensor  # int64 [len(slots), len(COLUMNS)] on the device
    aligned: bool
    t: int | Tensor  # a tensor: each slot's own, on the device
    eps_gate: float | Tensor | None


class Table(NamedTuple):
    """What was copied, and the copy. The pinned memory is kept: a CUDA graph that holds the copy reads it again."""

    rows: np.ndarray
    pinned: Tensor
    there: Tensor


def launches(slots: list[Slot], device: torch.device) -> list[Launch]:
    """The launches for these slots of one group, which are on one device."""
    shapes: dict[object, list[Slot]] = defaultdict(list)
    numbers = {}
    for slot in slots:
        if slot.w.numel():
            t, eps_gate = numbers[slot] = here(slot.t, device), here(slot.eps_gate, device)
            kinds = tuple("own" if isinstance(x, Tensor) else x for x in (t, eps_gate))
            shapes[slot.w.shape, slot.w.dtype, kinds].append(slot)
    members = list(shapes.values())
    if not members:
        return []
    rows = np.array([_row(slot, *numbers[slot]) for bucket in members for slot in bucket], np.int64)
    parts = _copied(slots[0], rows, device).split([len(bucket) for bucket in members])
    aligned = [not (part % ALIGNED).any() for part in np.split(rows[:, :4], np.cumsum([len(b) for b in members])[:-1])]
    return [Launch(one, table, fits, *numbers[one[0]]) for one, table, fits in zip(members, parts, aligned)]


def _row(slot: Slot, t: Any, eps_gate: Any) -> tuple[int, ...]:
    return (*map(_address, (slot.w, slot.g, slot.m, slot.v, t, eps_gate)), slot.key & 0xFFFFFFFF, slot.offset or 0)


def _address(x: Any) -> int:
    return x.data_ptr() if isinstance(x, Tensor) and not rehearsing() else 0


def _copied(owner: Slot, rows: np.ndarray, device: torch.device) -> Tensor:
    """The table on the device. The first slot of the group keeps it."""
    kept = owner.table
    if kept is None or kept.there.device != device or not np.array_equal(kept.rows, rows):
        pinned = torch.from_numpy(rows)
        if device.type == "cuda":
            pinned = pinned.pin_memory()
        kept = owner.table = Table(rows, pinned, pinned.to(device, non_blocking=True))
    return kept.there


def here(x: Any, device: torch.device) -> Any:
    """A tensor on this device as it is; one elsewhere as a number."""
    return x.item() if isinstance(x, Tensor) and x.device != device else x
