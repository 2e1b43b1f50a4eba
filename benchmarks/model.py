"""What does the sphere cost, and how fast are the blocks compared with other implementations?

    python benchmarks/model.py [--rounds 9] [--out benchmarks/results/model.json] [--only NAME ...]

Each line is one pair, forward and backward of the loss (without the optimizer, which has a separate benchmark):
    sphere     nGPT over GPT, the same hybrid Mamba-2 / attention / MoE model of width 256, eager and compiled
    moe        an MoE layer, 64 experts, top-6: tokens sorted by expert over the loop that visits every expert
    dense      training tokens per second of our dense nGPT over lucidrains' nGPT-pytorch of the same shape, eager and compiled:
               once with its defaults (weights are normalized inside every forward pass), once in its faster manual mode
               (weights are normalized after the backward pass, like ours). "bound", "compiled bound": theirs over the matrix
               products of the step alone, forward and backward, which is how far ahead one can be
With --only, --out keeps the stored figures of the other lines.

Process CPU time on one thread, the two of a pair interleaved, the median over rounds of the ratio within a round.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from step import B, T, products
from timing import by, machine
from torch import Tensor

import ngpt_core as ng
from ngpt_core.nn.moe import MoE
from ngpt_core.nn.unit import normalize_

TARGETS = {  # PERFORMANCE.md; the ratio must be below ("<") or above (">")
    "sphere eager": None,
    "sphere compiled": ("<", 1.10),
    "moe": ("<", 0.26),
    "dense eager": (">", 1.25),
    "dense compiled": (">", 1.25),
    "dense eager, manual": (">", 1.25),
    "dense compiled, manual": (">", 1.25),
    "dense bound": None,
    "dense compiled bound": None,
}


def compare(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """(median ratio ours / theirs of CPU time, median seconds of each), after two warmup rounds."""
    seconds = []
    for _ in range(rounds + 2):
        pair = []
        for step in (ours, theirs):
            start = time.process_time()
            step()
            pair.append(time.process_time() - start)
        seconds.append(pair)
    seconds = seconds[2:]
    return statistics.median(a / b for a, b in seconds), *(statistics.median(column) for column in zip(*seconds))


def step(model: torch.nn.Module, compiled: bool) -> Callable[[], object]:
    x, y = torch.randint(0, model.config.vocab_size, (2, B, T))
    if compiled:  # block by block, as a trainer does: blocks of one kind share their code
        for block in model.blocks:
            block.compile(fullgraph=True)

    def run() -> None:
        model.zero_grad()
        model.loss(x, y).backward()

    return run


def sphere(compiled: bool, rounds: int) -> tuple[float, float, float]:
    models = [ng.LanguageModel(ng.preset("mini", normalized, d_model=256, head_dim=32)) for normalized in (True, False)]
    return compare(*(step(model, compiled) for model in models), rounds)


def loop_over_experts(moe: MoE, h: Tensor) -> Tensor:
    """The usual plain form: for every expert, find its tokens, multiply, and add the results back."""
    x = h * moe.s_moe()
    _, chosen, weights = moe.router(x)
    x, chosen, weights, out = x.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
    for e in range(moe.experts.up.shape[0]):
        token, place = (chosen == e).nonzero(as_tuple=True)
        u = F.relu(F.linear(x[token], moe.experts.up[e]) * moe.experts.s_u())
        out = out.index_add(0, token, (u * u) @ moe.experts.down[e] * weights[token, place, None])
    return out.view_as(h)


def moe(rounds: int) -> tuple[float, float, float]:
    config = ng.ModelConfig(vocab_size=256, d_model=256, pattern="E", n_experts=64, top_k=6, expert_ff=128)
    layer, h = MoE(config), ng.sphere.random(B, T, 256).requires_grad_()
    torch.testing.assert_close(layer(h)[0], loop_over_experts(layer, h), atol=1e-4, rtol=1e-4)

    def run(forward: Callable[[], Tensor]) -> None:
        layer.zero_grad()
        forward().sum().backward()

    return compare(lambda: run(lambda: layer(h)[0]), lambda: run(lambda: loop_over_experts(layer, h)), rounds)


def dense(compiled: bool, manual: bool, rounds: int, bound: bool = False) -> tuple[float, float, float] | str:
    try:
        module = import_module("nGPT_pytorch.nGPT")
    except ImportError:
        return "nGPT-pytorch is not installed: pip install nGPT-pytorch"
    for cls in vars(module).values():  # 0.2.16 defines __eq__ without __hash__, so that .parameters() raises: give it back
        if isinstance(cls, type) and issubclass(cls, torch.nn.Module) and cls.__hash__ is None:
            cls.__hash__ = torch.nn.Module.__hash__
    d, depth, heads, V = 256, 6, 4, 256
    theirs = module.nGPT(
        num_tokens=V, dim=d, depth=depth, dim_head=d // heads, heads=heads, add_value_residual=False, manual_norm_weights=manual
    )  # fmt: skip
    ff = theirs.layers[0][1].fn.dim_inner
    config = ng.ModelConfig(
        vocab_size=V, d_model=d, pattern="*-" * depth, n_heads=heads, rope_theta=1e4, ff=ff, activation="swiglu"
    )  # fmt: skip
    ours = ng.LanguageModel(config)
    matrices = [sum(p.numel() for p in m.parameters() if p.ndim > 1) for m in (ours, theirs)]
    assert matrices[0] == matrices[1] + 2 * ff * depth, matrices  # ours keeps s_u and s_v as one [2, ff]
    tokens = torch.randint(0, V, (B, T + 1))
    run_ours = step(ours, compiled)
    if compiled:
        for block in [b for layer in theirs.layers for b in layer]:
            block.compile()

    def step_ours() -> None:
        run_ours()
        normalize_(ours)

    def step_theirs() -> None:
        theirs.zero_grad()
        theirs(tokens, return_loss=True).backward()
        if manual:
            theirs.norm_weights_()

    # time of theirs over ours = tokens a second of ours over theirs
    return compare(step_theirs, products(config) if bound else step_ours, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Past the limit a block silently runs eagerly, and a peer that recompiles more often than we do would look slow. So the
    # limit is high, every case starts with an empty cache, and reaching the limit stops the benchmark.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    runs = {
        "sphere eager": lambda: sphere(False, args.rounds),
        "sphere compiled": lambda: sphere(True, args.rounds),
        "moe": lambda: moe(args.rounds),
        "dense eager": lambda: dense(False, False, args.rounds),
        "dense compiled": lambda: dense(True, False, args.rounds),
        "dense eager, manual": lambda: dense(False, True, args.rounds),
        "dense compiled, manual": lambda: dense(True, True, args.rounds),
        "dense bound": lambda: dense(False, False, args.rounds, bound=True),
        "dense compiled bound": lambda: dense(True, False, args.rounds, bound=True),
    }
    results = {}
    print(f"{B} x {T} tokens, float32, one thread, torch {torch.__version__}")
    print(f"{'':24}{'ratio':>7}{'target':>9}{'CPU s of the pair':>22}")
    for name in args.only:
        torch._dynamo.reset()
        result = runs[name]()
        if isinstance(result, str):
            print(f"{name:24}{result}")
            continue
        ratio, first, second = result
        target = f"{TARGETS[name][0]} {TARGETS[name][1]}" if TARGETS[name] else ""
        print(f"{name:24}{ratio:7.3f}{target:>9}{first:11.3f}{second:11.3f}")
        results[name] = {"ratio": ratio, "target": target, "seconds": [first, second]}
    before = {}
    if args.before is not None:
        print(f"\nthe same with {args.before}")
        before = by(args.before, f"--rounds={args.rounds}", "--only", *args.only)["results"]
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        old = json.loads(args.out.read_text()) if args.out.exists() else {"results": {}, "before": {}}
        results, before = ({line: x for line, x in (old[when] | new).items() if line in TARGETS}
                           for when, new in (("results", results), ("before", before)))  # fmt: skip
        data = {"machine": machine(), "tokens": [B, T], "rounds": args.rounds, "results": results, "before": before}
        args.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
