"""How long does one whole training step take, and how far is that from the limit?

    python benchmarks/step.py [--presets pico micro] [--rounds 15] [--before CHECKOUT] [--out benchmarks/results/step.json]

A whole step: loss, backward, optimizer, schedule, router biases, on 4 x 256 random bytes, float32.
    NemotronH   transformers' model with the weights of our GPT, and torch's fused AdamW: the peer
    GPT, nGPT   our model with the optimizer of its recipe; ``compiled``: block by block, as --compile does
    products    only the matrix products of the step (forward, and the two of backward), of the same shapes and by the same
                library, and the operator for attention, which is products for the most part: the limit
    decode      64 new tokens for 4 sequences from a prompt of 64, with a cache; greedy
    before      the same by another checkout of this repository

Each way runs in its own process, on one thread. The parent lets every process make one step per round, so the processes are
interleaved; the result is the median over rounds of the ratio of CPU times within a round (see timing.py). Memory is the peak
of torch's allocator in a step above weights and optimizer states.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from timing import allocated_above, machine, ratio

import ngpt_core as ng
from ngpt_core.config import ModelConfig
from ngpt_core.train.flops import flops_per_token

B, T, PROMPT, NEW = 4, 256, 64, 64
TRAIN = ("NemotronH", "GPT", "nGPT", "GPT compiled", "nGPT compiled", "products")
DECODE = ("decode NemotronH", "decode GPT", "decode nGPT")
ROWS = {  # row: (way, base, target, stretch); a ratio of CPU times, except where a unit says otherwise
    "our GPT / NemotronH + fused AdamW": ("GPT", "NemotronH", {"micro": 0.60, "pico": 0.65}, 0.5),
    "nGPT, whole recipe / our GPT": ("nGPT", "GPT", {"micro": 1.05}, 1.03),
    "products alone / our GPT": ("products", "GPT", {"micro": 0.6}, 0.7),
    "products alone / NemotronH": ("products", "NemotronH", {}, None),
    "eager / compiled, GPT": ("GPT", "GPT compiled", {"micro": 1.5}, None),
    "eager / compiled, nGPT": ("nGPT", "nGPT compiled", {"micro": 1.5}, None),
    "decode: tokens/s of our GPT / NemotronH's": ("decode NemotronH", "decode GPT", {"micro": 2.0}, 4.0),
    "decode: tokens/s of nGPT / NemotronH's": ("decode NemotronH", "decode nGPT", {}, None),
}


# ---- what a way does -------------------------------------------------------------------------------------------------
def ours(config: ModelConfig, compiled: bool) -> Callable[[], object]:
    model = ng.LanguageModel(config)
    optimizer, schedule = ng.recipe.build(model, 10_000)
    x, y = torch.randint(0, config.vocab_size, (2, B, T))
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True)

    def step() -> None:
        model.loss(x, y).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if load := model.stats["load"]:
            model.update_router_bias(load)

    return step


def peer(config: ModelConfig) -> Callable[[], object]:
    model = ng.hf.to_nemotron_h(ng.LanguageModel(config)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    x, y = torch.randint(0, config.vocab_size, (2, B, T))

    def step() -> None:
        logits = model(x, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def decoding(config: ModelConfig, theirs: bool) -> Callable[[], object]:
    model = ng.LanguageModel(config).eval()
    prompt = torch.randint(0, config.vocab_size, (B, PROMPT))
    if theirs:
        hf = ng.hf.to_nemotron_h(model).eval()
        return lambda: hf.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return lambda: model.generate(prompt, NEW, temperature=0.0)


def shapes(c: ModelConfig) -> list[tuple[int, int, int, int]]:
    """(how many, m, k, n) of every product of the forward pass, with experts of equal load."""
    n, d, Q = B * T, c.d_model, min(c.chunk, T)
    chunks, dk, r = n // Q, c.head_dim or 0, c.mamba_heads // max(1, c.groups)
    P, N, G = c.mamba_head_dim, c.state, c.groups
    expert = (c.n_experts, n * c.top_k // max(1, c.n_experts), d, c.expert_ff)
    kinds = {
        "M": [
            (1, n, d, 2 * c.d_inner + 2 * G * N + c.mamba_heads),
            (1, n, c.d_inner, d),
            (chunks * G, Q, N, Q),
            (chunks * G * r, Q, Q, P),
            (chunks * G, N, Q, r * P),
            (chunks * G, Q, N, r * P),
        ],
        "*": [(1, n, d, c.n_heads * dk)] * 2 + [(1, n, d, (c.n_kv_heads or 0) * dk)] * 2,  # attention itself: see products
        "E": [expert] * 2 + [(1, n, d, c.n_experts)] + [(1, n, d, c.shared_ff)] * 2,
        "-": [(1, n, d, c.ff)] * (3 if c.activation == "swiglu" else 2),
    }
    return [(1, n, d, c.vocab_size)] + [s for letter in c.pattern for s in kinds[letter] if min(s) > 0]


def products(config: ModelConfig) -> Callable[[], object]:
    """Every product, forward and backward, by the library that the model asks, and the operator for attention."""
    from ngpt_core.nn import attention, product  # not in the checkout before

    calls: list[Callable[[], object]] = []
    for count, m, k, n in shapes(config):
        a, b, g = torch.randn(count, m, k), torch.randn(count, n, k), torch.randn(count, m, n)
        for x, y, out in ((a, b.mT, g.clone()), (g, b, a.clone()), (g.mT, a, b.clone())):
            if count > 1:
                calls.append(partial(torch.bmm, x, y, out=out))
            elif product._takes(a[0], b[0]):
                calls.append(partial(product._multiply, x[0], y[0], False))
            else:
                calls.append(partial(torch.mm, x[0], y[0], out=out[0]))
    if "*" in config.pattern:
        q, k, v = (torch.randn(B, T, n or 0, config.head_dim or 0) for n in (config.n_heads, *[config.n_kv_heads] * 2))
        heads = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]

        def attend() -> None:
            out = attention.causal(*heads, 1.0)
            torch.autograd.grad(out, heads, out.detach())

        calls += [attend] * config.pattern.count("*")

    def step() -> None:
        for call in calls:
            call()

    return step


def prepare(way: str, preset: str) -> Callable[[], object]:
    torch.manual_seed(0)
    config = ng.preset(preset, normalized="nGPT" in way)
    if way.startswith("decode"):
        return decoding(config, theirs="NemotronH" in way)
    if way == "products":
        return products(config)
    return peer(config) if way == "NemotronH" else ours(config, "compiled" in way)


# ---- the processes ---------------------------------------------------------------------------------------------------
def worker(way: str, preset: str) -> None:
    """A child: one line in, one step, its CPU seconds out; the line "memory" asks for the peak instead."""
    torch.set_num_threads(1)
    step = prepare(way, preset)
    for line in sys.stdin:
        if line.strip() == "memory":
            print("=", allocated_above(step), flush=True)
            continue
        start = time.process_time()
        step()
        print("=", time.process_time() - start, flush=True)


class Child:
    def __init__(self, way: str, preset: str, checkout: Path | None) -> None:
        env = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
        if checkout is not None:
            env["PYTHONPATH"] = str(checkout)
        command = [sys.executable, __file__, "--worker", way, preset]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, what: str = "step") -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(what, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("= "):
                return float(line[2:])
        raise RuntimeError("a child stopped; its message is above")

    def end(self) -> None:
        self.process.communicate()


def measure(preset: str, ways: list[str], rounds: int, before: Path | None) -> tuple[dict, dict]:
    """CPU seconds per way and round, and the peak bytes of a step per way."""
    children = {way: Child(way, preset, None) for way in ways}
    if before is not None:
        again = [w for w in ways if "NemotronH" not in w and w != "products"]
        children |= {f"before {way}": Child(way, preset, before) for way in again}
    seconds: dict[str, list[float]] = {way: [] for way in children}
    for i in range(-3, rounds):
        for way, child in children.items():
            spent = child.ask()
            if i >= 0:
                seconds[way].append(spent)
    train = [way for way in children if "decode" not in way and way != "products"]
    memory = {way: int(children[way].ask("memory")) for way in train}
    for child in children.values():
        child.end()
    return seconds, memory


def table(preset: str, seconds: dict, memory: dict) -> dict:
    rows = {}
    for row, (way, base, targets, stretch) in ROWS.items():
        target = targets.get(preset)
        for when in ("", "before "):
            pair = [w if "NemotronH" in w or w == "products" else when + w for w in (way, base)]
            if all(w in seconds for w in pair) and (not when or pair != [way, base]):
                x = round(ratio(seconds, *pair), 3)
                rows.setdefault(row, {})["before" if when else "now"] = x
        if row in rows:
            rows[row] |= {"target": target, "stretch": stretch if target else None}
    for way in ("GPT", "nGPT", "before GPT", "before nGPT"):
        if way in memory and "NemotronH" in memory:
            row = f"peak memory of a step: {way.split()[-1]} / NemotronH"
            when = "before" if way.startswith("before") else "now"
            rows.setdefault(row, {"target": 0.8, "stretch": 0.6})[when] = round(memory[way] / memory["NemotronH"], 3)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["pico", "micro"])
    parser.add_argument("--ways", nargs="+", choices=TRAIN + DECODE, default=list(TRAIN + DECODE))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(*args.worker)
    torch.set_num_threads(1)
    results = {}
    for preset in args.presets:
        seconds, memory = measure(preset, args.ways, args.rounds, args.before)
        config, n = ng.preset(preset, normalized=False), B * T
        rows = table(preset, seconds, memory)
        median = {way: statistics.median(s) for way, s in seconds.items()}
        dk = config.head_dim or 0
        executed = sum(6 * count * m * k * w for count, m, k, w in shapes(config))
        executed += config.pattern.count("*") * 6 * B * config.n_heads * T * T * dk  # half of the scores
        flops = {w: executed if w == "products" else n * flops_per_token(config, T) for w in median if "decode" not in w}
        speed = {way: round(flops[way] / median[way] / 1e9, 1) for way in flops}
        print(f"\n{preset}: {B} x {T} tokens, one thread, {args.rounds} rounds; {machine()['cpu']}, torch {torch.__version__}")
        print(f"{'':52}{'before':>8}{'now':>8}{'target':>8}{'stretch':>8}")
        for row, x in rows.items():
            print(f"{row:52}" + "".join(f"{x.get(k) or '':>8}" for k in ("before", "now", "target", "stretch")))
        for way, s in median.items():
            print(f"  {way:24}{1e3 * s:9.1f} ms" + (f"{speed[way]:8.1f} GFLOP/s" if way in speed else ""))
        results[preset] = {
            "rows": rows,
            "milliseconds": {way: round(1e3 * s, 2) for way, s in median.items()},
            "gflops_per_second": speed,
            "peak_bytes": memory,
        }
    if args.out:
        setting = {"batch": B, "tokens": T, "rounds": args.rounds, "dtype": "float32", "threads": 1}
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(json.dumps({"machine": machine(), "setting": setting, "presets": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
