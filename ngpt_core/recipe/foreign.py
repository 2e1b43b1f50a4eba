"""Which parameter groups does the recipe give to a model that is not ours? A Llama, a GPT-2, a ViT: from shapes and names.

    groups = recipe.groups_for(model)      # print(groups): the axis of each matrix, why, its rate, warmup, cap and noise
    optimizer = ng.GatedAdamW(groups)
    schedule = ng.Schedule(optimizer, total_steps)

A vector of the model has d numbers. A matrix that *reads* the hidden state holds one per output, a matrix that *writes* to it
one per input; the axis of length d says which. A square matrix has two such axes: there its name decides (``q_proj`` reads,
``o_proj`` writes), and where the name does not say, the user does. Biases, norms and what has no such axis stay coordinates.

Shapes: torch's Linear holds [out, in], transformers' Conv1D (GPT-2) holds [in, out], experts [E, out, in] or [E, in, out].
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from ..checks import is_count, is_integer
from ..config import ModelConfig
from .assemble import Row, format_table
from .numbers import RATES, Line, Settings

__all__ = ["Decision", "Groups", "groups_for"]

_WIDTHS = ("hidden_size", "n_embd", "d_model", "embed_dim", "dim")  # names of d in other people's configs
_READS = re.compile(
    r"(^|\.)(q|k|v|qkv|wq|wk|wv|w1|w3|query|key|value|query_key_value|gate|up|gate_up|in|fc1|fc_in|c_attn|c_fc|q_attn|linear1"
    r"|router|score|head|lm_head|classifier|pooler|intermediate|dense_h_to_4h|embed_out)(_proj)?(\.dense)?$"
)
_WRITES = re.compile(
    r"(^|\.)(o|wo|out|down|c|w2|fc2|fc_out|linear2|output|dense_4h_to_h)(_proj)?(\.dense)?$|(^|\.)attn\.proj$"
    r"|(attn|attention)\.dense$"
)
_ADDED = re.compile(
    r"pos(ition)?(_|s|$)|pos_?emb|wpe|token_type|cls_token|dist_token|mask_token|reg(ister)?_token", re.IGNORECASE
)
_SCALES = ("alpha", "s_qk", "s_u", "s_z", "s_mamba", "s_moe")  # nGPT's own, in an exported model
_ASK = "Say what it does: axes={NAME: -1}, the axis along which its vectors lie, or None for coordinates."


@dataclass(frozen=True)
class Decision(Row):
    """A ``Row`` with the reason."""

    why: str = ""
    """What decided the axis."""


class Groups(list[dict[str, Any]]):
    """Parameter groups for GatedAdamW, which print as a table. ``rows`` has one entry per parameter."""

    def __init__(self, groups: list[dict[str, Any]], rows: list[Decision]) -> None:
        super().__init__(groups)
        self.rows = rows

    def __str__(self) -> str:
        return format_table(list(self.rows))


def groups_for(
    model: nn.Module,
    d_model: int | None = None,
    axes: Mapping[str, int | None] | None = None,
    base: Settings | None = None,
    **overrides: Any,
) -> Groups:
    """Groups for GatedAdamW from a model of transformers, timm, or your own: unit rows for its matrices, Adam for the rest.

    Rates, caps and noise are the recipe's (``Settings``): C / sqrt(d) for rows, times 1.5 for experts and 2 for a router;
    warmups for Mamba's parameters except ``out_proj``. An nGPT of ``ng.hf`` gets the rates that it has as a ``LanguageModel``.
    Parameters with ``requires_grad=False`` are left out. The model is not changed here, but GatedAdamW normalizes the vectors
    of its groups: this is for training from the start.

    model: the model. Shard it first, if at all.
    d_model: d, the length of its hidden state. None: read from the model's config.
    axes: your own decisions by name, with * as in a shell: the axis along which the vectors of a parameter lie, or None for
        coordinates. Needed for a square matrix whose name does not say what it does.
    base, overrides: the numbers, as in ``build``, for example ``C=0.1`` or ``pmen=None``.
    """
    d = _width(model, d_model)
    numbers = Settings() if base is None else base
    numbers = type(numbers)(**{**vars(numbers), **overrides}) if overrides else numbers
    config, theirs = ModelConfig(vocab_size=1, d_model=d, pattern="-", ff=1), getattr(model, "config", None)
    if getattr(theirs, "model_type", None) == "ngpt":
        config = replace(config, C=theirs.C)  # type: ignore[union-attr]  # an NGPTConfig has it
    groups: dict[tuple, dict[str, Any]] = {}
    rows, undecided, used = [], [], set()
    for name, p, module, above in _parameters(model):
        own = next((pattern for pattern in axes or {} if fnmatchcase(name, pattern)), None)
        if own is not None and axes is not None:
            used.add(own)
            axis, why = _checked(name, p, axes[own]), "you decided"
        else:
            axis, why = _axis(name, p, module, d)
            if axis == "?":
                undecided.append(f"{name} {list(p.shape)}")
                continue
        line = _line(name, p, module, above, axis)
        values: dict[str, Any] = {**numbers.group(line, config, None), "unit_dim": axis}
        group = groups.setdefault(tuple(values.items()), {"params": [], "label": {}, **values})
        group["params"].append((name, p))
        group["label"][why] = None
        trained = (values["lr"], values["warmup"], values["a"], values["peak_cap"], values["pmen"] is not None)
        rows.append(Decision(name, tuple(p.shape), axis, *trained, values["weight_decay"], why))
    if undecided:
        raise ValueError(
            f"recipe: groups_for cannot tell from shape and name which axis has the {d} numbers of a hidden state in "
            f"{', '.join(undecided)}. {_ASK.replace('NAME', repr(undecided[0].split()[0]))}"
        )
    if missing := sorted(set(axes or ()) - used):
        raise ValueError(f"recipe: no trained parameter matches {', '.join(map(repr, missing))} of axes.")
    if not any(row.unit_dim is not None for row in rows):
        raise ValueError(f"recipe: no matrix of this model has an axis of length {d}. Is d_model right?")
    for group in groups.values():
        group["label"] = ", ".join(group["label"])
    return Groups(list(groups.values()), rows)


def _width(model: nn.Module, given: int | None) -> int:
    """d_model, as given or from the model's config."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"recipe: groups_for takes a torch module; got {model!r}.")
    if given is not None:
        if not is_count(given, 1):
            raise ValueError(f"recipe: d_model is the length of the hidden state, an integer >= 1; got {given!r}.")
        return int(given)
    for module in model.modules():
        for holder in (getattr(module, "config", None), module):
            for name in _WIDTHS:
                if is_integer(width := getattr(holder, name, None)):
                    return int(width)  # type: ignore[arg-type]  # an integer, as checked
    raise ValueError(f"recipe: {type(model).__name__} does not say its width ({', '.join(_WIDTHS)}): pass d_model=.")


