"""What does a step do, and how long would a card take for it? Operators, FLOPs, bytes and collectives, turned into a roofline.

An operator takes at least  max(FLOPs / peak, bytes / bandwidth), with the bytes of its inputs and outputs read and written
once. The estimate assumes a share of both that good kernels reach (``REACHED``), and 6 microseconds of the host per
operator: blocks run uncompiled. A collective over n ranks on k nodes, S bytes in its largest tensor:

    all_gather, reduce_scatter    S (n-1)/n over NVLink, S (k-1)/k over the network cards of its n/k ranks of a node: the slower
    all_reduce                    twice that
    all_to_all                    the part of S for other nodes over this rank's network card, the rest over NVLink

and a latency. Gathers, scatters and the replicas' all-reduces run beside the computation; the part that takes longer than it,
and every other collective, is exposed. This is a model, not a measurement.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import flop_registry

from ...gpus import Gpu
from .machine import Call, is_view, tensors_in
from .ranks import Axes

__all__ = ["HOST", "REACHED", "Collective", "Meter", "message_seconds", "not_hidden"]

REACHED = {"products": 0.7, "memory": 0.8, "links": 0.8}  # assumed shares of the data sheet
HOST = 6e-6  # seconds of the host per operator, uncompiled
LATENCY = 10e-6  # of a collective, per doubling of the ranks

c10d, aten = torch.ops.c10d, torch.ops.aten
_OPS = {  # operator -> name, index of the input, index of the output
    c10d._allgather_base_.default: ("all_gather", 1, 0),
    c10d._reduce_scatter_base_.default: ("reduce_scatter", 1, 0),
    c10d.allreduce_.default: ("all_reduce", 0, 0),
    c10d.alltoall_base_.default: ("all_to_all", 1, 0),
    c10d.broadcast_.default: ("broadcast", 0, 0),
    torch.ops._c10d_functional.all_to_all_single.default: ("all_to_all", 0, None),
    torch.ops._c10d_functional.all_reduce.default: ("all_reduce", 0, None),
}
_FREE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "set_"}  # nothing is launched
_FILL = ("copy", "zero", "cat", "loss_rows", "loss_dots")  # in the names of operators that do not read what they write


@dataclass
class Collective:
    """All calls of one collective over one axis."""

    op: str
    axis: str
    ranks: int
    nodes: int
    """On how many nodes the ranks are."""
    count: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """The estimate, whether exposed or not."""
    exposed: float = 0.0
    """The part of it that no computation hides."""
    beside: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Phase -> seconds that run beside the computation of that phase."""


@dataclass
class _Time:
    bound: float = 0.0
    estimate: float = 0.0


def message_seconds(card: Gpu, op: str, size: int, ranks: int, nodes: int) -> float:
    """The estimate for one collective whose largest tensor has this many bytes."""
    if ranks == 1:
        return 0.0
    across = (nodes - 1) / nodes
    if op == "all_to_all":
        seconds = max(size * across / card.network, size * (1 - across) * (ranks - 1) / ranks / card.link)
    else:
        seconds = max(size * (ranks - 1) / ranks / card.link, size * across / (card.network * ranks / nodes))
        seconds *= 2 if op == "all_reduce" else 1
    return seconds / REACHED["links"] + LATENCY * math.log2(ranks)


def not_hidden(computing: float, beside: float, alone: float, launches: int) -> tuple[float, float]:
    """(communication, host): the seconds of a phase that its computation does not hide. ``beside``: messages that run beside
    it; ``alone``: those that it waits for."""
    exposed = alone + max(0.0, beside - computing)
    return exposed, max(0.0, launches * HOST - computing - exposed)


