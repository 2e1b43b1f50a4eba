"""Which path does each tensor of a group take through a step? One-pass kernel, plain, stacked, or split across ranks.

All four are the same mathematics. ``fused`` holds the kernels; the other three run ``algorithm.update``: on one tensor, on a
stack of tensors of one shape (``foreach``), or on tensors whose vectors are split, in step with each other. Large tensors go
through it in pieces of whole vectors, so that the memory of a step stays below the size of one parameter tensor.

A ``Plan`` holds what the steps of a group share: the path of each tensor, its name, PMEN's key, the kernel's pointers. A step
reads the gradients, the moments and the counters again; where they are no longer what the plan was made for, it is made again.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..rehearsal import on_cpu, rehearsing
from . import auto_gate, fused, groups, sharding
from .algorithm import LATER, Rule, Slot, Update, run, update
from .diagnostics import Diagnostics
from .pmen import key as pmen_key

_SMALL = 1 << 16  # coordinates: below this, launching kernels one tensor at a time costs more than stacking (accelerators)


_PLAIN = (torch.nn.Parameter, Tensor)  # types that cannot be distributed
_SETTINGS = itemgetter("unit_dim", "tangent", "pmen", "foreach", "fused", "capturable")
_RARE = itemgetter("betas", "eps_gate", "eps_num", "a", "decay", "smgc", "transport", "maximize")  # seldom written in a run
Routes = tuple[dict[torch.device, list[Slot]], dict[sharding.Groups, list[Slot]]]


class Plan:
    """What the steps of one group share. ``first``: the index of its first parameter among those of all groups."""

    def __init__(self, group: dict, first: int, state: Mapping[Tensor, dict]):
        self._accept(group, first)
        self._settings = self._settings_of(group, first)
        dim, noise = group["unit_dim"], group["pmen"] if group["unit_dim"] is not None else None
        self._members: list[Slot | None] = []  # None: no gradient
        for name, p in groups.named_parameters(group, first):
            slot = None
            if p.grad is not None:
                slot = Slot(p, p.grad, p=p, name=name, limit=limit_of(group, p))
                if noise is not None:
                    slot.key, slot.offset = pmen_key(noise.seed, name), sharding.index_offset(p)
                self._learn(slot, state)
            self._members.append(slot)
        self.slots = [slot for slot in self._members if slot is not None]
        self._split = {slot: sharding.split_groups(slot.p, dim) if dim is not None else () for slot in self.slots}
        self._routes: dict[tuple[bool, bool], Routes] = {}

    def _accept(self, group: dict, first: int) -> None:
        """Check what was written into the group, once for each value."""
        groups.accept(group, first)
        self._written = (*_SETTINGS(group), *_RARE(group))

    @staticmethod
    def _settings_of(group: dict, first: int) -> tuple:
        return first, len(group["params"]), tuple(group.get("param_names") or ()), type(group["eps_gate"]), *_SETTINGS(group)

    @staticmethod
    def _take(slot: Slot, grad: Tensor | None, state: Mapping[Tensor, dict]) -> tuple:
        """Take the slot's tensors for this step, and return the facts about them that the plan depends on."""
        assert grad is not None
        if grad.is_sparse:
            raise ValueError(
                f"GatedAdamW: the gradient of {slot.name!r} is sparse, and the moments need dense ones. Build its embedding "
                "with sparse=False, or give it to torch.optim.SparseAdam."
            )
        p = w = slot.p
        g, m, v, step = grad, LATER, LATER, LATER
        if entry := state.get(p):
            m, v, step = entry["exp_avg"], entry["exp_avg_sq"], entry["step"]
        if type(p) not in _PLAIN:
            w, g, m, v = sharding.local(p), sharding.local_grad(p, grad), sharding.local(m), sharding.local(v)
        slot.w, slot.g, slot.m, slot.v, slot.step = w, g, m, v, step
        return (
            type(p), _address(w), w.dtype, w.shape, w.is_contiguous(), type(g), g.dtype, g.device, g.is_contiguous(),
            _address(m), m.dtype, m.is_contiguous(), _address(v), v.dtype, v.is_contiguous(), _address(step),
        )  # fmt: skip

    def _learn(self, slot: Slot, state: Mapping[Tensor, dict]) -> None:
        slot.facts = self._take(slot, slot.p.grad, state)
        slot.count = slot.step.numpy() if type(slot.step) is Tensor and slot.step.is_cpu else None

    def refresh(self, group: dict, first: int, state: Mapping[Tensor, dict]) -> bool:
        """Take the tensors of this step. False: something has changed, and the group needs a new plan."""
        if not all(map(is_, self._written, (*_SETTINGS(group), *_RARE(group)))):
            self._accept(group, first)
        if self._settings != self._settings_of(group, first):
            return False
        for p, slot in zip(group["params"], self._members):
            grad = p.grad
            if slot is None or grad is None:
                if slot is not grad:
                    return False
            elif p is not slot.p or self._take(slot, grad, state) != slot.facts:
                return False
        return True

    def release(self) -> None:
        """Let go of the tensors: the plan must not keep the memory of gradients and moments that others have freed."""
        for slot in self.slots:
            slot.w = slot.g = slot.m = slot.v = LATER

    def count(self, group: dict, state: dict, mask: Tensor | None) -> None:
        """Create the state where there is none, and count the step: t, from 1."""
        for slot in self.slots:
            if slot.step is LATER:
                dtype = torch.float64 if slot.p.dtype == torch.float64 else torch.float32
                step = torch.zeros((), dtype=torch.float32, device=slot.w.device if group["capturable"] else "cpu")
                state[slot.p] = {"step": step} | {x: torch.zeros_like(slot.p, dtype=dtype) for x in ("exp_avg", "exp_avg_sq")}
                self._learn(slot, state)
                if isinstance(group["eps_gate"], auto_gate.AutoGate):
                    slot.eps_gate = state[slot.p]["eps_gate"] = auto_gate.first(slot)
        if group["capturable"] and self.slots:
            torch._foreach_add_([slot.step for slot in self.slots], 1 if mask is None else mask)
        for slot in self.slots:
            if group["capturable"]:
                slot.t = slot.step
            elif slot.count is not None:
                slot.count[...] = slot.t = int(slot.count.item()) + 1
            else:
                slot.t = int(slot.step.add_(1).item())

    def routes(self, group: dict, masked: bool, probed: bool) -> Routes:
        """(the slots for a kernel, by device; those for the readable path, by the ranks over which their vectors are split)."""
        if (found := self._routes.get((masked, probed))) is not None:
            return found
        fast, plain = defaultdict(list), defaultdict(list)
        for slot in self.slots:
            why = self._why_not_fused(group, slot, masked, probed)
            if why is None:
                fast[slot.w.device].append(slot)
            elif group["fused"]:
                raise ValueError(
                    f"GatedAdamW: fused=True, but parameter {slot.name!r} cannot take the fused kernel: {why} "
                    "With fused=None such tensors take the plain path."
                )
            else:
                plain[self._split[slot]].append(slot)
        return self._routes.setdefault((masked, probed), (fast, plain))

    def _why_not_fused(self, group: dict, slot: Slot, masked: bool, probed: bool) -> str | None:
        """The reason as a sentence; None if a kernel may take the tensor."""
        if group["fused"] is False:
            return "fused=False."
        if probed:
            return "diagnostics look at what happens between its steps."
        if group["foreach"]:
            return "foreach=True asks for stacked tensors."
        if masked and on_cpu(slot.w):
            return "the mask of this step is on another device."
        if self._split[slot]:
            return "its vectors are split across ranks."
        if slot.offset is None:
            return "its shard is not one uninterrupted piece of the full tensor, and PMEN needs every coordinate's position."
        return fused.usable(slot.w, slot.g, group["unit_dim"])


