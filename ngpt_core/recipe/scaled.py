"""Which numbers does a small run need? The recipe scaled down, with the paper's numbers as its limit.

The published numbers were chosen for models at least 768 wide, in runs of tens of thousands of large steps. A short run or a
narrow model needs others (chapter 9). With w = min(1, d / 768) for the width and T for the length:

    beta1     1 - 1/m, with the memory m = w T / 400 in steps, at least m_0 = 2.5 (GPT: 5), at most the published one
    C         times (T_0 / T)^((1 - w) / 2), T between T_0 = 750 and 16,000            nGPT only
    warmup    of every rate, if w < 1                                                  nGPT only: GPT already does that

From d = 768 and T = 16,000 on, every number is the paper's. beta2, cap, decay, gate, noise, clipping and the rates of the
scales are as published at every size.

Symbols: d d_model; T total_steps; m memory 1 / (1 - beta1); w the width over that of the narrowest published model.
"""

from typing import Any

from torch import nn

from ..config import ModelConfig
from .assemble import check_steps, config_of, numbers_for
from .numbers import Baseline, Settings

__all__ = ["scaled"]

PUBLISHED_WIDTH = 768  # of the ladder's narrowest model
STEPS_PER_MEMORY = 400
SHORTEST = {Settings: 2.5, Baseline: 5.0}  # m_0
T_0, T_1 = 750, 16_000  # C falls between them


def scaled(
    model: nn.Module | ModelConfig,
    total_steps: int,
    base: Settings | Baseline | None = None,
    **overrides: Any,
) -> Settings | Baseline:
    """The numbers for a model of this width and a run of this length: the paper's, or adjusted
    ones for a small run. Use: ``recipe.build(model, steps, recipe.scaled(model, steps))``.

    With w = min(1, d_model / 768):

    - beta1: the memory 1 / (1 - beta1), in steps, is w T / 400, at least 2.5 (GPT: 5), at
      most the published one.
    - C (nGPT): times (750 / T)^((1 - w) / 2), T between 750 and 16,000.
    - warmup (nGPT): "all", every rate, if w < 1.

    model: the model, or its ModelConfig.
    total_steps: T, the number of optimizer steps.
    base: the numbers to start from, as in ``build``. None: the paper's.
    overrides: numbers to set by name; they are not scaled.
    """
    check_steps(total_steps)
    config, numbers = config_of(model), numbers_for(model, base)
    w = min(1.0, config.d_model / PUBLISHED_WIDTH)
    beta1, beta2 = numbers.betas
    m = max(SHORTEST[type(numbers)], w * total_steps / STEPS_PER_MEMORY)
    found: dict[str, Any] = {"betas": (min(beta1, 1 - 1 / m), beta2)}
    if w < 1 and isinstance(numbers, Settings):
        T = min(T_1, max(T_0, total_steps))
        C = config.C if numbers.C is None else numbers.C
        warmup = "all" if numbers.warmup == "group" else numbers.warmup
        found |= {"C": C * (T_0 / T) ** ((1 - w) / 2), "warmup": warmup}
    return numbers_for(model, numbers, **{**found, **overrides})