class Meter:
    """Measures the calls of a ``Machine`` in one phase at a time. ``weight`` counts a call that stands for several."""

    def __init__(self, card: Gpu, axes: Axes, now: Any) -> None:
        self.card, self.axes, self.now = card, axes, now
        self.weight = 1
        self.operations: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.flops = 0
        self.traffic = 0
        self.collectives: dict[tuple[str, str], Collective] = {}
        self.computing: dict[str, dict[str, _Time]] = defaultdict(lambda: defaultdict(_Time))  # phase -> kind of block
        self.talking: dict[str, dict[bool, float]] = defaultdict(lambda: defaultdict(float))  # phase -> overlapped? -> seconds
        self.clock = 0.0

    def __call__(self, call: Call) -> None:
        if call.func in _OPS:
            self._collective(call)
            return
        if call.func.namespace in ("c10d", "_c10d_functional", "prim") or is_view(call.func):  # prim: what device is it on?
            return
        phase, w = self.now.phase, self.weight
        self.operations[phase] += w * call.launches
        if str(call.func).split(".")[1] in _FREE:
            return
        self.launches[phase] += w * call.launches
        flops, dtype = _flops(call)
        traffic = _traffic(call)
        self.flops += w * flops
        self.traffic += w * traffic
        peak = self.card.fp32 if dtype in (torch.float32, torch.float64) else self.card.peak
        bound = max(flops / peak, traffic / self.card.bandwidth)
        estimate = max(flops / peak / REACHED["products"], traffic / self.card.bandwidth / REACHED["memory"])
        spent = self.computing[phase][self.now.module_kind()]
        spent.bound += w * bound
        spent.estimate += w * estimate
        self.clock += estimate

    def _collective(self, call: Call) -> None:
        name, source, target = _OPS[call.func]
        sent = _bytes(call.args[source])
        received = sent if target is None else _bytes(call.args[target])
        axis, ranks, nodes = self.axes.of(_group(call), name)
        self.operations[self.now.phase] += self.weight
        self.launches[self.now.phase] += self.weight
        seconds = message_seconds(self.card, name, max(sent, received), ranks, nodes)
        one = self.collectives.setdefault((name, axis), Collective(name, axis, ranks, nodes))
        one.count += self.weight
        one.bytes += self.weight * sent
        one.seconds += self.weight * seconds
        beside = name in ("all_gather", "reduce_scatter") or (name, axis) == ("all_reduce", "replica")
        self.talking[self.now.phase][beside] += self.weight * seconds
        if beside:
            one.beside[self.now.phase] += self.weight * seconds

    # ---- the roofline --------------------------------------------------------------------------------------------------
    def seconds(self) -> dict[str, float]:
        """The estimate by kind: kinds of blocks, optimizer, exposed communication, host; and their total."""
        found: dict[str, float] = defaultdict(float)
        for phase, kinds in self.computing.items():
            computing = sum(t.estimate for t in kinds.values())
            for kind, t in kinds.items():
                found["optimizer" if phase == "optimizer" else kind] += t.estimate
            exposed, host = not_hidden(computing, self.talking[phase][True], self.talking[phase][False], self.launches[phase])
            found["communication"] += exposed
            found["host"] += host
        found["total"] = sum(found.values())
        return dict(found)

    def overlapped(self) -> list[Collective]:
        """The collectives, with what of each is exposed: those beside a phase share what is longer than its computation."""
        for one in self.collectives.values():
            one.exposed = one.seconds - sum(one.beside.values())
            for phase, seconds in one.beside.items():
                computing = sum(t.estimate for t in self.computing[phase].values())
                total = self.talking[phase][True]
                one.exposed += seconds * max(0.0, 1 - computing / total) if total else 0.0
        return list(self.collectives.values())

    def bounds(self) -> dict[str, float]:
        """No step is shorter than this, by kind: the roofline with everything overlapped that can be, and no host."""
        found: dict[str, float] = defaultdict(float)
        for phase, kinds in self.computing.items():
            for kind, t in kinds.items():
                found["optimizer" if phase == "optimizer" else kind] += t.bound
            beside, alone = (self.talking[phase][hidden] * REACHED["links"] for hidden in (True, False))
            found["communication"] += max(alone, beside - sum(t.bound for t in kinds.values()))
        found["total"] = sum(found.values())
        return dict(found)


def _bytes(x: Any) -> int:
    return sum(t.nbytes for t in tensors_in(x))


def _traffic(call: Call) -> int:
    """Bytes read and written. An operator that returns nothing changes tensors in place: they are read and written."""
    size, schema = _bytes(call.taken) + _bytes(call.returned), call.func._schema
    if not schema.returns and not any(word in schema.name for word in _FILL):
        written = (a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        size += sum(_bytes([x]) for x, changed in zip(call.args, written) if changed)
    return size


def _group(call: Call) -> dist.ProcessGroup:
    """The process group of a collective."""
    if call.func.namespace == "c10d":
        return dist.ProcessGroup.unbox(call.args[1 if call.func in (c10d.allreduce_.default, c10d.broadcast_.default) else 2])
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(call.args[-1])


def _flops(call: Call) -> tuple[int, torch.dtype]:
    """FLOPs, and the precision in which they are done."""
    dtype = call.taken[0].dtype if call.taken else torch.float32
    if call.flops is not None:
        return call.flops, dtype
    packet = call.func._overloadpacket
    if packet is aten._grouped_mm:
        a, b = call.args[:2]
        return 2 * a.shape[0] * a.shape[1] * b.shape[-1], dtype  # [N, p] x [E, p, r], or [p, N] x [N, r]: all N rows once
    if "_scaled_dot_product" in str(packet):  # two products, and the five of backward; the registry does not know all of these
        backward = "backward" in str(packet)
        q, k = call.args[backward : backward + 2]
        b, h, T, d = q.shape
        return (10 if backward else 4) * b * h * T * k.shape[2] * d, dtype
    if packet is aten.addmm and len(call.args) > 2:
        return 2 * call.args[1].shape[0] * call.args[1].shape[1] * call.args[2].shape[1], call.args[1].dtype
    if packet is aten.mm:
        return 2 * call.args[0].shape[0] * call.args[0].shape[1] * call.args[1].shape[1], dtype
    if packet not in flop_registry:
        return 0, dtype
    return int(flop_registry[packet](*call.args, **call.kwargs, out_val=call.out)), dtype
