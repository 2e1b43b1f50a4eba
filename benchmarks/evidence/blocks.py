"""Which blocks does a trained model use? The held-out loss when one block is left out, block by block.

    python benchmarks/evidence/blocks.py [--runs runs/evidence]          appends to results/blocks.jsonl

This covers every run of the dense comparisons with a folder that still exists; only the runs' numbers are kept permanently. A
block is left out by making its step zero: alpha = 0 in nGPT (h does not move), an output of zero in GPT. For nGPT's attention
layers, also the largest |s_qk|: the softmax sees cosines times sqrt(d_k) s_qk^2.
"""

import argparse
import json
from pathlib import Path

import library
import torch
from analyse import comparisons, read, tuning
from runner import HERE, LENGTH
from study import SEEDS
from torch import nn

import ngpt_core as ng
from ngpt_core.nn.attention import Attention
from ngpt_core.nn.residual import Residual
from ngpt_core.train.evaluate import evaluate
from ngpt_core.train.world import World

TABLE = HERE / "results" / "blocks.jsonl"
WINDOWS = 400


def loss(model: nn.Module) -> float:
    return evaluate(model, [(library.corpus(), 1.0)], WINDOWS, 16, LENGTH, World(torch.device("cpu"))).loss


@torch.no_grad()
def without(model: nn.Module, block: Residual) -> float:
    """The held-out loss of the model with that block's step left out."""
    output = "o_proj" if isinstance(block.mixer, Attention) else "down"
    weight = getattr(block.mixer, output) if block.alpha is None else block.alpha.weight
    kept = weight.clone()
    weight.zero_()
    found = loss(model)
    weight.copy_(kept)
    return found


def s_qk(model: nn.Module) -> list[float]:
    mixers = [block.mixer for block in model.blocks if isinstance(block.mixer, Attention)]
    return [round(float(mixer.s_qk().detach().abs().max()), 2) for mixer in mixers if mixer.s_qk is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/evidence"))
    folder = parser.parse_args().runs
    torch.set_num_threads(1)
    done = {json.loads(line)["name"] for line in TABLE.read_text().splitlines()} if TABLE.exists() else set()
    rows = read()
    betas = {side: x["best"]["betas"] for side, x in tuning(rows).items()}
    mine = {(f["model"], side, f["steps"], str(f["recipes"][side])) for f in comparisons(rows, betas) for side in betas}
    for row in rows:
        export = folder / row["name"] / "export"
        wanted = (row["model"], row["side"], row["steps"], str(row["recipe"])) in mine and row["model"].startswith("dense")
        wanted = wanted and row["batch"] is None and row["seed"] in SEEDS
        if not wanted or row["name"] in done or not export.exists():
            continue
        model = ng.load(export).eval()
        whole = loss(model)
        costs = [round(without(model, block) - whole, 4) for block in model.blocks]
        with TABLE.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": row["name"], "costs": costs, "s_qk": s_qk(model)}) + "\n")
        print(f"{row['name']:<44} {row['val_loss']}  {costs}", flush=True)


if __name__ == "__main__":
    main()
