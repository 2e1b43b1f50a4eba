"""How is each parameter trained? The paper's recipe, from a table to an optimizer.

Items 1-11 of the summary (section 3.3) and the experimental setup (section 4.1) specify for every parameter whether its rows
are points on the sphere, and its peak learning rate, warmup, gate, cap and noise.

    optimizer, schedule = recipe.build(model, total_steps)        # GatedAdamW + log decay, or AdamW + WSD for the baseline
    print(recipe.format_table(recipe.table(model)))

    numbers.py   the table and the paper's numbers                assemble.py   from a model to groups, optimizer and schedule
    scaled.py    the numbers for a small run                      foreign.py    groups for a model that is not ours

Symbols: d d_model; C the constant of the global peak learning rate C / sqrt(d); q, k, v, o projections as in section 3.
"""

from .assemble import Row, build, format_table, numbers_for, param_groups, table
from .foreign import Decision, Groups, groups_for
from .numbers import TABLE, Baseline, Line, Settings
from .scaled import RULES, initialized, scaled

__all__ = [
    "RULES",
    "TABLE",
    "Baseline",
    "Decision",
    "Groups",
    "Line",
    "Row",
    "Settings",
    "build",
    "format_table",
    "groups_for",
    "initialized",
    "numbers_for",
    "param_groups",
    "scaled",
    "table",
]
