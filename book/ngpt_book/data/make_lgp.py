"""How does s_z move in a small run? Writes lgp.json, which chapter 3 draws.

    OMP_NUM_THREADS=1 python book/ngpt_book/data/make_lgp.py     (two minutes of one core; finished runs are not repeated)

A dense nGPT of 0.18M parameters on the embedded corpus, 1000 steps, twice: with the recipe's logarithmic decay, and with a
constant learning rate. Stored before every fifth step: the mean of s_z over all 256 bytes and over those that occurred in the
run ("seen"), the loss, and the norm of the gradient of all parameters except s_z, with LGP at q = 1. Without LGP it would be
mean(s_z) times as large: a dense model has no router with a balance loss that bypasses the head.
"""

import json
from pathlib import Path

import torch

import ngpt_core as ng
from ngpt_core.data.corpus import embedded
from ngpt_core.data.loader import Loader

STEPS, EVERY, FILE = 1000, 5, Path(__file__).with_name("lgp.json")
SCHEDULES = {"log decay": "log", "constant": lambda r: 1.0 + 0.0 * r}


def run(schedule) -> dict[str, list[float] | int]:
    torch.manual_seed(0)
    model = ng.LanguageModel(ng.preset("pico-dense", pattern="*-*-*-"))
    optimizer, scheduler = ng.recipe.build(model, STEPS, schedule=schedule)
    loader = Loader([(embedded(), 1.0)], batch_size=8, seq_len=128)
    seen = torch.zeros(256, dtype=torch.bool)
    steps, scales, losses, gradients = [], [], [], []
    for t in range(1, STEPS + 1):
        batch = loader.next()
        seen[batch.tokens.unique()] = True
        loss = model.loss(batch.tokens, batch.targets, batch.documents)
        optimizer.zero_grad()
        loss.backward()
        if t == 1 or t % EVERY == 0:
            others = [p.grad.norm() for name, p in model.named_parameters() if not name.startswith("head.s_z")]
            steps.append(t)
            scales.append(model.head.s_z().detach().clone())
            losses.append(loss.item())
            gradients.append(torch.stack(others).norm().item())
        optimizer.step()
        scheduler.step()
    model.check()
    s_z = torch.stack(scales)
    kept = {"step": steps, "mean": s_z.mean(1).tolist(), "seen": s_z[:, seen].mean(1).tolist()}
    kept |= {"loss": losses, "gradient": gradients}
    return {name: [float(f"{x:.4g}") for x in values] for name, values in kept.items()} | {"bytes_seen": int(seen.sum())}


if __name__ == "__main__":
    runs = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name, schedule in SCHEDULES.items():
        if name not in runs:
            runs[name] = run(schedule)
            FILE.write_text(json.dumps(runs, separators=(",", ":")) + "\n")
            print(f"{name}: mean of s_z {runs[name]['mean'][-1]}, loss {runs[name]['loss'][-1]}", flush=True)
