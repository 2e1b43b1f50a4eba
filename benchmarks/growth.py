"""Does anything grow faster than its FLOPs? CPU time per token against width, length, experts and documents.

    python benchmarks/growth.py [--rounds 5] [--out benchmarks/results/growth.json]

Forward and backward of models with the blocks of `micro`, on one thread, the sizes of a row interleaved. The exponent is the
slope of log(CPU time per token) over log(size), fitted to the medians; beside it is that of the FLOPs per token. An exponent of
0 is a constant cost per token, as that of the scan should be over the length. With more experts, each has fewer tokens, so
reading its matrices and writing their gradients weighs more: the row below shows the same for the products only.
"""

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import step
import torch
from timing import interleaved, machine

import ngpt_core as ng
from ngpt_core.train.flops import flops_per_token

TOKENS = 2048  # of a batch, unless one sequence is longer


def work(T: int = 256, documents: int = 1, **fields: object) -> tuple[Callable[[], object], float, int]:
    """(one forward and backward pass, FLOPs per token, tokens)."""
    torch.manual_seed(0)
    config = ng.preset("micro", **fields)
    model, batch = ng.LanguageModel(config), max(1, TOKENS // T)
    x, y = torch.randint(0, config.vocab_size, (2, batch, T))
    ids = (torch.arange(T) * documents // T).expand(batch, T) if documents > 1 else None

    def once() -> None:
        model.zero_grad(set_to_none=True)
        model.loss(x, y, ids).backward()

    return once, flops_per_token(config, T), batch * T


def width(d: int) -> tuple[Callable[[], object], float, int]:
    return work(d_model=d, n_heads=d // 32, head_dim=32, mamba_heads=d // 16, expert_ff=d // 2, shared_ff=d)


def products(experts: int) -> tuple[Callable[[], object], float, int]:
    config = ng.preset("micro", pattern="EEE", n_experts=experts)
    step.B, step.T = TOKENS // 256, 256
    return step.products(config), flops_per_token(config, 256), TOKENS


ROWS: dict[str, tuple[Callable[[int], tuple[Callable[[], object], float, int]], Iterable[int]]] = {
    "width, M*E": (lambda d: width(d), (64, 128, 256, 512)),
    "length, only Mamba-2": (lambda T: work(T, pattern="MMM"), (128, 512, 2048, 8192)),
    "length, only attention": (lambda T: work(T, pattern="***"), (128, 512, 2048, 8192)),
    "experts, top 4": (lambda E: work(pattern="EEE", n_experts=E), (4, 16, 64, 128)),
    "experts, products alone": (products, (4, 16, 64, 128)),
    "documents, only Mamba-2": (lambda n: work(2048, n, pattern="MMM"), (1, 4, 16, 64, 256)),
    "documents, only attention": (lambda n: work(2048, n, pattern="***"), (4, 16, 64, 256)),
}


def slope(sizes: list[int], values: list[float]) -> float:
    x, y = [math.log(s) for s in sizes], [math.log(v) for v in values]
    mx, my = statistics.fmean(x), statistics.fmean(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    print(f"{'':28}{'exponent':>9}{'FLOPs':>8}   microseconds per token")
    for row in args.only:
        make, sizes = ROWS[row]
        made = {str(size): make(size) for size in sizes}
        seconds = interleaved({name: once for name, (once, _, _) in made.items()}, args.rounds, warmup=1)
        micros = [1e6 * statistics.median(seconds[name]) / tokens for name, (_, _, tokens) in made.items()]
        flops = [f for _, f, _ in made.values()]
        grown, expected = slope(list(sizes), micros), slope(list(sizes), flops)
        listed = "  ".join(f"{size}: {us:.1f}" for size, us in zip(sizes, micros))
        print(f"{row:28}{grown:9.2f}{expected:8.2f}   {listed}", flush=True)
        results[row] = {"exponent": round(grown, 3), "exponent_of_flops": round(expected, 3),
                        "microseconds_per_token": dict(zip(made, (round(us, 2) for us in micros)))}  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps({"machine": machine(), "rounds": args.rounds, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
