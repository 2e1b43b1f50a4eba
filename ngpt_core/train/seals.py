"""Has a bit changed since it was last written, and where? Seals on every tensor of a model and its optimizer.

A seal is a vector of int32: the bits of a small tensor themselves; of a larger one, for each row, the sum of its 32-bit words
modulo 2^32. One flipped bit changes its word by a power of two below 2^32, so it always changes the seal; several at once keep
a sum only by a chance of 2^-32. Taking or comparing all seals reads each number once, at the speed of the memory. Nothing here
waits for the host, except for naming what was found.

Where the optimizer's kernel for the CPU updates a row, it compares the row's seals as it reads w, m and v, and takes the new
ones as it writes them, so that no time between two updates is left uncovered. Elsewhere the seals are compared just before the
update and taken just after it.
"""

from dataclasses import dataclass
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..optim import fused_cpu
from ..optim.sharding import is_dtensor, local, offsets

__all__ = ["Sealed", "Seals", "sealed_tensors"]

SMALL = 4096  # numbers: up to here a seal holds the bits themselves
NAMES = {"parameter": "{}", "buffer": "{}", "step": "the step counter of {}"}
NAMES |= {"exp_avg": "the first moment of {}", "exp_avg_sq": "the second moment of {}"}


@dataclass
class Sealed:
    """A tensor under seal: a parameter, a state of the optimizer, or a buffer."""

    kind: str
    name: str
    tensor: Tensor
    unit: bool = False  # its rows have norm 1

    def __str__(self) -> str:
        return NAMES.get(self.kind, self.kind + " of {}").format(self.name)

    @property
    def here(self) -> Tensor:
        """This rank's piece. (Under no_grad: a DTensor then returns it without a copy.)"""
        return local(self.tensor)

    def bits(self) -> Tensor:
        x = self.here.contiguous()
        words = x.view(torch.int32 if x.element_size() >= 4 else torch.int16)
        return words.reshape(-1).int() if x.numel() <= SMALL else words.sum(-1, dtype=torch.int32).reshape(-1)

    @property
    def compiled(self) -> bool:
        """Whether the compiled code reads it."""
        x = self.here
        return (
            x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() and not isinstance(fused_cpu.load(), str)
        )

    def norms(self) -> Tensor:
        return torch.linalg.vector_norm(self.here, dim=-1).reshape(-1)

    def row(self, index: int) -> str:
        """The name of a row of this rank's piece, by its position in the full tensor."""
        shape, start, at = self.here.shape[:-1], offsets(self.tensor), []
        for n, first in reversed(list(zip(shape, start))):
            at.append(str(first + index % n))
            index //= n
        return f"{self}, row {', '.join(reversed(at))}" if at else str(self)

    def place(self, index: int) -> str:
        """The name of what number ``index`` of the seal belongs to."""
        x = self.here
        if x.numel() <= SMALL and x.ndim:
            index //= x.shape[-1] * max(1, x.element_size() // 4)
        return self.row(index)


def sealed_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Sealed]:
    """Everything that a checkpoint holds as a tensor: parameters, the optimizer's state, the routers' biases."""
    found = [Sealed("buffer", name, x) for name, x in model.named_buffers()]
    for group in optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"]):
            found.append(Sealed("parameter", name, p, unit=group.get("unit_dim") is not None))
            state = sorted(optimizer.state.get(p, {}).items())  # the moments first: one row's seals for the optimizer's kernel
            found += [Sealed(kind, name, x) for kind, x in state if isinstance(x, Tensor)]
    return found


@dataclass
class RowSeal:
    """The seals of a parameter's rows and of its two moments' rows, as the optimizer's kernel sees them."""

    address: int  # of 3 x rows int32
    changed: int  # of as many bools: where the kernel found that one did not fit
    taken: bool = False  # the kernel has taken them in this step


