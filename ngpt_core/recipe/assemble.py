"""How does a model become parameter groups, an optimizer and a schedule?

This is where the forward pass and the update meet; neither depends on the other. Parameters that are trained alike share a
group.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import is_count
from ..config import ModelConfig
from ..nn.mlp import MLP
from ..nn.moe import MoE
from ..nn.residual import Residual
from ..nn.scale import Scale
from ..nn.unit import unit_axes
from ..optim.schedule import Schedule
from .numbers import TABLE, Baseline, Line, Settings

__all__ = ["Row", "build", "format_table", "numbers_for", "param_groups", "table"]


def numbers_for(
    model: nn.Module | ModelConfig, base: Settings | Baseline | None = None, **overrides: Any
) -> Settings | Baseline:
    """The numbers for this model or its config: ``base`` with ``overrides``, as in ``build``."""
    kind = Settings if config_of(model).normalized else Baseline
    if base is not None and not isinstance(base, kind):
        raise ValueError(f"recipe: nGPT takes Settings, GPT takes Baseline; this model needs {kind.__name__}, got {base!r}.")
    numbers = base or kind()
    known = [f.name for f in fields(numbers)]
    if unknown := sorted(overrides.keys() - set(known)):
        names = ", ".join(map(repr, unknown))
        raise ValueError(f"recipe: {kind.__name__} has no {names}. It has: {', '.join(known)}.")
    return replace(numbers, **overrides)


# ---- from a model to groups ------------------------------------------------------------------------------------------
def config_of(model: nn.Module | ModelConfig) -> ModelConfig:
    """The config of a model; a config is returned unchanged."""
    return model if isinstance(model, ModelConfig) else _config(model)


def _config(model: nn.Module) -> ModelConfig:
    if not isinstance(model, nn.Module):
        raise ValueError(f"recipe: expected a model, such as LanguageModel(config); got {model!r}.")
    for module in model.modules():  # the model itself, or the model inside a wrapper (compile, DDP)
        if isinstance(config := getattr(module, "config", None), ModelConfig):
            return config
    raise ValueError(f"recipe: {type(model).__name__} needs a ModelConfig as .config, for d_model, C and normalized.")


def check_steps(total_steps: object) -> None:
    """ValueError unless total_steps is a number of steps."""
    if not is_count(total_steps, 1):
        raise ValueError(f"recipe: total_steps must be a number of optimizer steps >= 1; got {total_steps!r}.")


def _lines(model: nn.Module, table: Mapping[str, Line]) -> Iterator[tuple[str, Tensor, str]]:
    """(name, parameter, key of its line) for every parameter of every module; a ValueError if a line is missing."""
    modules = list(model.named_modules())
    shared = {id(mlp) for _, moe in modules if isinstance(moe, MoE) for mlp in moe.modules() if isinstance(mlp, MLP)}
    owner = {id(s): (m, name) for _, m in modules for name, s in m.named_children() if isinstance(s, Scale)}
    for prefix, module in modules:
        holder, attribute = owner.get(id(module), (module, None))
        # the class of a sharded module is generated and inherits from ours: use the first base class with a line
        classes = ["Shared"] if id(holder) in shared else [c.__name__ for c in type(holder).__mro__]
        inside = [c.__name__ for c in type(holder.mixer).__mro__] if isinstance(holder, Residual) else []
        for own, p in module.named_parameters(recurse=False):
            name = f"{prefix}.{own}" if prefix else own
            keys = [f"{c}.{attribute or own}" for c in classes]
            by_block = [f"{c}[{block}].{attribute or own}" for c in classes for block in inside]
            key = next((k for k in by_block + keys if k in table), None)
            if key is None:
                raise ValueError(f"recipe: no line of TABLE covers {name}. Add one: recipe.TABLE[{keys[0]!r}] = Line(...).")
            yield name, p, key


def param_groups(
    model: nn.Module, total_steps: int | None = None, base: Settings | Baseline | None = None, **overrides: Any
) -> list[dict[str, Any]]:
    """Complete groups for GatedAdamW (nGPT) or torch's AdamW (GPT): parameters with names, peak lr, warmup and everything else.

    Parameters that are trained alike share a group; ``group["label"]`` lists its lines of ``TABLE``. Every parameter of the
    model is in exactly one group. The arguments are those of ``build``; ``total_steps`` matters only for GPT's warmup and is
    optional (see ``Baseline.tokens_per_step``).
    """
    if total_steps is not None:
        check_steps(total_steps)
    numbers, config, axes = numbers_for(model, base, **overrides), _config(model), unit_axes(model)
    groups: dict[tuple, dict[str, Any]] = {}
    own = getattr(numbers, "lines", None) or {}  # GPT has one warmup for all, and does not take lines
    lines = {**TABLE, **own}
    found = list(_lines(model, lines))
    _check_used(own, {key for _, _, key in found})
    for name, p, key in found:
        values = numbers.group(lines[key], config, total_steps)
        if config.normalized:
            values["unit_dim"] = axes.get(name)
            if lines[key].unit != (name in axes):
                raise ValueError(f"recipe: TABLE has unit={lines[key].unit} for {key}, but its module's unit_dims disagree.")
        group = groups.setdefault(tuple(values.items()), {"params": [], "label": {}, **values})
        group["params"].append((name, p))
        group["label"][key] = None
    for group in groups.values():
        group["label"] = ", ".join(group["label"])
    _check_partition(model, groups.values())
    return list(groups.values())


def _check_used(own: Mapping[str, Line], used: set[str]) -> None:
    """A line that fits no parameter is a mistake, unless it fits one of another model of ours."""
    kinds = {key.partition(".")[0] for key in TABLE}
    by_block = {f"Residual[{kind}].{attribute}" for kind in kinds for attribute in ("alpha", "norm_weight")}
    if unknown := sorted(own.keys() - used - TABLE.keys() - by_block):
        raise ValueError(
            f"recipe: lines has {', '.join(map(repr, unknown))}, which names no parameter of this model. A key is a class and "
            "an attribute, as in TABLE ('Head.s_z'), or a residual step by its block ('Residual[Mamba2].alpha')."
        )


def _check_partition(model: nn.Module, groups: Iterable[dict[str, Any]]) -> None:
    held = [id(p) for group in groups for _, p in group["params"]]
    every = {id(p): name for name, p in model.named_parameters()}
    twice = sorted({every[i] for i in held if held.count(i) > 1}) if len(held) != len(set(held)) else []
    missing = sorted(name for i, name in every.items() if i not in set(held))
    if twice or missing:
        raise ValueError(f"recipe: every parameter must be in one group, once; {missing=}; shared by two modules: {twice}.")


def build(
    model: nn.Module, total_steps: int, base: Settings | Baseline | None = None, **overrides: Any
) -> tuple[torch.optim.Optimizer, Schedule]:
    """(optimizer, schedule) for a run of ``total_steps`` optimizer steps: call ``schedule.step()`` after ``optimizer.step()``.

    nGPT: GatedAdamW and logarithmic decay, with the numbers of ``Settings``. GPT: AdamW and WSD, with those of ``Baseline``.
    nGPT's last step has a learning rate of 0 (r = 1), so a run of one step changes nothing; GPT's last step has 1% of the peak.

    model: a module with a ``ModelConfig`` as its ``config`` (for d_model, C and normalized), or a wrapper around it (compile,
        DDP); otherwise a ValueError. Shard the model first, if at all.
    total_steps: T, the number of optimizer steps.
    base: the numbers to start from, ``Settings`` for nGPT or ``Baseline`` for GPT. None: the paper's.
    overrides: numbers to change by name, e.g. ``C=0.2, cap_degrees=2.0, pmen=None``.
    """
    check_steps(total_steps)
    numbers = numbers_for(model, base, **overrides)
    return numbers.build(param_groups(model, total_steps, numbers), total_steps)


# ---- the table for people --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Row:
    """How one parameter is trained: ``row.lr`` or ``row["lr"]``."""

    name: str
    """The parameter's name in the model."""
    shape: tuple[int, ...]
    """The parameter's shape."""
    unit_dim: int | None
    """The axis along which the parameter has norm 1, or None."""
    lr: float
    """The peak learning rate."""
    warmup: float
    """The share of training over which its rate is warmed up; 0: no warmup."""
    a: float
    """The gate's sharpness; 1 is Adam's, and AdamW's."""
    cap: float | None
    """The peak of its angular cap in radians, or None."""
    pmen: bool
    """Whether it receives exploration noise."""
    weight_decay: float
    """lambda, the weight decay: 0 in nGPT's recipe."""

    def __getitem__(self, column: str) -> object:
        return getattr(self, column)

    def keys(self) -> list[str]:
        """The names of the columns."""
        return list(asdict(self))


