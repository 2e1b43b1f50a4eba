"""Would a test notice if a sign, an order or a constant of the optimizer were wrong? One mutation at a time, on a copy.

    python benchmarks/mutate_optim.py [words of the mutations to run]

Each line of MUTANTS changes one place of one file; the tests of that file then run until the first failure. A mutant that no
test notices survives and is printed: a test is missing (or the line is not needed). Takes a few minutes.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLAIN = ["test_gated_adamw.py", "test_pmen.py", "test_smgc.py", "test_sphere.py"]
RANKS = ["test_optim_distributed.py"]
TESTS = {name: [f"test_{name}.py", *PLAIN] for name in ("smgc", "pmen", "sphere")} | {"sharding": RANKS}

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
    ("sphere", "return unit(h + alpha * (suggestion - h), dim)", "return h + alpha * (suggestion - h)"),
    ("sphere", "return unit(h + alpha * (suggestion - h), dim)", "return unit(h + alpha * suggestion, dim)"),
    ("sphere", "tangent(axis, a, dim), u)", "u, u)"),
    ("sphere", "return x.float() if x.dtype in", "return x if x.dtype in"),
    # the gate and Algorithm 1
    ("algorithm", "torch.sigmoid(a * torch.log(", "torch.sigmoid(-a * torch.log("),
    ("algorithm", "torch.sigmoid(a * torch.log(", "torch.sigmoid(torch.log("),
    ("algorithm", "torch.sigmoid(a * torch.log(", "torch.sigmoid(a * torch.log10("),
    ("algorithm", "return 1 / (1 + (eps_gate / torch.as_tensor(d)) ** a)", "return 1 / (1 + (eps_gate / torch.as_tensor(d)))"),
    ("algorithm", "(d / eps_gate) ** (1 - a)", "(d / eps_gate) ** (a - 1)"),
    ("algorithm", "(d / eps_gate) ** (1 - a)", "(d / eps_gate) ** a"),
    ("algorithm", "denominator = d + eps_gate *", "denominator = d - eps_gate *"),
    ("algorithm", "torch.where(denominator == 0, 0.0, m_hat / denominator)", "m_hat / denominator"),
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
    ("algorithm", "g = torch.where(on, growth_clip", "g = torch.where(~on, growth_clip"),
    ("algorithm", "            g = growth_clip(g, v, k, rule.beta2,", "            g = growth_clip(g, v, k, rule.beta1,"),
    ("algorithm", "            g = growth_clip(g, v, k, rule.beta2,", "            g = growth_clip(g, v, t, rule.beta2,"),
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
    ("algorithm", "psi = noise.profile(v.sqrt(), rule.pmen) * due", "psi = noise.profile(v.sqrt(), rule.pmen)"),
    ("algorithm", "psi = noise.profile(v.sqrt(), rule.pmen) * due", "psi = noise.profile(d, rule.pmen) * due"),
    ("algorithm", "psi = noise.profile(v.sqrt(), rule.pmen) * due", "psi = noise.profile(v, rule.pmen) * due"),
    ("algorithm", "delta = delta + size * (psi", "delta = delta - size * (psi"),
    ("algorithm", "delta = delta + size * (psi", "delta = size * (psi"),
    ("algorithm", "rule.pmen, rule.lr, rule.length, rule.beta1)", "rule.pmen, rule.lr, rule.length, rule.beta2)"),
    ("algorithm", "torch.hypot(along, uu.sqrt())", "along"),
    ("algorithm", "> rule.cap) & (length > 0)", "> rule.cap)"),
    ("algorithm", "over = (torch.atan2(length, along) > rule.cap)", "over = (length > rule.cap)"),
    ("algorithm", "sphere.turn(w, u, ww, length, rule.cap), new)", "sphere.turn(w, delta, ww, length, rule.cap), new)"),
    ("algorithm", "norm = torch.where(over, 1.0, norm)", "norm = norm"),
    ("algorithm", "(moved > 0) & (norm > 0), new / norm, w)", "(norm > 0), new / norm, w)"),
    ("algorithm", "(moved > 0) & (norm > 0), new / norm, w)", "(moved > 0), new / norm, w)"),
    ("algorithm", "(moved > 0) & (norm > 0), new / norm, w)", "(moved > 0) & (norm > 0), new, w)"),
    ("algorithm", "delta * delta, delta.abs())", "delta * delta, delta)"),
    ("algorithm", "scale = (v / bias_correction(rule.beta2, t)).sqrt()", "scale = v.sqrt()"),
    # Second-Moment Growth Clipping
    ("smgc", "math.sqrt(1 - beta2**k) * s_min if", "math.sqrt(1 - beta2 ** (k + 1)) * s_min if"),
    ("smgc", "math.sqrt(1 - beta2**k) * s_min if", "(1 - beta2**k) * s_min if"),
    ("smgc", "torch.sqrt(1 - beta2**k) * s_min", "torch.sqrt(1 + beta2**k) * s_min"),
    ("smgc", "torch.clamp_min(v.sqrt(), floor)", "v.sqrt() + floor"),
    ("smgc", "torch.clamp_min(v.sqrt(), floor)", "v.sqrt()"),
    ("smgc", "(R - beta2) / (1 - beta2)) * root", "(R - 1) / (1 - beta2)) * root"),
    ("smgc", "math.sqrt((R - beta2) / (1 - beta2)) * root", "(R - beta2) / (1 - beta2) * root"),
    ("smgc", "(R - beta2) / (1 - beta2)) * root", "(R - beta2)) * root"),
    ("smgc", "torch.clamp(g, -bound, bound)", "torch.clamp(g, max=bound)"),
    ("smgc", "rule(1 <= self.R", "rule(0 <= self.R"),
    ("smgc", "R: float = 100.0\n", "R: float = 10.0\n"),
    ("smgc", "s_min: float = 1e-10\n", "s_min: float = 1e-8\n"),
    ("smgc", "start: int = 500\n", "start: int = 0\n"),
    ("smgc", "R: float = 100.0, s_min: float = 1e-10)", "R: float = 10.0, s_min: float = 1e-10)"),
    ("smgc", "R: float = 100.0, s_min: float = 1e-10)", "R: float = 100.0, s_min: float = 1e-8)"),
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
    ("groups", "w * torch.rsqrt(ww)", "w / ww"),
    ("groups", "off = (ww - 1).abs() > rounding", "off = ww > 0"),
    ("groups", "off = (ww - 1).abs() > rounding", "off = (ww - 1).abs() > 1e3 * rounding"),
    ("groups", "asdict(v) if isinstance(v, (SMGC, PMEN)) else v", "v"),
    ("groups", '| saved\n', '\n'),
    ("groups", "all(0 <= b < 1 for b in betas)", "all(0 <= b <= 1 for b in betas)"),
    ("groups", "-p.ndim <= dim < p.ndim", "-p.ndim <= dim <= p.ndim"),
    ("groups", "type(dim) is int", "isinstance(dim, int)"),
    ("groups", "float(cap) >= 0", "True"),
    # the optimizer
    ("gated_adamw", 'betas: tuple[float, float] = (0.975, 0.975)', 'betas: tuple[float, float] = (0.9, 0.975)'),
    ("gated_adamw", 'betas: tuple[float, float] = (0.975, 0.975)', 'betas: tuple[float, float] = (0.975, 0.999)'),
    ("gated_adamw", "eps_gate: float = 1e-8,", "eps_gate: float = 1e-6,"),
    ("gated_adamw", "eps_num: float = 1e-14,", "eps_num: float = 1e-8,"),
    ("gated_adamw", "a: float = 0.5,", "a: float = 1.0,"),
    ("gated_adamw", "weight_decay: float = 0.0,", "weight_decay: float = 0.01,"),
    ("gated_adamw", 'decay: str = "lr",', 'decay: str = "eta",'),
    ("gated_adamw", "tangent: bool = True,", "tangent: bool = False,"),
    ("gated_adamw", 'nonfinite: str = "raise",', 'nonfinite: str = "off",'),
    ("gated_adamw", "self.param_groups.pop()  # as before", "pass"),
    ("gated_adamw", "with torch.enable_grad():", "if True:"),
    ("gated_adamw", "        if go is False:\n            return loss\n", ""),
    ("gated_adamw", "dtype = torch.float64 if slot.p.dtype == torch.float64 else torch.float32", "dtype = slot.p.dtype"),
    ("gated_adamw", "torch.zeros((), dtype=torch.float32, device", "torch.zeros((), device"),
    ("gated_adamw", "1 if mask is None or not group[\"capturable\"] else mask)", "1)"),
    ("gated_adamw", "int(slot.step.item()) + 1", "int(slot.step.item())"),
    ("gated_adamw", "if p.dtype in (torch.bfloat16, torch.float16) and n", "if False and n"),
    ("gated_adamw", '| {"_watch": self._watch, "diagnostics": self.diagnostics}', ""),
    ("gated_adamw", "require_fused(group, members, mask, probe)  # before anything", "pass  # before anything"),
    ("gated_adamw", "_dict(self) -> dict:\n        self._watch.settle()\n", "_dict(self) -> dict:\n"),
    # which way a tensor takes
    ("paths", 'eta = lr if group["decay"] == "lr" else lr / group["alpha"]', "eta = lr"),
    ("paths", 'decay=eta * group["weight_decay"]', 'decay=group["weight_decay"]'),
    ("paths", 'beta1=group["betas"][0], beta2=group["betas"][1]', 'beta1=group["betas"][1], beta2=group["betas"][0]'),
    ("paths", "length=1 if dim is None else p.shape[dim]", "length=1 if dim is None else p.shape[0]"),
    ("paths", "dim=None if dim is None else dim % p.ndim - p.ndim", "dim=None if dim is None else -1"),
    ("paths", "dim=None if dim is None else dim % p.ndim - p.ndim", "dim=dim"),
    ("paths", '-g if group["maximize"] else g', "g"),
    ("paths", "slot.g.dtype, t, sharding", "slot.g.dtype, sharding"),
    ("paths", "[index.new_full((), k) for k in keys]", "[index.new_full((), keys[0]) for k in keys]"),
    ("paths", "torch.where(mask, value.to(old.dtype), old)", "value"),
    ("paths", 'cap=number(rule.cap), maximize=group["maximize"]', 'cap=number(rule.cap), maximize=False'),
    # gradients that are not finite
    ("nonfinite", "math.isfinite(g.sum().item()) or bool(g.isfinite().all())", "math.isfinite(g.sum().item())"),
    ("nonfinite", "self.skipped += 1", "self.skipped += 0"),
    ("nonfinite", "                step.sub_(1)\n", "                pass\n"),
    ("nonfinite", "t = 1 + int(step.item())", "t = int(step.item())"),
    ("nonfinite", "return anywhere == 0", "return anywhere != 0"),
    ("nonfinite", "found.names[where[0]]", "found.names[-1 - where[0]]"),
    # diagnostics
    ("diagnostics", '(d < rule.eps_gate).sum()', '(d > rule.eps_gate).sum()'),
    ("diagnostics", '(seen["raw"] == 0).sum()', '(seen["d"] == 0).sum()'),
    ("diagnostics", "(self._calls - 1) % self.every == 0", "self._calls % self.every == 0"),
    ("diagnostics", "scale[scale > 0].double().log10()", "scale[scale > 0].double().log()"),
    ("diagnostics", '"angle_mean": x["angle"] / rows', '"angle_mean": x["angle"] / n'),
    ("diagnostics", '"capped": x["capped"] / rows', '"capped": x["capped"] / n'),
    ("diagnostics", "del self.records[: -self.keep]", "pass"),
    # ranks
    ("sharding", "device=piece.device) + start[dim]", "device=piece.device)"),
    ("sharding", "stride *= p.shape[dim]", "stride *= piece.shape[dim]"),
    ("sharding", "offset = offset * p.shape[dim] + start[dim]", "offset = offset * piece.shape[dim] + start[dim]"),
    ("sharding", "any(piece.shape[dim] != 1 for dim in range(cut[-1]))", "False"),
    ("sharding", "whole = all_sum(torch.cat(", "whole = (lambda x, _: x)(torch.cat("),
    ("sharding", "mesh.size(i) > 1 and wanted(x)", "mesh.size(i) > 1"),
    ("sharding", 'getattr(x, "dim", None) == dim % p.ndim', 'getattr(x, "dim", None) == dim'),
    ("sharding", "op=dist.ReduceOp.MAX, group=mesh.get_group(dim))", "op=dist.ReduceOp.MIN, group=mesh.get_group(dim))"),
    ("sharding", "if is_dtensor(p) and g.placements != p.placements:", "if False:"),
]  # fmt: skip


def copy(to: Path) -> None:
    for name in ("ngpt_core", "tests", "README.md", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
        else:
            shutil.copy(source, to / name)


def verdict(folder: Path, tests: list[str], limit: int = 600) -> str:
    """Run the tests in a child that has torch already."""
    child = os.fork()
    if child == 0:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1), os.dup2(sink, 2)
        os.chdir(folder)
        sys.path[:0] = [str(folder), str(folder / "tests")]
        signal.alarm(limit)
        import pytest

        names = [str(folder / "tests" / name) for name in dict.fromkeys(tests)]
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *names])))
    status = os.waitpid(child, 0)[1]
    return "SURVIVED" if status == 0 else "hangs" if os.WIFSIGNALED(status) else "killed"


def main(words: list[str]) -> int:
    sys.dont_write_bytecode = True  # a mutant may have the size and the second of the file before it
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    import hypothesis  # everything heavy is imported once, in the parent, for all children
    import pytest  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict

    torch.set_num_threads(1)
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # a failure is enough: it need not be made small
    hypothesis.settings.register_profile("mutants", phases=phases, database=None)
    hypothesis.settings.load_profile("mutants")
    chosen = [m for m in MUTANTS if all(any(w in part for part in m) for w in words)]
    survivors, began = [], time.time()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        copy(folder)
        if not words and verdict(folder, [*PLAIN, *RANKS]) != "SURVIVED":
            raise SystemExit("The tests fail without any mutation: there is nothing to learn from more.")
        for number, (name, old, new) in enumerate(chosen, 1):
            path = folder / "ngpt_core" / ("sphere.py" if name == "sphere" else f"optim/{name}.py")
            text = path.read_text()
            if text.count(old) != 1:
                raise SystemExit(f"{name}: this must stand there once, it does {text.count(old)} times: {old!r}")
            path.write_text(text.replace(old, new))
            fate = verdict(folder, TESTS.get(name, PLAIN))
            path.write_text(text)
            print(f"{number:4d}/{len(chosen)}  {fate:8}  {name}: {old!r} -> {new!r}", flush=True)
            if fate == "SURVIVED":
                survivors.append((name, old, new))
    print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} mutants killed in {time.time() - began:.0f} s.")
    for name, old, new in survivors:
        print(f"  survived  {name}: {old!r} -> {new!r}")
    return len(survivors)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
