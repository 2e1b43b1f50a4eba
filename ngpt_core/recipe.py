"""Which parameter is trained how? One table, and what follows from it.

The summary's items 1-11 (section 3.3) and the experimental setup (section 4.1) say for every parameter whether its rows are
points on the sphere, its peak learning rate, its warmup, its gate, its cap and its noise. ``TABLE`` below says it line by line,
keyed by the class and the name under which a module holds the parameter (a ``Scale`` counts as its owner's). ``Settings`` and
``Baseline`` hold the numbers, the paper's by default. Here the forward pass and the update meet; neither knows the other.

    optimizer, schedule = recipe.build(model, total_steps)        # GatedAdamW + log decay, or AdamW + WSD for the baseline
    print(recipe.format_table(recipe.table(model)))

Symbols: d d_model; C the constant of the global peak learning rate C / sqrt(d); q, k, v, o projections as in section 3.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .nn.mlp import MLP
from .nn.moe import MoE
from .nn.scale import Scale
from .nn.unit import unit_axes
from .optim.gated_adamw import GatedAdamW
from .optim.pmen import PMEN
from .optim.schedule import Schedule, log_decay, wsd
from .optim.smgc import SMGC

__all__ = ["TABLE", "Baseline", "Row", "Rule", "Settings", "build", "format_table", "param_groups", "settings", "table"]


# ---- the table -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Rule:
    """One line of the table."""

    rate: str = "global"
    """Which of the peak learning rates of ``Settings.rates``."""
    unit: bool = False
    """In nGPT its rows are points of the sphere (item 2): projection, a = 0.5, PMEN, Norm. Others: Adam, a = 1, no geometry."""
    cap: bool = False
    """The Angular Step Cap holds for it: unit vectors that are not embeddings (item 2)."""
    warmup: bool = False
    """Its rate is warmed up over the first 10%: s_z, and Mamba's parameters except out_proj (section 4.1)."""
    decays: bool = False
    """The baseline decays it: matrices and embeddings, not norms, convolutions, A_log, D and dt_bias."""


_ROWS = Rule(unit=True, cap=True, decays=True)
_EMBEDDING = Rule(unit=True, decays=True)
_EXPERT = Rule("expert", unit=True, cap=True, decays=True)

TABLE: dict[str, Rule] = {
    # input and output
    "Embedding.weight": _EMBEDDING,
    "Head.weight": _EMBEDDING,
    "Head.s_z": Rule("s_z", warmup=True),
    "LanguageModel.norm_weight": Rule(),  # GPT alone
    # the residual step around every block
    "Residual.alpha": Rule("alpha"),
    "Residual.norm_weight": Rule(),  # GPT alone
    # attention
    "Attention.q_proj": _ROWS,
    "Attention.k_proj": _ROWS,
    "Attention.v_proj": _ROWS,
    "Attention.o_proj": _ROWS,
    "Attention.s_qk": Rule("s_qk"),
    # Mamba-2
    "Mamba2.in_proj": replace(_ROWS, warmup=True),
    "Mamba2.out_proj": _ROWS,
    "Mamba2.conv_weight": Rule(warmup=True),
    "Mamba2.conv_bias": Rule(warmup=True),
    "Mamba2.A_log": Rule(warmup=True),
    "Mamba2.D": Rule(warmup=True),
    "Mamba2.dt_bias": Rule(warmup=True),
    "Mamba2.s_mamba": Rule(warmup=True),
    "Mamba2.norm_weight": Rule(),  # GPT alone
    # dense MLP
    "MLP.up": _ROWS,
    "MLP.gate": _ROWS,
    "MLP.down": _ROWS,
    "MLP.s_u": Rule(),
    # mixture of experts; "Shared" is the MLP inside an MoE
    "Router.weight": Rule("router", unit=True, cap=True, decays=True),
    "Experts.up": _EXPERT,
    "Experts.down": _EXPERT,
    "Experts.s_u": Rule(),
    "Shared.up": _EXPERT,
    "Shared.down": _EXPERT,
    "Shared.s_u": Rule(),
    "MoE.s_moe": Rule(),
}


