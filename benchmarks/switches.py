"""What do the switches that the paper leaves open do in a small run, and what do they cost?

    OMP_NUM_THREADS=1 python benchmarks/switches.py [--steps 100] [--seeds 3] [--out FILE]     (finished runs are not repeated)

Each row is the preset `pico` on the embedded corpus, 512 tokens per step, with the numbers of ``recipe.scaled`` and one change.
``loss`` is the mean training loss of the last tenth of the steps, one number per seed. Weights and batches of a seed are the
same in every row, so ``difference`` compares seed by seed: the mean of (row - default), and its standard deviation over the
seeds. A mean below its deviation decides nothing. Small runs of a small model: they show that a switch works and what it does
here, not whether it is worth having at 1B.

``cost`` is the CPU time of an optimizer step on pico's tensors over that of the default, interleaved, median of the rounds.
"""

import argparse
import json
import math
import re
import statistics
from pathlib import Path

import torch
from timing import interleaved, machine, ratio

import ngpt_core as ng
from ngpt_core.data.corpus import embedded
from ngpt_core.data.loader import Loader

NUGPT = {name: getattr(ng.recipe.initialized(ng.preset("pico")), name) for name in ("alpha_init", "s_z_init")}
WARM = {"Residual[Mamba2].alpha": ng.recipe.Line("alpha", warmup=True)}
# name -> (changes of the config, arguments of recipe.scaled, changes of the recipe)
SWITCHES: dict[str, tuple[dict, dict, dict]] = {
    "default": ({}, {}, {}),
    "eps_gate: median": ({}, {}, {"eps_gate": ng.AutoGate(0.5, every=20)}),
    "eps_gate: 90% quantile": ({}, {}, {"eps_gate": ng.AutoGate(0.9, every=20)}),
    "eps_gate: median, C doubled": ({}, {}, {"eps_gate": ng.AutoGate(0.5, every=20), "C": 0.48}),
    "C doubled": ({}, {}, {"C": 0.48}),
    "eps_gate: function, 1e-6 to 1e-8": ({}, {}, {"eps_gate": lambda t, group: 10 ** -(6 + 2 * min(1.0, t / 100))}),
    "transport: project": ({}, {}, {"transport": "project"}),
    "transport: parallel": ({}, {}, {"transport": "parallel"}),
    "PMEN: input embedding only": ({}, {}, {"pmen_embeddings": (True, False)}),
    "PMEN: output embedding only": ({}, {}, {"pmen_embeddings": (False, True)}),
    "PMEN: embeddings with tau = 0": ({}, {}, {"pmen_embeddings": ng.PMEN(tau=0.0)}),
    "PMEN: tau = 0": ({}, {}, {"pmen": ng.PMEN(tau=0.0)}),
    "warmup: alpha of Mamba too": ({}, {}, {"warmup": "group", "lines": WARM}),
    "warmup: the paper's": ({}, {}, {"warmup": "group"}),
    "warmup: one for all, then decay": ({}, {}, {"warmup": "before"}),
    "dt unscaled": ({"scale_dt": False}, {}, {}),
    "vectors s_mamba and s_moe": ({"vector_s_mamba": True, "vector_s_moe": True}, {}, {}),
    "q = 0.5, positive s_z": ({"lgp_q": 0.5}, {}, {}),
    "q = 0.5, power form": ({"lgp_q": 0.5, "lgp_form": "power"}, {}, {}),
    "rule: nugpt, rates only": ({}, {"rule": "nugpt"}, {}),
    "rule: nugpt, with its initialization": (NUGPT, {"rule": "nugpt"}, {}),
    "rule: hyperp": ({}, {"rule": "hyperp"}, {}),
    "rule: paper": ({}, {"rule": "paper"}, {}),
}


def train(name: str, seed: int, steps: int) -> float:
    change, arguments, settings = SWITCHES[name]
    torch.manual_seed(seed)
    model = ng.LanguageModel(ng.preset("pico", **change))
    numbers = ng.recipe.scaled(model, steps, **arguments, **settings)
    optimizer, schedule = ng.recipe.build(model, steps, numbers)
    loader = Loader([(embedded(), 1.0)], batch_size=8, seq_len=64, seed=seed)
    losses = []
    for _ in range(steps):
        batch = loader.next()
        loss = model.loss(batch.tokens, batch.targets, batch.documents)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        model.update_router_bias(model.stats["load"])
        losses.append(float(model.stats["cross_entropy"]))
    model.check()
    return round(statistics.mean(losses[-math.ceil(steps / 10) :]), 4)


def difference(losses: list[float], default: list[float]) -> list[float] | None:
    """[mean, standard deviation] of the differences, seed by seed."""
    gaps = [a - b for a, b in zip(losses, default)]
    if len(gaps) < 2 or losses is default:
        return None
    return [round(statistics.mean(gaps), 3), round(statistics.stdev(gaps), 3)]


def cost(rounds: int) -> dict[str, float]:
    steps = {}
    for name in ("default", "eps_gate: median", "transport: project", "transport: parallel"):
        torch.manual_seed(0)
        optimizer, _ = ng.recipe.build(ng.LanguageModel(ng.preset("pico")), 1000, **SWITCHES[name][2])
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = 1e-3 * torch.randn_like(p)
        steps[name] = lambda optimizer=optimizer: optimizer.step()  # the schedule's wrapper of step holds no optimizer
    seconds = interleaved({name: lambda step=step: [step() for _ in range(20)] for name, step in steps.items()}, rounds)
    return {name: round(ratio(seconds, name, "default"), 3) for name in steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "switches.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    old = json.loads(args.out.read_text()) if args.out.exists() else {}
    found = old.get("loss", {}) if old.get("steps") == args.steps else {}
    gaps: dict[str, list[float] | None] = {}
    record = {"machine": machine(), "preset": "pico", "steps": args.steps, "cost": cost(21), "loss": found, "difference": gaps}
    print(record["cost"], flush=True)
    for name in SWITCHES:
        losses = found.setdefault(name, [])
        losses += [train(name, seed, args.steps) for seed in range(len(losses), args.seeds)]
        gaps[name] = difference(losses, found["default"])
        text = re.sub(r"\[\s+([^][]*?)\s+\]", lambda x: f"[{' '.join(x[1].split())}]", json.dumps(record, indent=1))
        args.out.write_text(text + "\n")  # a list on one line
        print(f"{name:38} {losses} {gaps[name] or ''}", flush=True)


if __name__ == "__main__":
    main()
