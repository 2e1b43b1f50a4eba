"""How does the learning rate move through training, and the angular cap with it?

Two layers. Plain functions of the progress r in [0, 1], each a dimensionless multiplier eta (section 2.2):

    log_decay   eta_min + (eta_max - eta_min) [1 - log(1 + r/rho) / log(1 + 1/rho)]     front-loaded; rho -> inf is linear
    cosine, linear, wsd                                                                  what it is compared with
    warmup_before(schedule)   a linear warmup first, then the schedule, as in figure 3
    match_auc(schedule, reference)   the schedule times a constant, so that both have the same area

and ``Schedule``, which writes lr and cap into the groups of an optimizer. The recipe has no global warmup: decay starts at
the first step, and the warmup of a group is a factor on its decayed rate. For step t = 1 ... T of a group:

    lr_t  = peak_lr  * eta(t/T) * min(1, t / (warmup T))          cap_t = peak_cap * min(1, t / (0.1 T))   (no decay)

Symbols: t step, from 1; T total_steps; r progress; eta_max, eta_min, rho as in section 2.2; warmup a share of training.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..checks import is_count, is_number, is_within

__all__ = ["SCHEDULES", "Schedule", "area", "cosine", "linear", "log_decay", "match_auc", "warmup_before", "wsd"]

Progress = float | np.ndarray | Tensor
R = TypeVar("R", float, np.ndarray, Tensor)
P = ParamSpec("P")
Decay = Callable[[R], R]  # for a number a number, for an array an array, for a tensor a tensor


# ---- functions of the progress r -------------------------------------------------------------------------------------
def _of_progress(schedule: Callable[Concatenate[Any, P], Any]) -> Callable[Concatenate[R, P], R]:
    """Check r and the range of eta; a number gives a float, an array an array, a tensor a tensor."""

    @wraps(schedule)
    def checked(r: R, *args: P.args, **kwargs: P.kwargs) -> R:
        x = r.detach().cpu().double().numpy() if isinstance(r, Tensor) else r
        fits = is_number(x) or (isinstance(x, np.ndarray) and x.dtype.kind in "fiu")
        at = np.asarray(x if fits else math.nan, dtype=np.float64)
        if not np.all((at >= -1e-9) & (at <= 1 + 1e-9)):
            what = "a number, or an array or tensor of them,"
            raise ValueError(f"{schedule.__name__}: the progress r = t/T, {what} must be in [0, 1]; got {r!r}.")
        eta = schedule(np.clip(at, 0.0, 1.0), *args, **kwargs)
        if isinstance(r, Tensor):
            return torch.as_tensor(eta, dtype=r.dtype if r.is_floating_point() else None, device=r.device)
        return eta if isinstance(r, np.ndarray) else float(eta)

    return checked


def _check_range(eta_max: float, eta_min: float) -> None:
    if not (is_within(eta_min, 0) and is_within(eta_max, eta_min)):
        raise ValueError(f"A schedule falls from eta_max to eta_min, 0 <= eta_min <= eta_max; got {eta_max=}, {eta_min=}.")


@_of_progress
def log_decay(
    r: Progress,
    rho: float = 0.05,
    eta_max: float = 1.0,
    eta_min: float = 0.0,
) -> Progress:
    """Logarithmic Learning Rate Decay (section 2.2): eta_max at r = 0, eta_min at 1.

    r: the progress t/T, in [0, 1].
    rho: > 0; the smaller it is, the earlier the rate falls. ``math.inf`` is linear
        decay, and large values approach it without loss of digits.
    eta_max, eta_min: the first value and the last, 0 <= eta_min <= eta_max.

    >>> rs = (0, 0.1, 0.5, 1)
    >>> [round(log_decay(r), 4) for r in rs]
    [1.0, 0.6392, 0.2124, 0.0]
    """
    _check_range(eta_max, eta_min)
    if not (is_number(rho) and rho >= 1e-300):
        raise ValueError(
            f"log_decay: rho must be > 0 (paper: 0.05; math.inf is linear); got {rho!r}.",
        )
    fallen = r if math.isinf(rho) else np.log1p(r / rho) / np.log1p(1.0 / rho)
    return eta_min + (eta_max - eta_min) * (1.0 - fallen)  # sec. 2.2, eta(t)


@_of_progress
def cosine(r: Progress, eta_max: float = 1.0, eta_min: float = 0.0) -> Progress:
    """Half a cosine from eta_max at r = 0 to eta_min at r = 1. Arguments as in ``log_decay``.

    >>> cosine(0.5), cosine(1.0, eta_min=0.1)
    (0.5, 0.1)
    """
    _check_range(eta_max, eta_min)
    return eta_min + (eta_max - eta_min) * 0.5 * (1.0 + np.cos(np.pi * r))


@_of_progress
def linear(r: Progress, eta_max: float = 1.0, eta_min: float = 0.0) -> Progress:
    """A straight line from eta_max at r = 0 to eta_min at r = 1. Arguments as in ``log_decay``."""
    _check_range(eta_max, eta_min)
    return eta_min + (eta_max - eta_min) * (1.0 - r)


@_of_progress
def wsd(r: Progress, eta_max: float = 1.0, eta_min: float = 0.0, decay: float = 0.2) -> Progress:
    """Warmup-Stable-Decay without the warmup: eta_max, then linear to eta_min over the last ``decay`` of training.

    ``decay`` is a share, in (0, 1]; the other arguments are as in ``log_decay``. The baseline of section 4 uses it with
    eta_min = 0.01; the share of the decay is not published, 20% is usual.
    """
    _check_range(eta_max, eta_min)
    if not (is_within(decay, 0, open=True) and decay <= 1):
        raise ValueError(f"wsd: decay is the share of training over which the rate falls, in (0, 1]; got {decay!r}.")
    return eta_min + (eta_max - eta_min) * (np.minimum(1.0 - r, decay) / decay)


SCHEDULES: dict[str, Decay] = {"log": log_decay, "cosine": cosine, "linear": linear, "wsd": wsd}


def _check_share(share: float, what: str) -> None:
    if not (is_within(share, 0) and share < 1):
        raise ValueError(f"{what} is a share of training, in [0, 1); got {share!r}.")


def _warmup(r: float, share: float) -> float:
    """min(1, r / share): the factor of a linear warmup over the first ``share`` of training."""
    return min(1.0, r / share) if share > 0 else 1.0


def _decay(decay: Decay | str) -> Decay:
    """The function of r that this is or names."""
    if not callable(decay) and not (isinstance(decay, str) and decay in SCHEDULES):
        raise ValueError(f"decay must be a function of r or one of {', '.join(SCHEDULES)}; got {decay!r}.")
    return SCHEDULES[decay] if isinstance(decay, str) else decay


def warmup_before(schedule: Decay | str, share: float = 0.1) -> Callable[[R], R]:
    """A linear warmup to schedule(0) over the first ``share`` of training, and the schedule over the rest (figure 3).

    ``schedule`` is a function of r or its name, as ``Schedule`` takes it; returns a function of r. With t_warmup = share T,
    the schedule sees r = (t - t_warmup) / (T - t_warmup), section 2.2.

    >>> eta = warmup_before(cosine)
    >>> rs = (0, 0.05, 0.1, 0.55, 1)
    >>> [round(eta(r), 4) for r in rs]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    _check_share(share, "The warmup")
    schedule = _decay(schedule)
    if share == 0:
        return schedule

    @_of_progress
    def warmed(r: Progress) -> Progress:
        after = np.clip((r - share) / (1.0 - share), 0.0, 1.0)  # sec. 2.2, r
        return np.where(r < share, schedule(0.0) * (np.minimum(r, share) / share), schedule(after))

    return warmed


