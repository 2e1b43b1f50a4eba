"""What happens while a model learns? Writes motion.json, which the training animations draw.

    OMP_NUM_THREADS=1 python book/ngpt_book/data/make_motion.py     (with CPython 3.11.7; four minutes of one core)

The smallest hybrid of chapter 9, GPT and nGPT on the same batches (seed 1), each with the numbers that its tuning found there,
trained by the package's Trainer on the evidence's text, the library of CPython 3.11.7. Recording does not change the runs:
their last held-out losses are stored with those that benchmarks/evidence has for the same flags. Stored, at some of the steps:

    loss      both      the held-out loss over 200 windows of text that is never trained on
    sample    both      what the model writes after "def ", with the same random numbers every time
    load      nGPT      the tokens of each expert in each layer, as multiples of the mean, averaged since the frame before
    scales    nGPT      how many coordinates have which sqrt(v_hat), in quarters of a decade, over all unit rows
    start     nGPT      the angle between each row of the query matrix and where it started, in degrees
    end       nGPT      the angle between it and where it will end
    turn      nGPT      the largest angle by which any of these rows turned in one step, and the cap of that step
"""

import argparse
import json
import math
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ngpt_core as ng
from ngpt_book.motion.codec import encode
from ngpt_core.data.corpus import Corpus
from ngpt_core.train.evaluate import evaluate
from ngpt_core.train.run import prepare
from ngpt_core.train.trainer import Trainer
from ngpt_core.train.world import World

FILE = Path(__file__).with_name("motion.json")
EVIDENCE = Path(__file__).parents[3] / "benchmarks" / "evidence"
STEPS, SEED, SEQUENCES, LENGTH = 2000, 1, 2, 128
RECIPE = {"gpt": ("lr=0.002", "betas=0.8,0.99"), "ngpt": ("C=0.12", "betas=0.6,0.99", "warmup=all")}  # chapter 9, numbers B
WINDOWS, LAST_WINDOWS = 200, 1000
QUERIES = "blocks.5.mixer.q_proj"

EVEN = range(25, STEPS + 1, 25)
AT = {  # the steps after which each is recorded
    "loss": (0, 5, 10, 15, 20, *EVEN),
    "sample": (0, 10, 25, 50, 75, 100, 150, *range(200, STEPS + 1, 100)),
    "load": (5, 10, 15, 20, *EVEN),
    "scales": (1, 2, 3, 5, 7, 10, 14, 19, *EVEN),
    "start": (*range(0, 250, 5), *range(250, STEPS + 1, 50)),
}
AT["end"] = AT["start"]
PROMPT, CONTINUED, TEMPERATURE = "def ", 150, 0.7


def trainer(which: str, data: Path, folder: str) -> Trainer:
    settings = {"out": f"{folder}/{which}", "data": (str(data),), "steps": STEPS, "batch_size": SEQUENCES, "seq_len": LENGTH}
    settings |= {"seed": SEED, "recipe": RECIPE[which], "scaled": False}
    run = prepare(settings, {"preset": "pico", "normalized": which == "ngpt"}, resume=False)
    torch.manual_seed(SEED)
    return Trainer(run, World(torch.device("cpu")), [(Corpus(data), 1.0)])


def held_out(model: ng.LanguageModel, data: Path, windows: int) -> float:
    return evaluate(model, [(Corpus(data), 1.0)], windows, 8, LENGTH, World(torch.device("cpu"))).loss


def written(model: ng.LanguageModel) -> str:
    prompt = torch.tensor([list(PROMPT.encode())])
    draw = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        found = model.eval().generate(prompt, CONTINUED, temperature=TEMPERATURE, generator=draw)
    model.train()
    return bytes(found[0].tolist()).decode("utf-8", "replace")


def angles(rows: torch.Tensor, to: torch.Tensor) -> np.ndarray:
    return torch.rad2deg(ng.sphere.angle(to.double(), rows.double() - to.double())).numpy()


