"""What does the whole recipe's optimizer step cost, next to torch's fused AdamW?

    python benchmarks/optim.py [--millions 30] [--d 1024] [--rounds 15] [--out FILE]

The same tensors for all: matrices of unit rows, float32, one row in a hundred without a gradient (PMEN works there).
    AdamW fused      torch.optim.AdamW(fused=True): seven streams at the speed of the memory
    whole recipe     GatedAdamW: tangent projection, SMGC, gate a = 0.5, PMEN, cap of one degree, Norm; with its default check
                     for nan and inf before anything changes (which reads the gradients once more)
    ... unchecked    the same with nonfinite="off", like AdamW
    plain a=1        GatedAdamW as AdamW: no geometry, nonfinite="off"
    reading g        torch.sum of every gradient: what one more reading costs by itself, beside the check's share
    readable         the whole recipe without the kernel (fused=False), nonfinite="off"; fewer rounds, because it is slow
    its operations   torch's operations of a piece of the readable path, each repeated by itself: its limit, without the Python
                     between them and with operands that are in the cache

A second table: the recipe of the preset `pico` (all its groups, 63 small tensors), where a step is short and what surrounds the
kernels shows. Each way makes 20 steps per round.

The limit is memory: a way moves at least BYTES per parameter (w, g, m, v read; w, m, v written; the check reads g once more).
Where all ways move about the same GB/s, none can be faster than the ratio of its bytes to AdamW's.

Time: one thread, see timing.py. Memory: the larger of two increases during a step, in units of the largest parameter: the peak
of torch's allocator, and the peak of the resident set (which includes memory that a kernel allocates itself, but not memory
that the process already held). Each way runs in a separate process.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from timing import allocated_above, by, interleaved, machine, peak_above, ratio
from torch.utils._python_dispatch import TorchDispatchMode

import ngpt_core as ng
from ngpt_core import sphere
from ngpt_core.optim import paths
from ngpt_core.optim.gated_adamw import GatedAdamW
from ngpt_core.optim.pmen import PMEN
from ngpt_core.optim.smgc import SMGC

TENSORS = 6
CACHED = getattr(paths, "_CACHED", 1 << 17)  # coordinates that the readable path takes at a time
BYTES = {"AdamW fused": 28, "whole recipe": 32, "... unchecked": 28, "plain a=1": 28}  # per parameter
WHOLE = dict(lr=1e-3, unit_dim=-1, smgc=SMGC(start=1), pmen=PMEN(), cap=math.radians(1))
WAYS = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "whole recipe": lambda p: GatedAdamW(p, **WHOLE, fused=True),
    "... unchecked": lambda p: GatedAdamW(p, **WHOLE, fused=True, nonfinite="off"),
    "plain a=1": lambda p: GatedAdamW(p, lr=1e-3, a=1.0, fused=True, nonfinite="off"),
    "readable": lambda p: GatedAdamW(p, **WHOLE, fused=False, nonfinite="off"),
}


class Calls(TorchDispatchMode):
    """Collects torch's operations with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Callable[[], object]] = []

    def __torch_dispatch__(self, function: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.seen.append(partial(function, *args, **(kwargs or {})))
        return self.seen[-1]()


@torch.no_grad()
def operations(d: int) -> float:
    """CPU seconds per coordinate of the readable path's operations, each repeated by itself on a piece of the path's size."""
    share, paths._SHARE = paths._SHARE, 1  # one piece
    chosen = optimizer("readable", gradients(CACHED // d, d)[:1])
    chosen.step()
    with Calls() as mode:
        chosen.step()
    paths._SHARE = share
    total = 0.0
    for call in mode.seen:
        seconds = interleaved({"": lambda call=call: [call() for _ in range(8)]}, rounds=5)  # type: ignore[misc]
        total += statistics.median(seconds[""]) / 8
    return total / CACHED


def gradients(rows: int, d: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    grads = [1e-4 * torch.randn(rows, d, generator=rng) for _ in range(TENSORS)]
    for g in grads:
        g[::100] = 0
    return grads


def optimizer(way: str, grads: list[torch.Tensor]) -> torch.optim.Optimizer:
    rng = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(sphere.random(*g.shape, generator=rng)) for g in grads]
    for p, g in zip(params, grads):
        p.grad = g
    return WAYS[way](params)


def small_tensors(rounds: int) -> dict[str, dict[str, float]]:
    """The table of `pico`: GatedAdamW as its recipe builds it, and fused AdamW on tensors of the same shapes."""
    torch.manual_seed(0)
    recipe, _ = ng.recipe.build(ng.LanguageModel(ng.preset("pico")), 1000)
    params = [p for group in recipe.param_groups for p in group["params"]]
    for p in params:
        p.grad = 1e-3 * torch.randn_like(p)
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    for p, q in zip(params, copies):
        q.grad = p.grad
    steps = {"AdamW fused": WAYS["AdamW fused"](copies).step, "whole recipe": recipe.step}
    seconds = interleaved({way: lambda step=step: [step() for _ in range(20)] for way, step in steps.items()}, 2 * rounds)
    print(f"\npico's {len(params)} small tensors, {sum(p.numel() for p in params) / 1e6:.2f}M parameters")
    print(f"{'':15}{'CPU ms':>9}{'/ AdamW':>9}")
    table = {}
    for way in steps:
        milliseconds, x = 1e3 * statistics.median(seconds[way]) / 20, ratio(seconds, way, "AdamW fused")
        table[way] = {"milliseconds": round(milliseconds, 3), "ratio": round(x, 3)}
        print(f"{way:15}{milliseconds:9.3f}{x:9.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("millions", 30), ("d", 1024), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", default=Path(__file__).parent / "results" / "optim.json", type=Path)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--peak", choices=WAYS, help=argparse.SUPPRESS)  # a child process: print one number
    args = parser.parse_args()
    torch.set_num_threads(1)
    grads = gradients(round(args.millions * 1e6 / TENSORS / args.d), args.d)
    if args.peak:
        chosen = optimizer(args.peak, grads)
        chosen.step()
        print(max(peak_above(chosen.step), allocated_above(chosen.step)))
        return

    tensor = grads[0].numel() * grads[0].element_size()
    peak = {way: int(subprocess.check_output([sys.executable, *sys.argv, "--peak", way])) for way in WAYS}
    steps = {way: optimizer(way, grads).step for way in WAYS}
    count = sum(g.numel() for g in grads)
    slow = interleaved({way: steps[way] for way in ("AdamW fused", "readable")}, rounds=5, warmup=1)
    alone = operations(args.d) * count / statistics.median(slow["AdamW fused"])
    fast = {way: step for way, step in steps.items() if way != "readable"} | {"reading g": lambda: [g.sum() for g in grads]}
    seconds = interleaved(fast, args.rounds)
    print(f"{count / 1e6:.1f}M parameters in rows of {args.d}, float32, one thread, {args.rounds} rounds; {machine()['cpu']}")
    print(f"{'':15}{'CPU ms':>9}{'/ AdamW':>9}{'bytes / AdamW':>15}{'GB/s':>7}{'extra memory, tensors':>24}")
    table = {}
    for way in WAYS:
        run = slow if way == "readable" else seconds
        table[way] = {
            "milliseconds": round(1e3 * statistics.median(run[way]), 2),
            "ratio": round(ratio(run, way, "AdamW fused"), 3),
            "extra_bytes": peak[way],
            "extra_tensors": round(peak[way] / tensor, 3),
        }
        x, limit = table[way], f"{'':22}"
        if way in BYTES:
            x |= {"bytes": BYTES[way], "gigabytes_per_second": round(BYTES[way] * count / x["milliseconds"] / 1e6, 1)}
            limit = f"{BYTES[way] / BYTES['AdamW fused']:15.2f}{x['gigabytes_per_second']:7.1f}"
        print(f"{way:15}{x['milliseconds']:9.1f}{x['ratio']:9.2f}{limit}{x['extra_tensors']:24.2f}")
    table["reading g"] = {"ratio": round(ratio(seconds, "reading g", "AdamW fused"), 3)}
    print(f"{'reading g':15}{'':9}{table['reading g']['ratio']:9.2f}")
    table["its operations"] = {"ratio": round(alone, 3)}
    print(f"{'its operations':15}{'':9}{alone:9.2f}")
    pico = small_tensors(args.rounds)
    before = {}
    if args.before is not None:
        print(f"\nthe same with {args.before}")
        before = by(args.before, *(f"--{name}={getattr(args, name)}" for name in ("millions", "d", "rounds")))
    args.out.parent.mkdir(exist_ok=True)
    setting = {"parameters": count, "d": args.d, "tensors": TENSORS, "dtype": "float32", "rounds": args.rounds}
    args.out.write_text(
        json.dumps(
            {"machine": machine(), "setting": setting, "ways": table, "pico": pico, "before": before},
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
