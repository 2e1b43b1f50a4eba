"""What is a model of ours, as a transformers config?

transformers' names where it has one (``hidden_size``, ``num_attention_heads``, ``layer_types``; NemotronH's for Mamba-2 and
experts), the names of ``ngpt_core.ModelConfig`` for everything else. ``convert.py`` maps one to the other, field by field.

This file needs only transformers and is copied unchanged into every exported folder.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

__all__ = ["NGPTConfig"]

LAYER_TYPES = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}  # letter of a pattern -> layer type


@strict
class NGPTConfig(PreTrainedConfig):
    """An nGPT (``normalized=True``) or its GPT twin (``normalized=False``): a hybrid of Mamba-2, attention, MLP and experts.

    ``layer_types`` has one entry per block: "linear_attention" (Mamba-2), "full_attention", "moe" or "mlp". Other fields are
    described in ``ngpt_core/config.py``. Five fields exist for imported checkpoints only:
    ``rope_first`` (rotate before Norm and s_qk), ``rope_form`` ("rotation", or "nvidia" for the original nGPT's embedding),
    ``s_qk_per_head``, ``s_qk_on_keys`` and ``value_residual``.
    """

    model_type = "ngpt"
    keys_to_ignore_at_inference = ("past_key_values",)

    # ---- the whole ----
    vocab_size: int = 256
    hidden_size: int = 128
    layer_types: list[str] | None = None
    normalized: bool = True
    preset: str = ""
    max_seq_len: int | None = None
    max_position_embeddings: int = 2**18
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    # ---- attention ----
    num_attention_heads: int = 0
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | int | None = None
    rope_first: bool = False
    rope_form: str = "rotation"
    s_qk_per_head: bool = False
    s_qk_on_keys: bool = True
    value_residual: bool = False
    # ---- Mamba-2 ----
    mamba_num_heads: int = 0
    mamba_head_dim: int = 64
    ssm_state_size: int = 128
    n_groups: int = 8
    conv_kernel: int = 4
    chunk_size: int = 128
    A_range: list[float | int] | tuple[float | int, ...] = (1.0, 16.0)
    dt_range: list[float | int] | tuple[float | int, ...] = (1e-3, 0.1)
    dt_min: float | int = 0.0
    vector_s_mamba: bool = False
    scale_dt: bool = True
    # ---- MLP and experts ----
    intermediate_size: int = 0
    activation: str = "relu2"
    n_routed_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    routed_scaling_factor: float | int = 2.5
    router_bias_rate: float | int = 1e-3
    balance_loss: float | int = 1e-4
    s_u_per_expert: bool = False
    vector_s_moe: bool = False
    # ---- head ----
    lgp_q: float | int | None = 1.0
    lgp_form: str = "ratio"
    positive_s_z: bool | None = None
    # ---- scales: initial value and unit ----
    alpha_init: float | int = 0.1
    alpha_scale: float | int = 1.0
    abs_alpha: bool = True
    s_qk_init: float | int = 1.0
    s_qk_scale: float | int = 1.0
    s_u_init: float | int = 1.0
    s_u_scale: float | int = 1.0
    s_z_init: float | int = 1.0
    s_z_scale: float | int = 1.0
    s_mamba_init: float | int | None = None
    s_mamba_scale: float | int = 1.0
    s_moe_init: float | int | None = None
    s_moe_scale: float | int = 1.0
    # ---- GPT, and the training recipe ----
    initializer_range: float | int = 0.02
    layer_norm_epsilon: float | int = 1e-5
    C: float | int = 0.24
    gpt_lr: float | int = 2.2e-3
    training_tokens: int | float | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("num_hidden_layers", None)  # it follows from layer_types
        if self.layer_types is None:
            self.layer_types = []
        if "full_attention" not in self.layer_types:
            self.use_cache = False  # transformers' cache counts its tokens in an attention layer, and raises without one
        super().__post_init__(**kwargs)

    @property
    def num_hidden_layers(self) -> int:
        """One per entry of ``layer_types``."""
        return len(self.layer_types or ())

    def validate_layer_type(self) -> None:
        """transformers calls it: only our four kinds of blocks are valid."""
        if unknown := sorted(set(self.layer_types or ()) - set(LAYER_TYPES.values())):
            raise ValueError(f"layer_types must be a list of {', '.join(LAYER_TYPES.values())}; got {', '.join(unknown)}.")

    def scale_of(self, name: str) -> tuple[float, float]:
        """(s_init, s_scale) of a scale; without a value, s_mamba and s_moe start at 0.5 sqrt(d_model)."""
        init, scale = getattr(self, f"{name}_init"), getattr(self, f"{name}_scale")
        return 0.5 * self.hidden_size**0.5 if init is None else init, scale