# ---- areas -----------------------------------------------------------------------------------------------------------
def area(schedule: Decay, tolerance: float = 1e-11) -> float:
    """The integral of a schedule over r in [0, 1]: Simpson's rule, halving where two halves disagree with the whole.

    Corners (a warmup, WSD) and the steep start of a small rho are found by the halving; 48 halvings of an interval are the
    limit, and 10,000 intervals: a schedule with noise in its last digits is summed as finely as that.
    ``tolerance`` is relative to the largest of 129 values.

    >>> round(area(linear), 10), round(area(cosine), 10)
    (0.5, 0.5)
    """
    if not callable(schedule):
        raise ValueError(f"A schedule is a function of the progress r in [0, 1], such as ngpt_core.cosine; got {schedule!r}.")

    def eta(r: float) -> float:
        value = schedule(r)
        if not is_within(value, -math.inf, open=True):
            raise ValueError(f"A schedule gives one finite number for each r in [0, 1]; got {value!r} at r = {r:g}.")
        return float(value)

    # multiples of the golden ratio, modulo 1: evenly spread, and no period divides the distances of them all
    borders = sorted([0.0, 1.0, *(i * (math.sqrt(5) - 1) / 2 % 1 for i in range(1, 64))])
    first = [(a, b, eta(a), eta((a + b) / 2), eta(b), 48) for a, b in pairwise(borders)]
    tolerance *= max(abs(value) for _, _, *values, _ in first for value in values)
    todo = deque(first)
    total, room = 0.0, 10_000
    while todo:
        a, b, fa, fm, fb, depth = todo.popleft()
        m, room = (a + b) / 2, room - 1
        fl, fr = eta((a + m) / 2), eta((m + b) / 2)
        whole, halves = (b - a) / 6 * (fa + 4 * fm + fb), (b - a) / 12 * (fa + 4 * fl + 2 * fm + 4 * fr + fb)
        if depth == 0 or room < len(todo) or abs(halves - whole) <= 15 * tolerance * (b - a):
            total += halves + (halves - whole) / 15
        else:
            todo += [(a, m, fa, fl, fm, depth - 1), (m, b, fm, fr, fb, depth - 1)]
    return total


