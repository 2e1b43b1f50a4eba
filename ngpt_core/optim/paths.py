"""Which way does each tensor of a group take through a step? One-pass kernel, plain, stacked, or split across ranks.

All four are the same mathematics. ``fused`` holds the kernels; the other three run ``algorithm.update``: on one tensor, on a
stack of tensors of one shape (``foreach``), or on tensors whose vectors are split, in step with each other. Large tensors go
through it in pieces of whole vectors, so that the memory of a step stays below one parameter tensor's worth.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .. import checks
from . import sharding
from .algorithm import Rule, Update, run, update
from .diagnostics import Diagnostics
from .pmen import key as pmen_key

_LATER = torch.empty(0, device="cpu")  # stands for what is filled in later
_SMALL = 1 << 16  # coordinates: below this, launching kernels one tensor at a time costs more than stacking (accelerators)


@dataclass
class Slot:
    """One parameter with a gradient, at one step: this rank's pieces of it."""

    name: str
    p: Tensor  # as the optimizer holds it (a DTensor where sharded)
    w: Tensor  # its local piece; g, m, v likewise
    g: Tensor
    limit: float = math.inf  # ``limit_of`` its gradient
    m: Tensor = _LATER
    v: Tensor = _LATER
    step: Tensor = _LATER  # the counter in the state
    t: int | Tensor = 0  # this step, counted from 1: a number, or the counter itself where it lives on the device
    region: tuple[slice, ...] | None = None  # of the local piece, where w, g, m, v are a part of it

    def cut(self, region: tuple[slice, ...]) -> "Slot":
        """A part of it, sharing its memory."""
        parts = {name: getattr(self, name)[region] for name in ("w", "g", "m", "v")}
        return replace(self, region=region, **parts)


def rule_of(group: dict, p: Tensor) -> Rule:
    """The group's numbers at this step, for a parameter of p's shape."""
    dim, lr = group["unit_dim"], group["lr"]
    eta = lr if group["decay"] == "lr" else lr / group["alpha"]

    def one(x: Any) -> Any:
        """A tensor [1] would give its dimension to a parameter that has none."""
        return x.reshape(()) if isinstance(x, Tensor) else x

    return Rule(
        lr=one(lr), decay=one(eta * group["weight_decay"]), beta1=group["betas"][0], beta2=group["betas"][1],
        eps_gate=group["eps_gate"], eps_num=group["eps_num"], a=group["a"], tangent=group["tangent"],
        dim=None if dim is None else dim % p.ndim - p.ndim, length=1 if dim is None else p.shape[dim],
        smgc=group["smgc"], pmen=None if dim is None else group["pmen"], cap=None if dim is None else one(group["cap"]),
    )  # fmt: skip


def limit_of(group: dict, p: Tensor) -> float:
    """What a gradient's magnitudes must stay below, so that its square, which goes into v and stays there, cannot overflow.

    With the tangent projection |g - w <w, g>| <= (1 + sqrt(d_j)) max|g|, since |<w, g>| <= ||w|| ||g|| <= sqrt(d_j) max|g|.
    """
    root = math.sqrt(torch.finfo(torch.float64 if p.dtype == torch.float64 else torch.float32).max)
    if group["unit_dim"] is None or not group["tangent"]:
        return root
    return root / (1 + math.sqrt(p.shape[group["unit_dim"]]))


def check_written(number: int, group: dict) -> None:
    """The numbers that are written between steps. Tensors may live on a device, where looking would make the host wait."""
    for name in ("lr", "weight_decay"):
        if not isinstance(value := group[name], Tensor) and not checks.is_within(value, 0):
            raise ValueError(f"GatedAdamW: {name} must be a finite number >= 0; the group {number} has {value!r} now.")
    cap = group["cap"]
    if not (cap is None or isinstance(cap, Tensor) or (checks.is_number(cap) and cap >= 0)):
        raise ValueError(f"GatedAdamW: cap is an angle in radians, >= 0, or None; the group {number} has {cap!r} now.")


