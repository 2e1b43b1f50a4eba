"""What is added to plain training? Small changes around the trainer's step, each switched on by a key of a point's ``extra``.

    floor, held, over    the angle by which a unit row turns in a step has a floor, in degrees, that follows the schedule: it is
                         floor * lr / peak lr. ``held``: every row turns by exactly that. ``over`` "matrix": not each row, but
                         the root mean square over a matrix's rows (as Hyperball does it, arXiv 2606.16899)
    memory               [from, to]: the memory 1 / (1 - beta1) is multiplied by a factor that goes from the one to the other on
                         a straight line over log(memory), as the run proceeds
    head                 "embedding": the output embedding has the input embedding's rate, embedding_multiplier times the rest's
    hidden               see peers.py
    initialized          a rule of recipe.initialized, for the model's first values

Every run also averages its weights, uniformly over the last 5 and 20% of the steps (``Average``): that costs little, and
changes nothing about the run.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ngpt_core import recipe, sphere
from ngpt_core.nn.unit import unit_axes
from ngpt_core.train.config import recipe_numbers
from ngpt_core.train.trainer import Trainer

SHARES = (0.05, 0.2)  # of the run, at its end: what is averaged


class Change:
    """Something that happens before and after every step. Nothing, here."""

    def before(self, trainer: Trainer) -> None: ...

    def after(self, trainer: Trainer) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


# ---- the angle -------------------------------------------------------------------------------------------------------
def turned(w: Tensor, new: Tensor, floor: float, held: bool, over: str = "row") -> Tensor:
    """The rows of ``new``, at least ``floor`` radians from those of ``w`` (``held``: exactly that far), on the great circles
    between the two. A row that did not move has no direction, and stays."""
    delta = new - w
    angle = sphere.angle(w, delta)[..., None]
    size = angle if over == "row" else angle.square().mean((-2, -1), keepdim=True).sqrt()
    wanted = torch.full_like(size, floor) if held else size.clamp(min=floor)
    target = (angle * (wanted / size.clamp(min=1e-30))).clamp(max=math.pi / 2)
    u = sphere.tangent(delta, w)
    length = u.norm(dim=-1, keepdim=True)
    out = target.cos() * w + target.sin() * u / length.clamp(min=1e-30)
    return torch.where(length > 0, sphere.unit(out), new)


class Floor(Change):
    """The floor on the angle of every unit row that has a cap: embeddings are left out of both."""

    def __init__(self, trainer: Trainer, degrees: float, held: bool = False, over: str = "row"):
        self.angle, self.held, self.over = math.radians(degrees), held, over
        if not self.rows(trainer):
            raise ValueError("a floor on the angle is for nGPT's unit rows, and there are none here.")

    @staticmethod
    def rows(trainer: Trainer) -> list[tuple[Tensor, float]]:
        """(matrix, its rate as a share of the peak) of every matrix with a cap."""
        groups = [g for g in trainer.optimizer.param_groups if g.get("unit_dim") is not None and g["peak_cap"] is not None]
        return [(p, g["lr"] / g["peak_lr"]) for g in groups for p in g["params"]]

    def before(self, trainer: Trainer) -> None:
        self.old = [
            (p, p.detach().clone(), share) for p, share in self.rows(trainer)
        ]  # the step's rates, before the next one's

    @torch.no_grad()
    def after(self, trainer: Trainer) -> None:
        for p, w, share in self.old:
            if share > 0:
                p.copy_(turned(w, p, share * self.angle, self.held, self.over))


# ---- momentum --------------------------------------------------------------------------------------------------------
class Memory(Change):
    """A first moment whose memory grows or shrinks."""

    def __init__(self, trainer: Trainer, first: float, last: float):
        self.first, self.last = first, last
        self.betas = [group["betas"] for group in trainer.optimizer.param_groups]

    def before(self, trainer: Trainer) -> None:
        r = trainer.t / max(1, trainer.run.steps - 1)
        factor = self.first * (self.last / self.first) ** r
        for group, (beta1, beta2) in zip(trainer.optimizer.param_groups, self.betas):
            group["betas"] = (max(0.0, 1 - (1 - beta1) / factor), beta2)


# ---- averages --------------------------------------------------------------------------------------------------------
class Average(Change):
    """The mean of the weights over the last ``share`` of the steps. nGPT's rows are put back on the sphere."""

    def __init__(self, trainer: Trainer, share: float):
        self.first = trainer.run.steps - max(1, round(share * trainer.run.steps))  # the steps after this one count
        self.sums = [torch.zeros_like(p, dtype=torch.float64) for p in trainer.model.parameters()]
        self.count = 0

    @torch.no_grad()
    def after(self, trainer: Trainer) -> None:
        if trainer.t > self.first:
            self.count += 1
            for total, p in zip(self.sums, trainer.model.parameters()):
                total += p

    @contextlib.contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """The model with its mean weights, within the block."""
        axes, kept = unit_axes(model), [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for (name, p), total in zip(model.named_parameters(), self.sums):
                mean = (total / self.count).to(p.dtype)
                p.copy_(sphere.unit(mean, axes[name]) if name in axes else mean)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, old in zip(model.parameters(), kept):
                    p.copy_(old)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums, self.count = state["sums"], state["count"]


def head_as_embedding(trainer: Trainer) -> None:
    """Build the optimizer again, with one rate for both embeddings."""
    numbers = recipe_numbers(trainer.run.config, trainer.run.model, trainer.run.steps)
    lines = {"Head.weight": replace(recipe.TABLE["Head.weight"], rate="embedding")}
    trainer.optimizer, trainer.schedule = recipe.build(trainer.model, trainer.run.steps, numbers, lines=lines)
    trainer.rate = next(g for g in trainer.optimizer.param_groups if "embedding.weight" in g["param_names"])


def changes(trainer: Trainer, extra: dict[str, Any]) -> list[Change]:
    """The changes that ``extra`` asks for."""
    if extra.get("head") == "embedding":
        head_as_embedding(trainer)
    found: list[Change] = []
    if "floor" in extra:
        found.append(Floor(trainer, extra["floor"], extra.get("held", False), extra.get("over", "row")))
    if "memory" in extra:
        found.append(Memory(trainer, *extra["memory"]))
    return found
