"""What do the ranks tell each other at each step?

One message, a vector of float64 that is summed over all ranks:

    loss, balance    the two parts of the loss
    stop, alarm      how many ranks were asked to stop, and how many have found damage
    load             the tokens of every expert, layer by layer
    squares          ||g||^2 of every parameter: for the norm of the gradient, and the name of one that is not finite

The device needs some of it for the update, and has it immediately. The host reads the same numbers as a ``Message``: on a CPU
before the update, on a GPU one step later, so that neither waits for the other.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..nn.model import LanguageModel
from ..nn.moe import MoE

__all__ = ["Layout", "Message", "Step"]


@dataclass(frozen=True)
class Layout:
    """The lengths of a message's parts."""

    layers: int
    experts: int
    parameters: int

    @classmethod
    def of(cls, model: LanguageModel) -> "Layout":
        layers = sum(isinstance(block.mixer, MoE) for block in model.blocks)
        return cls(layers, model.config.n_experts, len(list(model.parameters())))

    def split(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """(load [layers, experts], squares), on the device."""
        _, load, squares = message.split([4, self.layers * self.experts, self.parameters])
        return load.view(self.layers, self.experts), squares


@dataclass(frozen=True)
class Message:
    """A message on the host, with the scales that follow it: the mean of s_z, and with diagnostics the mean |alpha| of each
    block (nothing for GPT)."""

    loss: float
    balance: float
    stop: float
    alarm: float
    load: list[list[float]]
    squares: list[float]
    scales: list[float]

    @classmethod
    def of(cls, numbers: list[float], layout: Layout) -> "Message":
        E = layout.experts
        load = [numbers[4 + i * E : 4 + (i + 1) * E] for i in range(layout.layers)]
        first = 4 + layout.layers * E
        last = first + layout.parameters
        loss, balance, stop, alarm = numbers[:4]
        return cls(loss, balance, stop, alarm, load, numbers[first:last], numbers[last:])

    @property
    def norm(self) -> float:
        """||g|| over all parameters and ranks."""
        return math.sqrt(sum(self.squares))

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss + self.balance + sum(self.squares))

    def report(self, diagnose: bool) -> dict[str, object]:
        """What metrics.jsonl says about routers and scales. Per MoE layer: the largest load over the mean, and the number of
        experts that received no token."""
        found: dict[str, object] = {}
        if self.load:
            found["load_max"] = [max(x) / (sum(x) / len(x)) for x in self.load]
            found["dead_experts"] = [x.count(0.0) for x in self.load]
            found |= {"load": self.load} if diagnose else {}
        if self.scales:
            found["s_z"] = self.scales[0]
            found |= {"alpha": self.scales[1:]} if diagnose else {}
        return found


@dataclass
class Step:
    """A step whose message the host has not read yet."""

    t: int
    begin: float
    lr: float
    diagnose: bool
    diagnostics: dict[str, Any]
    read: Callable[[], list[float]]  # the message and the scales
    record: dict[str, Any] = field(default_factory=dict)  # the step's numbers, once they are known
