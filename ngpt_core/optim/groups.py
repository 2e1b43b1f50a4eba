"""Can GatedAdamW work with this parameter group? The rules, and the error that states each of them.

An error comes before anything is changed, with the rule, the value received and what to do.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields

import torch
from torch import Tensor

from ..checks import LEAST_DIVISOR, is_count, is_integer, is_number, is_within
from ..sphere import widen
from . import sharding
from .auto_gate import AutoGate
from .pmen import PMEN
from .smgc import SMGC

_SETTINGS = {"smgc": SMGC, "pmen": PMEN, "eps_gate": AutoGate}
_FUNCTION = "function"  # an eps_gate of a saved state: the function itself is not saved


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
    gate = group["eps_gate"]
    rule(
        is_within(gate, LEAST_DIVISOR) or isinstance(gate, AutoGate) or callable(gate) or _is(gate, "auto"),
        f"eps_gate must be a finite number >= {LEAST_DIVISOR}, 'auto', AutoGate(...) or a function of (t, group), got "
        f"{gate!r}. It is the gate's threshold; the paper uses 1e-8.",
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
    way = group["transport"]
    known = way is None or _is(way, "project") or _is(way, "parallel")
    rule(known, f"transport of the first moment must be None, 'project' or 'parallel', got {way!r}.")
    for name in ("tangent", "maximize", "capturable", "foreach", "fused"):
        free = name in ("foreach", "fused")
        fits = isinstance(group[name], bool) or (free and group[name] is None)
        rule(fits, f"{name} must be True or False{' or None' if free else ''}, got {group[name]!r}.")
    for name, kind in (("smgc", SMGC), ("pmen", PMEN)):
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


def accept(group: dict, first: int = 0) -> None:
    """``check``, and bring two values into the form that the step and a state take."""
    check(group, first)
    if group["unit_dim"] is not None:
        group["unit_dim"] = int(group["unit_dim"])  # a state with numpy's integers could not be loaded
    if isinstance(group["eps_gate"], str):  # "auto", as checked
        group["eps_gate"] = AutoGate()


def _is(x: object, text: str) -> bool:
    """x == text, where x may be a tensor, which compares its numbers."""
    return isinstance(x, str) and x == text


_KEYS = (
    "lr", "betas", "eps_gate", "eps_num", "a", "weight_decay", "decay", "unit_dim", "tangent", "smgc", "pmen", "cap",
    "transport", "maximize", "foreach", "capturable", "fused", "nonfinite", "params", "param_names",
    "alpha", "peak_lr", "peak_cap", "warmup",  # the last three are the schedule's
)  # fmt: skip


def check_keys(group: Mapping) -> None:
    """Refuse keys that look useful and would have no effect. Keys of other libraries are left alone."""
    for key in group.keys() - set(_KEYS):
        if meant := next((own for own in _KEYS if _nearly(key, own)), None):
            raise ValueError(
                f"GatedAdamW: {key!r} is not a key of a parameter group; {meant!r} is. Correct it, or rename your own key that "
                "only looks like it."
            )
    for key, instead in (
        ("eps", "AdamW's eps is two numbers here: eps_gate, the gate's threshold (with a=1 it is AdamW's eps), and eps_num."),
        ("nonfinite", "It applies to all groups: pass it to the constructor."),
    ):
        if key in group:
            raise ValueError(f"GatedAdamW: {key} is not a key of a parameter group; got {group[key]!r}. {instead}")


def _nearly(key: object, own: str) -> bool:
    """Whether a key differs from one of ours in one letter, in two that changed places, or in case and underscores."""
    if not isinstance(key, str) or len(key) < 4 or len(own) < 3:
        return False
    bare = [x.replace("_", "").replace("-", "").lower() for x in (key, own)]
    n = next((i for i, (x, y) in enumerate(zip(key, own)) if x != y), min(len(key), len(own)))
    a, b = key[n:], own[n:]
    swapped = a[:2] == b[:2][::-1] and a[2:] == b[2:]
    return bare[0] == bare[1] or swapped or a[1:] == b or a == b[1:] or a[1:] == b[1:]


def check_arguments(unknown: Mapping) -> None:
    """Refuse arguments that the constructor does not have."""
    check_keys({key: value for key, value in unknown.items() if key == "eps"})
    for key in unknown:
        meant = next((f": did you mean {own}?" for own in _KEYS if _nearly(key, own)), ".")
        raise TypeError(f"GatedAdamW has no argument {key!r}{meant}")


def check_biases(groups: list[dict], inherited: list[bool]) -> None:
    """A tensor of one dimension on the sphere must have been asked for: by a group of such tensors with its own ``unit_dim``.

    ``inherited``: for each group, whether its ``unit_dim`` is the constructor's.
    """
    matrices = [any(p.ndim > 1 for p in group["params"]) for group in groups]
    first = 0
    for group, default, mixed in zip(groups, inherited, matrices):
        if group["unit_dim"] is not None and (mixed or (default and any(matrices))):
            for name, p in named_parameters(group, first):
                if p.ndim == 1:
                    raise ValueError(
                        f"GatedAdamW: {name!r} has one dimension ({len(p)} numbers), like a bias or the weight of a norm, and "
                        f"unit_dim={group['unit_dim']} would make it one unit vector. Put such tensors into a group with "
                        "unit_dim=None; if you want unit vectors, give them a separate group with this unit_dim."
                    )
        first += len(group["params"])


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


def check_saved(state_dict: object) -> None:
    """The form of a state_dict: groups with their parameters' numbers (torch's checkpoints: names), a dictionary for each."""
    saved: Mapping = state_dict if isinstance(state_dict, Mapping) else {}
    groups, state = saved.get("param_groups"), saved.get("state")
    if not (
        isinstance(groups, list | tuple)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple) for group in groups)
        and all(is_integer(n) or isinstance(n, str) for group in groups for n in group["params"])
        and isinstance(state, Mapping)
        and all(isinstance(entry, Mapping) for entry in state.values())
        and is_count(saved.get("skipped", 0), 0)
    ):
        raise ValueError(
            "GatedAdamW: a state is a dictionary as state_dict() returns it: param_groups, a list of groups with params, and "
            f"state, a dictionary for each parameter; got {str(state_dict)[:80]!r}."
        )


def check_state(state: Mapping) -> None:
    """The saved state must come from (Gated)AdamW: a counter and two moments for each parameter that has a state."""
    wanted, extra = {"exp_avg", "exp_avg_sq", "step"}, "max_exp_avg_sq"
    for i, entry in state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            is_tensor = isinstance(moment := entry.get(key, torch.zeros(1)), Tensor)
            if not is_tensor or not moment.is_floating_point() or moment.layout != torch.strided:
                raise ValueError(
                    f"GatedAdamW: {key} of parameter {i} must be a dense floating-point tensor; got {moment!r:.80}."
                )
        if not (is_count(step := entry.get("step", 0), 0) and step < 2**53):  # a float holds it exactly
            raise ValueError(f"GatedAdamW: step of parameter {i} is a number of updates >= 0; got {entry['step']!r:.80}.")
        if "eps_gate" in entry and not is_within(entry["eps_gate"], LEAST_DIVISOR):  # AutoGate's
            raise ValueError(
                f"GatedAdamW: eps_gate of parameter {i} must be one finite number >= {LEAST_DIVISOR}; got "
                f"{entry['eps_gate']!r:.80}."
            )
        if entry and not (wanted <= entry.keys() and extra not in entry):
            raise ValueError(
                f"GatedAdamW: the state of a parameter must have {', '.join(sorted(wanted))}, as AdamW's does, and no {extra} "
                f"(amsgrad); parameter {i} has {', '.join(sorted(map(str, entry)))}. Load the state of a GatedAdamW or AdamW, "
                "or start without one."
            )


@torch.no_grad()
def check_moments(moments: Sequence[tuple[str, Tensor, str, Tensor]]) -> None:
    """Saved moments (name, parameter, key, moment) that no update can have left: all ranks raise, or none."""

    def is_spoiled(p: Tensor, key: str, moment: Tensor) -> bool:
        x = sharding.local(moment)
        if x.is_meta:
            return not p.is_meta
        return not bool((x >= 0).all() if key == "exp_avg_sq" else x.isfinite().all())

    flags = torch.tensor([float(is_spoiled(p, key, moment)) for _, p, key, moment in moments])
    device = next((p.device for _, p, _, _ in moments if not p.is_meta), "cpu")
    bad, anywhere = sharding.agree(flags.to(device), [p for _, p, _, _ in moments])
    if anywhere:
        name, _, key, _ = moments[int(bad.argmax())]
        rule = "squares: no nan, none below 0" if key == "exp_avg_sq" else "finite numbers"
        raise ValueError(f"GatedAdamW: {key} holds {rule}; that of {name!r} in this state does not. Load an undamaged state.")


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
    plain = {k: asdict(v) if isinstance(v, (SMGC, PMEN, AutoGate)) else v for k, v in group.items()}
    return plain | ({"eps_gate": _FUNCTION} if callable(group.get("eps_gate")) else {})


def unpack(saved: dict, own: dict) -> dict:
    """A saved group, completed by the optimizer's group ``own``: torch's AdamW saves fewer keys.

    Another optimizer's switches for its kernels are not taken over, nor is its eps, which has no effect here.
    """
    foreign = ("eps",) if "eps_gate" in saved else ("eps", "foreach", "fused", "capturable")
    group = {k: v for k, v in own.items() if k not in ("params", "param_names")}
    group |= {k: v for k, v in saved.items() if k not in foreign}
    if _is(group["eps_gate"], _FUNCTION):
        group["eps_gate"] = own["eps_gate"]
        if not callable(own["eps_gate"]):
            raise ValueError(
                "GatedAdamW: the state is from a group with a function as its eps_gate, which a state cannot hold, and this "
                f"group has eps_gate={own['eps_gate']!r}. Build the optimizer with that function."
            )
    group = {k: _setting(k, v) if k in _SETTINGS and isinstance(v, dict) else v for k, v in group.items()}
    return group | ({"eps_gate": AutoGate()} if _is(group["eps_gate"], "auto") else {})


def _setting(name: str, values: dict) -> SMGC | PMEN | AutoGate:
    kind: type[SMGC] | type[PMEN] | type[AutoGate] = _SETTINGS[name]
    if unknown := values.keys() - {f.name for f in fields(kind)}:
        names = ", ".join(map(str, unknown))
        raise ValueError(f"GatedAdamW: the state's {name} has keys that {kind.__name__} does not have: {names}.")
    return kind(**values)