def _address(x: Tensor) -> int:
    return 0 if rehearsing() else x.data_ptr()


def rule_of(group: dict, bucket: list[Slot]) -> Rule:
    """The group's numbers at this step, for slots of one shape."""
    dim, lr, p, eps_gate = group["unit_dim"], group["lr"], bucket[0].p, bucket[0].eps_gate
    if isinstance(eps_gate, Tensor) and len(bucket) > 1:  # a column, as ``_update`` stacks the tensors
        eps_gate = torch.stack([slot.eps_gate for slot in bucket]).reshape(-1, *(1,) * p.ndim)  # type: ignore[misc]  # tensors, as the first
    eta = lr if group["decay"] == "lr" else lr / group["alpha"]
    return Rule(
        lr=_scalar(lr), decay=_scalar(eta * group["weight_decay"]), beta1=group["betas"][0], beta2=group["betas"][1],
        eps_gate=group["eps_gate"] if eps_gate is None else eps_gate, eps_num=group["eps_num"], a=group["a"],
        tangent=group["tangent"], smgc=group["smgc"],
        dim=None if dim is None else dim % p.ndim - p.ndim, length=1 if dim is None else p.shape[dim],
        pmen=None if dim is None else group["pmen"], cap=None if dim is None else _scalar(group["cap"]),
        transport=None if dim is None else group["transport"], maximize=group["maximize"],
    )  # fmt: skip


