"""When is a batch read, and how does it reach the device?

On a GPU a thread reads the batch of the next step while this one is computed: into pinned memory, and from there to the device
on a separate stream, with the offsets of its documents, which only the host can find without waiting. The step then finds
everything there. On a CPU a batch is read when it is needed.

The position in the data is the loader's, after the last batch that was handed out. A batch that was read ahead is used only if
it begins there.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from ..data.loader import Batch, Loader
from ..nn.documents import Packed, pack

__all__ = ["Fed", "Feed", "MicroBatch"]


class MicroBatch(NamedTuple):
    """What the model reads at once, on the device."""

    tokens: Tensor
    targets: Tensor
    documents: Packed | None
    """None: one document per row, for which plain causal attention is faster."""


class Fed(NamedTuple):
    """A rank's share of a batch, on the device."""

    micro_batches: list[MicroBatch]
    counted: Tensor
    """int64 []: the targets that count."""

    def tensors(self) -> list[Tensor]:
        packed = (x for micro in self.micro_batches if micro.documents for x in micro.documents[:2] if x is not None)
        return [self.counted, *packed, *(x for micro in self.micro_batches for x in micro[:2])]


class Feed:
    """The batches of a loader, in micro-batches of ``rows``, on a device. ``ahead``: a thread reads the next one meanwhile."""

    def __init__(self, loader: Loader, rows: int, device: torch.device, ahead: bool):
        self.loader, self.rows, self.device = loader, rows, device
        self.thread = ThreadPoolExecutor(1, "ngpt-feed", self._enter) if ahead else None
        self.stream = torch.cuda.Stream(device) if ahead and device.type == "cuda" else None
        self.coming: tuple[list[int], Future] | None = None  # where it begins, and the batch

    def next(self) -> Fed:
        if self.thread is None:
            return self._send(self.loader.next())
        if self.coming is None or self.coming[0] != self.loader.counts:
            self._begin()
        assert self.coming is not None
        fed, self.loader.counts, arrived = self.coming[1].result()
        self._begin()
        if arrived is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(arrived)
            for x in fed.tensors():
                x.record_stream(now)  # its memory is not used again before this stream is done with it
        return fed

    def _enter(self) -> None:
        """A new thread is on GPU 0, whatever the rank's own is, and would open a context there: half a gigabyte per rank."""
        if self.stream is not None:
            torch.cuda.set_device(self.stream.device)

    def _begin(self) -> None:
        assert self.thread is not None
        self.coming = list(self.loader.counts), self.thread.submit(self._read, list(self.loader.counts))

    def _read(self, counts: list[int]) -> tuple[Fed, list[int], torch.cuda.Event | None]:
        """In the thread: (the batch at this position, the position after it, when it has arrived)."""
        batch, after = self.loader.read(counts)
        if self.stream is None:
            return self._send(batch), after, None
        with torch.cuda.stream(self.stream):
            fed = self._send(batch.pinned())
            return fed, after, self.stream.record_event()

    def _send(self, batch: Batch) -> Fed:
        counted = batch.counted.to(self.device, non_blocking=True)
        micro_batches = []
        for part in batch.split(self.rows):
            packed = pack(part.documents, self.device) if bool(part.documents.any()) else None
            tokens, targets = (x.to(self.device, non_blocking=True) for x in (part.tokens, part.targets))
            micro_batches.append(MicroBatch(tokens, targets, packed))
        return Fed(micro_batches, counted)
