"""Does the plan agree with the simulation, and how far does training scale? Writes benchmarks/results/cluster.json.

    python benchmarks/cluster.py [PART ...] [--again]     what is stored is not simulated again without --again

    agreement   ``ngpt plan`` against ``ngpt simulate``: memory and time of 36 layouts
    scaling     30B, 14B and 1B on 64, 512 and 4,096 ranks, simulated
    reach       the planned step of the three on 8 to 4,096 ranks: where scaling stops, and why

Nothing is measured on a GPU: both are models of H100 cards of 80 GB, eight to a node. Documents have 2,000 tokens on average,
sequences 8,192. The batch is the ladder's, 512 sequences; on 4,096 ranks, which are more, it is 4,096. One process, about half
an hour of CPU time.
"""

import json
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import ngpt_core as ng
from ngpt_core.gpus import GIB, GPUS
from ngpt_core.tools.layout import LAYOUT, fastest, memory, messages, seconds
from ngpt_core.tools.simulate import simulate
from ngpt_core.train.config import TrainConfig, run_defaults
from ngpt_core.train.flops import flops_per_token

RESULTS = Path(__file__).parent / "results" / "cluster.json"
GPU, DOCUMENTS = "h100-80gb", 2000
WAYS = (("1B", 8, 1, 1), ("1B", 16, 8, 2), ("7B", 32, 1, 1), ("7B", 64, 16, 1), ("30B", 64, 1, 1), ("30B", 64, 8, 2))
GRID = [  # preset, ranks, expert parallelism, replicas, checkpointing, micro-batch
    (*way, how, rows) for rows in (1, 2) for how in ("none", "selective", "full") for way in WAYS
]
SCALING = [(name, ranks) for name in ("30B", "14B", "1B") for ranks in (64, 512, 4096)]


def config_of(name: str, ranks: int, **settings: object) -> TrainConfig:
    config = TrainConfig.from_dict({**run_defaults(ng.preset(name)), "precision": "bf16", **settings})
    return replace(config, batch_size=max(config.batch_size, ranks))


def layout_of(name: str, ranks: int, P: int, R: int, how: str, rows: int) -> TrainConfig:
    """One layout with two micro-batches."""
    layout = {"expert_parallel": P, "replicas": R, "activation_checkpointing": how, "micro_batch": rows}
    return replace(config_of(name, ranks, **layout), batch_size=2 * ranks * rows)


def simulated(name: str, ranks: int, *layout: object) -> dict:
    found = simulate(ng.preset(name), layout_of(name, ranks, *layout), ranks, GPU, document_length=DOCUMENTS)
    return {
        "simulated": found.peak_bytes / GIB,
        "simulated_memory": {kind: size / GIB for kind, size in found.memory.items()},
        "simulated_seconds": found.seconds["total"],
    }


def planned(name: str, ranks: int, *layout: object) -> dict:
    model, config = ng.preset(name), layout_of(name, ranks, *layout)
    need = memory(model, config, ranks, DOCUMENTS, GPU)
    return {
        "planned": need.total / GIB,
        "planned_memory": {kind: size / GIB for kind, size in vars(need).items()},
        "planned_seconds": seconds(model, config, ranks, GPU, DOCUMENTS)["total"],
    }


def compared(table: dict) -> dict:
    """How far the plan is from the simulation, in percent."""
    found: dict = {"layouts": len(table)}
    for what, suffix in (("memory", ""), ("seconds", "_seconds")):
        off = {key: 100 * (row["planned" + suffix] / row["simulated" + suffix] - 1) for key, row in table.items()}
        found[what] = {"least": min(off.values()), "most": max(off.values()), "worst": max(off, key=lambda key: abs(off[key]))}
    return found


def scaling(name: str, ranks: int) -> dict:
    """The chosen layout of one model on this number of ranks, simulated."""
    model, config = ng.preset(name), config_of(name, ranks)
    best = fastest(model, config, ranks, GPU, set(), DOCUMENTS)
    assert best is not None
    found = simulate(model, best, ranks, GPU, document_length=DOCUMENTS)
    return {
        "batch": best.batch_size,
        "layout": {key: getattr(best, key) for key in LAYOUT},
        "memory": found.peak_bytes / GIB,
        "messages": {f"{c.op} {c.axis}": c.bytes / GIB for c in found.collectives},
        "total_messages": sum(c.bytes for c in found.collectives) / GIB,
        "seconds": found.seconds,
        "bound": found.bound,
        "mfu": found.mfu(),
        "mfu_bound": found.mfu(found.bound),
    }


def reach(name: str) -> dict:
    """The planned step on 8, 16, ... 4,096 ranks: at the ladder's batch, and beyond 512 ranks with one sequence for each."""
    model, rows = ng.preset(name), {}
    for ranks in (2**i for i in range(3, 13)):
        best = fastest(model, config_of(name, ranks), ranks, GPU, set(), DOCUMENTS)
        if best is None:  # it does not fit
            continue
        spent = seconds(model, best, ranks, GPU, DOCUMENTS)
        flops = best.batch_size * best.seq_len * flops_per_token(model, best.seq_len)
        rows[str(ranks)] = {
            "batch": best.batch_size,
            "layout": {key: getattr(best, key) for key in LAYOUT},
            "seconds": spent,
            "messages": sum(m.seconds for m in messages(model, best, ranks, GPUS[GPU])),
            "mfu": flops / (ranks * GPUS[GPU].peak * spent["total"]),
        }
    return rows


def stops(rows: dict) -> dict:
    """From which number of ranks on a step does not become shorter, and what else takes time then, apart from the operators?"""
    for ranks, more in pairwise(rows):
        spent = rows[ranks]["seconds"]
        if rows[more]["seconds"]["total"] > 0.95 * spent["total"]:
            break
    lost = {kind: spent[kind] / spent["total"] for kind in ("communication", "host", "optimizer")}
    return {"ranks": int(ranks), "sequences_per_rank": rows[ranks]["batch"] / int(ranks), "share": lost}


def main() -> None:
    again, parts = "--again" in sys.argv, [word for word in sys.argv[1:] if not word.startswith("-")]
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() and not again else {}
    jobs = {
        "agreement": [("{} {} EP{} R{} {} {}".format(*case), simulated, case) for case in GRID],
        "scaling": [("{} {}".format(*case), scaling, case) for case in SCALING],
        "reach": [(name, reach, (name,)) for name in ("30B", "14B", "1B")],
    }
    for part, cases in jobs.items():
        if parts and part not in parts:
            continue
        table = stored.setdefault(part, {})
        for number, (key, run, case) in enumerate(cases, start=1):
            if key not in table:
                begin = time.process_time()
                table[key] = rounded(run(*case))
                print(f"{part} {number}/{len(cases)} {key}: {time.process_time() - begin:.0f} s of CPU time", flush=True)
            if run is simulated:  # the plan may have changed since
                table[key] |= rounded(planned(*case))
            RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
        summary = {"compared": compared(table)} if part == "agreement" else {}
        summary |= {"stops": {key: stops(rows) for key, rows in table.items()}} if part == "reach" else {}
        stored |= rounded(summary)
        print(json.dumps(rounded(summary), indent=1))
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n")


def rounded(x: object) -> object:
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    return float(f"{x:.5g}") if isinstance(x, float) else x


if __name__ == "__main__":
    main()