def _scalar(x: Any) -> Any:
    """A tensor [1] would give its dimension to a parameter that has none."""
    return x.reshape(()) if isinstance(x, Tensor) else x


def limit_of(group: dict, p: Tensor) -> float:
    """What a gradient's magnitudes must stay below so that their squares, which accumulate in v, cannot overflow.

    With the tangent projection |g - w <w, g>| <= (1 + sqrt(d_j)) max|g|, since |<w, g>| <= ||w|| ||g|| <= sqrt(d_j) max|g|.
    """
    root = math.sqrt(torch.finfo(torch.float64 if p.dtype == torch.float64 else torch.float32).max)
    if group["unit_dim"] is None or not group["tangent"]:
        return root
    return root / (1 + math.sqrt(p.shape[group["unit_dim"]]))


def _is_one(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def check_written(index: int, group: dict) -> None:
    """The numbers that are written between steps. Tensors are not checked: on a device, that would make the host wait."""
    for name in ("lr", "weight_decay"):
        value = group[name]
        if not (_is_one(value) or (0 <= value < math.inf if type(value) is float else checks.is_within(value, 0))):
            raise ValueError(f"GatedAdamW: {name} must be a finite number >= 0; group {index} has {value!r} now.")
    cap = group["cap"]
    if not (cap is None or _is_one(cap) or (checks.is_number(cap) and cap >= 0)):
        raise ValueError(f"GatedAdamW: cap is an angle in radians, >= 0, or None; group {index} has {cap!r} now.")


def step_group(index: int, group: dict, routes: Routes, mask: Tensor | None, probe: Diagnostics | None) -> None:
    """One step of one group, in place. ``mask``: a bool on the device; where it is False, nothing changes."""
    fast, plain = routes
    for slots in fast.values():
        fused.fused_step(slots, rule_of(group, slots[:1]), mask)
    for over, members in plain.items():
        for batch in _batches(group, members, together=bool(over)):
            rules = [rule_of(group, bucket) for bucket in batch]
            seens: list[dict[str, Tensor] | None] = [None if probe is None else {} for _ in batch]
            updates = [_update(*one) for one in zip(batch, rules, seens)]
            results = sharding.run_split(updates, over) if over else map(run, updates)
            for bucket, rule, result, seen in zip(batch, rules, results, seens):
                _finish(bucket, rule, result, mask)
                if probe is not None and seen is not None:
                    probe.add(index, group, rule, bucket[0].t, [slot.p for slot in bucket], seen)


# ---- the readable path, a little at a time -------------------------------------------------------------------------------

_SHARE = 1 / 32  # of the group's largest tensor: ``update`` makes some two dozen temporaries of what it is given
_LEAST, _ELSEWHERE = 1 << 14, 1 << 20  # coordinates, on the CPU and elsewhere: below, the calls cost more than the work
_CACHED = 1 << 18  # coordinates, on the CPU: above, the temporaries no longer fit into its cache


def _batches(group: dict, slots: list[Slot], together: bool) -> Iterator[list[list[Slot]]]:
    """What is updated at the same time: batches of buckets, a bucket being one piece of a tensor or a stack of pieces.

    A batch holds about ``budget`` coordinates, so that its temporaries need less memory than one parameter tensor. If
    not ``together``, it is one bucket. Sizes are counted in whole vectors, so that all ranks that share them get the same.
    """
    dim = group["unit_dim"]

    def extent(slot: Slot) -> list[int]:
        return [slot.p.shape[i] if dim is not None and i == dim % slot.p.ndim else n for i, n in enumerate(slot.w.shape)]

    share = int(_SHARE * max(math.prod(extent(slot)) for slot in slots))
    budget = max(_LEAST, min(share, _CACHED)) if on_cpu(slots[0].w) else max(_ELSEWHERE, share)
    buckets: dict[object, list[list[Slot]]] = defaultdict(list)
    for slot in slots:
        for region in regions(extent(slot), dim, budget):
            piece = slot if region is None else slot.cut(region)
            w, stack = piece.w, group["foreach"]
            if stack is None:
                stack = not on_cpu(w) and slot.w.numel() <= _SMALL
            t = None if isinstance(slot.t, Tensor) else slot.t
            alike = (w.shape, slot.p.shape, w.dtype, w.device, slot.g.dtype, t, sharding.shard_groups(slot.p))
            stacks = buckets[alike if stack else id(piece)]
            if not stacks or (len(stacks[-1]) + 1) * math.prod(extent(piece)) > budget:
                stacks.append([])
            stacks[-1].append(piece)

    batch: list[list[Slot]] = []
    size = 0
    for bucket in (bucket for stacks in buckets.values() for bucket in stacks):
        more = len(bucket) * math.prod(extent(bucket[0]))
        if batch and (not together or size + more > budget):
            yield batch
            batch, size = [], 0
        batch.append(bucket)
        size += more
    yield batch


def regions(shape: Sequence[int], dim: int | None, most: int) -> Iterator[tuple[slice, ...] | None]:
    """Boxes of about ``most`` coordinates that fill a tensor of this shape; None if it is small enough as a whole.

    Never cut along ``dim``: a vector stays whole, however long it is. Cut after multiples of 64 coordinates, if that is not
    too many: a processor's vector instructions start again there in the whole tensor too, and every bit stays the same.
    (Stacked matrices with rows of odd lengths start elsewhere: there the last bit of a power may differ.)
    """
    size = math.prod(shape)
    if size <= most:
        yield None
        return
    starts = []
    for i, n in enumerate(shape):
        inner, step = size // n, n
        if size > most and (dim is None or i != dim % len(shape)):
            step, even = max(1, most // inner), 64 // math.gcd(64, inner)
            step -= step % even if step > even else 0
        starts.append([slice(j, j + step) for j in range(0, n, step)])
        size = inner * step
    yield from product(*starts)


def _update(bucket: list[Slot], rule: Rule, seen: dict[str, Tensor] | None) -> Update:
    """``algorithm.update`` for a bucket, vectors last; a stack of tensors is one tensor with one more dimension in front."""
    first, many, axis = bucket[0], len(bucket) > 1, rule.dim
    rule = rule if axis is None else rule._replace(dim=-1)

    def stack(tensors: list[Tensor]) -> Tensor:
        rows = tensors if axis is None else [x.contiguous().movedim(axis, -1) for x in tensors]
        return torch.stack(rows) if many else rows[0].contiguous()

    column = (-1, *(1,) * first.p.ndim)
    t = first.t
    key: int | Tensor = first.key
    if many and isinstance(t, Tensor):
        t = torch.stack([slot.step for slot in bucket]).reshape(column)  # slot.t is slot.step there
    if many and rule.pmen is not None:
        # filled on the device: a copy from the host would make it wait, and cannot be captured
        keys = [torch.full((), slot.key, dtype=torch.int64, device=slot.w.device) for slot in bucket]
        key = torch.stack(keys).reshape(column)
    w, g, m, v = (stack([getattr(slot, x) for slot in bucket]).to(first.m.dtype) for x in ("w", "g", "m", "v"))

    def index() -> Tensor:
        return stack([sharding.global_index(slot.p, slot.region) for slot in bucket])

    return update(w, -g if rule.maximize else g, m, v, t, rule, key, index, seen)


def _finish(bucket: list[Slot], rule: Rule, result: tuple[Tensor, Tensor, Tensor], mask: Tensor | None) -> None:
    """Write the new values into the parameter and the state."""
    for kept, new in zip(("w", "m", "v"), result):
        new = new if rule.dim is None else new.movedim(-1, rule.dim)
        for slot, value in zip(bucket, new.unbind() if len(bucket) > 1 else [new]):
            old = getattr(slot, kept)
            old.copy_(value if mask is None else torch.where(mask, value.to(old.dtype), old))
