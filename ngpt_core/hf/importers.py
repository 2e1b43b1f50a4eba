"""How does an nGPT that somebody else trained become one of ours?

    ng.hf.from_nvidia("ckpt.pt")               NVIDIA's original nGPT (github.com/NVIDIA/ngpt), or its GPT baseline
    ng.hf.from_lucidrains(model)               lucidrains' nGPT-pytorch: the module

Both are dense: attention and SwiGLU in alternation. Both rotate queries and keys before Norm and s_qk, and have an s_qk per
head. NVIDIA's rotary embedding is not a rotation (``rotate_at``); lucidrains scales only the queries and averages each layer's
values with those of the first. The result keeps all of this, so its logits equal theirs. It is therefore an NGPTForCausalLM;
a LanguageModel supports none of it.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import sphere
from .convert import need_transformers

if TYPE_CHECKING:
    from .modeling_ngpt import NGPTForCausalLM

__all__ = ["from_lucidrains", "from_nvidia"]


def _model(state: Mapping[str, Tensor], layers: int, **config: Any) -> "NGPTForCausalLM":
    need_transformers()
    from .configuration_ngpt import NGPTConfig
    from .modeling_ngpt import NGPTForCausalLM

    with torch.device("meta"):
        model = NGPTForCausalLM(NGPTConfig(layer_types=["full_attention", "mlp"] * layers, activation="swiglu", **config))
    model.load_state_dict({name: x.detach().float().clone().contiguous() for name, x in state.items()}, assign=True)
    return model.eval()


def _read(path: str | Path) -> Any:
    """The content of a ckpt.pt. It has numpy's random state in it; any other class of a pickle is refused, and not run."""
    import numpy as np

    core = getattr(np, "_core", None) or np.core
    admitted: list = [(core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"), np.ndarray, np.dtype]
    admitted += [core.multiarray._reconstruct, np.dtypes.UInt32DType]
    try:
        with torch.serialization.safe_globals(admitted):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise ValueError(
            f"{path} is damaged, or has objects that are neither tensors nor numbers and could run code: it is not read."
        ) from error


def from_nvidia(checkpoint: str | Path | Mapping[str, Any]) -> "NGPTForCausalLM":
    """The model of a ``ckpt.pt`` of NVIDIA's nGPT code, in float32, or of the dictionary in it (``model``, ``model_args``)."""
    if isinstance(checkpoint, str | Path):
        checkpoint = _read(checkpoint)
    if not isinstance(checkpoint, Mapping) or not {"model", "model_args"} <= checkpoint.keys():
        raise ValueError("from_nvidia takes a ckpt.pt of NVIDIA's nGPT code: a dictionary with model and model_args.")
    args = checkpoint["model_args"]
    theirs = {name.removeprefix("_orig_mod."): x for name, x in checkpoint["model"].items()}
    if args.get("bias"):
        raise ValueError("This checkpoint has biases (bias=True), which our model does not have.")
    normalized, d, base = bool(args["use_nGPT"]), args["n_embd"], args.get("base_scale", args["n_embd"] ** -0.5)
    state = {"model.embeddings.weight": theirs["transformer.wte.weight"], "lm_head.weight": theirs["lm_head.weight"]}
    state |= {"s_z.weight": theirs["sz"]} if normalized else {"model.norm_f.weight": theirs["rmsnorm_f.weight"]}
    for i in range(args["n_layer"]):
        h, a, m = f"transformer.h.{i}", f"model.layers.{2 * i}", f"model.layers.{2 * i + 1}"
        names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "att_c_proj"}
        state |= {f"{a}.mixer.{ours}.weight": theirs[f"{h}.{name}.weight"] for ours, name in names.items()}
        up, gate = theirs[f"{h}.c_fc.weight"].chunk(2)
        state |= {f"{m}.mixer.up_proj.weight": up, f"{m}.mixer.gate_proj.weight": gate}
        state[f"{m}.mixer.down_proj.weight"] = theirs[f"{h}.mlp_c_proj.weight"]
        if normalized:
            state |= {f"{a}.alpha.weight": theirs[f"{h}.attn_alpha"], f"{m}.alpha.weight": theirs[f"{h}.mlp_alpha"]}
            state[f"{a}.mixer.s_qk.weight"] = theirs[f"{h}.sqk"].view(args["n_head"], -1)
            state[f"{m}.mixer.s_u.weight"] = theirs[f"{h}.suv"].view(2, -1)  # its sqrt(d) on u is a factor that Norm removes
        else:
            state |= {f"{x}.norm.weight": theirs[f"{h}.rmsnorm_{y}.weight"] for x, y in ((a, "att"), (m, "mlp"))}
    return _model(
        state, args["n_layer"], vocab_size=args["vocab_size"], hidden_size=d, num_attention_heads=args["n_head"],
        head_dim=d // args["n_head"], intermediate_size=4 * d, normalized=normalized, rope_theta=10000.0, rope_first=True,
        rope_form="nvidia", s_qk_per_head=True, alpha_init=0.05, alpha_scale=base, s_qk_scale=base, s_z_scale=base,
        layer_norm_epsilon=1e-6,
    )  # fmt: skip


def from_lucidrains(model: Any) -> "NGPTForCausalLM":
    """A model of lucidrains' nGPT-pytorch (an instance of its class ``nGPT``), in float32.

    Its rotary embedding turns the pairs (2i, 2i + 1), ours (i, i + d_k/2): the rows of queries and keys are reordered.
    ValueError for ``num_hyperspheres`` above 1, ``norm_eps`` above 0, ``attn_norm_qk=False`` or ``causal=False``.
    """
    if not all(hasattr(model, name) for name in ("token_embed", "layers", "logit_scale", "add_value_residual")):
        raise ValueError(f"from_lucidrains takes an nGPT of nGPT-pytorch; got {type(model).__name__}.")
    first, norm, d_k, H = model.layers[0][0].fn, model.token_embed.l2norm, model.dim_head, model.heads
    odd = {"num_hyperspheres": norm.groups != 1, "norm_eps": norm.norm_eps != 0, "attn_norm_qk": not first.norm_qk}
    if bad := [name for name, found in (odd | {"causal": not model.causal}).items() if found]:
        raise ValueError(f"Our model cannot represent this one's {', '.join(bad)}: only the defaults can be imported.")

    def pairs(x: Tensor) -> Tensor:  # [H d_k, ...]: within each head the even coordinates first
        return x.unflatten(0, (H, d_k // 2, 2)).transpose(1, 2).flatten(0, 2)

    def matrix(layer: Any, dim: int = -1) -> Tensor:
        return sphere.unit(layer.weight.detach().float(), dim)

    head = model.token_embed if model.to_logits is None else model.to_logits
    state = {"model.embeddings.weight": matrix(model.token_embed), "lm_head.weight": matrix(head)}
    state["s_z.weight"] = model.logit_scale()
    for i, (attention, ff) in enumerate(model.layers):
        a, m, f, g = f"model.layers.{2 * i}", f"model.layers.{2 * i + 1}", attention.fn, ff.fn
        state |= {f"{a}.mixer.q_proj.weight": pairs(matrix(f.to_q)), f"{a}.mixer.k_proj.weight": pairs(matrix(f.to_k))}
        state |= {f"{a}.mixer.v_proj.weight": matrix(f.to_v), f"{a}.mixer.o_proj.weight": matrix(f.to_out, 0)}
        state[f"{a}.mixer.s_qk.weight"] = pairs(f.qk_scale()).view(H, d_k)
        state |= {f"{m}.mixer.up_proj.weight": matrix(g.to_hidden), f"{m}.mixer.gate_proj.weight": matrix(g.to_gate)}
        state[f"{m}.mixer.down_proj.weight"] = matrix(g.to_out, 0)
        state[f"{m}.mixer.s_u.weight"] = torch.stack((g.hidden_scale(), g.gate_scale()))
        state |= {f"{a}.alpha.weight": attention.branch_scale(), f"{m}.alpha.weight": ff.branch_scale()}
    # Each scale arrives as its value, so its unit is its initial value, here 1.
    return _model(
        state, model.depth, vocab_size=model.num_tokens, hidden_size=model.dim, num_attention_heads=H, head_dim=d_k,
        intermediate_size=model.layers[0][1].fn.dim_inner, rope_theta=10000.0, rope_first=True, s_qk_per_head=True,
        s_qk_on_keys=False, value_residual=model.add_value_residual, alpha_init=1.0, abs_alpha=False, lgp_q=None,
    )  # fmt: skip