def follow(which: str, data: Path, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """One run from its first step to its last: (what both sides have, what only nGPT has)."""
    made, normalized = trainer(which, data, folder), which == "ngpt"
    model, losses, samples, loads, scales, turns, caps = made.model, [], [], [], [], [], []
    queries = model.get_parameter(QUERIES)
    kept, since = [queries.detach().clone()], []
    losses.append(held_out(model, data, WINDOWS))
    samples.append(written(model))
    group = next(g for g in made.optimizer.param_groups if any(p is queries for p in g["params"]))
    for t in range(1, STEPS + 1):
        before, cap = queries.detach().clone(), group.get("cap")
        made.step(diagnose=normalized and t in AT["scales"])
        since.append(torch.stack([x / x.mean() for x in model.stats["load"]]))
        if normalized:
            turns.append(angles(queries.detach(), before).max())
            caps.append(math.degrees(cap))
            if t in AT["start"]:
                kept.append(queries.detach().clone())
            if t in AT["scales"]:
                seen, groups = made.optimizer.diagnostics, made.optimizer.param_groups
                scales.append(np.sum([r["histogram"] for r in seen.last if groups[r["group"]]["unit_dim"] is not None], 0))
            if t in AT["load"]:
                loads.append(torch.stack(since).mean(0).numpy())
                since = []
        if t in AT["loss"]:
            losses.append(held_out(model, data, WINDOWS))
        if t in AT["sample"]:
            samples.append(written(model))
        if t % 100 == 0:
            print(f"{which}: step {t}, held out {losses[-1]:.4f}", flush=True)
    last = held_out(model, data, LAST_WINDOWS)
    both = {"loss": [round(x, 4) for x in losses], "last": round(last, 4), "sample": samples}
    if not normalized:
        return both, {}
    model.check()
    used = np.flatnonzero(np.sum(scales, 0))
    first, stop = int(used[0]), int(used[-1]) + 1  # bin i lies between edges[i - 1] and edges[i]
    counts = np.array(scales)[:, first:stop]
    only = {
        "load": encode(np.array(loads)),
        "scales": {"edges": seen.edges[first - 1 : stop], "share": encode(counts / counts.sum(1, keepdims=True))},
        "start": encode(np.array([angles(w, kept[0]) for w in kept])),
        "end": encode(np.array([angles(w, kept[-1]) for w in kept])),
        "turn": encode(np.array(turns)),
        "cap": encode(np.array(caps)),
    }
    return both, only


def stored_loss(which: str) -> float:
    """The held-out loss of the same flags in the table of benchmarks/evidence."""
    import runner

    recipe = dict(item.split("=") for item in RECIPE[which])
    recipe = {name: value if name in ("betas", "warmup") else float(value) for name, value in recipe.items()}
    name = runner.Job("hybrid-0.2M", which, STEPS, SEED, recipe).name
    return next(row["val_loss"] for row in map(json.loads, runner.TABLE.read_text().splitlines()) if row["name"] == name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    sys.path.insert(0, str(EVIDENCE))
    import library

    torch.set_num_threads(1)
    data = library.corpus().folder
    about = {
        "command": "python book/ngpt_book/data/make_motion.py", "seed": SEED, "steps": STEPS, "bytes": SEQUENCES * LENGTH,
        "recipe": RECIPE, "corpus": library.CHECKSUM, "python": platform.python_version(), "torch": torch.__version__,
        "prompt": PROMPT, "temperature": TEMPERATURE, "windows": WINDOWS, "matrix": QUERIES,
    }  # fmt: skip
    found: dict[str, Any] = {"about": about, "at": {name: list(steps) for name, steps in AT.items()}}
    with tempfile.TemporaryDirectory() as folder:
        for which in ("gpt", "ngpt"):
            found[which], only = follow(which, data, folder)
            found |= only
            found[which]["evidence"] = stored_loss(which)
            print(f"{which}: {found[which]['last']} here, {found[which]['evidence']} in the evidence", flush=True)
    FILE.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{FILE.name}: {FILE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
