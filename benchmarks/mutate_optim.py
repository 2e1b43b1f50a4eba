"""Would a test notice if a sign, an order or a constant of the optimizer were wrong? One mutation at a time, on a copy.

    python benchmarks/mutate_optim.py [--fresh] [words of the mutations to run]

Two kinds. MUTANTS, written by hand: mistakes that someone who knows the paper could make, such as the wrong moment, the wrong
order, a missing guard. FLIPPED: in these functions, which contain the mathematics, *every* sign, operator, comparison and
number is changed in turn. The tests of the file then run until the first failure. A mutant that no test notices survives:
either a test is missing, or the mutant computes the same result, for the reason in EQUIVALENT (those are not run). An
interrupted run continues where it stopped (unless --fresh) and tries the survivors again. Takes about an hour of CPU time; the
score goes to results/mutate_optim.json.
"""

import argparse
import ast
import compileall
import gc
import hashlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "mutate_optim.json"
PARTIAL = RESULT.with_suffix(".partial.jsonl")
TWIN = "test_gated_adamw.py::test_it_is_the_twin_over_200_steps"
NAMES = ("everything", "coordinates, gate 0.5, decay", "everything, smooth", "everything new, projected")
MOST = [f"{TWIN}[{name}]" for name in NAMES]  # these notice most of it
SHORT = (["test_gated_adamw.py"], "not twin")  # the tests of this file that do not take long, by pytest's -k
PLAIN = [*MOST, "test_gated_adamw.py", "test_pmen.py", "test_smgc.py", "test_sphere.py"]
RANKS = ["test_optim_distributed.py"]
TESTS = {name: [f"test_{name}.py", *PLAIN] for name in ("smgc", "pmen", "sphere")} | {
    "algorithm": [*PLAIN, "test_auto_gate.py"],
    "auto_gate": ["test_auto_gate.py", *PLAIN, *RANKS],
    "sharding": RANKS,
    "schedule": ["test_schedule.py"],
    "paths": [
        "test_optim_memory.py::test_pieces_fill_the_tensor_once_and_never_cut_a_vector",
        "test_optim_memory.py::test_pieces_are_as_large_as_they_may_be",
        "test_optim_plan.py",
        *PLAIN,
        "test_auto_gate.py",
        "test_optim_memory.py",
        *RANKS,
    ],
    "fused": ["test_fused.py", "test_optim_plan.py", *PLAIN],
    "fused_cpu": ["test_fused.py", "test_optim_plan.py"],
    "simd.h": ["test_fused.py"],
    "fused_triton": ["test_triton.py"],
    "gated_adamw": ["test_optim_plan.py", "test_auto_gate.py", *PLAIN],
    "groups": ["test_auto_gate.py", *PLAIN],
    "nonfinite": ["test_optim_plan.py", *PLAIN, *RANKS],
    "fused_cpu.cpp": [
        "test_fused.py",
        "test_gated_adamw.py::test_a_short_memory_forgets_a_large_gradient_on_every_path",
        "test_gated_adamw.py::test_a_candidate_beyond_the_range_leaves_its_row_where_it_is",
        "test_gated_adamw.py::test_a_row_that_stays_keeps_its_moment_or_has_it_projected",
        "test_gated_adamw.py::test_only_the_direction_counts_of_a_row_that_left_the_sphere",
        "test_gated_adamw.py::test_at_the_antipode_there_is_no_great_circle_and_the_moment_stays",
    ],
}

FLIPPED = {
    "algorithm": ["gate", "gate_of", "gate_power", "gated", "bias_correction", "adaptive", "update", "carried"],
    "auto_gate": ["_digits", "quantiles", "_counts", "set_gates", "_refresh", "first", "_next", "called"],
    "smgc": ["clipped", "growth_clip"],
    "pmen": ["due", "profile", "amplitude", "_mix", "signs"],
    "sphere": ["tangent", "project", "polar", "turn", "angle", "cap_angle"],
    # not schedule.area: the resolution of an integral is arbitrary
    "schedule": ["log_decay", "cosine", "linear", "wsd", "_warmup", "warmup_before", "match_auc", "progress", "at"],
}

# Survivors that compute the same as the original, and why.
EQUIVALENT = {
    "algorithm.update: torch.atan2(length, along) > rule.cap -> torch.atan2(length, along) >= rule.cap": (
        "a candidate exactly at the cap is the point to which the cap would turn it"
    ),
    "algorithm.gate_of: 1.0 -> 1.5": "only the type of this number matters",
    "algorithm.gate_power: 1.0 -> 1.5": "only the type of this number matters",
    "algorithm.carried: 1 + c > 1e-06 -> 1 + c >= 1e-06": "exactly at the threshold, which is ours, either answer will do",
    "algorithm.carried: 1e-06 -> 1.5e-06": "the threshold is ours",
    "auto_gate._digits: 1 -> 2": "range(48, -2, -16) ends with 0 too",
    "auto_gate._counts: 1 -> 2": "twice as many counts, and the second half is always 0",
    "auto_gate._counts: 16 -> 17": "the same",
    "auto_gate._counts: 1 -> 2 (2)": "how many coordinates are counted at a time",
    "auto_gate._counts: 20 -> 21": "the same",
    "auto_gate.quantiles: 1 -> 2 (10)": "no positive number begins with sixteen ones: the last two sums are equal",
    "pmen: 'setting.profile == \"step\" and not isinstance' -> 'not isinstance'": (
        "no profile increases, so the vectors that are left out would have no noise with the smooth one either"
    ),
    "smgc.clipped: 10000.0 -> 15000.0": "at either number expm1 is -1",
    "sphere.cap_angle: torch.atan2(length, along) > max_angle -> torch.atan2(length, along) >= max_angle": "the same",
    "sphere.polar: length > 4 * torch.finfo(uu.dtype).eps * dd.sqrt() -> length >= 4 * torch.finfo(uu.dtype).eps * dd.sqrt()": (
        "exactly at the threshold, which is ours, either answer will do; for no displacement the length is 0 either way"
    ),
    "sphere.turn: 1.0 -> 1.5": "what stands there instead of a length of 0 only has to be finite: nobody takes that point",
    "schedule.warmup_before: 1.0 -> 1.5": "the upper end of np.clip: r <= 1 was checked before, so nothing is above 1",
    "schedule.warmup_before: r < share -> r <= share": "both sides are schedule(0) at r = share: it is continuous",
}

