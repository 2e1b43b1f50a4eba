"""Where should the gate's threshold lie, if a number for all tensors is too coarse? At a quantile of each tensor's own scales.

The paper uses eps_gate = 1e-8 and mentions, without results, schedules by model size and values from tensor statistics
(section 4.2). Here are both: ``eps_gate`` may be a function of the step and the group, or ``AutoGate(quantile, every)``.

The quantile is that of sqrt(v_hat) over the coordinates of the whole tensor that have seen a gradient (v > 0): the smallest
scale with at least that share of them at or below it. It is an order statistic, so it is found by counting: sqrt and the bias
correction keep the order of v, and the bits of a positive float, as an integer, keep it too. Sixteen bits at a time, the
highest first, one count of 65,536 numbers says which ones belong to it. Counts of shards add up: N ranks find the number of
one rank, to the bit, and the host waits for nothing.

Symbols: v second moment after the k completed steps; n coordinates with v > 0; t the step to come, t = k + 1.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import LEAST_DIVISOR, is_count, is_number, is_within
from . import sharding
from .algorithm import LATER, Slot, bias_correction

__all__ = ["AutoGate", "quantiles"]

FIRST = 1e-8  # before there is a statistic: the paper's
_TOGETHER = 32  # tensors whose counts are added up in one message

Gate = Callable[[int | Tensor, dict], float | Tensor]  # eps_gate as a function of (t, group)


@dataclass(frozen=True)
class AutoGate:
    """eps_gate from statistics, as ``GatedAdamW``'s ``eps_gate`` keyword and group key take it; "auto" is ``AutoGate()``.

    quantile: of sqrt(v_hat) over the tensor's coordinates with v > 0, in (0, 1). 0.5 is the median, which the paper reports.
    every: how many steps a threshold is kept: it is taken before the steps t = 2, 2 + every, 2 + 2 every, ... from the second
        moments of the steps so far. At the first step, and while no coordinate has seen a gradient, it is 1e-8, the paper's.

    A parameter's threshold is in its state under "eps_gate". With ``capturable=True`` the quantile is computed at every step,
    and kept where it is due: a captured step cannot leave it out.
    """

    quantile: float = 0.5
    every: int = 100

    def __post_init__(self) -> None:
        if not (is_within(self.quantile, 0, open=True) and self.quantile < 1):
            raise ValueError(
                f"AutoGate: quantile is a share of the coordinates, in (0, 1); got {self.quantile!r}. Median: 0.5."
            )
        if not is_count(self.every, 1):
            raise ValueError(f"AutoGate: every counts steps, an integer >= 1; got {self.every!r}.")
        for name, kind in (("quantile", float), ("every", int)):  # a state with numpy's numbers could not be loaded
            object.__setattr__(self, name, kind(getattr(self, name)))


def _digits(v: Tensor) -> tuple[Tensor, range]:
    """The bits of v as integers, and how far to shift them to see their sixteen-bit digits, the highest first."""
    wide = v.dtype == torch.float64
    return v.contiguous().view(torch.int64 if wide else torch.int32), range(48 if wide else 16, -1, -16)


def quantiles(moments: Sequence[Tensor], share: float, groups: sharding.Groups = ()) -> Tensor:
    """[len(moments)]: the ``share`` quantile of the positive coordinates of each tensor; 0 where there are none.

    float32 or float64, all of one dtype on one device. ``groups``: the ranks that hold the rest of each tensor.
    """
    pieces = [_digits(v.reshape(-1)) for v in moments]
    prefix = torch.zeros(len(moments), dtype=torch.int64, device=moments[0].device)
    rank = prefix
    for shift in pieces[0][1]:
        here = torch.stack([_counts(bits, shift, start) for (bits, _), start in zip(pieces, prefix)])
        counts = sharding.all_sum(here, groups)
        up_to = counts.cumsum(1)
        if shift == pieces[0][1][0]:
            n = up_to[:, -1]
            rank = (n.double() * share).ceil().long().clamp_min(1)
        digit = torch.searchsorted(up_to, rank[:, None]).clamp_max((1 << 16) - 1)
        below = up_to.gather(1, digit) - counts.gather(1, digit)
        rank, prefix = rank - below[:, 0], (prefix << 16) | digit[:, 0]
    dtype = moments[0].dtype
    found = prefix.view(dtype) if dtype == torch.float64 else prefix.to(torch.int32).view(dtype)
    return torch.where(n > 0, found, 0.0)


def _counts(bits: Tensor, shift: int, prefix: Tensor) -> Tensor:
    """How many positive numbers with these higher digits have each next digit: 65,536 integers."""
    counts = torch.zeros(1 << 16, dtype=torch.int64, device=bits.device)
    for part in bits.split(1 << 20):  # a little at a time: the indices are eight bytes each
        here = (part > 0) & ((part >> shift >> 16) == prefix)
        counts.scatter_add_(0, ((part >> shift) & 0xFFFF).long(), here.long())
    return counts


def set_gates(group: dict, slots: Sequence[Slot], state: Mapping[Tensor, dict]) -> None:
    """Give the slots of a group their thresholds for the step to come. Called before anything changes.

    A function is asked once. A quantile that is due is taken from the moments as they are, and kept in the state.
    """
    gate = group["eps_gate"]
    if is_number(gate):
        return
    if not isinstance(gate, AutoGate):
        if slots:
            value = called(gate, _next(group, slots[0]), group, slots[0].w.device)
            for slot in slots:
                slot.eps_gate = value
        return
    due: dict[tuple[torch.dtype, torch.device, sharding.Groups], list[tuple[Slot, bool | Tensor]]] = defaultdict(list)
    for slot in slots:
        entry, t = state.get(slot.p) or {}, _next(group, slot)
        slot.eps_gate = entry.get("eps_gate")
        if slot.step is LATER:  # its first step
            continue
        new = slot.eps_gate is None
        if new:
            slot.eps_gate = entry["eps_gate"] = first(slot)
        now = ((t - 2) % gate.every == 0) | new
        if isinstance(now, Tensor) or now:
            due[slot.v.dtype, slot.v.device, sharding.shard_groups(slot.p)].append((slot, now))
    for (_, _, over), members in due.items():
        for i in range(0, len(members), _TOGETHER):
            _refresh(members[i : i + _TOGETHER], gate.quantile, group["betas"][1], over)


def _refresh(members: list[tuple[Slot, bool | Tensor]], share: float, beta2: float, over: sharding.Groups) -> None:
    for (slot, now), v in zip(members, quantiles([slot.v for slot, _ in members], share, over)):
        k = slot.step if isinstance(now, Tensor) else int(slot.step)
        kept, root = slot.eps_gate, (v / bias_correction(beta2, k)).sqrt()
        assert isinstance(kept, Tensor)
        keep = (v == 0) | ~now if isinstance(now, Tensor) else v == 0
        kept.copy_(torch.where(keep, kept, root.clamp_min(LEAST_DIVISOR)))


def first(slot: Slot) -> Tensor:
    """The threshold before there is a statistic, as the state keeps it."""
    dtype = torch.float64 if slot.w.dtype == torch.float64 else torch.float32
    return torch.full((), FIRST, dtype=dtype, device=slot.w.device)


def _next(group: dict, slot: Slot) -> int | Tensor:
    """t of the step to come; a tensor where the counter is on the device."""
    if slot.step is LATER:
        return 1
    return slot.step + 1 if group["capturable"] else int(slot.step) + 1


def called(gate: Gate, t: int | Tensor, group: dict, device: torch.device) -> float | Tensor:
    """gate(t, group), checked; a tensor on an accelerator only by its shape, since reading it would make the host wait."""
    value = gate(t, group)
    there = value if isinstance(value, Tensor) and value.device.type != "cpu" else None
    if there is not None and is_number(value):
        return there.reshape(()).to(device)
    if there is None and is_within(value, LEAST_DIVISOR):
        return float(value)
    got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) and value.numel() != 1 else repr(value)
    raise ValueError(
        f"GatedAdamW: eps_gate, as a function of (t, group), must return one finite number >= {LEAST_DIVISOR}; got {got} at "
        f"t = {int(t)}. Nothing was changed."
    )
