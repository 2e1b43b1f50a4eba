"""Where do the weights in the page come from? Two runs of ``ngpt train``, nGPT and its GPT twin, on the same batches.

    python book/ngpt_book/live/train.py [ngpt] [gpt] [--runs runs/live]      (with CPython 3.11.7; ten minutes of one core each)

Both are hybrids of 1.6 million parameters (1.0 million active) that read bytes. The text is the evidence's: the library of
CPython 3.11.7, 9.8 MB pinned file by file, of which a run sees a quarter, once, so nothing is memorized. Model and length are
the largest hybrid and the first budget of chapter 9. nGPT has the numbers of ``recipe.scaled``; GPT has those that its tuning
found there. Stop it at any time: the next call continues. Afterwards both models are quantized (pack.py) into
weights_ngpt.safetensors and weights_gpt.safetensors.
"""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import ngpt_core as ng
from ngpt_book.live import pack
from ngpt_core.data.corpus import Corpus
from ngpt_core.train.evaluate import evaluate
from ngpt_core.train.world import World

EVIDENCE = Path(__file__).parents[3] / "benchmarks" / "evidence"
MODEL = "--preset pico --d-model 136 --pattern MEMEM*EME --expert-ff 96 --shared-ff 192 --mamba-heads 8"
RUN = "--steps 2400 --batch-size 4 --seq-len 256 --seed 0 --compile"  # 2.5 million bytes
SIDES = {"ngpt": "--normalized", "gpt": "--baseline --no-scaled --recipe lr=0.001 betas=0.8,0.99"}
WATCH = "--eval-every 1200 --eval-windows 200 --diagnostics-every 0 --save-every 100 --no-tensorboard"
WINDOWS, LENGTH = 300, 256  # of the held-out text, for the losses that are stored with the weights


def train(which: str, folder: Path, data: Path) -> None:
    """The run of one of the two, from its start or from its last checkpoint."""
    command = [sys.executable, "-m", "ngpt_core", "train", "--data", str(data), "--out", str(folder)]
    command += shlex.split(f"{MODEL} {RUN} {WATCH} {SIDES[which]}")
    command += ["--resume"] if (folder / "config.json").exists() else []
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def loss(model: ng.LanguageModel, data: Path) -> float:
    """The held-out loss, in nats per byte."""
    return evaluate(model, [(Corpus(data), 1.0)], WINDOWS, 8, LENGTH, World(torch.device("cpu"))).loss


def facts(which: str, model: ng.LanguageModel, data: Path) -> dict[str, Any]:
    """What is stored with the weights."""
    rounded = ng.LanguageModel(model.config)
    rounded.load_state_dict(pack.dequantized(pack.quantized(model)))
    losses = {"val_loss": loss(model, data), "val_loss_int8": loss(rounded.eval(), data)}
    command = f"ngpt train {MODEL} {RUN} {SIDES[which]}"
    text = "the library of CPython 3.11.7"
    return {"command": command, "text": text, **{name: round(value, 4) for name, value in losses.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", metavar="ngpt|gpt")
    parser.add_argument("--runs", type=Path, default=Path("runs/live"))
    options = parser.parse_args()
    sys.path.insert(0, str(EVIDENCE))
    import library

    torch.set_num_threads(1)
    data = library.corpus().folder
    for which in options.which or SIDES:
        folder = options.runs / which
        train(which, folder, data)
        model = ng.load(folder / "export")
        print(pack.write(which, model, facts(which, model, data)), flush=True)


if __name__ == "__main__":
    main()