def _parameters(model: nn.Module) -> Iterator[tuple[str, Tensor, nn.Module, list[nn.Module]]]:
    """(name, parameter, its module, the modules around it) for each trained parameter, once."""
    modules, seen = dict(model.named_modules()), set()
    for prefix, module in modules.items():
        parts = prefix.split(".")
        above = [modules[".".join(parts[:i])] for i in range(1, len(parts) + 1)] if prefix else []
        for own, p in module.named_parameters(recurse=False):
            if p.requires_grad and id(p) not in seen:
                seen.add(id(p))
                yield (f"{prefix}.{own}" if prefix else own), p, module, above


def _axis(name: str, p: Tensor, module: nn.Module, d: int) -> tuple[Any, str]:
    """(the axis of the vectors, None for coordinates or "?" for a question, why)."""
    shape, kind = p.shape, type(module).__name__
    if p.ndim < 2:
        return None, "one dimension"
    if "lora_" in name:
        return None, "an adapter"
    if kind.endswith("Scale"):
        return None, "a scale"
    if _ADDED.search(name):
        return None, "added to the tokens"  # its length matters
    if isinstance(module, nn.Embedding):
        return (-1, "one row per token") if shape[-1] == d else (None, "no axis of d")
    if isinstance(module, nn.modules.conv._ConvNd):
        return (0, "writes (patches)") if shape[0] == d and module.groups == 1 else (None, "no axis of d")
    out, into = (-1, -2) if kind == "Conv1D" else (-2, -1)  # the axes of the outputs and of the inputs
    reads, writes = shape[into] == d, shape[out] == d
    own = name.removesuffix(".weight")
    if reads and writes:
        reads, writes = bool(_READS.search(own)), bool(_WRITES.search(own))
        if p.ndim > 2 or reads == writes:  # which axis of experts holds the inputs is not in a name
            return "?", ""
        axis, why = (into, "reads") if reads else (out, "writes")
        why += f" ({own.split('.')[-1]}; square)"
    elif p.ndim > 2:
        axis = -1 if shape[-1] == d else -2
        return (axis, "the axis of d") if reads or writes else (None, "no axis of d")
    elif reads or writes:
        axis, why = (into, "reads") if reads else (out, "writes")
    else:
        return None, "no axis of d"
    return axis if axis == -1 else axis + p.ndim, why


def _checked(name: str, p: Tensor, axis: object) -> int | None:
    if axis is not None and not (is_integer(axis) and -p.ndim <= axis < p.ndim):  # type: ignore[operator]  # an integer here
        raise ValueError(f"recipe: axes[{name!r}] must be an axis of its shape {list(p.shape)} or None; got {axis!r}.")
    return axis  # type: ignore[return-value]  # an integer or None, as checked


def _line(name: str, p: Tensor, module: nn.Module, above: list[nn.Module], axis: int | None) -> Line:
    """How the recipe would train such a parameter."""
    own = name.removesuffix(".weight").split(".")
    warmup = any(hasattr(m, "A_log") for m in above) and "out_proj" not in own  # Mamba's layer is the one with an A_log
    if (scale := own[-1]) in _SCALES and type(module).__name__.endswith("Scale"):
        return Line(scale if scale in RATES else "global", warmup=warmup or scale == "s_z")
    kinds = [type(m).__name__.lower() for m in above]
    output = "output" if own[-1] in ("lm_head", "embed_out") else ""
    embedding = "input" if isinstance(module, nn.Embedding) else output
    expert = any("expert" in part and "gate" not in part for part in own[:-1]) or own[-1].startswith("experts")
    router = "router" in own[-1] or (own[-1] == "gate" and any("router" in kind or "gate" in kind for kind in kinds[-1:]))
    rate = "expert" if expert else "router" if router else "embedding" if embedding == "input" else "global"
    unit = axis is not None
    return Line(rate, unit=unit, cap=unit and not embedding, warmup=warmup, decays=p.ndim > 1, embedding=embedding)
