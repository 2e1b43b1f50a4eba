"""What if a gradient holds nan or inf? It must not reach the parameters, and the user must learn where it came from.

    "raise"  a ValueError that names the parameter and the step; nothing was changed
    "skip"   the step does not happen, and is counted in ``skipped``
    "off"    nobody looks

A finite number can do the same harm: a second moment that has overflowed stays infinite, and its coordinate never moves again.
So each gradient has a limit (``paths.limit_of``) that its magnitudes must stay below; the largest of them is what the one
reading finds anyway.

On the CPU the gradients are looked at before anything changes. On an accelerator that would make the host wait for the
device at every step, so there a flag on the device masks the whole update, and the host reads the flag a step later, when it
is there already. Ranks agree on the flag first: all raise, or none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import sharding
from .fused import finite

POLICIES = ("raise", "skip", "off")


@dataclass
class Found:
    """What one step found, until the host has read it."""

    bad: Tensor  # one number a parameter, then one for any rank's; on the host, or on its way there
    arrived: torch.cuda.Event | None  # the device's event after which ``bad`` may be read
    names: list[str]
    steps: Sequence[Tensor | None]  # the parameters' counters of completed steps; None before the first
    on_host: list[bool] = field(default_factory=list)  # counters there went on without knowing: they must come back


class Watch:
    """Looks at the gradients of each step; the policy and the count of skipped steps are its state."""

    def __init__(self, policy: str):
        if policy not in POLICIES:
            raise ValueError(
                f"GatedAdamW: nonfinite says what a gradient with nan or inf does, one of {POLICIES}; got {policy!r}."
            )
        self.policy = policy
        self.skipped = 0
        self.defer: bool | None = None  # None: on accelerators only
        self._pending: Found | None = None

    def look(
        self,
        grads: Sequence[Tensor],
        limits: Sequence[float],
        params: Sequence[Tensor],
        names: list[str],
        steps: list[Tensor | None],
    ) -> bool | Tensor:
        """True: go on. False: skip this step. A bool tensor on the device: mask the update with it."""
        if self.policy == "off" or not grads:
            return True
        devices = {g.device for g in grads}
        device = next(iter(devices))
        if self.defer or (self.defer is None and len(devices) == 1 and device.type != "cpu"):
            # the largest magnitude is nan or inf exactly if some coordinate is, and no second tensor is made to find it
            whole = [g if g.numel() else g.new_zeros(1) for g in grads]
            largest = torch._foreach_norm(whole, math.inf)
            bad = torch.stack([~(x < limit) for x, limit in zip(largest, limits)]).to(torch.float32)  # nan is below nothing
            bad, anywhere = sharding.agree(bad, params)
            if not capturing():
                self._pending = self._send(torch.cat([bad, anywhere.reshape(1)]), names, steps)
            return anywhere == 0
        bad = torch.tensor([float(not finite(g, limit)) for g, limit in zip(grads, limits)], device=device)
        bad, anywhere = sharding.agree(bad, params)
        if anywhere == 0:
            return True
        self._report(Found(torch.cat([bad, anywhere.reshape(1)]), None, names, steps))
        return False

    def counted(self, steps: list[Tensor], on_host: list[bool]) -> None:
        """The masked step has counted up these counters; those on the host come back should it turn out bad."""
        if self._pending is not None:
            self._pending.steps, self._pending.on_host = steps, on_host

    def settle(self) -> None:
        """Read what the previous step found on the device, if it is still unread. (A CUDA graph being captured cannot wait.)"""
        found, self._pending = self._pending, None
        if found is None or capturing():
            return
        if found.arrived is not None:
            found.arrived.synchronize()
        if found.bad[-1] == 0:
            return
        for step, here in zip(found.steps, found.on_host):
            if here and step is not None:
                step.sub_(1)
        self._report(found)

    def _send(self, bad: Tensor, names: list[str], steps: list[Tensor | None]) -> Found:
        if bad.device.type != "cuda":
            return Found(bad, None, names, steps)  # read with an ordinary (waiting) copy
        host = torch.empty(bad.shape, dtype=bad.dtype, pin_memory=True)
        host.copy_(bad, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Found(host, arrived, names, steps)

    def _report(self, found: Found) -> None:
        if self.policy == "skip":
            self.skipped += 1
            return
        where = [i for i, flag in enumerate(found.bad[:-1].tolist()) if flag]
        if not where:
            raise ValueError('nonfinite="raise": a gradient on another rank is not finite; nothing was changed on any rank.')
        step = found.steps[where[0]]
        t = 1 + int(step.item()) if step is not None else 1
        others = f" ({len(where) - 1} more parameters too)" if len(where) > 1 else ""
        raise ValueError(
            f'nonfinite="raise": the gradient of parameter {found.names[where[0]]!r} holds nan or inf, or numbers whose '
            f"square overflows, at step {t}{others}; nothing was changed. Look at the loss of this batch, lower lr or clip; "
            'nonfinite="skip" drops such steps and counts them.'
        )


def capturing() -> bool:
    """Whether what is launched now goes into a CUDA graph instead of being done."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