# ---- the numbers -----------------------------------------------------------------------------------------------------
def _positive(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"recipe: {name} must be a positive number (or None where None is allowed); got {value}.")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """nGPT's numbers: the paper's by default."""

    C: float | None = None
    """The global peak learning rate is C / sqrt(d_model) (section 4.1). None: the config's, 0.24 down to 0.12 on the ladder."""
    expert_multiplier: float = 1.5
    """On the rate of routed and shared expert rows."""
    router_multiplier: float = 2.0
    """On the rate of router rows."""
    s_z_lr: float = 0.5
    """Absolute peak learning rate of s_z (item 11)."""
    alpha_lr: float = 0.2
    """Of the eigen learning rates alpha_A and alpha_M (item 11)."""
    s_qk_lr: float = 0.2
    """Of s_qk (item 11). s_u, s_mamba and s_moe, of which the paper says nothing, take the global rate."""
    betas: tuple[float, float] = (0.975, 0.975)
    eps_gate: float = 1e-8
    eps_num: float = 1e-14
    a: float = 0.5
    """The gate's sharpness for unit rows (item 2)."""
    a_other: float = 1.0
    """For everything else: Adam's (item 2)."""
    tangent: bool = True
    """Pre-Moment Tangent Projection of unit rows (item 2)."""
    cap_degrees: float | None = 1.0
    """The Angular Step Cap after its warmup; it does not follow the decay. None: no cap."""
    pmen: PMEN | None = field(default_factory=PMEN)
    """Post-Moment Exploration Noise on unit rows (item 9). None: none."""
    pmen_embeddings: bool = True
    """Also on the input and output embeddings."""
    smgc: SMGC | None = field(default_factory=SMGC)
    """Second-Moment Growth Clipping on every coordinate, after 500 steps (item 10). None: none."""
    weight_decay: float = 0.0
    """On matrices and embeddings, for experiments: the recipe has none (item 1)."""
    decay: str = "lr"
    """How GatedAdamW multiplies a weight decay: "lr" as torch, "eta" as Algorithm 1."""
    schedule: str | Callable[[float], float] = "log"
    """eta as a function of progress, or its name; see optim/schedule.py."""
    rho: float = 0.05
    """Of the logarithmic decay."""
    warmup: str = "group"
    """"group": decay from the first step, and the table's own warmups. "before": one for all, then decay (figure 3)."""
    warmup_share: float = 0.1
    """The share of training of every warmup, the cap's too."""
    clip_norm: float | None = None
    """Global gradient norm clipping, for the training loop to do; not part of the recipe."""
    nonfinite: str = "raise"

    def __post_init__(self) -> None:
        _positive(self, "C", "expert_multiplier", "router_multiplier", "s_z_lr", "alpha_lr", "s_qk_lr")
        _positive(self, "cap_degrees", "clip_norm")

    def rates(self, config: ModelConfig) -> dict[str, float]:
        """The peak learning rates that ``Rule.rate`` names."""
        peak = (config.C if self.C is None else self.C) / math.sqrt(config.d_model)  # section 4.1
        return {
            "global": peak,
            "expert": self.expert_multiplier * peak,
            "router": self.router_multiplier * peak,
            "s_z": self.s_z_lr,
            "alpha": self.alpha_lr,
            "s_qk": self.s_qk_lr,
        }

    def group(self, rule: Rule, config: ModelConfig, total_steps: int | None) -> dict[str, object]:
        """A parameter group of GatedAdamW, complete but for its parameters and their ``unit_dim``."""
        lr, cap = self.rates(config)[rule.rate], None
        if rule.cap and self.cap_degrees is not None:
            cap = math.radians(self.cap_degrees)
        return {
            "lr": lr, "peak_lr": lr, "warmup": self.warmup_share if rule.warmup else 0.0, "cap": cap, "peak_cap": cap,
            "a": self.a if rule.unit else self.a_other, "tangent": rule.unit and self.tangent,
            "pmen": self.pmen if rule.unit and (rule.cap or self.pmen_embeddings) else None, "smgc": self.smgc,
            "betas": self.betas, "eps_gate": self.eps_gate, "eps_num": self.eps_num,
            "weight_decay": self.weight_decay if rule.decays else 0.0, "decay": self.decay,
        }  # fmt: skip

    def build(self, groups: list[dict], total_steps: int) -> tuple[GatedAdamW, Schedule]:
        optimizer = GatedAdamW(groups, nonfinite=self.nonfinite)
        eta = partial(log_decay, rho=self.rho) if self.schedule == "log" else self.schedule
        return optimizer, Schedule(optimizer, total_steps, eta, self.warmup, self.warmup_share, self.warmup_share)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """GPT's numbers (section 4.1): AdamW, WSD."""

    lr: float | None = None
    """The peak learning rate. None: the config's, 2.2e-3 down to 1.2e-3 on the ladder."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    """On matrices and embeddings; not on norms, convolutions, A_log, D and dt_bias."""
    schedule: str | Callable[[float], float] = "wsd"
    """eta as a function of progress, or its name. The next two are for "wsd"; to others give parameters with partial."""
    eta_min: float = 0.01
    """WSD falls to 1% of the peak,"""
    wsd_decay: float = 0.2
    """linearly over this last share of training (not published; ours)."""
    warmup: str = "group"
    warmup_tokens: float = 1e9
    """Linear warmup over 1B tokens ..."""
    tokens_per_step: float | None = None
    """... if this says how many tokens a step has ..."""
    warmup_share: float = 0.1
    """... but never more than this share of a (short) run; exactly this share if tokens_per_step is not given."""
    clip_norm: float | None = 1.0
    """Global gradient norm clipping, for the training loop to do (not published; ours)."""

    def __post_init__(self) -> None:
        _positive(self, "lr", "warmup_tokens", "tokens_per_step", "clip_norm")

    def share(self, total_steps: int | None) -> float:
        """The warmup as a share of training."""
        if self.tokens_per_step is None or total_steps is None:
            return self.warmup_share
        return min(self.warmup_share, self.warmup_tokens / self.tokens_per_step / total_steps)

    def group(self, rule: Rule, config: ModelConfig, total_steps: int | None) -> dict[str, object]:
        """A parameter group of torch's AdamW, complete but for its parameters."""
        lr = config.gpt_lr if self.lr is None else self.lr
        weight_decay = self.weight_decay if rule.decays else 0.0
        warmup = self.share(total_steps)
        return {"lr": lr, "peak_lr": lr, "warmup": warmup, "betas": self.betas, "eps": self.eps, "weight_decay": weight_decay}

    def build(self, groups: list[dict], total_steps: int) -> tuple[torch.optim.AdamW, Schedule]:
        optimizer = torch.optim.AdamW(groups)
        eta = partial(wsd, eta_min=self.eta_min, decay=self.wsd_decay) if self.schedule == "wsd" else self.schedule
        return optimizer, Schedule(optimizer, total_steps, eta, self.warmup, self.share(total_steps))