# file, what stands there (once), what is put in its place
MUTANTS = [
    # the geometry
    ("sphere", "return x - w * (wx / ww.clamp_min(eps))", "return x + w * (wx / ww.clamp_min(eps))"),
    ("sphere", "return x - w * (wx / ww.clamp_min(eps))", "return x - w * wx"),
    ("sphere", "eps: float = 1e-12) -> Tensor:", "eps: float = 1e-6) -> Tensor:"),
    ("sphere", "4 * torch.finfo(uu.dtype).eps * dd.sqrt()", "0 * torch.finfo(uu.dtype).eps * dd.sqrt()"),
    ("sphere", "4 * torch.finfo(uu.dtype).eps * dd.sqrt()", "1e9 * torch.finfo(uu.dtype).eps * dd.sqrt()"),
    ("sphere", "return length, norm + wd / norm", "return length, norm - wd / norm"),
    ("sphere", "return length, norm + wd / norm", "return length, norm + wd"),
    ("sphere", "tool.cos(theta) * torch.rsqrt(ww)", "tool.cos(theta)"),
    ("sphere", "tool.cos(theta) * torch.rsqrt(ww)", "tool.sin(theta) * torch.rsqrt(ww)"),
    ("sphere", "+ (tool.sin(theta) / safe) * u", "- (tool.sin(theta) / safe) * u"),
    ("sphere", "+ (tool.sin(theta) / safe) * u", "+ tool.sin(theta) * u"),
    ("sphere", "return torch.atan2(length, along).squeeze(dim)", "return torch.atan2(length, along.abs()).squeeze(dim)"),
    ("sphere", "over = (torch.atan2(length, along) > max_angle)", "over = (torch.atan2(length, along) < max_angle)"),
    ("sphere", "over = (torch.atan2(length, along) > max_angle)", "over = (torch.atan2(length, along.abs()) > max_angle)"),
    ("sphere", "> max_angle) & (length > 0)", "> max_angle)"),
    ("sphere", "turn(w, u, ww, length, max_angle), w + delta)", "turn(w, u, ww, length, max_angle), unit(w + delta, dim))"),
    ("sphere", "return unit(a + alpha * (b - a), dim).to", "return (a + alpha * (b - a)).to"),
    ("sphere", "return unit(a + alpha * (b - a), dim)", "return unit(a + alpha * b, dim)"),
    ("sphere", "tangent(axis, a, dim), u)", "u, u)"),
    ("sphere", "return x.float() if x.dtype in", "return x if x.dtype in"),
    # the gate and Algorithm 1
    ("algorithm", "torch.sigmoid(a * torch.log(", "torch.sigmoid(-a * torch.log("),
    ("algorithm", "torch.sigmoid(a * torch.log(", "torch.sigmoid(torch.log("),
    ("algorithm", "torch.sigmoid(a * torch.log(", "torch.sigmoid(a * torch.log10("),
    ("algorithm", "gamma = 1 / (1 + (eps_gate / sphere.widen(d)) ** a)", "gamma = 1 / (1 + (eps_gate / sphere.widen(d)))"),
    ("algorithm", "(d / eps_gate) ** (1 - a)", "(d / eps_gate) ** (a - 1)"),
    ("algorithm", "(d / eps_gate) ** (1 - a)", "(d / eps_gate) ** a"),
    ("algorithm", "_quotient(m_hat, d + eps_gate *", "_quotient(m_hat, d - eps_gate *"),
    ("algorithm", "return torch.where(y == 0, 0.0, x / y)", "return x / y"),
    ("algorithm", "bool(y.amin() > 0):", "bool(y.amax() > 0):"),
    ("algorithm", "(x, y, ~which) if", "(x, y, which) if"),
    ("algorithm", "most.index_put(rows, rest[rows]) if", "most if"),
    ("algorithm", "return 1 - beta**t\n", "return 1 - beta ** (t + 1)\n"),
    ("algorithm", "return 1 - beta**t\n", "return 1.0\n"),
    ("algorithm", "-torch.expm1(t * math.log(beta))", "1 - beta**t"),
    ("algorithm", "m_hat = m / bias_correction(beta1, t)", "m_hat = m"),
    ("algorithm", "m_hat = m / bias_correction(beta1, t)", "m_hat = m / bias_correction(beta2, t)"),
    ("algorithm", "v_hat = v / bias_correction(beta2, t)", "v_hat = v"),
    ("algorithm", "v_hat = v / bias_correction(beta2, t)", "v_hat = v / bias_correction(beta1, t)"),
    ("algorithm", "d = v_hat.sqrt() + eps_num", "d = v_hat.sqrt()"),
    ("algorithm", "d = v_hat.sqrt() + eps_num", "d = (v_hat + eps_num).sqrt()"),
    ("algorithm", "eps=1e-12)  # app. B", "eps=2.0)  # app. B"),
    ("algorithm", "        if rule.tangent:\n", "        if True:\n"),
    ("algorithm", "        if rule.tangent:\n", "        if False:\n"),
    ("algorithm", "on = (k := t - 1) >= rule.smgc.start", "on = (k := t) >= rule.smgc.start"),
    ("algorithm", "on = (k := t - 1) >= rule.smgc.start", "on = (k := t - 1) > rule.smgc.start"),
    ("algorithm", "        elif on:\n", "        elif False:\n"),
    ("algorithm", "g = torch.where(on, clipped", "g = torch.where(~on, clipped"),
    ("algorithm", "            g = clipped(g, v, k, rule.beta2,", "            g = clipped(g, v, k, rule.beta1,"),
    ("algorithm", "            g = clipped(g, v, k, rule.beta2,", "            g = clipped(g, v, t, rule.beta2,"),
    ("algorithm", "m = torch.lerp(m, g, 1 - rule.beta1)", "m = torch.lerp(m, g, rule.beta1)"),
    ("algorithm", "m = torch.lerp(m, g, 1 - rule.beta1)", "m = torch.lerp(m, projected, 1 - rule.beta1)"),
    ("algorithm", "m = torch.lerp(m, g, 1 - rule.beta1)", "m = torch.lerp(m, raw, 1 - rule.beta1)"),
    ("algorithm", "(1 - rule.beta2) * (g * g)", "(1 - rule.beta2) * (projected * projected)"),
    ("algorithm", "(1 - rule.beta2) * (g * g)", "(1 - rule.beta2) * (raw * raw)"),
    ("algorithm", "(1 - rule.beta2) * (g * g)", "(1 - rule.beta2) * g.abs()"),
    ("algorithm", "delta = -rule.lr * direction", "delta = rule.lr * direction"),
    ("algorithm", "kept = (1 - rule.decay) * w", "kept = (1 + rule.decay) * w"),
    ("algorithm", "torch.where(delta == 0, kept, kept + delta)", "kept + delta"),
    ("algorithm", "delta = delta - rule.decay * w", "delta = delta + rule.decay * w"),
    ("algorithm", "rule.length, rule.beta1) * due", "rule.length, rule.beta1)"),
    ("algorithm", 'seen["psi"] = noise.profile(v.sqrt(), rule.pmen) * due', 'seen["psi"] = noise.profile(v, rule.pmen) * due'),
    ("algorithm", 'seen["psi"] = noise.profile(v.sqrt(), rule.pmen) * due', 'seen["psi"] = noise.profile(v.sqrt(), rule.pmen)'),
    ("algorithm", "if isinstance(rule.decay, Tensor) or rule.decay:", "if isinstance(rule.decay, Tensor):"),
    ("algorithm", "if isinstance(rule.decay, Tensor) or rule.decay:", "if not isinstance(rule.decay, Tensor):"),
    ("pmen", "delta + size * (profile(v.sqrt(), setting)", "delta - size * (profile(v.sqrt(), setting)"),
    ("pmen", "size * (profile(v.sqrt(), setting) *", "size * (profile(v, setting) *"),
    ("pmen", "delta[noisy] + size * here", "delta[noisy] - size * here"),
    ("pmen", "delta[noisy] + size * here", "size * here"),
    ("pmen", "profile(v[noisy].sqrt(), setting)", "profile(v[noisy], setting)"),
    ("pmen", "profile(v.amin(-1).sqrt(), setting)", "profile(v.amax(-1).sqrt(), setting)"),
    ("pmen", "profile(v.amin(-1).sqrt(), setting)", "profile(v.amin(-1), setting)"),
    ("pmen", 'setting.profile == "step" and not isinstance', "not isinstance"),
    ("algorithm", "rule.pmen, rule.lr, rule.length, rule.beta1)", "rule.pmen, rule.lr, rule.length, rule.beta2)"),
    ("algorithm", "torch.hypot(along, uu.sqrt())", "along"),
    ("algorithm", "> rule.cap) & (length > 0)", "> rule.cap)"),
    ("algorithm", "over = (torch.atan2(length, along) > rule.cap)", "over = (length > rule.cap)"),
    ("algorithm", "sphere.turn(w, u, ww, length, rule.cap), new)", "sphere.turn(w, delta, ww, length, rule.cap), new)"),
    ("algorithm", "norm = torch.where(over, 1.0, norm)", "norm = norm"),
    ("algorithm", "stays = (moved == 0) | (ww == 0)", "stays = (ww == 0)"),
    ("algorithm", "stays = (moved == 0) | (ww == 0)", "stays = (moved == 0)"),
    ("algorithm", "| (size == 0) | (size == math.inf)", "| (size == math.inf)"),
    ("algorithm", "| (size == 0) | (size == math.inf)", "| (size == 0)"),
    ("algorithm", "_where(stays, w,", "_where(~((moved > 0) & (size > 0)), w,"),
    ("algorithm", "_where(stays, w, new / norm)", "_where(stays, w, new)"),
    ("algorithm", "delta * delta, delta.abs())", "delta * delta, delta)"),
    ("algorithm", "scale = (v / bias_correction(rule.beta2, t)).sqrt()", "scale = v.sqrt()"),
    # transport of the first moment
    ("algorithm", 'stays & (rule.transport == "parallel")', "stays"),
    ("algorithm", "yield _sums(rule.dim, w * m, new * m, w * new)", "yield _sums(rule.dim, w * m, w * m, w * new)"),
    ("algorithm", "c, r = wn / norm, wm / norm", "c, r = wn / norm, wm"),
    ("algorithm", "share * (w / norm) + (2 * r", "share * w + (2 * r"),
    # thresholds from statistics
    ("auto_gate", "FIRST = 1e-8", "FIRST = 1e-6"),
    ("auto_gate", "quantile: float = 0.5", "quantile: float = 0.9"),
    ("auto_gate", "every: int = 100", "every: int = 10"),
    ("auto_gate", "open=True) and self.quantile < 1)", "open=True))"),
    ("auto_gate", "is_within(self.quantile, 0, open=True)", "is_within(self.quantile, 0)"),
    ("auto_gate", "is_count(self.every, 1)", "is_count(self.every, 0)"),
    ("auto_gate", "sharding.all_sum(here, groups)", "here"),
    ("auto_gate", "sharding.shard_groups(slot.p)]", "()]"),
    ("auto_gate", "members[i : i + _TOGETHER]", "members[:_TOGETHER]"),
    ("auto_gate", "(v / bias_correction(beta2, k)).sqrt()", "v.sqrt()"),
    ("auto_gate", "(v / bias_correction(beta2, k)).sqrt()", "v / bias_correction(beta2, k)"),
    ("auto_gate", 'group["betas"][1], over)', 'group["betas"][0], over)'),
    ("auto_gate", "root.clamp_min(LEAST_DIVISOR)", "root"),
    ("auto_gate", "kept.copy_(torch.where(keep, kept, root", "kept.copy_(torch.where(keep, FIRST, root"),
    ("auto_gate", "return there.reshape(()).to(device)", "return there.to(device)"),
    ("auto_gate", "there is None and is_within(value, LEAST_DIVISOR):", "there is None and is_within(value, 0):"),
    ("auto_gate", "there is not None and is_number(value):", "there is not None:"),
    ("auto_gate", "kind(getattr(self, name)))", "getattr(self, name))"),
    ("groups", 'if "eps_gate" in entry and not is_within(entry["eps_gate"], LEAST_DIVISOR):', "if False:"),
    # Second-Moment Growth Clipping
    ("smgc", "math.sqrt(1 - beta2**k) * s_min", "math.sqrt(1 - beta2 ** (k + 1)) * s_min"),
    ("smgc", "math.sqrt(1 - beta2**k) * s_min", "(1 - beta2**k) * s_min"),
    ("smgc", "torch.sqrt(-torch.expm1(k * log)) * s_min", "torch.sqrt(1 + torch.exp(k * log)) * s_min"),
    ("smgc", "torch.clamp_min(v.sqrt(), floor)", "v.sqrt() + floor"),
    ("smgc", "torch.clamp_min(v.sqrt(), floor)", "v.sqrt()"),
    ("smgc", "(R - beta2) / (1 - beta2)) * root", "(R - 1) / (1 - beta2)) * root"),
    ("smgc", "math.sqrt((R - beta2) / (1 - beta2)) * root", "(R - beta2) / (1 - beta2) * root"),
    ("smgc", "(R - beta2) / (1 - beta2)) * root", "(R - beta2)) * root"),
    ("smgc", "torch.clamp(g, -bound, bound)", "torch.clamp(g, max=bound)"),
    ("smgc", "within(self.R, 1)", "within(self.R, 0)"),
    ("smgc", "setting = SMGC(R, s_min)  # checks both", "setting = SMGC(max(R, 1), max(s_min, 0))"),
    ("smgc", "R: float = 100.0\n", "R: float = 10.0\n"),
    ("smgc", "s_min: float = 1e-10\n", "s_min: float = 1e-8\n"),
    ("smgc", "start: int = 500\n", "start: int = 0\n"),
    ("smgc", "R: float = 100.0,\n    s_min", "R: float = 10.0,\n    s_min"),
    ("smgc", "s_min: float = 1e-10,", "s_min: float = 1e-8,"),
    # Post-Moment Exploration Noise
    ("pmen", "(s <= setting.tau)", "(s < setting.tau)"),
    ("pmen", "(s <= setting.tau)", "(s >= setting.tau)"),
    ("pmen", "(s / setting.tau) ** setting.b", "(s / setting.tau)"),
    ("pmen", "(s / setting.tau) ** setting.b", "(setting.tau / s) ** setting.b"),
    ("pmen", "c = 1 / math.sqrt(length)", "c = 1 / length"),
    ("pmen", "math.sqrt((1 - beta1) / (1 + beta1))", "math.sqrt((1 + beta1) / (1 - beta1))"),
    ("pmen", "math.sqrt((1 - beta1) / (1 + beta1))", "math.sqrt(1 - beta1)"),
    ("pmen", "return lr * setting.strength * c", "return setting.strength * c"),
    ("pmen", "return lr * setting.strength * c", "return lr * c"),
    ("pmen", "(t >= self.start) &", "(t > self.start) &"),
    ("pmen", "(t - self.start) % self.every == 0", "t % self.every == 0"),
    ("pmen", "strength: float = 10.0\n", "strength: float = 1.0\n"),
    ("pmen", "tau: float = 1e-10\n", "tau: float = 1e-8\n"),
    ("pmen", 'profile: str = "step"\n', 'profile: str = "smooth"\n'),
    ("pmen", 'reference: str = "row"\n', 'reference: str = "adam"\n'),
    ("pmen", "0x7FEB352D", "0x7FEB352F"),
    ("pmen", "0x846CA68B", "0x846CA68D"),
    ("pmen", "x = x ^ (x >> 15)", "x = x ^ (x >> 16)"),
    ("pmen", "_mix(key ^ _mix(t & _32))", "_mix(key ^ (t & _32))"),
    ("pmen", "^ (index >> 32)) >> 31", ") >> 31"),
    ("pmen", "return 1 - 2 * bit", "return 2 * bit - 1"),
    ("pmen", 'f"{seed}/{name}"', 'f"{name}"'),
    ("pmen", "setting.tau) ** setting.b)", "setting.tau) ** setting.b) * 0.5"),
    # groups
    ("groups", "names = group.get(\"param_names\") or", "names ="),
    ("groups", "str(first + i)", "str(i)"),
    ("groups", '"_checkpoint_wrapped_module."', '"_nothing."'),
    ("groups", '.removeprefix("module.")', ""),
    ("groups", "x * xx.sqrt().reciprocal()", "x / xx"),
    ("groups", "off = (ww - 1).abs() > rounding", "off = ww > 0"),
    ("groups", "off = (ww - 1).abs() > rounding", "off = (ww - 1).abs() > 1e3 * rounding"),
    ("groups", "asdict(v) if isinstance(v, (SMGC, PMEN, AutoGate)) else v", "v"),
    ("groups", "(SMGC, PMEN, AutoGate)) else v", "(SMGC, PMEN)) else v"),
    ("groups", '| ({"eps_gate": _FUNCTION} if callable(group.get("eps_gate")) else {})', ""),
    ("groups", '        group["eps_gate"] = own["eps_gate"]\n', ""),
    ("groups", 'if not callable(own["eps_gate"]):', "if False:"),
    ("groups", 'or isinstance(gate, AutoGate) or callable(gate) or _is(gate, "auto")', "or True"),
    ("groups", 'known = way is None or _is(way, "project") or _is(way, "parallel")', "known = True"),
    ("groups", "number(b) and 0 <= b < 1", "number(b) and 0 <= b <= 1"),
    ("groups", "-p.ndim <= dim < p.ndim", "-p.ndim <= dim <= p.ndim"),
    ("groups", "dim is None or is_integer(dim)", "dim is None or isinstance(dim, int)"),
    ("groups", "float(cap) >= 0", "True"),
    ("groups", "(size > 0) & size.isfinite()).all()", "(size > 0)).all()"),
    ("groups", "(size > 0) & size.isfinite()).all()", "size.isfinite()).all()"),
    ("checks", "low <= float(x) < math.inf", "low < float(x) < math.inf"),
    ("checks", "low <= float(x) < math.inf", "low <= float(x)"),
    ("checks", "and not (open and float(x) == low)", ""),
    ("checks", "return not isinstance(x, bool) and x.bit_length()", "return x.bit_length()"),
    ("checks", "x.bit_length() <= 1023", "True"),
    ("checks", "x >= least", "x > least"),
    # the optimizer
    ("gated_adamw", 'betas: tuple[float, float] = (0.975, 0.975)', 'betas: tuple[float, float] = (0.9, 0.975)'),
    ("gated_adamw", 'betas: tuple[float, float] = (0.975, 0.975)', 'betas: tuple[float, float] = (0.975, 0.999)'),
    ("gated_adamw", "AutoGate | Gate = 1e-8,", "AutoGate | Gate = 1e-6,"),
    ("gated_adamw", "eps_num: float = 1e-14,", "eps_num: float = 1e-8,"),
    ("gated_adamw", "a: float = 0.5,", "a: float = 1.0,"),
    ("gated_adamw", "weight_decay: float = 0.0,", "weight_decay: float = 0.01,"),
    ("gated_adamw", 'decay: str = "lr",', 'decay: str = "eta",'),
    ("gated_adamw", "tangent: bool = True,", "tangent: bool = False,"),
    ("gated_adamw", 'nonfinite: str = "raise",', 'nonfinite: str = "off",'),
    ("gated_adamw", "self.param_groups.pop()  # the optimizer is as it was", "pass"),
    ("gated_adamw", "with torch.enable_grad():", "if True:"),
    ("gated_adamw", "        if go is False:\n            return\n", ""),
    ("paths", "dtype = torch.float64 if slot.p.dtype == torch.float64 else torch.float32", "dtype = slot.p.dtype"),
    ("paths", "torch.zeros((), dtype=torch.float32, device", "torch.zeros((), device"),
    ("paths", "1 if mask is None else mask)", "1)"),
    ("paths", "int(slot.count.item()) + 1", "int(slot.count.item())"),
    ("gated_adamw", "if p.dtype in (torch.bfloat16, torch.float16):", "if False:"),
    ("gated_adamw", '"eps_gate", e["eps_gate"]) for n, p, e in kept', '"eps_gate", e["eps_gate"]) for n, p, e in ()'),
    ("gated_adamw", 'isinstance(one[0]["eps_gate"], AutoGate))', 'callable(one[0]["eps_gate"]))'),
    ("groups", '        group["eps_gate"] = AutoGate()', "        pass"),
    ("groups", 'group["unit_dim"] = int(group["unit_dim"])', "pass"),
    ("groups", '({"eps_gate": AutoGate()} if _is(group["eps_gate"], "auto") else {})', "{}"),
    ("paths", "if not all(map(is_, self._written, (*_SETTINGS(group), *_RARE(group)))):", "if False:"),
    ("paths", "        self._accept(group, first)\n        self._settings", "        self._settings"),
    ("paths", "(*_SETTINGS(group), *_RARE(group))\n", "_SETTINGS(group)\n"),
    ("paths", "isinstance(value, Tensor) and value.numel() == 1", "isinstance(value, Tensor)"),
    ("gated_adamw", "if moment.shape != p.shape:", "if False:"),
    ("gated_adamw", '| {"_watch": self._watch, "diagnostics": self.diagnostics}', ""),
    ("gated_adamw", "                plan.release()\n", "                pass\n"),
    ("gated_adamw", "old[i].refresh(group, first, self.state)", "old[i].refresh(group, first, self.state) or True"),
    ("gated_adamw", "        self._watch.counted()\n", ""),
    # the plan: what it depends on
    ("paths", "if self._settings != self._settings_of(group, first):", "if False:"),
    ("paths", 'tuple(group.get("param_names") or ()), type(', "type("),
    ("paths", 'type(group["eps_gate"]), ', ""),
    ("paths", '"unit_dim", "tangent", "pmen",', '"tangent", "pmen",'),
    ("paths", '"unit_dim", "tangent", "pmen",', '"unit_dim", "tangent",'),
    ("paths", '"foreach", "fused", "capturable")', '"fused", "capturable")'),
    ("paths", '"foreach", "fused", "capturable")', '"foreach", "capturable")'),
    ("paths", "                if slot is not grad:\n                    return False\n", "                pass\n"),
    ("paths", "elif p is not slot.p or self._take", "elif self._take"),
    ("paths", "type(p), _address(w), w.dtype,", "type(p), w.dtype,"),
    ("paths", "w.shape, w.is_contiguous(), type(g)", "w.shape, type(g)"),
    ("paths", "g.dtype, g.device, g.is_contiguous(),", "g.dtype, g.device,"),
    ("paths", "_address(m), m.dtype, m.is_contiguous(), _address(v)", "_address(v)"),
    ("paths", "_address(v), v.dtype, v.is_contiguous(), _address(step)", "_address(step)"),
    ("paths", "v.is_contiguous(), _address(step),", "v.is_contiguous(),"),
    ("paths", "slot.w = slot.g = slot.m = slot.v = LATER", "slot.w = slot.g = slot.m = LATER"),
    ("paths", "slot.w = slot.g = slot.m = slot.v = LATER", "slot.w = slot.m = slot.v = LATER"),
    ("paths", "self._routes.get((masked, probed))", "self._routes.get((False, False))"),
    ("paths", "            elif group[\"fused\"]:\n", "            elif False:\n"),
    ("gated_adamw", "_dict(self) -> dict:\n        self._watch.settle()\n", "_dict(self) -> dict:\n"),
    # which way a tensor takes
    ("paths", 'eta = lr if group["decay"] == "lr" else lr / group["alpha"]', "eta = lr"),
    ("paths", 'decay=_scalar(eta * group["weight_decay"])', 'decay=_scalar(group["weight_decay"])'),
    ("paths", 'beta1=group["betas"][0], beta2=group["betas"][1]', 'beta1=group["betas"][1], beta2=group["betas"][0]'),
    ("paths", "length=1 if dim is None else p.shape[dim]", "length=1 if dim is None else p.shape[0]"),
    ("paths", "dim=None if dim is None else dim % p.ndim - p.ndim", "dim=None if dim is None else -1"),
    ("paths", "dim=None if dim is None else dim % p.ndim - p.ndim", "dim=dim"),
    ("paths", "-g if rule.maximize else g", "g"),
    ("paths", "if isinstance(eps_gate, Tensor) and len(bucket) > 1:", "if False:"),
    ("paths", "torch.stack([slot.eps_gate for slot in bucket])", "torch.stack([eps_gate for slot in bucket])"),
    ("paths", 'eps_gate=group["eps_gate"] if eps_gate is None', "eps_gate=1e-8 if eps_gate is None"),
    ("paths", 'transport=None if dim is None else group["transport"]', "transport=None"),
    ("paths", "slot.g.dtype, t, sharding", "slot.g.dtype, sharding"),
    ("paths", "torch.full((), slot.key, dtype", "torch.full((), first.key, dtype"),
    ("paths", "torch.where(mask, value.to(old.dtype), old)", "value"),
    ("paths", "rule._replace(dim=-1)", "rule"),
    ("paths", "x.contiguous().movedim(axis, -1) for x in tensors", "x.contiguous() for x in tensors"),
    ("paths", "new if rule.dim is None else new.movedim(-1, rule.dim)", "new"),
    ("paths", "sharding.global_index(slot.p, slot.region)", "sharding.global_index(slot.p)"),
    ("paths", "i != dim % len(shape)):", "i != dim):"),
    ("paths", "[slice(j, j + step) for j in range(0, n, step)]", "[slice(j, j + step - 1) for j in range(0, n, step)]"),
    ("paths", "        size = inner * step\n", ""),
    ("paths", "step -= step % even if step > even else 0", "pass"),
    ("paths", "_SHARE = 1 / 32", "_SHARE = 1 / 8"),
    ("paths", "(len(stacks[-1]) + 1) * math.prod(extent(piece)) > budget", "False"),
    ("paths", 'maximize=group["maximize"]', "maximize=False"),
    # gradients that are not finite
    ("fused", "all(abs(float(end)) < limit", "any(abs(float(end)) < limit"),
    ("fused", "all(abs(float(end)) < limit", "all(float(end) < limit"),
    ("nonfinite", "~(torch.stack(largest) < limits)", "(torch.stack(largest) >= limits)"),
    ("nonfinite", "slot.g if slot.g.numel() else slot.g.new_zeros(1) for slot", "slot.g for slot"),
    ("nonfinite", "good = finite(slots)", "good = True"),
    ("nonfinite", "not good and not below(slot.g, slot.limit)", "not below(slot.g, math.inf)"),
    ("nonfinite", "if good and all(slot.w is slot.p for slot in slots):", "if good:"),
    ("fused", "(not known or fused_cpu.finite(known)) and", ""),
    ("fused", "for slot in slots if slot.job is None)", "for slot in ())"),
    ("fused", "            slot.m.copy_(copy.m)\n", ""),
    ("fused_cpu", "slot.job.g = slot.g.data_ptr()", "pass"),
    ("fused_cpu", "= slot.g.data_ptr(), int(slot.t), None, None", "= job.g or slot.g.data_ptr(), int(slot.t), None, None"),
    ("paths", 'root / (1 + math.sqrt(p.shape[group["unit_dim"]]))', "root"),
    ("paths", "        return root\n", "        return math.inf\n"),
    ("nonfinite", "self.skipped += 1", "self.skipped += 0"),
    ("nonfinite", "                slot.step.sub_(1)\n", "                pass\n"),
    ("nonfinite", "t = 1 + int(first.step.item())", "t = int(first.step.item())"),
    ("nonfinite", "return anywhere == 0", "return anywhere != 0"),
    ("nonfinite", "first = slots[where[0]]", "first = slots[-1 - where[0]]"),
    # diagnostics
    ("diagnostics", '(d < rule.eps_gate).sum()', '(d > rule.eps_gate).sum()'),
    ("diagnostics", '(seen["raw"] == 0).sum()', '(seen["d"] == 0).sum()'),
    ("diagnostics", "(self._calls - 1) % self.every == 0", "self._calls % self.every == 0"),
    ("diagnostics", "scale[scale > 0].double().log10()", "scale[scale > 0].double().log()"),
    ("diagnostics", '"angle_mean": x["angle"] / rows', '"angle_mean": x["angle"] / n'),
    ("diagnostics", '"capped": x["capped"] / rows', '"capped": x["capped"] / n'),
    ("diagnostics", "del self.records[: -max(int(self.keep), len(totals))]", "pass"),
    # the kernel: its arguments, and its steps
    ("fused_cpu", "unit, unit and rule.tangent, rule.maximize,", "unit, unit, rule.maximize,"),
    ("fused_cpu", "rule.tangent, rule.maximize,", "rule.tangent, False,"),
    ("fused_cpu", 'pmen.reference == "row",', "True,"),
    ("fused_cpu", "w.shape[-1] if unit else 1", "w.shape[0] if unit else 1"),
    ("fused_cpu", '_WAYS = (None, "project", "parallel")', '_WAYS = (None, "parallel", "project")'),
    ("fused_cpu", "job.eps_gate = float(slot.eps_gate)", "job.eps_gate = job.eps_gate or float(slot.eps_gate)"),
    ("fused_cpu.cpp", "j.eps_gate > 0 ? j.eps_gate : r.eps_gate", "r.eps_gate"),
    ("fused_cpu.cpp", "eps_gate(eps), root_gate(std::sqrt(eps))", "eps_gate(eps), root_gate(std::sqrt(r.eps_gate))"),
    ("fused_cpu.cpp", "nm = A * p.total + B * q.total;", "nm = A * p.total - B * q.total;"),
    ("fused_cpu.cpp", "nm = A * p.total + B * q.total;", "nm = A * p.total;"),
    ("fused_cpu.cpp", "c = (A * ww + B * s.total) / norm", "c = (A * ww - B * s.total) / norm"),
    ("fused_cpu.cpp", "c = (A * ww + B * s.total) / norm", "c = A * ww + B * s.total"),
    ("fused_cpu.cpp", "radial = p.total / norm;", "radial = p.total;"),
    ("fused_cpu.cpp", "        if (!(1 + c > 1e-6)) return;\n", ""),
    ("fused_cpu.cpp", "along = (radial + nm) / (1 + c);", "along = (radial - nm) / (1 + c);"),
    ("fused_cpu.cpp", "ahead = along - 2 * radial;", "ahead = along - radial;"),
    ("fused_cpu.cpp", "a = along / norm + ahead * A", "a = along + ahead * A"),
    ("fused_cpu.cpp", "a = along / norm + ahead * A", "a = along / norm - ahead * A"),
    ("fused_cpu.cpp", "b = ahead * B;", "b = 0;"),
    ("fused_cpu.cpp", "if (r.transport == 1) carry(r, n, w, w, m, 1, 0, ww);", ""),
    ("fused_cpu.cpp", "if (r.transport == 1) carry", "if (r.transport) carry"),
    ("fused_cpu.cpp", "    if (r.transport) carry(r, n, w, z, m, A, B, ww);\n", ""),
    ("fused_triton", '_WAYS = (None, "project", "parallel")', '_WAYS = (None, "parallel", "project")'),
    ("fused_triton", "m = m - new * tl.sum(new * m, 0)", "m = m - w * tl.sum(w * m, 0)"),
    ("fused_triton", "c = tl.sum(w * new, 0) / norm", "c = tl.sum(w * new, 0) * 0"),
    ("fused_triton", "r = tl.sum(w * m, 0) / norm", "r = 0.0"),
    ("fused_triton", "share = (r + tl.sum(new * m, 0)) / (1 + c)", "share = (r - tl.sum(new * m, 0)) / (1 + c)"),
    ("fused_triton", '(length != float("inf")) & (1 + c > 1e-6)', '(length != float("inf"))'),
    ("fused_triton", "moved = (tl.sum(tl.abs(whole), 0) * length != 0) &", "moved ="),
    ("fused_triton", "(2 * r - share) * new, m)", "(r - share) * new, m)"),
    ("fused_triton", "eps_gate = tl.load(EPS).to(tl.float32) if OWN else EPS", "eps_gate = 1e-8"),
    ("fused_triton", "rule.eps_gate if eps_gate is None else eps_gate", "rule.eps_gate"),
    ("fused_cpu.cpp", "if (j.t - 1 >= r.smgc_start)", "if (j.t >= r.smgc_start)"),
    ("fused_cpu.cpp", "std::sqrt((r.R - r.beta2) / (1 - r.beta2))", "std::sqrt((r.R - 1) / (1 - r.beta2))"),
    ("fused_cpu.cpp", "std::pow(r.beta2, j.t - 1)) * r.s_min", "std::pow(r.beta2, j.t)) * r.s_min"),
    ("fused_cpu.cpp", "j.t >= r.pmen_start && (j.t - r.pmen_start)", "(j.t - r.pmen_start)"),
    ("fused_cpu.cpp", "(j.t - r.pmen_start) % r.pmen_every == 0", "true"),
    ("fused_cpu.cpp", "1 / std::sqrt(j.d)", "1.0 / j.d"),
    ("fused_cpu.cpp", "std::sqrt((1 - r.beta1) / (1 + r.beta1))", "std::sqrt((1 + r.beta1) / (1 - r.beta1))"),
    ("fused_cpu.cpp", "bc1(1 - std::pow(r.beta1, j.t))", "bc1(1 - std::pow(r.beta2, j.t))"),
    ("fused_cpu.cpp", "bc2(1 - std::pow(r.beta2, j.t))", "bc2(1 - std::pow(r.beta1, j.t))"),
    ("fused_cpu.cpp", "jobs[j]->rows * jobs[j]->d, 1,", "jobs[j]->rows, 1,"),
    ("fused_cpu.cpp", "rest1 * (x - m0) + m0", "rest1 * (x - m0) - m0"),
    ("fused_cpu.cpp", "beta2 * v0 + rest2 * xx", "beta2 * v0 + rest1 * xx"),
    ("fused_cpu.cpp", "x = most(-bound, least(bound, x))", "x = least(bound, x)"),
    ("fused_cpu.cpp", "            xx = x * x;\n", ""),
    ("fused_cpu.cpp", "bound = clip * most(root(v0), all(floor))", "bound = clip * root(v0)"),
    ("fused_cpu.cpp", "root(v1) * root2 + eps_num", "root(v1) * root2"),
    ("fused_cpu.cpp", "whole = d + eps_gate;", "whole = d;"),
    ("fused_cpu.cpp", "whole = quick_root(d) * root_gate + d;", "whole = quick_root(d) * eps_gate + d;"),
    # what is compiled only where there is AVX-512
    ("simd.h", "better = (x - y * y) * (guess * 0.5f) + y;", "better = y;"),
    ("simd.h", "better = (x - y * y) * (guess * 0.5f) + y;", "better = (x - y * y) * guess + y;"),
    ("simd.h", "_mm512_fpclass_ps_mask(v, 0x1E)", "_mm512_fpclass_ps_mask(v, 0x06)"),
    ("simd.h", "_mm512_fpclass_ps_mask(v, 0x1E)", "_mm512_fpclass_ps_mask(v, 0x18)"),
    ("simd.h", "return (a - y * least(all(1e38f), b)) * guess + y;", "return y;"),
    ("simd.h", "y * least(all(1e38f), b)", "y * b"),
    ("fused_cpu.cpp", "one_a(1 - r.a)", "one_a(r.a)"),
    ("fused_cpu.cpp", "scale = -now.noise * now.bc1", "scale = -now.noise"),
    ("fused_cpu.cpp", "scale = -now.noise * now.bc1", "scale = now.noise * now.bc1"),
    ("fused_cpu.cpp", ": s <= tau ? all(1)", ": s < tau ? all(1)"),
    ("fused_cpu.cpp", "sign * product.total / std::max(ww, 1e-12)", "product.total / std::max(ww, 1e-12)"),
    ("fused_cpu.cpp", "(sign * at.load(g + i) - radial * y,", "(sign * at.load(g + i) + radial * y,"),
    ("fused_cpu.cpp", "step = -r.lr / now.bc1;", "step = -r.lr;"),
    ("fused_cpu.cpp", "if (uu < 0.01 * zz) {", "if (false) {"),
    ("fused_cpu.cpp", "along = norm * (1 + step * k - r.decay)", "along = norm * (1 + step * k + r.decay)"),
    ("fused_cpu.cpp", "A = (1 - r.decay) / length", "A = 1 / length"),
    ("fused_cpu.cpp", "across * cap.cos > along * cap.sin", "across > along * cap.sin"),
    ("fused_cpu.cpp", "B = step * cap.sin / across;", "B = -step * cap.sin / across;"),
    ("fused_cpu.cpp", "A = cap.cos / norm - B * k;", "A = cap.cos / norm;"),
    ("fused_cpu.cpp", "length == 0 || length ==", "length =="),
    ("fused_cpu.cpp", "length == 0 || length == std::numeric_limits<double>::infinity()", "length == 0"),
    ("fused_cpu.cpp", "rest1 < 0.5f ?", "true ?"),
    ("fused_cpu.cpp", "x - beta1 * (x - m0)", "x - rest1 * (x - m0)"),
    ("fused_cpu.cpp", "if (ww == 0 || ((step == 0", "if (((step == 0"),
    ("fused_cpu.cpp", "(step == 0 || zz == 0) && r.decay == 0", "zz == 0 && r.decay == 0"),
    ("fused_cpu.cpp", "delta == 0 ? y : y + delta", "y + delta"),
    ("fused_cpu.cpp", "0x7FFFu + ((bits >> 16) & 1)", "0x7FFFu"),
    ("fused_cpu.cpp", "at, unused) - decay * y", "at, unused) + decay * y"),
    # ranks
    ("sharding", "device=piece.device) + start[dim]", "device=piece.device)"),
    ("sharding", "stride *= p.shape[dim]", "stride *= piece.shape[dim]"),
    ("sharding", "offset = offset * p.shape[dim] + start[dim]", "offset = offset * piece.shape[dim] + start[dim]"),
    ("sharding", "any(piece.shape[dim] != 1 for dim in range(cut[-1]))", "False"),
    ("sharding", "whole = all_sum(torch.cat(", "whole = (lambda x, _: x)(torch.cat("),
    ("sharding", "mesh.size(i) > 1 and wanted(x)", "mesh.size(i) > 1"),
    ("sharding", 'getattr(x, "dim", None) == dim % p.ndim', 'getattr(x, "dim", None) == dim'),
    ("sharding", "op=dist.ReduceOp.MAX, group=mesh.get_group(dim))", "op=dist.ReduceOp.MIN, group=mesh.get_group(dim))"),
    ("sharding", "if is_dtensor(p) and is_dtensor(g) and g.placements != p.placements:", "if False:"),
]  # fmt: skip


