"""What do layouts of the ladder need on H100 cards? Writes layouts.json, which chapter 11 draws.

    OMP_NUM_THREADS=1 python book/ngpt_book/data/make_layouts.py     (about two minutes of one core)

The planner's memory (GiB) and step time (seconds) of one rank, kind by kind, at the ladder's batch of 512 sequences of 8192
tokens in bf16, with documents of 2000 tokens on average and one replica. Keys: preset, GPUs, expert parallelism,
checkpointing, micro-batch.
"""

import json
from dataclasses import replace
from pathlib import Path

from ngpt_core.gpus import GIB
from ngpt_core.presets import LADDER, preset
from ngpt_core.tools.layout import memory, seconds
from ngpt_core.train.config import TrainConfig, run_defaults

FILE = Path(__file__).with_name("layouts.json")
GPU = "h100-80gb"
GPUS_TRIED, EXPERT_PARALLEL, ROWS = (8, 16, 32, 64, 128, 256, 512), (1, 8), (1, 2, 4, 8)
HOWS = ("none", "selective", "full")


def layouts(name: str) -> dict[str, dict[str, dict[str, float]]]:
    model = preset(name)
    config = replace(TrainConfig.from_dict(run_defaults(model)), precision="bf16")
    found = {}
    for gpus in GPUS_TRIED:
        for P in EXPERT_PARALLEL:
            for how in HOWS:
                for rows in (n for n in ROWS if n * gpus <= config.batch_size):
                    layout = replace(config, expert_parallel=P, activation_checkpointing=how, micro_batch=rows)
                    need, spent = memory(model, layout, gpus, gpu=GPU), seconds(model, layout, gpus, GPU)
                    found[f"{gpus} {P} {how} {rows}"] = {
                        "memory": {kind: round(size / GIB, 3) for kind, size in vars(need).items()},
                        "seconds": {kind: float(f"{s:.4g}") for kind, s in spent.items()},
                    }
    return found


if __name__ == "__main__":
    found = {}
    for name in LADDER:
        found[name] = layouts(name)
        print(name, len(found[name]), flush=True)
    FILE.write_text(json.dumps(found, separators=(",", ":")) + "\n")