def settings(model: nn.Module, base: Settings | Baseline | None = None, **overrides: object) -> Settings | Baseline:
    """The numbers for this model: ``base`` (by default the paper's, for nGPT or for GPT) with ``overrides`` by name."""
    kind = Settings if _config(model).normalized else Baseline
    if base is not None and not isinstance(base, kind):
        raise ValueError(f"recipe: nGPT takes Settings, GPT takes Baseline; this model wants {kind.__name__}, got {base!r}.")
    known = [f.name for f in fields(kind)]
    if unknown := sorted(overrides.keys() - set(known)):
        raise ValueError(f"recipe: {kind.__name__} has no {', '.join(map(repr, unknown))}. It has: {', '.join(known)}.")
    return replace(base or kind(), **overrides)


# ---- from a model to groups ------------------------------------------------------------------------------------------
def _config(model: nn.Module) -> ModelConfig:
    for module in model.modules():  # the model itself, or what a wrapper (compile, DDP) holds
        if isinstance(getattr(module, "config", None), ModelConfig):
            return module.config
    raise ValueError(f"recipe: {type(model).__name__} has no ModelConfig as .config, which says d_model, C and normalized.")


def _lines(model: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    """(name, parameter, key of its line) for every parameter of every module; a ValueError if there is no line for it."""
    modules = list(model.named_modules())
    shared = {id(mlp) for _, moe in modules if isinstance(moe, MoE) for mlp in moe.modules() if isinstance(mlp, MLP)}
    owner = {id(s): (m, name) for _, m in modules for name, s in m.named_children() if isinstance(s, Scale)}
    for prefix, module in modules:
        holder, attribute = owner.get(id(module), (module, None))
        # a sharded module's class is made on the fly and inherits from ours: the first base that has a line counts
        classes = ["Shared"] if id(holder) in shared else [c.__name__ for c in type(holder).__mro__]
        for own, p in module.named_parameters(recurse=False):
            name = f"{prefix}.{own}" if prefix else own
            keys = [f"{c}.{attribute or own}" for c in classes]
            key = next((k for k in keys if k in TABLE), None)
            if key is None:
                raise ValueError(f"recipe: no line of TABLE covers {name}. Add one: recipe.TABLE[{keys[0]!r}] = Rule(...).")
            yield name, p, key


def param_groups(
    model: nn.Module,
    total_steps: int | None = None,
    base: Settings | Baseline | None = None,
    **overrides: object,
) -> list[dict[str, object]]:
    """Groups for GatedAdamW (nGPT) or torch's AdamW (GPT), each complete: parameters with names, peak lr, warmup and all else.

    Parameters that are trained alike share a group; ``group["label"]`` says which lines of the table it holds. Every
    parameter of the model is in exactly one. ``total_steps`` matters only for GPT's warmup (see Baseline.warmup_share).
    """
    numbers, config, axes = settings(model, base, **overrides), _config(model), unit_axes(model)
    groups: dict[tuple, dict] = {}
    for name, p, key in _lines(model):
        values = numbers.group(TABLE[key], config, total_steps)
        if config.normalized:
            values["unit_dim"] = axes.get(name)
            if TABLE[key].unit != (name in axes):
                raise ValueError(f"recipe: TABLE says unit={TABLE[key].unit} for {key}, its module's unit_dims say otherwise.")
        group = groups.setdefault(tuple(values.items()), {"params": [], "label": {}, **values})
        group["params"].append((name, p))
        group["label"][key] = None
    for group in groups.values():
        group["label"] = ", ".join(group["label"])
    _check_partition(model, groups.values())
    return list(groups.values())


def _check_partition(model: nn.Module, groups) -> None:
    held = [id(p) for group in groups for _, p in group["params"]]
    every = {id(p): name for name, p in model.named_parameters()}
    twice = sorted({every[i] for i in held if held.count(i) > 1}) if len(held) != len(set(held)) else []
    missing = sorted(name for i, name in every.items() if i not in set(held))
    if twice or missing:
        raise ValueError(f"recipe: every parameter belongs to one group, once; {missing=}; shared by two modules: {twice}.")


def build(
    model: nn.Module,
    total_steps: int,
    base: Settings | Baseline | None = None,
    **overrides: object,
) -> tuple[torch.optim.Optimizer, Schedule]:
    """(optimizer, schedule) for a run of ``total_steps`` optimizer steps: call ``schedule.step()`` after ``optimizer.step()``.

    nGPT: GatedAdamW and logarithmic decay, with the numbers of ``Settings``. GPT: AdamW and WSD, with those of ``Baseline``.
    ``overrides`` change numbers by name, e.g. ``C=0.2, cap_degrees=2.0, pmen=None``. Build it after sharding the model.
    """
    numbers = settings(model, base, **overrides)
    return numbers.build(param_groups(model, total_steps, numbers), total_steps)


# ---- to be read ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Row:
    """How one parameter is trained: ``row.lr`` or ``row["lr"]``."""

    name: str
    shape: tuple[int, ...]
    unit_dim: int | None
    """The axis along which it has norm 1, or None."""
    lr: float
    """Peak learning rate."""
    warmup: float
    """The share of training of its own warmup."""
    a: float
    """The gate's sharpness; 1 is Adam's, and AdamW's."""
    cap: float | None
    """The peak of its angular cap in radians, or None."""
    pmen: bool
    """Does it receive exploration noise?"""
    weight_decay: float

    def __getitem__(self, column: str) -> object:
        return getattr(self, column)

    def keys(self) -> list[str]:
        return list(asdict(self))


def table(
    model: nn.Module, total_steps: int | None = None, base: Settings | Baseline | None = None, **overrides: object
) -> list[Row]:
    """One row for every parameter, in the model's order: what ``build`` would do, to be read before it is done."""
    rows = {
        name: Row(
            name,
            tuple(p.shape),
            *(group.get(k) for k in ("unit_dim", "lr", "warmup")),
            group.get("a", 1.0),
            group.get("peak_cap"),
            group.get("pmen") is not None,
            group["weight_decay"],
        )
        for group in param_groups(model, total_steps, base, **overrides)
        for name, p in group["params"]
    }
    return [rows[name] for name, _ in model.named_parameters()]


def format_table(rows: list[Row]) -> str:
    """The table as text. Layers that are trained alike share a line: their numbers become *, and ``x`` counts them."""
    merged: dict[tuple, list[Row]] = {}
    for row in rows:
        pattern = re.sub(r"\.\d+\.", ".*.", row.name)
        merged.setdefault((pattern, *(row[k] for k in row.keys() if k != "name")), []).append(row)
    lines = [("parameter", "x", "shape", "unit", "peak lr", "warmup", "a", "cap", "noise", "decay")]
    for (name, *_), same in merged.items():
        r = same[0]
        lines.append((
            name, str(len(same)), "x".join(map(str, r.shape)), "-" if r.unit_dim is None else str(r.unit_dim), f"{r.lr:.4g}",
            f"{r.warmup:.0%}" if r.warmup else "-", f"{r.a:g}", "-" if r.cap is None else f"{math.degrees(r.cap):g}°",
            "yes" if r.pmen else "-", f"{r.weight_decay:g}" if r.weight_decay else "-",
        ))  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = {0, 2}
    return "\n".join(
        "  ".join(cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))).rstrip()
        for line in lines
    )
