"""Where do the documents of packed sequences begin and end? Found once per forward pass, for all layers.

A packed row holds several documents, and no token may see another's. Each kind of layer reads that in its own way: Mamba-2 the
number of every token's document, attention on a GPU the offsets of all documents in the flattened batch, attention on a CPU a
mask [T, T], which it makes from the numbers. On a GPU the offsets are computed by the host, because their number is the shape
of a tensor: ``pack`` on the loader's batch, before it is sent to the GPU, waits for nothing.

Symbols: B rows of T tokens, n documents in all rows together.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rehearsal import on_gpu

__all__ = ["Packed", "pack", "segments"]


class Packed(NamedTuple):
    """The documents of a batch, as ``pack`` finds them. Every ``documents`` argument of the model takes one."""

    ids: Tensor
    """int32 [B, T]: 0, 0, 1, 1, 1, ... along each row."""
    offsets: Tensor | None = None
    """int32 [n + 1], on a GPU: document i is offsets[i] : offsets[i + 1] of the B T tokens; the last entry is B T."""
    longest: int = 0
    """Tokens of the longest document, rounded up to a power of two, so that compiled code sees few different numbers."""

    @property
    def shape(self) -> torch.Size:
        return self.ids.shape


def segments(documents: Tensor | Packed) -> Tensor:
    """Documents [B, T] renumbered 0, 1, 2, ... along each row: a segment ends where the id changes."""
    if isinstance(documents, Packed):
        return documents.ids
    change = (documents[:, 1:] != documents[:, :-1]).cumsum(1, dtype=torch.int32)
    return F.pad(change, (1, 0))


def pack(documents: Tensor | Packed, device: torch.device | None = None) -> Packed:
    """The ids [B, T] of a batch's documents, made ready for the layers on ``device`` (None: where they are).

    Call it on the loader's ids, which are on the host. For ids that are on a GPU already, the host waits once.
    """
    if isinstance(documents, Packed):
        return documents
    ids = segments(documents)
    there = ids if device is None else ids.to(device, non_blocking=True)
    if not on_gpu(there):
        return Packed(there)
    begins = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True).cpu()
    offsets = F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=ids.numel()).to(torch.int32)
    longest = int(torch.diff(offsets).max()) if len(offsets) > 1 else 1
    return Packed(there, offsets.to(there.device, non_blocking=True), 1 << (longest - 1).bit_length())
