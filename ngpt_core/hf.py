"""How does the GPT baseline become a transformers model, and back?

    to_nemotron_h(model)       our baseline -> transformers' NemotronHForCausalLM, the same logits
    from_nemotron_h(hf_model)  the other way

One table of names serves both ways. Two things differ in storage: output matrices (o_proj, out_proj, down) are [n, d] here,
so that every model vector is a row, and [d, n] there; the convolution is [taps, channels] here and [channels, 1, taps] there.

Only the baseline has a twin there: nemotron_h has no unit vectors, no scales and no eigen learning rates.

A trap: transformers clamps dt from below to ``time_step_min`` (0.001 by default), a number that mamba-ssm uses only to draw
dt_bias, and does not read ``time_step_limit``. ``dt_min`` is that bound here; a model of ours, which has none, is exported with
a ``time_step_min`` too small to matter.
"""

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .nn.model import LanguageModel

__all__ = ["from_nemotron_h", "to_nemotron_h"]

_LAYERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}

# a block's parameter here -> (its name there, how it is stored there), by the letter of the pattern
_BLOCK = {
    "M": {
        "mixer.in_proj": ("mixer.in_proj.weight", ""),
        "mixer.out_proj": ("mixer.out_proj.weight", "T"),
        "mixer.conv_weight": ("mixer.conv1d.weight", "conv"),
        "mixer.conv_bias": ("mixer.conv1d.bias", ""),
        "mixer.A_log": ("mixer.A_log", ""),
        "mixer.D": ("mixer.D", ""),
        "mixer.dt_bias": ("mixer.dt_bias", ""),
        "mixer.norm_weight": ("mixer.norm.weight", ""),
    },
    "*": {
        "mixer.q_proj": ("mixer.q_proj.weight", ""),
        "mixer.k_proj": ("mixer.k_proj.weight", ""),
        "mixer.v_proj": ("mixer.v_proj.weight", ""),
        "mixer.o_proj": ("mixer.o_proj.weight", "T"),
    },
    "-": {
        "mixer.up": ("mixer.up_proj.weight", ""),
        "mixer.down": ("mixer.down_proj.weight", "T"),
    },
    "E": {
        "mixer.router.weight": ("mixer.gate.weight", ""),
        "mixer.router.bias": ("mixer.gate.e_score_correction_bias", ""),
        "mixer.experts.up": ("mixer.experts.up_proj", ""),
        "mixer.experts.down": ("mixer.experts.down_proj", "T"),
        "mixer.shared.up": ("mixer.shared_experts.up_proj.weight", ""),
        "mixer.shared.down": ("mixer.shared_experts.down_proj.weight", "T"),
    },
}
_OUTER = {
    "embedding.weight": "model.embeddings.weight",
    "norm_weight": "model.norm_f.weight",
    "head.weight": "lm_head.weight",
}

_THERE = {"": lambda w: w, "T": lambda w: w.mT, "conv": lambda w: w.mT[:, None]}
_HERE = {"": lambda w: w, "T": lambda w: w.mT, "conv": lambda w: w[:, 0].mT}


def _names(pattern: str) -> dict[str, tuple[str, str]]:
    """(our name -> their name, storage) for every tensor of a model with this pattern."""
    names = {ours: (theirs, "") for ours, theirs in _OUTER.items()}
    for i, letter in enumerate(pattern):
        table = {"norm_weight": ("norm.weight", ""), **_BLOCK[letter]}
        names |= {f"blocks.{i}.{ours}": (f"model.layers.{i}.{theirs}", how) for ours, (theirs, how) in table.items()}
    return names


def _transformers():
    try:
        from transformers import NemotronHConfig, NemotronHForCausalLM
    except ImportError as error:
        raise ImportError(
            'ngpt_core.hf needs a transformers that has NemotronH (5.0 or newer): pip install "ngpt-core[hf]".'
        ) from error
    return NemotronHConfig, NemotronHForCausalLM


