"""Which parameter is trained how? The paper's recipe, from a table to an optimizer.

The summary's items 1-11 (section 3.3) and the experimental setup (section 4.1) say for every parameter whether its rows are
points on the sphere, its peak learning rate, its warmup, its gate, its cap and its noise.

    optimizer, schedule = recipe.build(model, total_steps)        # GatedAdamW + log decay, or AdamW + WSD for the baseline
    print(recipe.format_table(recipe.table(model)))

    numbers.py   the table, and the numbers: the paper's          assemble.py   from a model to groups, optimizer and schedule
    scaled.py    the numbers of a small run

Symbols: d d_model; C the constant of the global peak learning rate C / sqrt(d); q, k, v, o projections as in section 3.
"""

from .assemble import Row, build, format_table, numbers_for, param_groups, table
from .numbers import TABLE, Baseline, Line, Settings
from .scaled import scaled

__all__ = [
    "TABLE",
    "Baseline",
    "Line",
    "Row",
    "Settings",
    "build",
    "format_table",
    "numbers_for",
    "param_groups",
    "scaled",
    "table",
]