def table(
    model: nn.Module, total_steps: int | None = None, base: Settings | Baseline | None = None, **overrides: Any
) -> list[Row]:
    """One row per parameter, in the model's order: what ``build`` would do, without doing it.

    The arguments are those of ``build``; ``total_steps`` matters only for GPT's warmup with ``tokens_per_step``. If it is
    omitted, the warmup is the longest one, ``warmup_share``.
    """
    rows = {
        name: Row(
            *(name, tuple(p.shape), group.get("unit_dim"), group["lr"], group["warmup"], group.get("a", 1.0)),
            *(group.get("peak_cap"), group.get("pmen") is not None, group["weight_decay"]),
        )
        for group in param_groups(model, total_steps, base, **overrides)
        for name, p in group["params"]
    }
    return [rows[name] for name, _ in model.named_parameters()]


def format_table(rows: list[Row]) -> str:
    """The table as text. Layers that are trained alike share a line: their indices become *, and ``x`` counts them."""
    merged: dict[tuple, list[Row]] = {}
    for row in rows:
        pattern = re.sub(r"\.\d+\.", ".*.", row.name)
        merged.setdefault((pattern, *(row[k] for k in row.keys() if k != "name")), []).append(row)
    lines: list[tuple[str, ...]] = [
        ("parameter", "x", "shape", "unit", "peak lr", "warmup", "a", "cap", "noise", "decay", "why")
    ]
    for (name, *_), same in merged.items():
        r = same[0]
        lines.append((
            name, str(len(same)), "x".join(map(str, r.shape)), "-" if r.unit_dim is None else str(r.unit_dim), f"{r.lr:.4g}",
            f"{100 * r.warmup:.3g}%" if r.warmup else "-", f"{r.a:g}", "-" if r.cap is None else f"{math.degrees(r.cap):g}°",
            "yes" if r.pmen else "-", f"{r.weight_decay:g}" if r.weight_decay else "-", getattr(r, "why", ""),
        ))  # fmt: skip
    if not any(line[-1] for line in lines[1:]):  # of models that are not ours
        lines = [line[:-1] for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = {0, 2, 10}
    return "\n".join(
        "  ".join(cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))).rstrip()
        for line in lines
    )
