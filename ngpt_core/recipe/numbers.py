"""How is each parameter trained, and with which numbers? One table, and two lists of numbers.

``TABLE`` has one line per parameter: whether its rows are points on the sphere, and which rate, warmup and cap it uses. Keys
are the class and attribute of the module that holds the parameter (a ``Scale`` belongs to its owner). A parameter of the
residual step may also be named by the block inside it, which comes first: "Residual[Mamba2].alpha" is the alpha around Mamba-2
layers. ``Settings`` (nGPT) and ``Baseline`` (GPT) hold the numbers: the paper's by default.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ..checks import LEAST_DIVISOR, is_within
from ..config import ModelConfig
from ..optim.auto_gate import AutoGate, Gate
from ..optim.gated_adamw import GatedAdamW
from ..optim.pmen import PMEN
from ..optim.schedule import Schedule, log_decay, wsd
from ..optim.smgc import SMGC

__all__ = ["TABLE", "Baseline", "Line", "Settings"]


# ---- the table -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Line:
    """One line of the table."""

    rate: str = "global"
    """Its peak learning rate in ``Settings``: "global", "embedding", "expert", "router", "s_z", "alpha" or "s_qk"."""
    unit: bool = False
    """In nGPT, its rows are on the sphere (item 2): projection, a = 0.5, PMEN, Norm. Others: Adam, a = 1, no geometry."""
    cap: bool = False
    """The Angular Step Cap applies to it: unit vectors that are not embeddings (item 2)."""
    warmup: bool = False
    """Its rate is warmed up over the first 10%: s_z, and Mamba's parameters except out_proj (section 4.1). Whether the alpha
    around a Mamba layer counts as Mamba's is not said; here it does not, since every block has one. To warm it up with the
    layer: ``lines={"Residual[Mamba2].alpha": Line("alpha", warmup=True)}``."""
    decays: bool = False
    """The baseline applies weight decay to it: matrices and embeddings, not norms, convolutions, A_log, D and dt_bias."""
    embedding: str = ""
    """"input" or "output" for the two embeddings, which ``Settings.pmen_embeddings`` can tell apart."""


RATES = ("global", "embedding", "expert", "router", "s_z", "alpha", "s_qk")

_ROWS = Line(unit=True, cap=True, decays=True)
_EXPERT = Line("expert", unit=True, cap=True, decays=True)

TABLE: dict[str, Line] = {
    # input and output
    "Embedding.weight": Line("embedding", unit=True, decays=True, embedding="input"),
    "Head.weight": Line(unit=True, decays=True, embedding="output"),
    "Head.s_z": Line("s_z", warmup=True),
    "LanguageModel.norm_weight": Line(),  # GPT only
    # the residual step around every block
    "Residual.alpha": Line("alpha"),
    "Residual.norm_weight": Line(),  # GPT only
    # attention
    "Attention.q_proj": _ROWS,
    "Attention.k_proj": _ROWS,
    "Attention.v_proj": _ROWS,
    "Attention.o_proj": _ROWS,
    "Attention.s_qk": Line("s_qk"),
    # Mamba-2
    "Mamba2.in_proj": replace(_ROWS, warmup=True),
    "Mamba2.out_proj": _ROWS,
    "Mamba2.conv_weight": Line(warmup=True),
    "Mamba2.conv_bias": Line(warmup=True),
    "Mamba2.A_log": Line(warmup=True),
    "Mamba2.D": Line(warmup=True),
    "Mamba2.dt_bias": Line(warmup=True),
    "Mamba2.s_mamba": Line(warmup=True),
    "Mamba2.norm_weight": Line(),  # GPT only
    # dense MLP
    "MLP.up": _ROWS,
    "MLP.gate": _ROWS,
    "MLP.down": _ROWS,
    "MLP.s_u": Line(),
    # mixture of experts; "Shared" is the MLP inside an MoE
    "Router.weight": Line("router", unit=True, cap=True, decays=True),
    "Experts.up": _EXPERT,
    "Experts.down": _EXPERT,
    "Experts.s_u": Line(),
    "Shared.up": _EXPERT,
    "Shared.down": _EXPERT,
    "Shared.s_u": Line(),
    "MoE.s_moe": Line(),
}


# ---- the numbers -----------------------------------------------------------------------------------------------------
OPTIONAL = ("C", "lr", "cap_degrees", "clip_norm", "tokens_per_step")  # may be None


def _check(numbers: "Settings | Baseline", *names: str) -> None:
    """The rules for both; ``names`` must be positive. betas may be a list, as in JSON."""
    for name in names:
        value, free = getattr(numbers, name), name in OPTIONAL
        if not (is_within(value, 0, open=True) or (free and value is None)):
            raise ValueError(f"recipe: {name} must be a positive number{' or None' if free else ''}; got {value!r}.")
    betas = numbers.betas
    if not (isinstance(betas, (tuple, list)) and len(betas) == 2 and all(is_within(b, 0) and b < 1 for b in betas)):
        raise ValueError(f"recipe: betas must be two numbers in [0, 1); got {betas!r}.")
    object.__setattr__(numbers, "betas", tuple(betas))
    for name in ("weight_decay", "eps_num", "eps", "eta_min"):  # each kind of numbers has some of them
        if not is_within(getattr(numbers, name, 0.0), 0):
            raise ValueError(f"recipe: {name} must be a number >= 0; got {getattr(numbers, name)!r}.")
    if not (is_within(numbers.warmup_share, 0) and numbers.warmup_share < 1):
        raise ValueError(f"recipe: warmup_share must be a share of training in [0, 1); got {numbers.warmup_share!r}.")


def _check_lines(lines: Mapping[str, Line] | None) -> None:
    if lines is not None and not isinstance(lines, Mapping):
        raise ValueError(f"recipe: lines maps keys of TABLE to Line(...), or is None; got {lines!r}.")
    for key, line in (lines or {}).items():
        attribute = key.rpartition(".")[2] if isinstance(key, str) else ""
        if not isinstance(line, Line) or line.rate not in RATES:
            raise ValueError(f"recipe: lines[{key!r}] must be a Line whose rate is one of {', '.join(RATES)}; got {line!r}.")
        if not any(attribute == known.rpartition(".")[2] for known in TABLE):
            near = f" Such as 'Residual[Mamba2].alpha'; the keys of TABLE are {', '.join(TABLE)}."
            raise ValueError(f"recipe: lines has the key {key!r}, which names no parameter.{near}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """nGPT's numbers: the paper's by default."""

    C: float | None = None
    """The global peak learning rate is C / sqrt(d_model) (section 4.1). None: the config's, 0.24 down to 0.12 on the ladder."""
    expert_multiplier: float = 1.5
    """The factor on the global rate for the rows of routed and shared experts."""
    embedding_multiplier: float = 1.0
    """The factor on the global rate for the rows of the input embedding: 1, since the paper gives none (nuGPT's rule does)."""
    router_multiplier: float = 2.0
    """The factor on the global rate for the rows of routers."""
    s_z_lr: float = 0.5
    """The peak learning rate of s_z (item 11)."""
    alpha_lr: float = 0.2
    """The peak learning rate of the eigen learning rates alpha_A and alpha_M (item 11), as stored: they start at 1, and the
    forward pass multiplies them by 0.1. (With this init and the original nGPT's scale 1/sqrt(d_model), the global rate
    C/sqrt(d_model) would move alpha at 0.1 C = 0.024. As the rate of the stored value, 0.2 moves it at 0.1 * 0.2 = 0.02, about
    the same; as the rate of the product, 0.2 would be eight times that.)"""
    s_qk_lr: float = 0.2
    """The peak learning rate of s_qk (item 11). The paper gives none for s_u, s_mamba and s_moe: they use the global rate."""
    betas: tuple[float, float] = (0.975, 0.975)
    """beta_1 and beta_2 of the two moments (section 4.1): both average over about 40 steps."""
    eps_gate: float | str | AutoGate | Gate = 1e-8
    """The gate's threshold (section 4.1): the gate is half open where sqrt(v_hat) equals it. Not in the paper: "auto" or
    ``AutoGate(...)``, a quantile of each tensor's sqrt(v_hat), or a function of (t, group)."""
    eps_num: float = 1e-14
    """Added to sqrt(v_hat) in the denominator (section 4.1)."""
    a: float = 0.5
    """The gate's sharpness for unit rows (item 2)."""
    a_other: float = 1.0
    """The gate's sharpness for all parameters that are not unit rows: 1, which is Adam's (item 2)."""
    tangent: bool = True
    """Pre-Moment Tangent Projection of unit rows (item 2)."""
    cap_degrees: float | None = 1.0
    """The Angular Step Cap after its warmup; it does not follow the decay. None: no cap."""
    pmen: PMEN | None = field(default_factory=PMEN)
    """Post-Moment Exploration Noise on unit rows (item 9). Default: ``PMEN()``. None: no noise."""
    pmen_embeddings: bool | PMEN | tuple[bool | PMEN, bool | PMEN] = True
    """Whether the input and output embeddings receive exploration noise as well: True, as ``pmen`` says; False, none; or their
    own ``PMEN(...)``. A pair sets the two separately: (input, output)."""
    transport: str | None = None
    """What ``GatedAdamW`` does with the first moment of a unit row that has moved: None, nothing, as in the paper; "project" or
    "parallel"."""
    smgc: SMGC | None = field(default_factory=SMGC)
    """Second-Moment Growth Clipping on every coordinate, after 500 steps (item 10). Default: ``SMGC()``. None: no clipping."""
    weight_decay: float = 0.0
    """lambda, the weight decay of matrices and embeddings, for experiments: the recipe uses none (item 1)."""
    decay: str = "lr"
    """What ``GatedAdamW`` multiplies the weight decay by: "lr" as in torch, "eta" as in Algorithm 1."""
    schedule: str | Callable[[float], float] = "log"
    """eta as a function of the progress r, or its name: "log", "cosine", "linear" or "wsd"."""
    rho: float = 0.05
    """rho of the logarithmic decay: the smaller, the earlier the rate falls. Other schedules do not use it."""
    warmup: str = "group"
    """"group": decay from the first step, with the table's warmups. "before": one warmup for all, then decay (figure 3).
    "all": like "group", but every rate is warmed up, as in GPT (not published; chapter 9 tries it)."""
    warmup_share: float = 0.1
    """The length of every warmup, including the cap's, as a share of training."""
    clip_norm: float | None = None
    """Global gradient norm clipping, done by the training loop; not part of the recipe."""
    lines: Mapping[str, Line] | None = None
    """Lines that replace or extend ``TABLE`` for this run, by key."""
    nonfinite: str = "raise"
    """What to do about a gradient that is not finite: "raise", "skip" or "off"; see ``GatedAdamW``."""

    def __post_init__(self) -> None:
        rates = ("C", "expert_multiplier", "embedding_multiplier", "router_multiplier", "s_z_lr", "alpha_lr", "s_qk_lr")
        _check(self, *rates, "a", "a_other", "cap_degrees", "clip_norm")
        if self.decay not in ("lr", "eta"):
            raise ValueError(f"recipe: decay must be 'lr' (as torch's) or 'eta' (the paper's Algorithm 1); got {self.decay!r}.")
        if not isinstance(self.tangent, bool):
            raise ValueError(f"recipe: tangent must be True or False; got {self.tangent!r}.")
        pair = self.pmen_embeddings
        if not all(isinstance(x, bool | PMEN) for x in (pair if isinstance(pair, tuple) and len(pair) == 2 else (pair,))):
            rule = "must be True or False, or PMEN(...), or two of these for the input and the output embedding"
            raise ValueError(f"recipe: pmen_embeddings {rule}; got {pair!r}.")
        if isinstance(self.eps_gate, str) and self.eps_gate == "auto":
            object.__setattr__(self, "eps_gate", AutoGate())
        if not (is_within(self.eps_gate, LEAST_DIVISOR) or isinstance(self.eps_gate, AutoGate) or callable(self.eps_gate)):
            rule = f"a number >= {LEAST_DIVISOR}, 'auto', AutoGate(...) or a function of (t, group)"
            raise ValueError(f"recipe: eps_gate must be {rule}; got {self.eps_gate!r}.")
        if self.transport not in (None, "project", "parallel"):
            raise ValueError(f"recipe: transport must be None, 'project' or 'parallel'; got {self.transport!r}.")
        _check_lines(self.lines)
        for name, kind in (("pmen", PMEN), ("smgc", SMGC)):
            if not isinstance(getattr(self, name), kind | None):
                raise ValueError(f"recipe: {name} must be {kind.__name__}(...) or None; got {getattr(self, name)!r}.")
        if self.warmup not in ("group", "before", "all"):
            rule = "'group' (the table's), 'before' (one for all, then decay) or 'all' (a factor on every decayed rate)"
            raise ValueError(f"recipe: warmup must be {rule}; got {self.warmup!r}.")

    def rates(self, config: ModelConfig) -> dict[str, float]:
        """The peak learning rates that ``Line.rate`` names."""
        peak = (config.C if self.C is None else self.C) / math.sqrt(config.d_model)  # section 4.1
        return {
            "global": peak,
            "embedding": self.embedding_multiplier * peak,
            "expert": self.expert_multiplier * peak,
            "router": self.router_multiplier * peak,
            "s_z": self.s_z_lr,
            "alpha": self.alpha_lr,
            "s_qk": self.s_qk_lr,
        }

    def group(self, rule: Line, config: ModelConfig, total_steps: int | None) -> dict[str, object]:
        """A parameter group of GatedAdamW, complete except for its parameters and their ``unit_dim``."""
        lr, cap = self.rates(config)[rule.rate], None
        warmup = self.warmup_share if rule.warmup or self.warmup != "group" else 0.0
        if rule.cap and self.cap_degrees is not None:
            cap = math.radians(self.cap_degrees)
        return {
            "lr": lr, "peak_lr": lr, "warmup": warmup, "cap": cap, "peak_cap": cap,
            "a": self.a if rule.unit else self.a_other, "tangent": rule.unit and self.tangent,
            "pmen": self.noise(rule), "transport": self.transport if rule.unit else None, "smgc": self.smgc,
            "betas": self.betas, "eps_gate": self.eps_gate, "eps_num": self.eps_num,
            "weight_decay": self.weight_decay if rule.decays else 0.0, "decay": self.decay,
        }  # fmt: skip

    def noise(self, rule: Line) -> PMEN | None:
        """The exploration noise of a line."""
        if not rule.unit:
            return None
        pair = self.pmen_embeddings if isinstance(self.pmen_embeddings, tuple) else (self.pmen_embeddings,) * 2
        own = pair[rule.embedding == "output"] if rule.embedding else True
        return self.pmen if own is True else own or None

    def build(self, groups: list[dict], total_steps: int) -> tuple[GatedAdamW, Schedule]:
        """GatedAdamW over these groups, and the schedule that sets their rates and caps."""
        optimizer = GatedAdamW(groups, nonfinite=self.nonfinite)
        eta = partial(log_decay, rho=self.rho) if self.schedule == "log" else self.schedule
        warmup = "before" if self.warmup == "before" else "group"
        return optimizer, Schedule(optimizer, total_steps, eta, warmup, self.warmup_share, self.warmup_share)


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    """Let AdamW take torch's fused step on a CPU: by default it does not, and its loop over the tensors takes three times as
    long. The fused step does not support sharded tensors."""
    for group in optimizer.param_groups:
        plain = all(type(p) is torch.nn.Parameter and p.device.type == "cpu" for p in group["params"])
        group["fused"] = True if plain else None


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """GPT's numbers (section 4.1): AdamW, WSD."""

    lr: float | None = None
    """The peak learning rate. None: the config's, 2.2e-3 down to 1.2e-3 on the ladder."""
    betas: tuple[float, float] = (0.9, 0.95)
    """beta_1 and beta_2 of AdamW's two moments."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: float = 0.1
    """lambda, the weight decay of matrices and embeddings; norms, convolutions, A_log, D and dt_bias do not decay."""
    schedule: str | Callable[[float], float] = "wsd"
    """eta as a function of the progress r, or its name: "log", "cosine", "linear" or "wsd". ``eta_min`` and ``wsd_decay`` are
    for "wsd"; set the parameters of other schedules with functools.partial."""
    eta_min: float = 0.01
    """The final learning rate of WSD as a share of the peak: 1%."""
    wsd_decay: float = 0.2
    """The share of training at its end over which WSD falls linearly (not published; ours)."""
    warmup: str = "group"
    """"group": the warmup is a factor on the decayed rate. "before": it comes first, and the schedule runs over the rest."""
    warmup_tokens: float = 1e9
    """Length of the linear warmup: 1B tokens, at most ``warmup_share`` of the run. Needs the run's number of tokens."""
    tokens_per_step: float | None = None
    """Tokens per optimizer step; times total_steps, that is the run's number of tokens. None: the config's ``tokens``, as on
    the paper's ladder. If that is None too, the warmup is ``warmup_share`` of the run."""
    warmup_share: float = 0.1
    """The longest warmup, as a share of the run; its actual length if the run's number of tokens is unknown."""
    clip_norm: float | None = 1.0
    """Global gradient norm clipping, done by the training loop (not published; ours)."""

    def __post_init__(self) -> None:
        _check(self, "lr", "warmup_tokens", "tokens_per_step", "clip_norm", "wsd_decay")
        if self.eta_min > 1 or self.wsd_decay > 1:
            raise ValueError(f"recipe: eta_min and wsd_decay must be at most 1; got {self.eta_min!r} and {self.wsd_decay!r}.")
        if self.warmup not in ("group", "before"):
            rule = "'group' (a factor on every decayed rate) or 'before' (one for all, then decay)"
            raise ValueError(f"recipe: GPT's warmup must be {rule}; got {self.warmup!r}.")

    def share(self, config: ModelConfig, total_steps: int | None) -> float:
        """The warmup as a share of training."""
        if self.tokens_per_step is not None and total_steps is not None:
            return min(self.warmup_share, self.warmup_tokens / self.tokens_per_step / total_steps)
        if self.tokens_per_step is None and config.tokens is not None:
            return min(self.warmup_share, self.warmup_tokens / config.tokens)
        return self.warmup_share

    def group(self, rule: Line, config: ModelConfig, total_steps: int | None) -> dict[str, object]:
        """A parameter group of torch's AdamW, complete except for its parameters."""
        lr = config.gpt_lr if self.lr is None else self.lr
        weight_decay = self.weight_decay if rule.decays else 0.0
        warmup = self.share(config, total_steps)
        return {"lr": lr, "peak_lr": lr, "warmup": warmup, "betas": self.betas, "eps": self.eps, "weight_decay": weight_decay}

    def build(self, groups: list[dict], total_steps: int) -> tuple[torch.optim.AdamW, Schedule]:
        """torch's AdamW over these groups, and the schedule that sets their rates."""
        optimizer = torch.optim.AdamW(groups)
        _fuse(optimizer)
        optimizer.register_load_state_dict_post_hook(_fuse)  # a state comes with the choice of the ranks that wrote it
        eta = partial(wsd, eta_min=self.eta_min, decay=self.wsd_decay) if self.schedule == "wsd" else self.schedule
        return optimizer, Schedule(optimizer, total_steps, eta, self.warmup, groups[0]["warmup"])  # all groups have the same
