"""What happens to a small Llama on the sphere? Writes foreign.json, which chapter 12 prints.

    OMP_NUM_THREADS=1 python book/ngpt_book/data/make_foreign.py     (15 minutes of one core; finished runs are not repeated)

transformers' Llama of 0.13M parameters on the embedded corpus, steps of 8 x 128 bytes. Each way to train it gets the rates
below on seed 0; the best of them then runs on seeds 1 and 2. Stored: the held-out loss over 64 windows.

    adamw    torch's AdamW, betas 0.9 and 0.95, decay 0.1, warmup over 10%, then cosine
    muon     torch's Muon for the matrices of the blocks, and the best AdamW above for the rest; the same schedule
    swap     GatedAdamW with the numbers of that AdamW: a one-line swap, no geometry
    rows     recipe.groups_for: unit rows, log decay, beta1 and warmup as recipe.scaled gives them for this length
    free     the same, but the output matrix keeps its lengths, with LGP through them (ng.lgp_cross_entropy)
"""

import json
from pathlib import Path

import torch
from torch import nn

import ngpt_core as ng
from ngpt_core.data.corpus import embedded
from ngpt_core.data.loader import Loader

FILE = Path(__file__).with_name("foreign.json")
ADAMW = dict(betas=(0.9, 0.95), weight_decay=0.1)
RATES = {  # steps -> way -> rates, or C for rows and free
    200: {
        "adamw": (7e-4, 2e-3, 6e-3, 2e-2),
        "muon": (5e-3, 2e-2, 5e-2, 0.1),
        "swap": (2e-3, 6e-3, 2e-2),
        "rows": (0.06, 0.12, 0.24, 0.48),
        "free": (0.06, 0.12, 0.24, 0.48),
    },
    600: {"adamw": (7e-4, 2e-3, 6e-3, 2e-2), "muon": (2e-2, 5e-2, 0.1, 0.2), "rows": (0.24,)},
}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=128, bos_token_id=0, eos_token_id=0, **sizes))


Trained = list[tuple[torch.optim.Optimizer, ng.Schedule]]


def trainers(model: nn.Module, steps: int, way: str, rate: float, adamw: float) -> Trained:
    """The optimizers of one way to train it, with their schedules."""
    if way in ("rows", "free"):
        betas = ng.recipe.scaled(ng.preset("pico", d_model=64), steps).betas
        axes = {"lm_head.weight": None} if way == "free" else None
        groups = ng.recipe.groups_for(model, axes=axes, C=rate, betas=betas, warmup="all")
        optimizer = ng.GatedAdamW(groups)
        return [(optimizer, ng.Schedule(optimizer, steps))]
    found: list[torch.optim.Optimizer]
    if way == "muon":
        inside = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
        rest = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "layers" in name)]
        found = [torch.optim.Muon(inside, lr=rate, weight_decay=0.1), torch.optim.AdamW(rest, lr=adamw, **ADAMW)]
    else:
        kind = torch.optim.AdamW if way == "adamw" else ng.GatedAdamW
        found = [kind(model.parameters(), lr=rate, **ADAMW)]
    return [(o, ng.Schedule(o, steps, "cosine", warmup="before")) for o in found]


def run(steps: int, way: str, rate: float, adamw: float, seed: int) -> float:
    torch.manual_seed(seed)
    model = llama()
    made = trainers(model, steps, way, rate, adamw)
    loader = Loader([(embedded(), 1.0)], batch_size=8, seq_len=128, seed=seed)

    def loss_of(batch) -> torch.Tensor:
        h = model.model(batch.tokens).last_hidden_state
        if way == "free":
            return ng.lgp_cross_entropy(h, model.lm_head.weight, batch.targets)
        return ng.linear_cross_entropy(h, model.lm_head.weight, batch.targets)

    for _ in range(steps):
        loss = loss_of(loader.next())
        for optimizer, _ in made:
            optimizer.zero_grad()
        loss.backward()
        if way in ("adamw", "muon", "swap"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in made:
            optimizer.step()
            schedule.step()
    held_out = Loader([(embedded(), 1.0)], batch_size=16, seq_len=128, split="val")
    with torch.no_grad():
        losses = [loss_of(held_out.next()).item() for _ in range(4)]
    return sum(losses) / len(losses)


def main() -> None:
    found = json.loads(FILE.read_text()) if FILE.exists() else {}

    def result(steps: int, way: str, rate: float, seed: int) -> float:
        key = f"{rate:g}/{seed}"
        runs = found.setdefault(str(steps), {}).setdefault(way, {})
        if key not in runs:
            runs[key] = round(run(steps, way, rate, best(steps, "adamw") if way == "muon" else 0.0, seed), 4)
            FILE.write_text(json.dumps(found, indent=1) + "\n")
            print(steps, way, key, runs[key], flush=True)
        return runs[key]

    def best(steps: int, way: str) -> float:
        return min(RATES[steps][way], key=lambda rate: result(steps, way, rate, 0))

    for steps, ways in RATES.items():
        for way in ways:
            for seed in (1, 2):
                result(steps, way, best(steps, way), seed)


if __name__ == "__main__":
    main()
