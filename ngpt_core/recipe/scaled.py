"""Which numbers does a short run want? The recipe scaled down, with the paper's numbers as its limit.

The published betas remember 40 steps. Of all numbers that were tried in short runs (chapter 9) the first of them mattered most,
and the shorter the run, the shorter the memory that did best. The rule:

    m = clip(T / 400, m_0, 1 / (1 - beta1))     the memory of the first moment, in steps            beta1 <- 1 - 1/m

with m_0 = 2.5 for nGPT and 5 for GPT. From T = 16,000 steps on it is the paper's recipe, number by number. It was found with a
dense model of 0.2M parameters and batches of 1,024 tokens between 250 and 2,000 steps. For a hybrid of that size with batches
of 256 its lower end holds: up to 1,000 steps no beta1 is better for nGPT than 0.6, beyond the noise; at 2,000 steps the rule's
0.8 is the best for GPT, and 0.01 behind 0.6 for nGPT. C, the cap and the second moment matter much less in these runs and stay
as published; a warmup of all rates (``warmup="all"``) gains 0.01 to 0.02 in runs of 250 and 500 steps, and is left to the user.

From there to the published value it is a straight line, and where that was tried it is not enough: with 4,800 steps of a hybrid
of 1M parameters the rule's numbers end 0.05 to 0.07 above tuned ones, and above a tuned GPT (chapter 9). For narrow models in
runs of thousands of steps take what was tuned: ``--recipe C=0.12 betas=0.6,0.99 warmup=all``.

Why it is so is not known. One guess: under the Angular Step Cap a row turns by up to one degree at every step, however small
its gradient, so that a direction remembered for m steps is followed through m degrees, and a short run has no time to come
back. But GPT, which has no cap, wants a short memory as well.

Symbols: T total_steps; m memory 1 / (1 - beta1) in steps.
"""

from torch import nn

from .groups import changed, check_steps, settings
from .numbers import Baseline, Settings

__all__ = ["scaled"]

STEPS_PER_MEMORY = 400
SHORTEST = {Settings: 2.5, Baseline: 5.0}  # m_0


def scaled(
    model: nn.Module | Settings | Baseline,
    total_steps: int,
    **overrides: object,
) -> Settings | Baseline:
    """The numbers for a run of ``total_steps``: a shorter first moment for a short run.

    beta1 = 1 - 1/m. The memory m, in steps, is T / 400, but at least 2.5 (nGPT) or 5
    (GPT) and at most the published beta1's, 1 / (1 - beta1): nGPT reaches it at
    T = 16,000, GPT at 4,000. No other number changes.

    model: whose published numbers are scaled; or numbers to start from.
    total_steps: T, the number of optimizer steps.
    overrides: numbers to change by name, on top.

    Use it as ``recipe.build(model, steps, recipe.scaled(model, steps))``.
    """
    check_steps(total_steps)
    numbers = model if isinstance(model, Settings | Baseline) else settings(model)
    beta1, beta2 = numbers.betas
    m = max(SHORTEST[type(numbers)], total_steps / STEPS_PER_MEMORY)
    return changed(numbers, {"betas": (min(beta1, 1 - 1 / m), beta2), **overrides})