_OTHER = {
    ast.Add: [ast.Sub], ast.Sub: [ast.Add], ast.Mult: [ast.Div], ast.Div: [ast.Mult], ast.Pow: [ast.Mult],
    ast.Mod: [ast.FloorDiv], ast.RShift: [ast.LShift], ast.BitXor: [ast.BitOr], ast.BitAnd: [ast.BitOr],
    ast.BitOr: [ast.BitAnd], ast.And: [ast.Or], ast.Or: [ast.And], ast.Gt: [ast.GtE, ast.Lt], ast.Lt: [ast.LtE, ast.Gt],
    ast.GtE: [ast.Gt, ast.Lt], ast.LtE: [ast.Lt, ast.Gt], ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq],
}  # fmt: skip


def flips(source: str, names: list[str]) -> Iterator[tuple[str, str]]:
    """(what changed, the changed source) for every sign, operator, comparison and number in the functions ``names``."""
    tree = ast.parse(source)
    seen: Counter[str] = Counter()
    for function in [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name in names]:
        words = [x for x in ast.walk(function) if isinstance(x, (ast.Raise, ast.JoinedStr))]  # messages to the user
        words += [x.annotation for x in ast.walk(function) if isinstance(x, (ast.arg, ast.AnnAssign)) and x.annotation]
        words += [x.returns for x in ast.walk(function) if isinstance(x, ast.FunctionDef) and x.returns]
        left_out = {id(x) for word in words for x in ast.walk(word)}
        for node in [x for x in ast.walk(function) if id(x) not in left_out]:
            for change in _changes(node):
                old, before = dict(node.__dict__), ast.unparse(node)
                node.__dict__.update(change)
                what, text = f"{function.name}: {before} -> {ast.unparse(node)}", ast.unparse(tree)
                node.__dict__.update(old)
                seen[what] += 1
                yield what + (f" ({seen[what]})" if seen[what] > 1 else ""), text