@dataclass(frozen=True)
class Scaled:
    """A schedule times a constant."""

    schedule: Decay
    scale: float

    def __call__(self, r: R) -> R:
        return self.scale * self.schedule(r)


def match_auc(schedule: Decay, reference: Decay) -> Scaled:
    """``schedule`` times the constant (``.scale``) that gives it the area of ``reference``: the same learning rate budget,
    spent at other times (figure 3). Its peak may exceed 1.

    >>> round(match_auc(log_decay, cosine).scale, 4)
    1.7956
    """
    budget, own = area(reference), area(schedule)
    if not (own > 0 and 0 < budget < math.inf):
        raise ValueError(f"match_auc needs two schedules with a positive area; got {own:g} and, for the reference, {budget:g}.")
    return Scaled(schedule, budget / own)


# ---- writing into an optimizer ---------------------------------------------------------------------------------------
def _position(state: object) -> tuple[int, int, tuple[int, float]]:
    """(t, T, anchor) of a schedule's state. ValueError unless it is one."""
    try:
        t, total, (t0, r0) = (state[key] for key in ("t", "total_steps", "anchor"))  # type: ignore[index]  # or a TypeError
        valid = is_count(t, 1) and is_count(total, 1) and is_count(t0, 0) and is_within(r0, 0) and r0 <= 1 and t0 < total
        valid = valid and max(t, total) < 2**53  # a float holds it exactly
    except (LookupError, TypeError, ValueError):
        valid = False
    if not valid:
        raise ValueError(f"A schedule's state has t >= 1, total_steps and anchor, as state_dict() has them; got {state!r:.99}.")
    return int(t), int(total), (t0, r0)


