"""Has a bit changed since it was last written, and where? Seals on every tensor of a model and its optimizer.

A seal is a vector of int32: the bits of a small tensor themselves; of a larger one, for each row, the sum of its 32-bit words
modulo 2^32. One flipped bit changes its word by a power of two below 2^32, so it always changes the seal; several at once leave
a sum unchanged with a probability of only 2^-32. Taking or comparing all seals reads each number once, at the speed of the
memory. Nothing here waits for the host, except for naming what was found.

Where the optimizer's kernel for the CPU updates a row, it compares the row's seals and its norm as it reads w, m and v, and
takes the new seals as it writes them: the row is in the cache, and no time between two updates is left uncovered. Elsewhere the
seals are compared just before the update and taken just after it.
"""

from dataclasses import dataclass
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..optim import fused_cpu
from ..optim.sharding import is_dtensor, local, offsets

__all__ = ["TOLERANCE", "Sealed", "Seals", "sealed_tensors"]

TOLERANCE = 1e-5  # of a norm
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
    """The seals of a parameter's rows and of its two moments' rows, as the optimizer's kernel sees them: addresses."""

    address: int  # of 3 x rows int32
    changed: int  # of as many bools: where the kernel found that one did not fit
    off: int  # of a bool for each row: where its norm was not 1
    broken: int  # of a bool: whether the kernel found either
    tolerance: float
    taken: bool = False  # the kernel took them in the last update


class Seals:
    """The seals of some tensors, and what ``compare`` and the optimizer have found since they were made."""

    @torch.no_grad()
    def __init__(self, tensors: list[Sealed], tolerance: float = TOLERANCE):
        self.device, self.tolerance = tensors[0].here.device, tolerance
        # First those that torch reads: all of them on a GPU, where the optimizer's counters are on the host and so come second.
        self.tensors = sorted(tensors, key=lambda x: (self._is_compiled(x), x.here.device != self.device))
        self.by_torch = sum(not self._is_compiled(x) for x in tensors)
        self.unit = [x for x in self.tensors if x.unit]
        self.lengths, self.norms = [len(x.bits()) for x in self.tensors], [len(x.norms()) for x in self.unit]
        self.values = self._bits(self.tensors)
        self.changed = torch.zeros_like(self.values, dtype=torch.bool)  # numbers of the seals that differed
        self.off = torch.zeros(sum(self.norms), dtype=torch.bool, device=self.device)  # unit rows whose norm was not 1
        self.broken = torch.zeros((), dtype=torch.bool, device=self.device)  # whether anything was found
        self.sharded = any(is_dtensor(x.tensor) for x in self.tensors)
        self.left = False  # whether the optimizer's kernel will compare, or has compared, the seals that it keeps
        self._plan()

    def _is_compiled(self, x: Sealed) -> bool:
        return self.device.type == "cpu" and x.compiled

    def _bits(self, tensors: list[Sealed]) -> Tensor:
        here, host = (
            [x.bits() for x in tensors if x.here.device == self.device],
            [x for x in tensors if x.here.device != self.device],
        )
        return torch.cat([*here, torch.cat([x.bits() for x in host]).to(self.device, non_blocking=True)] if host else here)

    def _plan(self) -> None:
        """Where the compiled code finds the tensors, their seals and what it has found."""
        starts, rows = [0, *accumulate(self.lengths)], iter([0, *accumulate(self.norms)])
        kinds, common = [x.kind for x in self.tensors], (self.broken.data_ptr(), self.tolerance)
        self.kept: dict[int, RowSeal] = {}  # by a parameter's index: the seals that the optimizer's kernel keeps
        structs: dict[int, fused_cpu.Sealed] = {}
        for i, x in enumerate(self.tensors):
            off = self.off.data_ptr() + next(rows) if x.unit else None
            if i < self.by_torch:
                continue
            piece, at = x.here, (self.values.data_ptr() + 4 * starts[i], self.changed.data_ptr() + starts[i])
            d, small = piece.shape[-1] if piece.ndim else 1, piece.numel() <= SMALL
            structs[i] = fused_cpu.Sealed(piece.data_ptr(), piece.numel() // max(d, 1), d, *at, off, *common, small)
            if off is not None and not small and kinds[i : i + 3] == ["parameter", "exp_avg", "exp_avg_sq"]:
                self.kept[i] = RowSeal(*at, off, *common)
        of_kernel = {j for i in self.kept for j in range(i, i + 3)}
        self.compiled = [list(structs), [i for i in structs if i not in of_kernel]]  # all, and without those of the kernel
        self.arrays = [(fused_cpu.Sealed * len(which))(*[structs[i] for i in which]) for which in self.compiled]

    def by_parameter(self) -> dict[Tensor, RowSeal]:
        """The seals that the optimizer's kernel keeps."""
        return {self.tensors[i].tensor: seal for i, seal in self.kept.items()}

    def _call(self, compare: bool) -> None:
        """Compare or take the seals of all tensors that the compiled code reads, except those that the kernel keeps."""
        array, which = self.arrays[self.left], self.compiled[self.left]
        if self.sharded:  # FSDP may exchange its pieces
            for struct, i in zip(array, which):
                struct.x = self.tensors[i].here.data_ptr()
        if which:
            fused_cpu.seals(array, compare)

    def _taken(self) -> bool:
        """Whether the kernel took the seals that it keeps in the last update."""
        return all(seal.taken for seal in self.kept.values())

    @torch.no_grad()
    def compare(self, kernel: bool = False) -> None:
        """Remember which seals no longer fit, and which unit rows have a norm further than ``tolerance`` from 1.

        kernel: an update follows, whose kernel will compare the seals that it keeps if it took them in the last one.
        """
        self.left = kernel and self._taken()
        for seal in self.kept.values():
            seal.taken = False
        self._call(compare=True)
        if self.by_torch:
            now = self._bits(self.tensors[: self.by_torch])
            self._note(self.changed, now != self.values[: len(now)])
            if unit := [x.norms() for x in self.tensors[: self.by_torch] if x.unit]:
                self._note(self.off, (torch.cat(unit) - 1).abs() > self.tolerance)

    def _note(self, where: Tensor, wrong: Tensor) -> None:
        where[: len(wrong)] |= wrong
        self.broken |= wrong.any()

    @torch.no_grad()
    def take(self) -> None:
        """After an update, take all seals that its kernel does not keep."""
        self.left = self.left or self._taken()
        self._call(compare=False)
        if self.by_torch:
            now = self._bits(self.tensors[: self.by_torch])
            self.values[: len(now)] = now

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
        """Where ranks that hold the same piece of a tensor hold different bits (HSDP's replicas, tensors that stay whole).

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