def _changes(node: ast.AST) -> list[dict]:
    """The changed fields of each mutation of a node."""
    if isinstance(node, (ast.BinOp, ast.BoolOp)):
        return [{"op": other()} for other in _OTHER.get(type(node.op), [])]
    if isinstance(node, ast.Compare):
        return [{"ops": [other(), *node.ops[1:]]} for other in _OTHER.get(type(node.ops[0]), [])]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return [{"op": ast.UAdd()}]
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return [{"value": node.value + 1 if type(node.value) is int else 1.5 * node.value or 1.0}]
    return []


def mutants() -> Iterator[tuple[str, str, str]]:
    """(file, what changed, the changed source)."""
    for name, old, new in MUTANTS:
        text = source(name).read_text()
        if text.count(old) != 1:
            raise SystemExit(f"{name}: this must stand there once, it does {text.count(old)} times: {old!r}")
        yield name, f"{name}: {old!r} -> {new!r}", text.replace(old, new)
    for name, functions in FLIPPED.items():
        for what, text in flips(source(name).read_text(), functions):
            yield name, f"{name}.{what}", text


def source(name: str, root: Path = ROOT) -> Path:
    file = name if "." in name else f"{name}.py"
    return root / "ngpt_core" / (file if name in ("sphere", "checks", "simd.h") else f"optim/{file}")


