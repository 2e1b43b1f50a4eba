"""Which numbers does a small run need? The recipe scaled down, with the paper's numbers as its limit.

The published numbers were chosen for models at least 768 wide, in runs of tens of thousands of large steps. A short run or a
narrow model needs others (chapter 9.2). With w = min(1, d / 768) for the width and T for the length:

    beta1     1 - 1/m, with the memory m = w T / 400 in steps, at least m_0 = 2.5 (GPT: 5), at most the published one
    C         times (T_0 / T)^((1 - w) / 2), T between T_0 = 750 and 16,000            nGPT only
    warmup    of every rate, if w < 1                                                  nGPT only: GPT already does that

From d = 768 and T = 16,000 on, every number is the paper's. beta2, cap, decay, gate, noise, clipping and the rates of the
scales are as published at every size.

Others have published rules for the rates of normalized models; ``rule`` replaces the line of C by one of them, at any width and
length, with the paper's C at d = 768 and T = 16,000:

    "nugpt"   rates of hidden rows and head ~ d^(-3/4), of the input embedding ~ d^(-1/2); all ~ T^(-1/3)  (arXiv 2604.27077)
    "hyperp"  all rates of rows ~ T^(-0.32); the width as in the paper, C / sqrt(d)                        (arXiv 2603.28743)
    "paper"   nothing is scaled, neither C nor beta1 nor a warmup

They fix no beta1 and no warmup: those are ours. nuGPT also has an initialization, which ``initialized`` gives to a config.

Symbols: d d_model; T total_steps; m memory 1 / (1 - beta1); w the width over that of the narrowest published model.
"""

import math
from dataclasses import replace
from typing import Any

from torch import nn

from ..config import ModelConfig
from ..presets import ladder_pattern
from .assemble import check_steps, config_of, numbers_for
from .numbers import Baseline, Settings

__all__ = ["RULES", "initialized", "scaled"]

PUBLISHED_WIDTH = 768  # of the ladder's narrowest model
PUBLISHED_DEPTH = len(ladder_pattern(10, 3))  # its blocks
STEPS_PER_MEMORY = 400
SHORTEST = {Settings: 2.5, Baseline: 5.0}  # m_0
T_0, T_1 = 750, 16_000  # C falls between them
RULES = ("ours", "paper", "nugpt", "hyperp")


def scaled(
    model: nn.Module | ModelConfig,
    total_steps: int,
    base: Settings | Baseline | None = None,
    *,
    rule: str = "ours",
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
    rule: how the rates of nGPT's rows follow width and length. "ours": as above. "nugpt", "hyperp": as others have published,
        equal to the paper's at d_model = 768 and T = 16,000 (see the top of scaled.py). "paper": nothing is scaled. The
        presets of the ladder are trained with the paper's numbers.
    overrides: numbers to set by name; they are not scaled.
    """
    check_steps(total_steps)
    _check_rule(rule)
    config, numbers = config_of(model), numbers_for(model, base)
    if rule == "paper":
        return numbers_for(model, numbers, **overrides)
    w = min(1.0, config.d_model / PUBLISHED_WIDTH)
    beta1, beta2 = numbers.betas
    m = max(SHORTEST[type(numbers)], w * total_steps / STEPS_PER_MEMORY)
    found: dict[str, Any] = {"betas": (min(beta1, 1 - 1 / m), beta2)}
    if isinstance(numbers, Settings):
        found |= _rates(rule, numbers, config, total_steps, w)
        if w < 1:
            found["warmup"] = "all" if numbers.warmup == "group" else numbers.warmup
    return numbers_for(model, numbers, **{**found, **overrides})


def _rates(rule: str, numbers: Settings, config: ModelConfig, total_steps: int, w: float) -> dict[str, float]:
    """C, and the input embedding's share of it, by a rule."""
    C = config.C if numbers.C is None else numbers.C
    width, length = config.d_model / PUBLISHED_WIDTH, total_steps / T_1
    if rule == "nugpt":  # C / sqrt(d) is already d^(-1/2), all that the input embedding needs; hidden rows need d^(-1/4) more
        hidden = width**-0.25
        return {"C": C * hidden * length ** (-1 / 3), "embedding_multiplier": numbers.embedding_multiplier / hidden}
    if rule == "hyperp":
        return {"C": C * length**-0.32}
    if w == 1:
        return {}
    T = min(T_1, max(T_0, total_steps))
    return {"C": C * (T_0 / T) ** ((1 - w) / 2)}


def initialized(config: ModelConfig, rule: str = "nugpt") -> ModelConfig:
    """The config with the initial values of a rule: nuGPT's alpha_init = 0.05 / (depth / 23), s_z_init = sqrt(d_model / 768).

    The multiples are those of the ladder's smallest model. The other rules have none: the config is returned unchanged.

    config: an nGPT's ModelConfig.
    rule: one of ``RULES``.
    """
    _check_rule(rule)
    if not isinstance(config, ModelConfig) or not config.normalized:
        raise ValueError(f"recipe: initialized takes the ModelConfig of an nGPT; got {config!r}.")
    if rule != "nugpt":
        return config
    depth, width = len(config.pattern) / PUBLISHED_DEPTH, config.d_model / PUBLISHED_WIDTH
    return replace(config, alpha_init=0.05 / depth, s_z_init=math.sqrt(width))


def _check_rule(rule: object) -> None:
    if rule not in RULES:
        raise ValueError(f"recipe: rule must be one of {', '.join(RULES)}; got {rule!r}.")