class Seals:
    """The seals of some tensors, and what ``compare`` and the optimizer have found since they were made."""

    @torch.no_grad()
    def __init__(self, tensors: list[Sealed]):
        self.tensors, self.unit = tensors, [x for x in tensors if x.unit]
        parts = [x.bits() for x in tensors]
        self.lengths, self.norms = [len(part) for part in parts], [len(x.norms()) for x in self.unit]
        self.values = torch.cat(parts)
        self.changed = torch.zeros_like(self.values, dtype=torch.bool)  # numbers of the seals that differed
        self.off = torch.zeros(sum(self.norms), dtype=torch.bool, device=self.values.device)  # unit rows whose norm was not 1
        self.starts = [0, *accumulate(self.lengths)][:-1]
        self.sharded, self.pieces = any(is_dtensor(x.tensor) for x in tensors), [x.here for x in tensors]
        self.compiled = [x.compiled for x in tensors]
        self.d = [1 if x.here.numel() <= SMALL else x.here.shape[-1] for x in tensors]
        self.left: set[int] = set()  # the tensors whose seals are left to the kernel in this step
        self.row_seals: list[RowSeal | None] = [None] * len(tensors)
        for i, x in enumerate(tensors):
            kinds = [y.kind for y in tensors[i : i + 3]]
            if x.unit and kinds == ["parameter", "exp_avg", "exp_avg_sq"] and all(self.compiled[i : i + 3]) and self.d[i] > 1:
                values, changed = (y.data_ptr() + self.starts[i] * y.element_size() for y in (self.values, self.changed))
                self.row_seals[i : i + 3] = [RowSeal(values, changed)] * 3

    def by_parameter(self) -> dict[Tensor, RowSeal]:
        """The seals that the optimizer's kernel keeps."""
        return {x.tensor: seal for x, seal in zip(self.tensors, self.row_seals) if seal is not None and x.kind == "parameter"}

    def _read(self, which: list[int], out: Tensor) -> None:
        """The seals of these tensors as they are now, to their places in ``out``."""
        fast, base = [i for i in which if self.compiled[i]], out.data_ptr()
        if fast:
            pieces = [x.here for x in self.tensors] if self.sharded else self.pieces  # FSDP may exchange its pieces
            addresses = [pieces[i].data_ptr() for i in fast]
            places = [base + 4 * self.starts[i] for i in fast]
            rows, d = [self.lengths[i] for i in fast], [self.d[i] for i in fast]
            fused_cpu.seals(addresses, rows, d, places, torch.get_num_threads())
        if rest := [i for i in which if not self.compiled[i]]:
            if len(rest) == len(self.tensors):
                torch.cat([x.bits() for x in self.tensors], out=out)
            for i in rest if len(rest) < len(self.tensors) else []:
                out[self.starts[i] : self.starts[i] + self.lengths[i]] = self.tensors[i].bits()

    @torch.no_grad()
    def compare(self, tolerance: float, kernel: bool = False) -> None:
        """Remember which seals no longer fit, and which unit rows have a norm further than ``tolerance`` from 1.

        kernel: an update follows, whose kernel will compare the seals that it keeps.
        """
        self.left = {i for i, seal in enumerate(self.row_seals) if kernel and seal is not None}
        now = self.values.clone()
        self._read(sorted(set(range(len(self.tensors))) - self.left), now)
        self.changed |= now != self.values
        if self.unit:
            self.off |= (torch.cat([x.norms() for x in self.unit]) - 1).abs() > tolerance

    @torch.no_grad()
    def take(self) -> None:
        """After an update, take all seals that its kernel does not keep."""
        self._read([i for i, x in enumerate(self.row_seals) if i not in self.left and not (x and x.taken)], self.values)
        for seal in self.row_seals:
            if seal is not None:
                seal.taken = False

    @property
    def broken(self) -> Tensor:
        """Whether anything was found: a bool on the device."""
        return self.changed.any() | self.off.any()

    @torch.no_grad()
    def found(self) -> list[str]:
        """What was found, by name."""
        changed = self.named(self.changed)
        off = [
            f"{x.row(i)}, has left the sphere"
            for x, part in zip(self.unit, self.off.split(self.norms))
            for i in part.nonzero().flatten().tolist()
        ]
        return [f"{place}, changed while training was not writing it" for place in changed] + off

    @torch.no_grad()
    def named(self, wrong: Tensor) -> list[str]:
        """The places of the seals' numbers that are ``wrong``, each once."""
        parts = zip(self.tensors, wrong.split(self.lengths))
        return list(dict.fromkeys(x.place(i) for x, part in parts for i in part.nonzero().flatten().tolist()))

    @torch.no_grad()
    def unequal_copies(self) -> list[str]:
        """Where ranks that hold the same piece of a tensor hold different bits: (HSDP's replicas, tensors that stay whole).

        All ranks call this together, after ``take``. The ranks in the minority are named, or all of them if there is none.
        """
        digests = torch.stack([part.sum(dtype=torch.int64) for part in self.values.split(self.lengths)])
        pieces = [hash((offsets(x.tensor), tuple(x.here.shape))) for x in self.tensors]  # of integers: the same on every rank
        mine = torch.stack([digests, torch.tensor(pieces, device=digests.device)])
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        table, found = torch.stack(every).cpu(), []
        for i, x in enumerate(self.tensors):
            holders: dict[int, dict[int, list[int]]] = {}  # piece -> digest -> ranks
            for rank, (digest, piece) in enumerate(table[:, :, i].tolist()):
                holders.setdefault(piece, {}).setdefault(digest, []).append(rank)
            for copies in holders.values():
                groups = sorted(copies.values(), key=len)
                if len(groups) > 1:
                    odd = groups[:-1] if len(groups[-2]) < len(groups[-1]) else groups
                    ranks = ", ".join(map(str, sorted(chain(*odd))))
                    found.append(f"{x} differs between ranks that hold the same part of it (rank {ranks})")
        return found
