"""What if a gradient holds nan or inf? It must not reach the parameters, and the user must learn where it came from.

    "raise"  a ValueError that names the parameter and the step; nothing was changed
    "skip"   the step does not happen, and is counted in ``skipped``
    "off"    gradients are not checked

A finite number can do the same harm: a second moment that has overflowed stays infinite, and its coordinate never moves again.
So the magnitudes of each gradient must stay below a limit (``paths.limit_of``), which needs no second pass.

On the CPU the gradients are checked before anything changes. On an accelerator that would make the host wait for the device at
every step, so there a flag on the device masks the whole update, and the host reads the flag one step later, when it has
arrived. Ranks agree on the flag first: all raise, or none.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import sharding
from .algorithm import Slot
from .arriving import Arriving, constant
from .fused import below, finite

POLICIES = ("raise", "skip", "off")


@dataclass
class Found:
    """What one step found, until the host has read it."""

    bad: Arriving  # one number per parameter, then one for all ranks
    slots: list[Slot]
    counted: bool = False  # counters on the host have counted it, and must be set back if it was bad


class Watch:
    """Checks the gradients of each step; its state is the policy and the count of skipped steps."""

    def __init__(self, policy: str):
        if policy not in POLICIES:
            raise ValueError(f"GatedAdamW: nonfinite (what to do about nan and inf) is one of {POLICIES}; got {policy!r}.")
        self.policy = policy
        self.skipped = 0
        self.defer: bool | None = None  # None: on accelerators only
        self._pending: Found | None = None

    def look(self, slots: list[Slot]) -> bool | Tensor:
        """True: go on. False: skip this step. A bool tensor on the device: mask the update with it."""
        if self.policy == "off" or not slots:
            return True
        params, device = [slot.p for slot in slots], slots[0].g.device
        if self.defer or (self.defer is None and device.type != "cpu" and all(slot.g.device == device for slot in slots)):
            # the largest magnitude is nan or inf exactly if some coordinate is, and no second tensor is made to find it
            whole = [slot.g if slot.g.numel() else slot.g.new_zeros(1) for slot in slots]
            largest = torch._foreach_norm(whole, math.inf)
            limits = constant(tuple(slot.limit for slot in slots), torch.float64, device)
            bad = (~(torch.stack(largest) < limits)).float()  # nan is below nothing
            bad, anywhere = sharding.agree(bad, params)
            if not capturing():
                self._pending = Found(Arriving(torch.cat([bad, anywhere.reshape(1)])), slots)
            return anywhere == 0
        good = finite(slots)
        if good and all(slot.w is slot.p for slot in slots):  # no other rank to ask
            return True
        bad = torch.tensor([float(not good and not below(slot.g, slot.limit)) for slot in slots], device=device)
        bad, anywhere = sharding.agree(bad, params)
        if anywhere == 0:
            return True
        self._report(slots, bad.tolist())
        return False

    def counted(self) -> None:
        """The masked step has been counted: counters on the host are set back if it turns out to be bad."""
        if self._pending is not None:
            self._pending.counted = True

    def settle(self) -> None:
        """Read what the previous step found on the device, if it is still unread. (A CUDA graph being captured cannot wait.)"""
        found, self._pending = self._pending, None
        if found is None or capturing():
            return
        *bad, anywhere = found.bad.read()
        if anywhere == 0:
            return
        for slot in found.slots if found.counted else ():
            if not isinstance(slot.t, Tensor):
                slot.step.sub_(1)
        self._report(found.slots, bad)

    def _report(self, slots: list[Slot], bad: list[float]) -> None:
        if self.policy == "skip":
            self.skipped += 1
            return
        where = [i for i, flag in enumerate(bad) if flag]
        if not where:
            raise ValueError('nonfinite="raise": a gradient on another rank is not finite; nothing was changed on any rank.')
        first = slots[where[0]]
        t = 1 + int(first.step.item()) if first.step.numel() else 1  # an empty one: no step is complete
        others = f" ({len(where) - 1} more parameters too)" if len(where) > 1 else ""
        raise ValueError(
            f'nonfinite="raise": the gradient of parameter {first.name!r} holds nan or inf, or numbers whose '
            f"square overflows, at step {t}{others}; nothing was changed. Look at the loss of this batch, lower lr or clip; "
            'nonfinite="skip" drops such steps and counts them.'
        )


def capturing() -> bool:
    """Whether what is launched now goes into a CUDA graph instead of being done."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
