"""What is a model, as a list of numbers?

``ModelConfig`` holds everything that determines a model's shape, its initialization and its recipe. GPT and nGPT differ only in
``normalized``. Each field's docstring gives its meaning, the paper's symbol and the section. Values are checked when a config
is created, so that a mistake is reported here and not deep inside a forward pass.

Letters of a pattern, one block each (as in Nemotron):
    M  Mamba-2        *  attention        E  mixture of experts (MoE)        -  dense MLP
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Integral
from typing import Any

from .checks import is_number, is_within

__all__ = ["FORMAT", "LAYERS", "ModelConfig"]

FORMAT = 1  # version of the dictionary below; other versions are rejected
LIMIT = 1 << 31  # no size of a model is this large
LAYERS = {"M": "Mamba-2", "*": "attention", "E": "MoE", "-": "MLP"}
CHOICES = {"activation": ("relu2", "swiglu"), "lgp_form": ("ratio", "power")}  # of the fields that are names
SCALES = ("alpha", "s_qk", "s_u", "s_z", "s_mamba", "s_moe")


def _fail(field: str, rule: str, value: object) -> ValueError:
    return ValueError(f"ModelConfig.{field} {rule}; got {value!r}.")


def _plain(value: object) -> object:
    """Numbers of numpy, torch and others as Python numbers, and lists of them as tuples, so that a config is hashable."""
    if isinstance(value, list | tuple) and all(map(is_number, value)):
        return tuple(map(_plain, value))
    if not is_number(value) or type(value) in (int, float):
        return value
    value = value.item() if hasattr(value, "item") else value
    return int(value) if isinstance(value, Integral) else float(value)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A complete model. Give the sizes that the letters of the pattern need; the others keep their defaults.

    All fields are keywords: ``ModelConfig(vocab_size=256, d_model=64, pattern="*-*-", n_heads=4, ff=256)``. Defaults are the
    paper's where it gives one; the others are Nemotron-3 Nano's or the usual ones.

    Creating a config fills in ``head_dim`` and ``n_kv_heads``, and ``dataclasses.replace`` keeps those numbers. To change
    ``n_heads`` or ``d_model`` later, set them too, or override the preset instead: ``preset("pico", n_heads=8)``.
    """

    # ---- the whole -------------------------------------------------------------------------------------------------
    vocab_size: int
    """V: the number of tokens, and of rows of the input and the output embedding (untied, as in Nemotron-3)."""
    d_model: int
    """d_model: the dimension of the hidden state h and of the sphere on which nGPT's vectors live (section 3.1)."""
    pattern: str
    """The blocks in order, one letter each: M Mamba-2, * attention, E mixture of experts, - dense MLP."""
    normalized: bool = True
    """True: nGPT (sections 3.1-3.3). False: the same blocks as a pre-RMSNorm GPT, the baseline of section 4."""
    name: str = ""
    """The preset's name. Only reports use it."""
    max_seq_len: int | None = None
    """The longest sequence that is accepted. None: any length, since there is no positional embedding to limit it."""

    # ---- attention (section 3.1) -----------------------------------------------------------------------------------
    n_heads: int = 0
    """Query heads."""
    n_kv_heads: int | None = None
    """Key and value heads; each serves n_heads / n_kv_heads query heads. None: as many as query heads."""
    head_dim: int | None = None
    """d_k: the dimension of a head. None: d_model / n_heads, which must be a whole number."""
    rope_theta: float | None = None
    """The base of the rotary embedding. None: no positional embedding, as in Nemotron-3 (Mamba layers see the order)."""

    # ---- Mamba-2 (section 3.2) -------------------------------------------------------------------------------------
    mamba_heads: int = 0
    """Heads of the state-space layer; their number times mamba_head_dim is the inner width d_inner."""
    mamba_head_dim: int = 64
    """P: channels of one head."""
    state: int = 128
    """N: the size of the state of one channel."""
    groups: int = 8
    """G: groups of heads that share the projections B and C."""
    conv: int = 4
    """The width of the causal depthwise convolution (with bias) over x, B and C."""
    chunk: int = 128
    """The chunk length of the fast scan. It changes the speed, and the result only by rounding errors."""
    A_range: tuple[float, float] = (1.0, 16.0)
    """-A is initialized uniformly in this range (not in the paper; the usual Mamba-2 initialization)."""
    dt_range: tuple[float, float] = (1e-3, 0.1)
    """softplus(dt_bias) is initialized log-uniformly in this range (not in the paper; the usual Mamba-2 initialization)."""
    dt_min: float = 0.0
    """A lower bound on dt after softplus. 0: none, as in mamba-ssm; transformers' NemotronH has one (see ``to_nemotron_h``)."""
    scale_dt: bool = True
    """s_mamba multiplies the whole input of the layer, so the logits of dt as well (section 3.2: "the input activations").
    False: dt is not scaled, since the reason for s_mamba, the scale of SiLU's inputs, does not apply to it."""
    vector_s_mamba: bool = False
    """Make s_mamba a vector of d_model entries instead of a scalar (section 3.2: no significant difference)."""

    # ---- dense MLP, and the activation of the experts (section 3.1) ------------------------------------------------
    ff: int = 0
    """d_MLP: the inner width of a '-' block."""
    activation: str = "relu2"
    """"relu2", the squared ReLU of Nemotron-3, or "swiglu" with its gate (for '-' blocks; experts are always relu2)."""

    # ---- mixture of experts (section 3.2) --------------------------------------------------------------------------
    n_experts: int = 0
    """Number of routed experts in an 'E' block."""
    top_k: int = 0
    """k: the number of experts each token is sent to."""
    expert_ff: int = 0
    """The inner width of one routed expert."""
    shared_ff: int = 0
    """The inner width of the shared expert, which sees every token; 0: none."""
    routed_scaling: float = 2.5
    """The sum of a token's routing weights."""
    router_bias_rate: float = 1e-3
    """How far one step moves the selection bias of an expert with too much or too little load."""
    balance_loss: float = 1e-4
    """The weight of the sequence-wise balance loss; added in training only."""
    s_u_per_expert: bool = False
    """One s_u per routed expert, instead of one for all routed experts of a layer."""
    vector_s_moe: bool = False
    """Make s_moe a vector of d_model entries instead of a scalar (section 3.2: no significant difference)."""

    # ---- head (section 2.1) ----------------------------------------------------------------------------------------
    lgp_q: float | None = 1.0
    """q of Logit Gradient Preconditioning (item 8 of the summary: 1). None: the ordinary gradient, without LGP. A non-integer q
    requires s_z > 0: s_z is then a ``PositiveScale``, which is nonlinear below its initial value."""
    positive_s_z: bool | None = None
    """Whether s_z is a ``PositiveScale``, which cannot reach 0. None: where ``lgp_q`` needs it (section 2.1)."""
    lgp_form: str = "ratio"
    """"ratio": (s_z / mean(s_z))^q, the paper's choice; "power": s_z^q / mean(s_z^q), its alternative. Same at q = 0 and 1."""

    # ---- scales: initial value and unit (section 3.1; items 3-7 of the summary) -------------------------------------
    alpha_init: float = 0.1
    """alpha_A,init = alpha_M,init: the initial eigen learning rates (item 5; on the order of 1/n_layers)."""
    alpha_scale: float = 1.0
    """alpha_A,scale = alpha_M,scale: alpha's unit, see ``Scale`` (item 11: 1; the original nGPT: 1/sqrt(d_model))."""
    abs_alpha: bool = True
    """Use |alpha|: the paper asks for alpha >= 0 and does not say how."""
    s_qk_init: float = 1.0
    """The initial s_qk, which scales queries and keys (s_qk,init; item 3)."""
    s_qk_scale: float = 1.0
    """s_qk's unit, see ``Scale`` (s_qk,scale; items 3 and 11)."""
    s_u_init: float = 1.0
    """The initial s_u, which scales the output of the up-projection of an MLP or of experts (s_u,init; item 4)."""
    s_u_scale: float = 1.0
    """s_u's unit, see ``Scale`` (s_u,scale; item 4)."""
    s_z_init: float = 1.0
    """The initial s_z, which scales the logits (s_z,init; item 7)."""
    s_z_scale: float = 1.0
    """s_z's unit, see ``Scale`` (s_z,scale; items 7 and 11)."""
    s_mamba_init: float | None = None
    """The initial s_mamba, which scales the input of a Mamba-2 layer (s_mamba,init; item 6). None: 0.5 sqrt(d_model)."""
    s_mamba_scale: float = 1.0
    """s_mamba's unit, see ``Scale`` (s_mamba,scale; item 6)."""
    s_moe_init: float | None = None
    """The initial s_moe, which scales the input of an MoE layer (s_moe,init; item 6). None: 0.5 sqrt(d_model)."""
    s_moe_scale: float = 1.0
    """s_moe's unit, see ``Scale`` (s_moe,scale; item 6)."""

    # ---- the GPT baseline ------------------------------------------------------------------------------------------
    init_std: float = 0.02
    """Initial standard deviation of GPT's matrices; output projections divide it by sqrt(number of blocks)."""
    norm_eps: float = 1e-5
    """Epsilon of GPT's RMSNorm. (nGPT has none: its Norm is exact.)"""

    # ---- what the training recipe reads (section 4.1) --------------------------------------------------------------
    C: float = 0.24
    """nGPT's peak learning rate is C / sqrt(d_model)."""
    gpt_lr: float = 2.2e-3
    """The baseline's peak learning rate."""
    tokens: int | None = None
    """Training tokens; the ladder's presets have the paper's. If set, ngpt train and ngpt plan derive the number of steps from
    it, unless steps is given."""

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _plain(getattr(self, field.name)))
        self._check_whole()
        checks = {"*": self._check_attention, "M": self._check_mamba, "-": self._check_mlp, "E": self._check_moe}
        for letter, check in checks.items():
            if letter in self.pattern:
                check()

    # ---- what follows from the fields ------------------------------------------------------------------------------
    @property
    def d_inner(self) -> int:
        """The inner width of a Mamba-2 layer."""
        return self.mamba_heads * self.mamba_head_dim

    def scale_of(self, name: str) -> tuple[float, float]:
        """(s_init, s_scale) of a scale, in the order of ``Scale``: ``Scale(shape, *config.scale_of("s_qk"))``."""
        init, scale = getattr(self, f"{name}_init"), getattr(self, f"{name}_scale")
        return 0.5 * math.sqrt(self.d_model) if init is None else init, scale  # item 6; only s_mamba and s_moe may be None

    # ---- as plain data ---------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON, with the format version. ``from_dict`` restores the same config."""
        return {"format": FORMAT} | {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> "ModelConfig":
        """The config that ``to_dict`` wrote. Unknown fields and other format versions are errors: they mean another model."""
        if not isinstance(data, Mapping):
            raise ValueError(f"A config must be a dictionary of fields, as returned by ModelConfig.to_dict; got {data!r}.")
        values: dict[str, Any] = dict(data)
        version = values.pop("format", None)
        if not isinstance(version, int) or version != FORMAT:
            raise ValueError(f"This version reads configs of format {FORMAT}; got {version!r}. Use the version that wrote it.")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"ModelConfig has no field {', '.join(map(repr, unknown))}. It has: {', '.join(sorted(known))}.")
        if missing := sorted({"vocab_size", "d_model", "pattern"} - values.keys()):
            raise ValueError(f"The config lacks the required {', '.join(map(repr, missing))}; add it to the dictionary.")
        return cls(**values)

    # ---- checks ----------------------------------------------------------------------------------------------------
    def _positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < LIMIT:
                letters = ", ".join(f"{k} = {v}" for k, v in LAYERS.items())
                raise _fail(name, f"must be a positive integer below 2^31 for pattern {self.pattern!r} ({letters})", value)

    def _check_whole(self) -> None:
        if not isinstance(self.pattern, str) or not self.pattern or set(self.pattern) - LAYERS.keys():
            letters = ", ".join(f"{k} ({v})" for k, v in LAYERS.items())
            raise _fail("pattern", f"must be a non-empty string of the letters {letters}", self.pattern)
        self._positive("vocab_size", "d_model", *(("max_seq_len",) if self.max_seq_len is not None else ()))
        for name in ("normalized", "abs_alpha", "s_u_per_expert", "vector_s_mamba", "vector_s_moe", "scale_dt"):
            if not isinstance(getattr(self, name), bool):
                raise _fail(name, "must be True or False", getattr(self, name))
        for name in SCALES:
            init, scale = getattr(self, f"{name}_init"), getattr(self, f"{name}_scale")
            if not (is_within(init, -math.inf, open=True) or (init is None and name in ("s_mamba", "s_moe"))):
                raise _fail(f"{name}_init", "must be finite (s_mamba and s_moe may be None: 0.5 sqrt(d_model))", init)
            if not is_within(scale, 0, open=True):
                raise _fail(f"{name}_scale", "must be a positive number", scale)
            if init == 0:  # sec. 3.1: s_eff = s_a s_init / s_scale
                raise _fail(f"{name}_init", "must not be 0: the scale is a multiple of it and would stay 0 forever", init)
        if self.lgp_q is not None and not is_within(self.lgp_q, 0):
            raise _fail("lgp_q", "must be a finite number >= 0 (paper: 1), or None for the ordinary gradient", self.lgp_q)
        if self.lgp_q and self.lgp_q % 1 and self.normalized and self.s_z_init <= 0:
            raise _fail("s_z_init", f"must be > 0 for the non-integer lgp_q = {self.lgp_q}", self.s_z_init)
        if not (self.positive_s_z is None or isinstance(self.positive_s_z, bool)):
            raise _fail("positive_s_z", "must be True, False, or None (where lgp_q needs it)", self.positive_s_z)
        if self.positive_s_z is False and self.lgp_q and self.lgp_q % 1:
            raise _fail(
                "positive_s_z", f"must not be False for the non-integer lgp_q = {self.lgp_q}: s_z^q needs s_z > 0", False
            )
        if self.positive_s_z and self.s_z_init <= 0:
            raise _fail("s_z_init", "must be > 0 with positive_s_z", self.s_z_init)
        if self.lgp_form not in ("ratio", "power"):
            raise _fail("lgp_form", "must be 'ratio' or 'power' (section 2.1)", self.lgp_form)
        for name in ("init_std", "norm_eps", "C", "gpt_lr"):
            if not is_within(getattr(self, name), 0, open=True):
                raise _fail(name, "must be a positive number", getattr(self, name))
        if self.tokens is not None and not is_within(self.tokens, 1):
            raise _fail("tokens", "must be a number of tokens, or None", self.tokens)

    def _check_attention(self) -> None:
        self._positive("n_heads")
        if self.head_dim is None:
            if self.d_model % self.n_heads:
                raise _fail("n_heads", f"must divide d_model = {self.d_model} when head_dim is not given", self.n_heads)
            object.__setattr__(self, "head_dim", self.d_model // self.n_heads)
        if self.n_kv_heads is None:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        self._positive("head_dim", "n_kv_heads")
        assert self.head_dim is not None and self.n_kv_heads is not None  # by now
        if self.n_heads % self.n_kv_heads:
            raise _fail("n_heads", f"must be a multiple of n_kv_heads = {self.n_kv_heads}", self.n_heads)
        if self.rope_theta is not None and (not is_within(self.rope_theta, 0, open=True) or self.head_dim % 2):
            rule = f"must be a positive number, and head_dim = {self.head_dim} must be even: coordinates rotate in pairs"
            raise _fail("rope_theta", rule, self.rope_theta)

    def _check_mamba(self) -> None:
        self._positive("mamba_heads", "mamba_head_dim", "state", "groups", "conv", "chunk")
        if self.mamba_heads % self.groups:
            raise _fail("mamba_heads", f"must be a multiple of groups = {self.groups}", self.mamba_heads)
        for name in ("A_range", "dt_range"):
            ends = getattr(self, name)
            pair = isinstance(ends, (tuple, list)) and len(ends) == 2 and is_within(ends[0], 0, open=True)
            if not (pair and is_within(ends[1], ends[0])):
                raise _fail(name, "must be (low, high), finite, with 0 < low <= high", ends)
        if not is_within(self.dt_min, 0):
            raise _fail("dt_min", "must be a number >= 0", self.dt_min)

    def _check_mlp(self) -> None:
        self._positive("ff")
        if self.activation not in ("relu2", "swiglu"):
            raise _fail("activation", "must be 'relu2' or 'swiglu'", self.activation)

    def _check_moe(self) -> None:
        self._positive("n_experts", "top_k", "expert_ff")
        if self.top_k > self.n_experts:
            raise _fail("top_k", f"must be at most n_experts = {self.n_experts}", self.top_k)
        if isinstance(self.shared_ff, bool) or not isinstance(self.shared_ff, int) or not 0 <= self.shared_ff < LIMIT:
            raise _fail("shared_ff", "must be an integer >= 0 and below 2^31 (0: no shared expert)", self.shared_ff)
        for name in ("routed_scaling", "router_bias_rate", "balance_loss"):
            if not is_within(getattr(self, name), 0):
                raise _fail(name, "must be a finite number >= 0", getattr(self, name))