def step_group(number: int, group: dict, slots: list[Slot], mask: Tensor | None, probe: Diagnostics | None) -> None:
    """One step of one group, in place. ``mask``: a bool on the device; where it is False, nothing changes."""
    fast, plain = [], defaultdict(list)
    for slot in slots:
        if group["fused"] is not False and _why_not_fused(group, slot, mask, probe) is None:
            fast.append(slot)
        else:  # by the ranks over which its vectors are split
            plain[() if group["unit_dim"] is None else sharding.split_groups(slot.p, group["unit_dim"])].append(slot)
    _step_fused(group, fast, mask)
    for over, members in plain.items():
        for batch in _batches(group, members, together=bool(over)):
            seens: list[dict[str, Tensor] | None] = [None if probe is None else {} for _ in batch]
            updates = [_update(group, bucket, seen) for bucket, seen in zip(batch, seens)]
            results = sharding.run_split(updates, over) if over else map(run, updates)
            for bucket, result, seen in zip(batch, results, seens):
                _finish(number, group, bucket, result, mask, probe, seen)


# ---- the readable path, a little at a time -------------------------------------------------------------------------------

_SHARE = 1 / 32  # of the group's largest tensor: ``update`` makes some two dozen temporaries of what it is given
_LEAST, _ELSEWHERE = 1 << 14, 1 << 20  # coordinates, on the CPU and elsewhere: below, calls cost more than their work


def _batches(group: dict, slots: list[Slot], together: bool) -> Iterator[list[list[Slot]]]:
    """What is updated at the same time: batches of buckets, a bucket being one piece of a tensor or a stack of pieces.

    A batch holds about ``budget`` coordinates, so that its temporaries need less memory than one parameter tensor does. If
    not ``together``, it is one bucket. Sizes are counted in whole vectors, which all ranks that share them count alike.
    """
    dim = group["unit_dim"]

    def extent(slot: Slot) -> list[int]:
        return [slot.p.shape[i] if dim is not None and i == dim % slot.p.ndim else n for i, n in enumerate(slot.w.shape)]

    least = _LEAST if slots[0].w.device.type == "cpu" else _ELSEWHERE
    budget = max(least, int(_SHARE * max(math.prod(extent(slot)) for slot in slots)))
    buckets: dict[object, list[list[Slot]]] = defaultdict(list)
    for slot in slots:
        for region in regions(extent(slot), dim, budget):
            piece = slot if region is None else slot.cut(region)
            w, stack = piece.w, group["foreach"]
            if stack is None:
                stack = w.device.type != "cpu" and slot.w.numel() <= _SMALL
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
    too many: there a processor's vector instructions begin anew in the whole tensor too, and every bit comes out the same.
    (Stacked matrices with rows of odd lengths begin elsewhere: there the last bit of a power may differ.)
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


def _update(group: dict, bucket: list[Slot], seen: dict[str, Tensor] | None) -> Update:
    """``algorithm.update`` for a bucket, vectors last; a stack of tensors is one tensor with one more dimension in front."""
    rule, first, many = rule_of(group, bucket[0].p), bucket[0], len(bucket) > 1
    axis = rule.dim
    rule = rule if axis is None else replace(rule, dim=-1)

    def stack(tensors: list[Tensor]) -> Tensor:
        rows = tensors if axis is None else [x.contiguous().movedim(axis, -1) for x in tensors]
        return torch.stack(rows) if many else rows[0].contiguous()

    column = (-1, *(1,) * first.p.ndim)
    t = first.t
    key: int | Tensor = 0
    index: Tensor | None = None
    if many and isinstance(t, Tensor):
        t = torch.stack([slot.step for slot in bucket]).reshape(column)  # slot.t is slot.step there
    if rule.pmen is not None:
        places = [sharding.global_index(slot.p, slot.region) for slot in bucket]
        index = stack(places)
        keys = [pmen_key(rule.pmen.seed, slot.name) for slot in bucket]
        # filled on the device: a copy from the host would make it wait, and cannot be captured
        key = torch.stack([index.new_full((), k) for k in keys]).reshape(column) if many else keys[0]
    w, g, m, v = (stack([getattr(slot, x) for slot in bucket]).to(first.m.dtype) for x in ("w", "g", "m", "v"))
    return update(w, -g if group["maximize"] else g, m, v, t, rule, key, index, seen)