def copy_project(to: Path) -> None:
    for name in ("ngpt_core", "tests", "README.md", "pyproject.toml"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
        else:
            shutil.copy(ROOT / name, to / name)
    with (to / "tests" / "conftest.py").open("a") as file:  # always the same examples; a failure need not be made small
        phases = "(hypothesis.Phase.explicit, hypothesis.Phase.generate)"
        file.write(f"\nhypothesis.settings.register_profile('m', deadline=None, derandomize=True, phases={phases})\n")
        file.write("hypothesis.settings.load_profile('m')\n")
    compileall.compile_dir(to, quiet=1)


def stages(name: str) -> Iterator[tuple[list[str], str]]:
    """(tests, pytest's -k) for a file, those that notice most first."""
    tests = TESTS.get(name, PLAIN)
    if MOST[0] in tests:
        yield tests[: tests.index(MOST[-1]) + 1], ""
        yield SHORT
    yield tests, ""


def fate_of(folder: Path, name: str) -> str:
    """The fate of the mutant that is in the folder now."""
    found = (verdict(folder, tests, only=only) for tests, only in stages(name))
    return next((fate for fate in found if fate != "SURVIVED"), "SURVIVED")


def verdict(folder: Path, tests: list[str], limit: int = 240, only: str = "") -> str:
    """Run the tests (``only`` those that pytest's -k selects) in a child that has torch already."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1), os.dup2(sink, 2)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join((str(folder), str(folder / "tests")))  # for the processes that tests start
        sys.path[:0] = [str(folder), str(folder / "tests")]
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))  # on a busy machine, time that others use does not count
        signal.alarm(max(600, limit))  # ranks that wait for each other use no CPU time
        gc.disable()  # it would touch, and so copy, all memory of the parent
        import pytest

        names = [str(folder / "tests" / name) for name in dict.fromkeys(tests)]
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "-k", only, *names])))
    status = os.waitpid(child, 0)[1]
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # the ranks that it started
    if os.waitstatus_to_exitcode(status) == 5:
        raise SystemExit(f"pytest finds none of these tests, -k {only!r}: {tests}")
    return "SURVIVED" if status == 0 else "hangs" if os.WIFSIGNALED(status) else "killed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="run only the mutants whose description holds all of these")
    parser.add_argument("--fresh", action="store_true", help="forget what an interrupted run has found")
    args = parser.parse_args()
    sys.dont_write_bytecode = True  # a mutant may have the size and the second of the file before it
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    import einops  # noqa: F401
    import hypothesis.strategies  # noqa: F401  (everything heavy is imported once, in the parent, for all children)
    import pytest  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.profiler

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    chosen = [m for m in mutants() if all(w in m[1] for w in args.words)]
    if args.fresh:
        PARTIAL.unlink(missing_ok=True)
    known = [json.loads(line) for line in PARTIAL.read_text().splitlines()] if PARTIAL.exists() else []
    version = {what: hashlib.sha256(text.encode()).hexdigest()[:16] for _, what, text in chosen}
    fates = {x["mutant"]: x["fate"] for x in known if x["fate"] != "SURVIVED" and version.get(x["mutant"]) == x["version"]}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        copy_project(folder)
        if not args.words and not known and verdict(folder, [t for tests in TESTS.values() for t in tests], 3600) != "SURVIVED":
            raise SystemExit("The tests fail without any mutation: there is nothing to learn from more.")
        print(f"{len(chosen)} mutants, {len(fates)} of them known to be killed", flush=True)
        for number, (name, what, text) in enumerate(chosen, 1):
            if what in EQUIVALENT:
                fates[what] = "SURVIVED"
            if what in fates:
                continue
            path = source(name, folder)
            original = path.read_text()
            path.write_text(text)
            Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)
            fates[what] = fate = fate_of(folder, name)
            path.write_text(original)
            with PARTIAL.open("a") as file:
                file.write(json.dumps({"version": version[what], "mutant": what, "fate": fate}) + "\n")
            print(f"{number:4d}/{len(chosen)}  {fate:8}  {what}", flush=True)
    gc.unfreeze()
    return report([m[1] for m in chosen], fates, whole=not args.words)


def report(chosen: list[str], fates: dict[str, str], whole: bool) -> int:
    lived = [what for what in chosen if fates[what] == "SURVIVED"]
    missed = [what for what in lived if what not in EQUIVALENT]
    for what in missed:
        print(f"  survived  {what}")
    killed = len(chosen) - len(lived)
    score = {"mutants": len(chosen), "killed": killed, "equivalent": len(lived) - len(missed), "survived": missed}
    print(f"{killed} of {len(chosen)} mutants killed, {len(lived) - len(missed)} equivalent, {len(missed)} survived.")
    if whole:
        score["score"] = round(killed / (killed + len(missed)), 4)
        RESULT.write_text(json.dumps(score, indent=1) + "\n")
        if not missed:
            PARTIAL.unlink(missing_ok=True)
    return len(missed)


if __name__ == "__main__":
    raise SystemExit(main())
