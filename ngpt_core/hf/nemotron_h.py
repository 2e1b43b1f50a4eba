"""How is the GPT baseline converted to a transformers model and back?

    hf_model = ng.hf.to_nemotron_h(model)          # a NemotronHForCausalLM with the same logits: save_pretrained, generate, ...
    model = ng.hf.from_nemotron_h(hf_model)        # the way back, for any NemotronH without the parts named below

transformers' NemotronH has the same four blocks, one letter each (M * E -), the same order of rows in in_proj and the same
gated norm; only the layout differs. Like all our matrices, those that write to the residual stream (o_proj, out_proj, down)
have d_model last; transformers has it first there, so they are transposed. The table below is the whole conversion.

An nGPT cannot be converted: NemotronH has no alpha, s_qk, s_u, s_mamba, s_moe or s_z, and no normalized hidden state.

Mamba-2's lower bound on dt is converted too: transformers' ``time_step_min`` is our ``dt_min``. By default our model has no
bound, like mamba-ssm. transformers needs a number with a logarithm, so "none" is exported as a number too small to matter.
transformers (5.22) is inconsistent: it clamps dt when it reads several tokens, but not when it reads one. Ours always clamps,
so if dt reaches the bound, an imported model agrees with transformers' prefill but not with its decoding. tests/test_hf.py
shows both.

Without an attention block, transformers' cache cannot count its tokens and the forward pass raises, so such a model is
exported with ``use_cache=False``.

Other limits of NemotronH: at least two experts, no rotary embedding, no SwiGLU. Limits of the import: no biases on linear
layers, no latent experts, no groups of experts, no sliding window.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config import ModelConfig
from ..nn.model import LanguageModel, unwrap

if TYPE_CHECKING:
    from transformers import NemotronHForCausalLM

__all__ = ["from_nemotron_h", "to_nemotron_h"]

NO_CLAMP = 1e-30  # time_step_min, too small to matter; 0 is impossible: transformers' initialization takes its logarithm


def _same(w: Tensor) -> Tensor:
    return w


def _transposed(w: Tensor) -> Tensor:
    return w.mT


# Sizes: letter of the block (or "" for the whole model) -> our field: transformers' field.
_SIZES = {
    "": {
        "vocab_size": "vocab_size", "d_model": "hidden_size", "norm_eps": "layer_norm_epsilon", "init_std": "initializer_range",
    },
    "M": {
        "mamba_heads": "mamba_num_heads", "mamba_head_dim": "mamba_head_dim", "state": "ssm_state_size", "groups": "n_groups",
        "conv": "conv_kernel", "chunk": "chunk_size",
    },
    "*": {"n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim"},
    "-": {"ff": "intermediate_size"},
    "E": {
        "n_experts": "n_routed_experts", "top_k": "num_experts_per_tok", "expert_ff": "moe_intermediate_size",
        "shared_ff": "moe_shared_expert_intermediate_size", "routed_scaling": "routed_scaling_factor",
    },
}  # fmt: skip

# Weights. Letter of the block -> (our name, transformers' name, theirs from ours, ours from theirs).
_BLOCKS = {
    "M": [
        ("in_proj", "in_proj.weight", _same, _same),
        ("out_proj", "out_proj.weight", _transposed, _transposed),
        ("conv_weight", "conv1d.weight", lambda w: w.mT[:, None], lambda w: w[:, 0].mT),  # [K, channels] and [channels, 1, K]
        ("conv_bias", "conv1d.bias", _same, _same),
        ("A_log", "A_log", _same, _same),
        ("D", "D", _same, _same),
        ("dt_bias", "dt_bias", _same, _same),
        ("norm_weight", "norm.weight", _same, _same),
    ],
    "*": [
        ("q_proj", "q_proj.weight", _same, _same),
        ("k_proj", "k_proj.weight", _same, _same),
        ("v_proj", "v_proj.weight", _same, _same),
        ("o_proj", "o_proj.weight", _transposed, _transposed),
    ],
    "-": [
        ("up", "up_proj.weight", _same, _same),
        ("down", "down_proj.weight", _transposed, _transposed),
    ],
    "E": [
        ("router.weight", "gate.weight", _same, _same),
        ("router.bias", "gate.e_score_correction_bias", _same, _same),
        ("experts.up", "experts.up_proj", _same, _same),
        ("experts.down", "experts.down_proj", _transposed, _transposed),
        ("shared.up", "shared_experts.up_proj.weight", _same, _same),
        ("shared.down", "shared_experts.down_proj.weight", _transposed, _transposed),
    ],
}


def _sizes(pattern: str) -> list[tuple[str, str]]:
    """The fields that a model of this pattern needs. The others keep their defaults on both sides."""
    return [pair for letter, fields in _SIZES.items() if letter in pattern for pair in fields.items()]


def _table(config: ModelConfig) -> list[tuple]:
    """The conversion of a whole model, with full names."""
    rows = [
        ("embedding.weight", "model.embeddings.weight", _same, _same),
        ("norm_weight", "model.norm_f.weight", _same, _same),
        ("head.weight", "lm_head.weight", _same, _same),
    ]
    for i, letter in enumerate(config.pattern):
        rows.append((f"blocks.{i}.norm_weight", f"model.layers.{i}.norm.weight", _same, _same))
        for ours, theirs, there, back in _BLOCKS[letter]:
            if config.shared_ff or not ours.startswith("shared."):
                rows.append((f"blocks.{i}.mixer.{ours}", f"model.layers.{i}.mixer.{theirs}", there, back))
    return rows


def _nemotron_h() -> tuple[Any, Any]:
    try:
        from transformers import NemotronHConfig, NemotronHForCausalLM
    except ImportError as error:
        raise ImportError(
            'This needs transformers with its NemotronH model. Install it: pip install "ngpt-core[hf]"'
        ) from error
    return NemotronHConfig, NemotronHForCausalLM


def to_nemotron_h(model: LanguageModel) -> "NemotronHForCausalLM":
    """The GPT baseline as transformers' NemotronHForCausalLM: a copy with the same logits, in eval() mode.

    An nGPT raises a ValueError: NemotronH has neither its scales nor its normalized hidden state. So do rotary embeddings,
    SwiGLU and a single expert. ``ModelConfig.dt_min`` becomes ``time_step_min``; transformers (5.22) applies it when it reads
    several tokens, but not when it reads one. Without an attention block, the model is exported with ``use_cache=False``.
    ``max_seq_len`` is exported as an extra field that transformers ignores. Token ids for padding, start and end are left
    unset: they belong to the tokenizer.
    """
    model = unwrap(model, "to_nemotron_h")
    c = model.config
    if c.normalized:
        raise ValueError(
            "An nGPT cannot become a NemotronH: that model has no normalized hidden state and no place for alpha, s_qk, s_u, "
            "s_mamba, s_moe and s_z. Export the GPT baseline (normalized=False), or keep the nGPT with ngpt_core.save."
        )
    if c.rope_theta is not None and "*" in c.pattern:
        raise ValueError(f"NemotronH's attention has no rotary embedding: rope_theta must be None; got {c.rope_theta}.")
    if c.activation != "relu2" and "-" in c.pattern:
        raise ValueError(f"NemotronH's MLP has no gate: activation must be 'relu2'; got {c.activation!r}.")
    if c.n_experts < 2 and "E" in c.pattern:
        raise ValueError(f"transformers' router needs n_experts >= 2; got {c.n_experts}.")
    make_config, make_model = _nemotron_h()
    config = make_config(
        hybrid_override_pattern=c.pattern,
        **{theirs: getattr(c, ours) for ours, theirs in _sizes(c.pattern)},
        time_step_min=c.dt_min or NO_CLAMP,
        max_position_embeddings=c.max_seq_len or 2**18,  # required, but transformers does not enforce it
        max_seq_len=c.max_seq_len,  # our limit is enforced: an extra field, for the import
        use_cache="*" in c.pattern,
        dtype=str(model.embedding.weight.dtype).removeprefix("torch."),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    )
    with torch.device("meta"):
        hf_model = make_model(config)
    ours = model.state_dict()
    theirs = {name: there(ours[mine]).clone(memory_format=torch.contiguous_format) for mine, name, there, _ in _table(c)}
    if "E" in c.pattern and not c.shared_ff:  # transformers always has a shared expert, even of width 0: fill it with zeros
        zeros = model.embedding.weight.detach().new_zeros
        theirs |= {name: zeros(p.shape) for name, p in hf_model.named_parameters() if ".shared_experts." in name}
    hf_model.load_state_dict(theirs, assign=True)
    return hf_model.eval()


def from_nemotron_h(hf_model: "NemotronHForCausalLM") -> LanguageModel:
    """A NemotronHForCausalLM as our GPT baseline: a copy with the same logits, in train() mode.

    A ValueError names any field that the baseline cannot represent: biases on linear layers, a convolution without bias,
    latent experts, groups of experts, unnormalized routing weights, a sliding window, multi-token prediction, another
    activation. If Mamba-2's dt reaches ``time_step_min``, the logits agree with transformers' prefill, not with its decoding.
    """
    _, make_model = _nemotron_h()
    if not isinstance(hf_model, make_model):
        raise ValueError(f"from_nemotron_h takes a transformers NemotronHForCausalLM; got {type(hf_model).__name__}.")
    h = hf_model.config
    required = {
        "use_bias": False, "mlp_bias": False, "attention_bias": False, "mamba_proj_bias": False, "use_conv_bias": True,
        "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "moe_latent_size": None, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "sliding_window": None, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    for field, value in required.items():
        if (found := getattr(h, field, value)) != value:
            raise ValueError(f"This NemotronH has {field} = {found!r}; the baseline can represent only {value!r}.")
    pattern = h.hybrid_override_pattern
    sizes = {ours: getattr(h, theirs) for ours, theirs in _sizes(pattern)}
    if "M" in pattern and h.time_step_min > NO_CLAMP:
        sizes["dt_min"] = h.time_step_min
    config = ModelConfig(pattern=pattern, normalized=False, max_seq_len=getattr(h, "max_seq_len", None), **sizes)
    with torch.device("meta"):
        model = LanguageModel(config)
    theirs = hf_model.state_dict()
    ours = {mine: back(theirs[name]).clone(memory_format=torch.contiguous_format) for mine, name, _, back in _table(config)}
    model.load_state_dict(ours, assign=True)
    return model