class Schedule(LRScheduler):
    """Writes the learning rate, and the angular cap where there is one, of step t into every group of an optimizer.

    When it is made it writes the values of t = 1; call ``step()`` after each ``optimizer.step()``. Beyond T it stays at the
    values of T. It is one of torch's schedulers, for trainers that check: t is torch's ``last_epoch`` + 1.

    optimizer: any torch optimizer. Of its groups' keys, ``peak_lr`` is the rate that eta multiplies (if absent: torch's
        ``initial_lr``, or the lr at the time), ``warmup`` the share of training of the group's warmup (if absent: 0),
        ``peak_cap`` the cap in radians that the group reaches (if absent: the schedule writes no cap), and ``lr_scale``
        multiplies the rate, as in timm's layer decay.
    total_steps: T, the number of optimizer steps.
    decay: eta, a function of r, or its name: "log", "cosine", "linear", "wsd". Give parameters with functools.partial.
    warmup: "group": each group has a separate warmup, a factor on the decayed rate (the recipe). "before": one warmup for all
        groups over ``warmup_share`` of training, and then the decay (figure 3); the groups' warmups are not used.
    warmup_share: the share of training of the one warmup of "before"; "group" does not use it.
    cap_warmup: the share of training over which the cap rises from 0 to its peak.

    >>> weights = torch.nn.Linear(2, 2).parameters()
    >>> optimizer = torch.optim.AdamW(weights, lr=0.1)
    >>> schedule = Schedule(optimizer, total_steps=10)
    >>> for _ in range(9):
    ...     schedule.step()
    >>> schedule.t, optimizer.param_groups[0]["lr"]
    (10, 0.0)
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        decay: Decay | str = log_decay,
        warmup: str = "group",
        warmup_share: float = 0.1,
        cap_warmup: float = 0.1,
    ) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise ValueError(f"Schedule takes an optimizer and its number of steps; got {optimizer!r:.80} as the optimizer.")
        if not is_count(total_steps, 1):
            raise ValueError(f"total_steps is the number of optimizer steps, an integer >= 1; got {total_steps!r}.")
        if warmup not in ("group", "before"):
            raise ValueError(f"warmup must be 'group' (each its own) or 'before' (one for all, then decay); got {warmup!r}.")
        _check_share(cap_warmup, "cap_warmup")
        self.total_steps, self.warmup, self.cap_warmup = int(total_steps), warmup, cap_warmup
        eta = _decay(decay)
        self.eta = warmup_before(eta, warmup_share) if warmup == "before" else eta
        self._anchor = (0, 0.0)  # (completed steps, progress) from which progress runs to 1 at T
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group.setdefault("peak_lr", float(group.get("initial_lr", group["lr"]))))
        super().__init__(optimizer)  # it makes the first step, to t = 1

    @property
    def t(self) -> int:
        """The step whose values the groups hold, from 1."""
        return self.last_epoch + 1

    @property
    def _step_count(self) -> int:
        """torch's count of steps. Accelerate stops a scheduler when it passes ``total_steps``, and would add the batches of
        accumulated gradients to it: ours counts optimizer steps, and ignores what others write."""
        return self.t

    @_step_count.setter
    def _step_count(self, value: int) -> None: ...

    def progress(self, t: int) -> float:
        """r at step t: t/T, unless a shorter or longer run was continued (``load_state_dict``)."""
        t0, r0 = self._anchor
        return min(1.0, r0 + (1.0 - r0) * (t - t0) / (self.total_steps - t0))

    def at(self, t: int) -> list[tuple[float, float | Tensor | None]]:
        """(lr, cap) of every group at step t, without writing them: for plots and plans."""
        r = self.progress(t)
        eta, cap_factor = self.eta(r), _warmup(r, self.cap_warmup)
        eta = eta.item() if isinstance(eta, np.ndarray) and eta.size == 1 else eta
        if not is_within(eta, 0):  # it would go into every parameter
            raise ValueError(f"eta must be a finite number >= 0; got {eta!r} at t={t} (r = {r:g}). Fix the decay function.")
        values = []
        for group in self.optimizer.param_groups:
            share, peak_cap = group.get("warmup", 0.0), group.get("peak_cap")
            _check_share(share, "A group's warmup")
            if not (peak_cap is None or isinstance(peak_cap, Tensor) or (is_number(peak_cap) and peak_cap >= 0)):
                raise ValueError(f"A group's peak_cap is an angle in radians, >= 0, or None for no cap; got {peak_cap!r}.")
            if not is_within(peak_lr := group.get("peak_lr", group["lr"]), 0):
                raise ValueError(f"A group's peak_lr is the rate that eta multiplies, finite and >= 0; got {peak_lr!r}.")
            factor = _warmup(r, share) if self.warmup == "group" else 1.0
            if not is_within(scale := group.get("lr_scale", 1.0), 0):
                raise ValueError(f"A group's lr_scale multiplies its rate: a finite number >= 0; got {scale!r}.")
            lr = peak_lr * float(eta) * factor * scale
            values.append((float(lr), None if peak_cap is None else peak_cap * cap_factor))
        return values

    def _write(self) -> None:
        for group in self.optimizer.param_groups:
            group.setdefault("peak_lr", float(group["lr"]))
        written = set()
        for group, values in zip(self.optimizer.param_groups, self.at(self.t)):
            for key, value in zip(("lr", "cap"), values):
                if value is None:
                    continue
                if not isinstance(group.get(key), Tensor):
                    group[key] = value
                    continue
                if id(group[key]) in written:  # torch gives one default tensor to several groups: copy it
                    group[key] = group[key].clone()
                group[key].fill_(value)  # a captured CUDA graph reads this very tensor
                written.add(id(group[key]))

    def step(self, epoch: int | None = None) -> None:
        """Move on to the next step's values: call it after ``optimizer.step()``. ``epoch``: to the values of t = epoch + 1."""
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._write()

    def get_lr(self) -> list[float | Tensor]:
        """The groups' learning rates at t, under the name that torch's schedulers give it."""
        return [lr for lr, _ in self.at(self.t)]

    def get_last_lr(self) -> list[float]:  # type: ignore[override]  # numbers, also where the groups hold tensors
        """The groups' current learning rates, under the name that torch's schedulers give it."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, object]:
        """Where the schedule stands, for ``load_state_dict``: plain numbers. The peaks are in the optimizer's state."""
        return {"t": self.t, "total_steps": self.total_steps, "anchor": list(self._anchor)}

    def load_state_dict(self, state_dict: dict, re_anchor: bool = False) -> None:
        """Continue where ``state_dict`` was taken. Load the optimizer's state first: its groups hold the peaks.

        Another ``total_steps`` is a ValueError, since lr would jump, unless ``re_anchor=True``: then progress stays where it
        stood and what is left of the schedule is spread over the steps that are left of this one's T.
        """
        t, total, (t0, r0) = _position(state_dict)
        if total != self.total_steps:
            if not re_anchor:
                raise ValueError(
                    f"The state is from a run of {total} steps and this schedule has {self.total_steps}: lr would jump. Build "
                    f"the schedule with total_steps={total}, or pass re_anchor=True to spread the rest over the new length."
                )
            done = t - 1
            if done >= self.total_steps:
                raise ValueError(f"The state has completed {done} steps; total_steps must be larger; got {self.total_steps}.")
            t0, r0 = done, min(1.0, r0 + (1.0 - r0) * (done - t0) / (total - t0))
            if r0 == 1.0 and self.eta(1.0) == 0:
                raise ValueError("The schedule has ended at a rate of 0, and nothing of it is left: start a new run.")
        self.last_epoch, self._anchor = t - 1, (t0, r0)
        self._write()
