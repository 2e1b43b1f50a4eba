"""Are the numbers still those that training wrote? ``--sentinel N`` notices hardware that changes or miscomputes them.

    seals       of every parameter, moment and router bias (seals.py): taken after each update, compared before the next one
                and before each checkpoint. A bit that flipped in between is found with certainty
    norms       before each update every unit row has norm 1, and in each forward pass h before and after every block
    replay      every N steps the step is computed a second time, from the stored state and batch: the same bits, and no capped
                row turned by more than its cap
    replicas    every N steps and before each checkpoint: ranks that hold the same numbers hold the same bits

What a rank finds stays on its device until the one message of a step carries it to all ranks (``alarm``); nothing else waits
for the host. Then all ranks raise ``Corrupted``, and the loop goes back to the last checkpoint, which was compared before it
was written.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import sphere
from ..nn import rows_cpu
from ..optim.gated_adamw import GatedAdamW
from .seals import TOLERANCE, Seals, sealed_tensors

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["Corrupted", "Sentinel"]

RETURNS = 3  # how often training goes back to the same checkpoint before it gives up
SHOWN = 3  # findings that a message lists per rank


class Corrupted(ValueError):
    """A number is not what training wrote or computed: raised on every rank, with the places in its message."""


class Sentinel:
    """Watches the numbers of a trainer. ``check`` and ``seal`` enclose each update; ``alarm`` is a part of its message."""

    def __init__(self, trainer: "Trainer", every: int):
        self.trainer, self.every = trainer, every
        self.returns: Counter[int] = Counter()  # step of a checkpoint -> how often training went back to it
        blocks = list(trainer.model.blocks) if trainer.model.config.normalized else []
        self.h = torch.zeros(len(blocks) + 1, device=trainer.world.device)  # the largest | ||h|| - 1 | after that many blocks
        self.h_tolerance = TOLERANCE
        self.read = torch.full((len(self.h),), -1.0)  # the same, of the state that compiled code has just read; -1: it has not
        self.compiled = self.read.numpy()
        for i, block in enumerate(blocks):
            block.off = self.read[i : i + 1]
            block.register_forward_hook(partial(self._look, i))
        self.reset()

    def reset(self) -> None:
        """Take the numbers as they are, at the start and after a checkpoint was loaded; forget what was found."""
        self.h.zero_()
        self._new_seals()

    def _new_seals(self) -> None:
        optimizer = self.trainer.optimizer
        self.seals, self.states = Seals(sealed_tensors(self.trainer.model, optimizer)), self._states()
        if isinstance(optimizer, GatedAdamW):
            optimizer.seals = self.seals.by_parameter()

    # ---- at every step -----------------------------------------------------------------------------------------------
    def alarm(self) -> Tensor:
        """1 if this rank has found something since the last alarm, on the device."""
        return (self.seals.broken | (self.h > self.h_tolerance).any()).double().reshape(1)  # h is nan: the loss is, too

    def check(self) -> None:
        """Before the update. (With diagnostics, it does not take the kernel.)"""
        optimizer = self.trainer.optimizer
        self.seals.compare(kernel=isinstance(optimizer, GatedAdamW) and optimizer.diagnostics is None)

    def seal(self) -> None:
        """After the update."""
        if self.states != self._states():  # the first step creates the optimizer's state
            self._new_seals()
        else:
            self.seals.take()

    def _states(self) -> int:
        return sum(map(len, self.trainer.optimizer.state.values()))

    def _look(self, i: int, block: nn.Module, args: tuple, output: tuple) -> None:
        """After block i: the state that it has read, and the last block's state."""
        self._note(i, args[0])
        if i + 2 == len(self.h):
            if rows_cpu.takes(h := output[0]):
                rows_cpu.off_sphere(h, self.read[i + 1 :])
            self._note(i + 1, h)

    def _note(self, i: int, h: Tensor) -> None:
        if (off := float(self.compiled[i])) >= 0:
            self.compiled[i] = -1
            if off > TOLERANCE:
                self.h[i] = max(float(self.h[i]), off)
            return
        self.h_tolerance = max(TOLERANCE, 4 * torch.finfo(h.dtype).eps)
        with torch.no_grad():
            norm = torch.linalg.vector_norm(h, dim=-1, dtype=torch.promote_types(h.dtype, torch.float32))
            self.h[i] = torch.maximum(self.h[i], (norm - 1).abs().max())

    # ---- where all ranks agree -----------------------------------------------------------------------------------------
    def verify(self) -> None:
        """Compare every number now, before a checkpoint. All ranks call this together."""
        self.seals.compare()
        copies = self.seals.unequal_copies() if self.trainer.world.size > 1 else []
        if copies or float(self.trainer.world.sum(self.alarm())):
            self.raise_found(copies)

    def raise_found(self, common: Sequence[str] = (), own: Sequence[str] = ()) -> None:
        """Raise Corrupted with what the ranks have found. All ranks call this together."""
        world = self.trainer.world
        own = [*own, *self.seals.found()]
        for i in (self.h > self.h_tolerance).nonzero().flatten().tolist():
            place = f"block {i - 1}" if i else "the embedding"
            own.append(f"h after {place} had a norm that differs from 1 by {float(self.h[i]):.1e}")
        every: list[list[str]] = [own] * world.size
        if world.size > 1:
            dist.all_gather_object(every, own)
        texts = list(common)
        for rank, found in enumerate(every):
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            texts += [f"rank {rank}: {'; '.join(found[:SHOWN])}{more}"] if found else []
        raise Corrupted(f"after step {self.trainer.t} the sentinel found damaged numbers: {'. '.join(texts)}.")

    # ---- every N steps -------------------------------------------------------------------------------------------------
    def step(self, diagnose: bool) -> dict:
        """``Trainer.step``; every N steps, computed twice and compared."""
        trainer = self.trainer
        if (trainer.t + 1) % self.every:
            return trainer.step(diagnose)
        before, caps = self._stored(), [group.get("cap") for group in trainer.optimizer.param_groups]
        with _deterministic(trainer.world.device):
            record = trainer.step(diagnose)
            trainer.finish()
            once = self.seals.values.clone()
            self._restore(before)
            again = trainer.step(diagnose)
            trainer.finish()
        wrong = [f"{place}, was computed twice with different results" for place in self.seals.named(self.seals.values != once)]
        names = [name for name in ("loss", "balance", "grad_norm") if record[name] != again[name]]
        wrong += [f"the {name} of the step was {record[name]!r}, and {again[name]!r} when it was repeated" for name in names]
        wrong += self._beyond_cap(before[0], caps)
        copies = self.seals.unequal_copies() if trainer.world.size > 1 else []
        if float(trainer.world.sum(torch.tensor(float(bool(wrong or copies)), device=trainer.world.device))):
            self.raise_found(copies, wrong)
        return record

    @torch.no_grad()
    def _stored(self) -> tuple[dict[str, Tensor], Tensor, dict]:
        """The state of training, in the memory of the host."""
        tensors = {f"{x.kind} {x.name}": x.here.to("cpu", copy=True) for x in self.seals.tensors}
        trainer = self.trainer
        rest = {"t": trainer.t, "counts": list(trainer.loader.counts), "schedule": trainer.schedule.state_dict()}
        return tensors, self.seals.values.clone(), rest

    @torch.no_grad()
    def _restore(self, stored: tuple[dict[str, Tensor], Tensor, dict]) -> None:
        tensors, values, rest = stored
        for x in self.seals.tensors:
            old = tensors.get(f"{x.kind} {x.name}")
            x.here.copy_(old) if old is not None else x.here.zero_()  # zero: what the first step found
        trainer = self.trainer
        trainer.t, trainer.loader.counts = rest["t"], list(rest["counts"])
        trainer.schedule.load_state_dict(rest["schedule"])
        if len(values) == len(self.seals.values):
            self.seals.values.copy_(values)
        else:
            self.seals.take()

    @torch.no_grad()
    def _beyond_cap(self, before: dict[str, Tensor], caps: list) -> list[str]:
        """The rows that this step turned by more than the cap of their group."""
        of = {p: cap for group, cap in zip(self.trainer.optimizer.param_groups, caps) for p in group["params"]}
        found = []
        for x in self.seals.unit:
            if (cap := of[x.tensor]) is not None and x.here.numel():
                w = before[f"parameter {x.name}"].to(x.here.device)
                turned = sphere.angle(w, x.here - w).reshape(-1)
                rows = (turned > 1.01 * float(cap) + 2e-6).nonzero().flatten().tolist()
                found += [f"{x.row(i)}, turned by {float(turned[i]):.2e} rad, and its cap is {float(cap):.2e}" for i in rows]
        return found


@contextlib.contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """On a GPU, use the algorithms that give the same bits twice; those of the CPU do."""
    if device.type == "cpu":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
