"""Which of the two learns faster at the smallest size that we have? A first look: one size, one budget, equal trials.

    python benchmarks/evidence/first_look.py          resumable: what is in results/first_look.jsonl is not run again

GPT and nGPT are the preset "pico" (the same blocks), trained on the embedded corpus with the same batches. Each side has six
trials on seed 0 (learning rate and schedule for GPT; C and betas for nGPT); the best of each is then trained on three other
seeds, and on shorter schedules for nGPT. One line of JSON a run, flushed.
"""

import json
import sys
import time
from pathlib import Path

import torch

import ngpt_core as ng
from ngpt_core.train.corpus import embedded
from ngpt_core.train.data import Loader

torch.set_num_threads(1)
RESULTS = Path(__file__).parent / "results" / "first_look.jsonl"
STEPS, BATCH, LENGTH, VALIDATION = 400, 8, 128, 24
TRIALS = {
    "gpt": [
        {"lr": 1e-3},
        {"lr": 2e-3},
        {"lr": 4e-3},
        {"lr": 8e-3},
        {"lr": 2e-3, "schedule": "cosine"},
        {"lr": 4e-3, "schedule": "cosine"},
    ],
    "ngpt": [{"C": C, "betas": betas} for betas in ([0.975, 0.975], [0.9, 0.95]) for C in (0.12, 0.24, 0.48)],
}


def mean_loss(model: ng.LanguageModel) -> float:
    loader = Loader([(embedded(), 1.0)], BATCH, LENGTH, split="val")
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for _ in range(VALIDATION):
            batch = loader.next()
            n = int((batch.targets != -100).sum())
            total, count = total + n * model.loss(batch.tokens, batch.targets, batch.documents).item(), count + n
    model.train()
    return total / count


def train(side: str, settings: dict, seed: int, steps: int) -> dict:
    torch.manual_seed(seed)
    model = ng.LanguageModel(ng.preset("pico", normalized=side == "ngpt"))
    settings = {key: tuple(value) if key == "betas" else value for key, value in settings.items()}
    optimizer, schedule = ng.recipe.build(model, steps, **settings)
    loader = Loader([(embedded(), 1.0)], BATCH, LENGTH, seed=seed)
    losses, start = [], time.process_time()
    for step in range(1, steps + 1):
        batch = loader.next()
        loss = model.loss(batch.tokens, batch.targets, batch.documents)
        optimizer.zero_grad()
        loss.backward()
        if side == "gpt":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if model.stats["load"]:
            model.update_router_bias(model.stats["load"])
        if step < steps:
            schedule.step()
        losses.append(model.stats["cross_entropy"].item())
    curve = [round(sum(losses[i : i + 20]) / len(losses[i : i + 20]), 4) for i in range(0, steps, 20)]
    return {"val_loss": round(mean_loss(model), 4), "curve": curve, "cpu_seconds": round(time.process_time() - start, 1)}


def main() -> None:
    done = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []

    def run(stage: str, side: str, settings: dict, seed: int, steps: int = STEPS) -> dict:
        key = {"stage": stage, "side": side, "settings": settings, "seed": seed, "steps": steps}
        for row in done:
            if all(row[k] == v for k, v in key.items()):
                return row
        row = {**key, **train(side, settings, seed, steps)}
        done.append(row)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row["stage"], side, settings, f"seed {seed}, {steps} steps: {row['val_loss']}", flush=True)
        return row

    if not done:
        about = {"corpus": embedded().checksum, "python": sys.version.split()[0], "torch": torch.__version__}
        done.append({"stage": "about", "side": "", "settings": {}, "seed": 0, "steps": 0, **about})
        RESULTS.write_text(json.dumps(done[0]) + "\n")
    best = {}
    for side, trials in TRIALS.items():
        rows = [run("tuning", side, settings, seed=0) for settings in trials]
        best[side] = min(rows, key=lambda row: row["val_loss"])["settings"]
    for seed in (1, 2, 3):
        for side in TRIALS:
            run("final", side, best[side], seed)
    for steps in (200, 280):
        for seed in (1, 2, 3):
            run("shorter", "ngpt", best["ngpt"], seed, steps)


if __name__ == "__main__":
    main()
