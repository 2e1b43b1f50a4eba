"""Can GatedAdamW work with this parameter group? The rules, and the error that states each of them.

An error comes before anything is changed, with the rule, the value received and what to do.
"""

import warnings
from collections.abc import Iterator
from dataclasses import asdict, fields

import torch
from torch import Tensor

from ..checks import LEAST_DIVISOR, is_integer, is_number, is_within
from ..sphere import widen
from . import sharding
from .pmen import PMEN
from .smgc import SMGC

_SETTINGS = {"smgc": SMGC, "pmen": PMEN}


def check(group: dict, first: int = 0) -> None:
    """Raise a ValueError if a value of the group breaks a rule. ``first``: the index of its first parameter."""

    def rule(holds: bool, text: str) -> None:
        if not holds:
            raise ValueError(f"GatedAdamW: {text}")

    def positive(name: str, usual: str, zero: bool = False) -> None:
        holds = is_within(group[name], 0, open=not zero)
        rule(holds, f"{name} must be a finite number {'>=' if zero else '>'} 0, got {group[name]!r}. {usual}")

    lr, betas, cap, dim = group["lr"], group["betas"], group["cap"], group["unit_dim"]
    rule(is_number(lr), f"lr must be one number, got {lr!r}. For several rates, use several groups.")
    positive("lr", "Usual: 0.24/sqrt(d_model) for unit rows.", zero=True)
    two = isinstance(betas, (tuple, list)) and len(betas) == 2 and all(is_number(b) and 0 <= b < 1 for b in betas)
    rule(two, f"betas must be two numbers in [0, 1), got {betas!r}. Paper: (0.975, 0.975).")
    rule(
        is_within(group["eps_gate"], LEAST_DIVISOR),
        f"eps_gate must be a finite number >= {LEAST_DIVISOR}, got {group['eps_gate']!r}. It is the gate's threshold; the "
        "paper uses 1e-8.",
    )
    positive("eps_num", "The paper uses 1e-14.", zero=True)
    positive("a", "It is the gate's sharpness; the paper uses 0.5, and 1 is Adam's gate.")
    positive("weight_decay", "The paper uses none for unit vectors.", zero=True)
    rule(
        group["decay"] in ("lr", "eta"),
        f"decay must be 'lr' (torch's lr*lambda) or 'eta' (the paper's eta_t*lambda), got {group['decay']!r}.",
    )
    rule(
        group["decay"] != "eta" or is_within(group["alpha"], 0, open=True),
        f"decay='eta' divides by the base step size alpha, which is {group['alpha']!r} (the lr when the group was added). Add "
        "the group with its peak lr, or give it the key 'alpha'.",
    )
    angle = cap is None or (is_number(cap) and float(cap) >= 0)
    rule(angle, f"cap, the largest angle of a step in radians, must be a number >= 0 or None, got {cap!r}.")
    for name in ("tangent", "maximize", "capturable", "foreach", "fused"):
        free = name in ("foreach", "fused")
        fits = isinstance(group[name], bool) or (free and group[name] is None)
        rule(fits, f"{name} must be True or False{' or None' if free else ''}, got {group[name]!r}.")
    for name, kind in _SETTINGS.items():
        value = group[name]
        rule(value is None or isinstance(value, kind), f"{name} must be {kind.__name__}(...) or None, got {value!r}.")
    rule(dim is None or is_integer(dim), f"unit_dim must be an integer or None, got {dim!r}.")
    for name, p in named_parameters(group, first):
        rule(p.is_floating_point(), f"parameters must be real floating-point tensors, {name!r} is {p.dtype}.")
        if dim is not None:
            rule(
                -p.ndim <= dim < p.ndim,
                f"unit_dim={dim} is not a dimension of {name!r}, whose shape is {tuple(p.shape)}. Put it into a group with "
                "unit_dim=None, or with one of its dimensions.",
            )
            rule(not p.is_meta, f"{name!r} is on the meta device and has no values to normalize. Materialize the model first.")


def check_keys(group: dict) -> None:
    """Keys that look useful and would have no effect."""
    for key, instead in (
        ("eps", "AdamW's eps is two numbers here: eps_gate, the gate's threshold (with a=1 it is AdamW's eps), and eps_num."),
        ("nonfinite", "It applies to all groups: pass it to the constructor."),
    ):
        if key in group:
            raise ValueError(f"GatedAdamW: {key} is not a key of a parameter group; got {group[key]!r}. {instead}")


def check_names(groups: list[dict]) -> None:
    """PMEN's signs come from the names: two parameters with the same name would get the same noise."""
    seen = set()
    for group in groups:
        if group["pmen"] is None or group["unit_dim"] is None or not group.get("param_names"):
            continue
        for name, _ in named_parameters(group):
            if name in seen:
                raise ValueError(
                    f"GatedAdamW: pmen draws its signs from the parameters' names, and two are called {name!r}: they would get "
                    "the same noise. Give them different names."
                )
            seen.add(name)


def check_state(state: dict) -> None:
    """The saved state must come from (Gated)AdamW: a counter and two moments for each parameter that has a state."""
    wanted, extra = {"exp_avg", "exp_avg_sq", "step"}, "max_exp_avg_sq"
    for i, entry in state.items():
        if entry and not (wanted <= entry.keys() and extra not in entry):
            raise ValueError(
                f"GatedAdamW: the state of a parameter must have {', '.join(sorted(wanted))}, as AdamW's does, and no {extra} "
                f"(amsgrad); parameter {i} has {', '.join(sorted(map(str, entry)))}. Load the state of a GatedAdamW or AdamW, "
                "or start without one."
            )


