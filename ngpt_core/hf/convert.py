"""How does a LanguageModel become an NGPTForCausalLM, and an NGPTForCausalLM a LanguageModel?

    hf_model = ng.hf.to_transformers(model)          # a copy with the same logits; nGPT and GPT alike
    model = ng.hf.from_transformers(hf_model)        # the way back, bit for bit

Names and layouts are NemotronH's where it has the same part (the tables of ``nemotron_h.py``); the rest are nGPT's scales, and
SwiGLU's gate.
"""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from ..config import ModelConfig
from ..nn.model import LanguageModel, unwrap
from .nemotron_h import _BLOCKS, _SIZES, _same

if TYPE_CHECKING:
    from .configuration_ngpt import NGPTConfig
    from .modeling_ngpt import NGPTForCausalLM

__all__ = ["from_transformers", "model_config", "to_transformers", "transformers_config"]

# Our field -> transformers' where the names differ. pattern and max_seq_len are treated separately.
NAMES = {ours: theirs for sizes in _SIZES.values() for ours, theirs in sizes.items()} | {
    "name": "preset",
    "tokens": "training_tokens",
}

# Our names of nGPT's own parameters and of SwiGLU's gate -> transformers'. Letter of the block -> rows; "" is any block.
_OWN = {
    "": [("alpha.weight", "alpha.weight")],
    "M": [("mixer.s_mamba.weight", "mixer.s_mamba.weight")],
    "*": [("mixer.s_qk.weight", "mixer.s_qk.weight")],
    "-": [("mixer.gate", "mixer.gate_proj.weight"), ("mixer.s_u.weight", "mixer.s_u.weight")],
    "E": [
        ("mixer.s_moe.weight", "mixer.s_moe.weight"),
        ("mixer.experts.s_u.weight", "mixer.experts.s_u.weight"),
        ("mixer.shared.s_u.weight", "mixer.shared_experts.s_u.weight"),
    ],
}


def need_transformers() -> None:
    """An ImportError that says what to install, unless transformers is installed."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError('This needs transformers. Install it: pip install "ngpt-core[hf]"') from error


def _table(pattern: str) -> list[tuple]:
    """(our name, transformers' name, theirs from ours, ours from theirs) of every tensor that a model may have."""
    rows: list[tuple] = [
        ("embedding.weight", "model.embeddings.weight", _same, _same),
        ("norm_weight", "model.norm_f.weight", _same, _same),
        ("head.weight", "lm_head.weight", _same, _same),
        ("head.s_z.weight", "s_z.weight", _same, _same),
    ]
    for i, letter in enumerate(pattern):
        block, layer = f"blocks.{i}", f"model.layers.{i}"
        rows.append((f"{block}.norm_weight", f"{layer}.norm.weight", _same, _same))
        rows += [(f"{block}.mixer.{mine}", f"{layer}.mixer.{name}", there, back) for mine, name, there, back in _BLOCKS[letter]]
        rows += [(f"{block}.{mine}", f"{layer}.{name}", _same, _same) for mine, name in _OWN[""] + _OWN[letter]]
    return rows


def transformers_config(config: ModelConfig, **others: Any) -> "NGPTConfig":
    """The same model as an NGPTConfig. ``others``: fields that only transformers has, such as token ids."""
    need_transformers()
    from .configuration_ngpt import LAYER_TYPES, NGPTConfig

    values = {NAMES.get(f.name, f.name): getattr(config, f.name) for f in fields(config) if f.name != "pattern"}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    values["max_position_embeddings"] = config.max_seq_len or 2**18  # tools ask for a number; the model needs none
    return NGPTConfig(layer_types=[LAYER_TYPES[letter] for letter in config.pattern], **values, **others)


def model_config(config: "NGPTConfig") -> ModelConfig:
    """The same model as a ModelConfig. ValueError if it has a part that only imported checkpoints have."""
    from .configuration_ngpt import LAYER_TYPES

    plain = {
        "rope_form": "rotation",
        "rope_first": False,
        "s_qk_per_head": False,
        "s_qk_on_keys": True,
        "value_residual": False,
    }
    for field, value in plain.items():
        if (found := getattr(config, field)) != value:
            raise ValueError(f"LanguageModel has no {field} = {found!r}, only {value!r}: keep this model in transformers.")
    letters = {kind: letter for letter, kind in LAYER_TYPES.items()}
    values = {f.name: getattr(config, NAMES.get(f.name, f.name)) for f in fields(ModelConfig) if f.name != "pattern"}
    return ModelConfig(pattern="".join(letters[kind] for kind in config.layer_types or ()), **values)


def to_transformers(model: LanguageModel, **others: Any) -> "NGPTForCausalLM":
    """A copy of the model as an NGPTForCausalLM, in eval() mode, with the same logits.

    ``others`` are fields of its config that only transformers has, such as ``eos_token_id``.
    """
    model = unwrap(model, "to_transformers")
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    config = transformers_config(model.config, dtype=dtype, **others)
    from .modeling_ngpt import NGPTForCausalLM

    with torch.device("meta"):
        hf_model = NGPTForCausalLM(config)
    ours, table = model.state_dict(), _table(model.config.pattern)
    theirs = {
        name: there(ours[mine]).clone(memory_format=torch.contiguous_format) for mine, name, there, _ in table if mine in ours
    }
    assert len(theirs) == len(ours)  # every tensor has its row
    hf_model.load_state_dict(theirs, assign=True)
    return hf_model.eval()


def from_transformers(hf_model: "NGPTForCausalLM") -> LanguageModel:
    """A copy of an NGPTForCausalLM as a LanguageModel, in train() mode: every tensor equal bit for bit.

    Merge adapters first (PEFT's ``merge_and_unload``); in nGPT, call ``ngpt_core.nn.unit.normalize_`` afterwards.
    """
    if getattr(getattr(hf_model, "config", None), "model_type", None) != "ngpt":
        raise ValueError(f"from_transformers takes an NGPTForCausalLM; got {type(hf_model).__name__}.")
    config = model_config(hf_model.config)
    with torch.device("meta"):
        model = LanguageModel(config)
    theirs, table = hf_model.state_dict(), _table(config.pattern)
    ours = {
        mine: back(theirs[name]).clone(memory_format=torch.contiguous_format) for mine, name, _, back in table if name in theirs
    }
    model.load_state_dict(ours, assign=True)
    return model
