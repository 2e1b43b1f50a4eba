"""Which way does each tensor of a group take through a step? One-pass kernel, plain, stacked, or split across ranks.

All four are the same mathematics. ``fused`` holds the kernels; the other three run ``algorithm.update``: on one tensor, on a
stack of tensors of one shape (``foreach``), or on tensors whose vectors are split, in step with each other.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from . import sharding
from .algorithm import Rule, Update, run, update
from .diagnostics import Diagnostics
from .pmen import key as pmen_key

_SMALL = 1 << 16  # coordinates: below this, launching kernels one tensor at a time costs more than stacking (accelerators)


@dataclass
class Slot:
    """One parameter with a gradient, at one step: this rank's pieces of it."""

    name: str
    p: Tensor  # as the optimizer holds it (a DTensor where sharded)
    w: Tensor  # its local piece; g, m, v likewise
    g: Tensor
    m: Tensor | None = None
    v: Tensor | None = None
    step: Tensor | None = None  # the counter in the state
    t: int | Tensor = 0  # this step, counted from 1: a number, or the counter itself where it lives on the device


def rule_of(group: dict, p: Tensor) -> Rule:
    """The group's numbers at this step, for a parameter of p's shape."""
    dim, lr = group["unit_dim"], group["lr"]
    eta = lr if group["decay"] == "lr" else lr / group["alpha"]
    return Rule(
        lr=lr, decay=eta * group["weight_decay"], beta1=group["betas"][0], beta2=group["betas"][1],
        eps_gate=group["eps_gate"], eps_num=group["eps_num"], a=group["a"], tangent=group["tangent"],
        dim=None if dim is None else dim % p.ndim - p.ndim, length=1 if dim is None else p.shape[dim],
        smgc=group["smgc"], pmen=None if dim is None else group["pmen"], cap=None if dim is None else group["cap"],
    )  # fmt: skip


def step_group(number: int, group: dict, slots: list[Slot], mask: Tensor | None, probe: Diagnostics | None) -> None:
    """One step of one group, in place. ``mask``: a bool on the device; where it is False, nothing changes."""
    fast, plain = [], []
    for slot in slots:
        kernel = group["fused"] is not False and _why_not_fused(group, slot, mask, probe) is None
        (fast if kernel else plain).append(slot)
    _step_fused(group, fast, mask)

    split = defaultdict(list)
    for bucket in _buckets(group, plain):
        over = () if group["unit_dim"] is None else sharding.split_groups(bucket[0].p, group["unit_dim"])
        if over:
            split[over].append(bucket)
        else:
            seen = None if probe is None else {}
            _finish(number, group, bucket, run(_update(group, bucket, seen)), mask, probe, seen)
    for over, buckets in split.items():
        seens = [None if probe is None else {} for _ in buckets]
        results = sharding.run_split([_update(group, bucket, seen) for bucket, seen in zip(buckets, seens)], over)
        for bucket, result, seen in zip(buckets, results, seens):
            _finish(number, group, bucket, result, mask, probe, seen)


def _buckets(group: dict, slots: list[Slot]) -> list[list[Slot]]:
    """What is updated together: one tensor, or (``foreach``) all of one shape that stand at the same step."""
    buckets = defaultdict(list)
    for slot in slots:
        w, stack = slot.w, group["foreach"]
        if stack is None:
            stack = w.device.type != "cpu" and w.numel() <= _SMALL
        t = None if isinstance(slot.t, Tensor) else slot.t
        alike = (w.shape, slot.p.shape, w.dtype, w.device, slot.g.dtype, t, sharding.shard_groups(slot.p))
        buckets[alike if stack else id(slot)].append(slot)
    return list(buckets.values())


def _update(group: dict, bucket: list[Slot], seen: dict | None) -> Update:
    """``algorithm.update`` for a bucket: a stack of tensors is one tensor with one more dimension in front."""
    rule, first, many = rule_of(group, bucket[0].p), bucket[0], len(bucket) > 1

    def stack(tensors: list[Tensor]) -> Tensor:
        return (torch.stack(tensors) if many else tensors[0]).to(first.m.dtype)

    column = (-1, *(1,) * first.p.ndim)
    t, key, index = first.t, 0, None
    if many and isinstance(t, Tensor):
        t = torch.stack([slot.t for slot in bucket]).reshape(column)
    if rule.pmen is not None:
        places = [sharding.global_index(slot.p) for slot in bucket]
        index = torch.stack(places) if many else places[0]
        keys = [pmen_key(rule.pmen.seed, slot.name) for slot in bucket]
        # filled on the device: a copy from the host would make it wait, and cannot be captured
        key = torch.stack([index.new_full((), k) for k in keys]).reshape(column) if many else keys[0]
    g = stack([slot.g for slot in bucket])
    w, m, v = (stack([getattr(slot, x) for slot in bucket]) for x in ("w", "m", "v"))
    return update(w, -g if group["maximize"] else g, m, v, t, rule, key, index, seen)


def _finish(
    number: int,
    group: dict,
    bucket: list[Slot],
    result: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    probe: Diagnostics | None,
    seen: dict | None,
) -> None:
    """Write the new values into the parameter and the state, and what was seen into the diagnostics."""
    for kept, new in zip(("w", "m", "v"), result):
        for slot, value in zip(bucket, new.unbind() if len(bucket) > 1 else [new]):
            old = getattr(slot, kept)
            old.copy_(value if mask is None else torch.where(mask, value.to(old.dtype), old))
    if probe is not None:
        probe.add(number, group, rule_of(group, bucket[0].p), bucket[0].t, [slot.p for slot in bucket], seen)


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

        def number(x: int | float | Tensor, device=device) -> int | float | Tensor:
            """A kernel on an accelerator reads tensors that live there; everything else is a number."""
            return x.item() if isinstance(x, Tensor) and (x.device != device or device.type == "cpu") else x

        rule = rule_of(group, members[0].p)
        fused_step(
            *([getattr(slot, x) for slot in members] for x in ("w", "g", "m", "v")),
            [number(slot.t) for slot in members],
            lr=number(rule.lr), beta1=rule.beta1, beta2=rule.beta2, eps_gate=rule.eps_gate, eps_num=rule.eps_num, a=rule.a,
            weight_decay_factor=number(rule.decay), unit=rule.dim is not None, tangent=rule.tangent, smgc=rule.smgc,
            pmen=rule.pmen, pmen_keys=[pmen_key(rule.pmen.seed, slot.name) if rule.pmen else 0 for slot in members],
            index_offsets=[sharding.index_offset(slot.p) if rule.pmen else 0 for slot in members],
            cap=number(rule.cap), maximize=group["maximize"], mask=mask,
        )  # fmt: skip
