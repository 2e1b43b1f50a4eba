"""Which numbers does a short run want? The recipe scaled down, with the paper's numbers as its limit.

Under the Angular Step Cap a row may turn by the cap at every step, however small its gradient is. A direction that the first
moment remembers for m steps is then followed through about m times the cap: 40 steps and 40 degrees with the published beta1.
Runs of a hundred thousand steps have time for that, short ones have not. The rule, from the runs of chapter 9:

    m = clip(T / M, m_0, 40)     the memory of the first moment in steps            beta1 = 1 - 1/m

The baseline's first moment follows the same rule up to its own 10 steps. Nothing else changes with the length.

Symbols: T total_steps; m memory 1 / (1 - beta1) in steps; M the steps of training that one step of memory asks for.
"""

from torch import nn

from .groups import changed, settings
from .numbers import Baseline, Settings

__all__ = ["scaled"]

M, SHORTEST = 400, 5.0


def scaled(model: nn.Module | Settings | Baseline, total_steps: int, **overrides: object) -> Settings | Baseline:
    """The numbers for a run of ``total_steps``: the paper's for a long one, a shorter first moment for a short one.

    ``model``: whose published numbers are scaled; or numbers to start from. ``overrides`` come on top, by name. Use it as
    ``recipe.build(model, steps, recipe.scaled(model, steps))``.
    """
    if total_steps < 1:
        raise ValueError(f"recipe.scaled: total_steps counts optimizer steps, at least 1; got {total_steps}.")
    numbers = model if isinstance(model, Settings | Baseline) else settings(model)
    beta1, beta2 = numbers.betas
    m = max(SHORTEST, total_steps / M)
    return changed(numbers, {"betas": (min(beta1, 1 - 1 / m), beta2), **overrides})