def _finish(
    number: int,
    group: dict,
    bucket: list[Slot],
    result: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    probe: Diagnostics | None,
    seen: dict[str, Tensor] | None,
) -> None:
    """Write the new values into the parameter and the state, and what was seen into the diagnostics."""
    rule = rule_of(group, bucket[0].p)
    for kept, new in zip(("w", "m", "v"), result):
        new = new if rule.dim is None else new.movedim(-1, rule.dim)
        for slot, value in zip(bucket, new.unbind() if len(bucket) > 1 else [new]):
            old = getattr(slot, kept)
            old.copy_(value if mask is None else torch.where(mask, value.to(old.dtype), old))
    if probe is not None and seen is not None:
        probe.add(number, group, rule, bucket[0].t, [slot.p for slot in bucket], seen)


# ---- the one-pass kernels --------------------------------------------------------------------------------------------------


def require_fused(group: dict, slots: list[Slot], mask: Tensor | None, probe: Diagnostics | None) -> None:
    """``fused=True`` turns the reason why a tensor cannot have a kernel into an error."""
    for slot in slots if group["fused"] else ():
        why = _why_not_fused(group, slot, mask, probe)
        if why is not None:
            raise ValueError(
                f"GatedAdamW: fused=True, but parameter {slot.name!r} cannot take the fused kernel: {why} "
                "With fused=None such tensors take the plain path."
            )


def _why_not_fused(group: dict, slot: Slot, mask: Tensor | None, probe: Diagnostics | None) -> str | None:
    """The reason as a sentence; None if a kernel may take the tensor."""
    from .fused import usable

    dim = group["unit_dim"]
    if probe is not None:
        return "diagnostics look at what happens between its steps."
    if group["foreach"]:
        return "foreach=True asks for stacked tensors."
    if mask is not None and slot.w.device.type == "cpu":
        return "the mask of this step lives on a device."
    if dim is not None and sharding.split_groups(slot.p, dim):
        return "its vectors are split across ranks."
    if dim is not None and group["pmen"] is not None and sharding.index_offset(slot.p) is None:
        return "its shard is not one uninterrupted piece of the full tensor, and PMEN needs every coordinate's position."
    return usable(slot.w, slot.g, dim)


def _step_fused(group: dict, slots: list[Slot], mask: Tensor | None) -> None:
    by_device = defaultdict(list)
    for slot in slots:
        by_device[slot.w.device].append(slot)
    for device, members in by_device.items():
        from .fused import fused_step

        def on_device(x: float | Tensor | None, device: torch.device = device) -> Any:
            """A kernel on an accelerator reads tensors that live there; everything else is a number."""
            return x.item() if isinstance(x, Tensor) and (x.device != device or device.type == "cpu") else x

        rule = rule_of(group, members[0].p)
        w, g, m, v = ([getattr(slot, x) for slot in members] for x in ("w", "g", "m", "v"))
        fused_step(
            w, g, m, v, [on_device(slot.t) for slot in members],
            lr=on_device(rule.lr), beta1=rule.beta1, beta2=rule.beta2, eps_gate=rule.eps_gate, eps_num=rule.eps_num, a=rule.a,
            weight_decay_factor=on_device(rule.decay), unit=rule.dim is not None, tangent=rule.tangent, smgc=rule.smgc,
            pmen=rule.pmen, pmen_keys=[pmen_key(rule.pmen.seed, slot.name) if rule.pmen else 0 for slot in members],
            index_offsets=[sharding.index_offset(slot.p) or 0 if rule.pmen else 0 for slot in members],
            cap=on_device(rule.cap), maximize=group["maximize"], mask=mask,
        )  # fmt: skip