def check_foreign(saved: dict, own: dict) -> None:
    """Settings of torch's Adam or AdamW that GatedAdamW treats differently: an error, or a warning."""
    if "eps_gate" in saved:  # our own
        return
    if saved.get("weight_decay") and not saved.get("decoupled_weight_decay", True):
        raise ValueError(
            "GatedAdamW: weight decay acts on the parameters, as AdamW's does, not on the gradient (L2), as in the state of an "
            f"Adam with weight_decay={saved['weight_decay']!r}. Set it to 0 in the state's groups, or start without a state."
        )
    if saved.get("eps", own["eps_gate"]) != own["eps_gate"]:
        warnings.warn(
            f"GatedAdamW: the state's eps = {saved['eps']!r} is not used; this optimizer has eps_gate = {own['eps_gate']!r}. "
            f"For AdamW's steps, build it with a=1, eps_num=0, eps_gate={saved['eps']!r}.",
            stacklevel=3,
        )


def named_parameters(group: dict, first: int = 0) -> Iterator[tuple[str, Tensor]]:
    """(name, parameter). Without names, parameters are numbered in the order in which they were added: "0", "1", ..."""
    names = group.get("param_names") or [str(first + i) for i in range(len(group["params"]))]
    return zip(map(bare, names), group["params"])


def bare(name: str) -> str:
    """The name in the user's model, without the prefixes of torch.compile, activation checkpointing and DDP."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


@torch.no_grad()
def sizes(group: dict, first: int = 0) -> list[Tensor]:
    """The sum of magnitudes of every vector, one tensor per parameter. A vector without a direction is a ValueError."""
    dim = group["unit_dim"]
    names, params = zip(*named_parameters(group, first)) if group["params"] and dim is not None else ((), ())
    found = []
    for p in params:
        size = widen(sharding.local(p)).abs().sum(dim, keepdim=True)
        found.append(sharding.all_sum(size, sharding.split_groups(p, dim)))
    flags = [float(not ((size > 0) & size.isfinite()).all()) for size in found]
    bad, anywhere = sharding.agree(torch.tensor(flags, device=found[0].device if found else None), params)
    if anywhere:  # all ranks raise, or none
        n = int(bad.argmax())
        at = (~((found[n] > 0) & found[n].isfinite())).nonzero().tolist()
        kind, where = "zero or nonfinite", "on another rank"
        if at:
            kind = "zero" if found[n][tuple(at[0])] == 0 else "nonfinite"
            place = [i + offset for i, offset in zip(at[0], sharding.offsets(params[n]))]
            del place[dim]
            where = f"at {place} of its other dimensions"
        raise ValueError(
            f"GatedAdamW: unit_dim={dim} asks for unit vectors along that dimension, but {names[n]!r} has a {kind} vector "
            f"({where}), which has no direction. Initialize it (from a Gaussian, for example), or use unit_dim=None."
        )
    return found


@torch.no_grad()
def normalize(group: dict, found: list[Tensor]) -> None:
    """Put the group's vectors on the sphere. ``found``: their ``sizes``.

    Vectors that are unit already, to rounding, keep their bits: building an optimizer on a loaded model changes nothing.
    """
    dim = group["unit_dim"]
    for p, size in zip(group["params"], found):
        w = sharding.local(p)
        x = widen(w)
        # a power of two near 1 / size: multiplying by it changes no digit, and then no square leaves the range
        tiny = torch.finfo(x.dtype).tiny
        scale = torch.exp2(-size.log2().floor()).clamp(tiny, 1 / tiny)
        x = x * scale
        xx = sharding.all_sum((x * x).sum(dim, keepdim=True), sharding.split_groups(p, dim))
        ww = xx / scale / scale
        rounding = torch.finfo(w.dtype).eps + 8 * torch.finfo(ww.dtype).eps  # of the coordinates, and of their sum
        off = (ww - 1).abs() > rounding
        w.copy_(torch.where(off, x * xx.sqrt().reciprocal(), w))


def pack(group: dict) -> dict:
    """The group as plain numbers, strings and dicts, which torch.load reads with weights_only=True."""
    return {k: asdict(v) if isinstance(v, (SMGC, PMEN)) else v for k, v in group.items()}


def unpack(saved: dict, own: dict) -> dict:
    """A saved group, completed by the optimizer's group ``own``: torch's AdamW saves fewer keys.

    Another optimizer's switches for its kernels are not taken over, nor is its eps, which has no effect here.
    """
    foreign = ("eps",) if "eps_gate" in saved else ("eps", "foreach", "fused", "capturable")
    group = {k: v for k, v in own.items() if k not in ("params", "param_names")}
    group |= {k: v for k, v in saved.items() if k not in foreign}
    return {k: _setting(k, v) if k in _SETTINGS and isinstance(v, dict) else v for k, v in group.items()}


def _setting(name: str, values: dict) -> SMGC | PMEN:
    kind = _SETTINGS[name]
    if unknown := values.keys() - {f.name for f in fields(kind)}:
        raise ValueError(f"GatedAdamW: the state's {name} has keys that {kind.__name__} does not have: {', '.join(unknown)}.")
    return kind(**values)