def to_nemotron_h(model: LanguageModel) -> nn.Module:
    """The same baseline as transformers' NemotronHForCausalLM, in eval mode, with copies of the weights."""
    NemotronHConfig, NemotronHForCausalLM = _transformers()
    c = model.config
    if c.normalized:
        raise ValueError(
            "to_nemotron_h takes the GPT baseline (normalized=False); nemotron_h has no unit vectors, scales or eigen learning "
            "rates, so an nGPT has no equal there. Use ng.save and ng.load for it."
        )
    if c.activation != "relu2" or c.rope_theta is not None:
        raise ValueError(
            f"nemotron_h has squared ReLU and no rotary embedding; got activation={c.activation!r}, rope_theta={c.rope_theta}."
        )
    if "E" in c.pattern and not c.shared_ff:
        raise ValueError("nemotron_h's MoE always has a shared expert; got shared_ff=0.")
    config = NemotronHConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.d_model,
        layers_block_type=[_LAYERS[letter] for letter in c.pattern],
        tie_word_embeddings=False,
        num_attention_heads=c.n_heads or 1,
        num_key_value_heads=c.n_kv_heads or c.n_heads or 1,
        head_dim=c.head_dim or c.d_model,
        intermediate_size=c.ff or c.d_model,
        ssm_state_size=c.state,
        mamba_num_heads=c.mamba_heads or 1,
        mamba_head_dim=c.mamba_head_dim,
        n_groups=c.groups,
        conv_kernel=c.conv,
        chunk_size=c.chunk,
        time_step_min=c.dt_min or 1e-30,  # its logarithm is taken, so it cannot be 0
        n_routed_experts=c.n_experts or 2,
        num_experts_per_tok=c.top_k or 1,
        moe_intermediate_size=c.expert_ff or c.d_model,
        moe_shared_expert_intermediate_size=c.shared_ff or c.d_model,
        routed_scaling_factor=c.routed_scaling,
        layer_norm_epsilon=c.norm_eps,
        initializer_range=c.init_std,
        max_position_embeddings=c.max_seq_len or 262_144,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    ours = model.state_dict()
    theirs = NemotronHForCausalLM(config).to(ours["embedding.weight"].dtype).eval()
    state = {name: _THERE[how](ours[own]).contiguous() for own, (name, how) in _names(c.pattern).items()}
    theirs.load_state_dict(state)
    return theirs


def from_nemotron_h(hf_model: nn.Module) -> LanguageModel:
    """Our baseline with the weights of a transformers NemotronHForCausalLM; a ValueError names what has no counterpart here."""
    _transformers()
    c = hf_model.config
    if getattr(c, "model_type", None) != "nemotron_h":
        raise ValueError(f"from_nemotron_h takes a NemotronHForCausalLM; got {type(hf_model).__name__}.")
    letters = {name: letter for letter, name in _LAYERS.items()}
    pattern = "".join(letters[name] for name in c.layers_block_type)
    wanted = {
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_bias": False,
        "mamba_proj_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "moe_latent_size": None,
        "n_group": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
    }
    if wrong := {name: getattr(c, name) for name, value in wanted.items() if getattr(c, name) != value}:
        raise ValueError(f"this model has features without a counterpart in ngpt_core: {wrong}; {wanted=} is what we have.")
    used = {letter: letter in pattern for letter in _LAYERS}
    config = ModelConfig(
        vocab_size=c.vocab_size,
        d_model=c.hidden_size,
        pattern=pattern,
        normalized=False,
        n_heads=c.num_attention_heads if used["*"] else 0,
        n_kv_heads=c.num_key_value_heads if used["*"] else None,
        head_dim=c.head_dim if used["*"] else None,
        mamba_heads=c.mamba_num_heads if used["M"] else 0,
        mamba_head_dim=c.mamba_head_dim,
        state=c.ssm_state_size,
        groups=c.n_groups,
        conv=c.conv_kernel,
        chunk=c.chunk_size,
        dt_min=c.time_step_min if c.time_step_min > 1e-20 else 0.0,
        ff=c.intermediate_size if used["-"] else 0,
        n_experts=c.n_routed_experts if used["E"] else 0,
        top_k=c.num_experts_per_tok if used["E"] else 0,
        expert_ff=c.moe_intermediate_size if used["E"] else 0,
        shared_ff=c.moe_shared_expert_intermediate_size if used["E"] else 0,
        routed_scaling=c.routed_scaling_factor,
        norm_eps=c.layer_norm_epsilon,
        init_std=c.initializer_range,
    )
    theirs = hf_model.state_dict()
    model = LanguageModel(config).to(theirs["lm_head.weight"].dtype)
    state: dict[str, Tensor] = {own: _HERE[how](theirs[name]).contiguous() for own, (name, how) in _names(pattern).items()}
    with torch.no_grad():
        model.load_state_dict(state)
    return model.eval()
