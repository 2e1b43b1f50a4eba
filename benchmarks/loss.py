"""What does the loss over a large vocabulary cost in memory and time, chunked against naive?

    python benchmarks/loss.py [--tokens 4096] [--d 256] [--vocab 32768] [--chunk N] [--rounds 5] [--out FILE]

Three ways to the same value and gradients of LGP's cross-entropy, forward and backward:
    naive     F.cross_entropy(logit_scale(F.linear(h, W), s_z), targets): stores full [tokens, vocabulary] tensors
    chunked   linear_cross_entropy, ours
    torch     linear_cross_entropy(backend="torch"): torch's F.linear_cross_entropy in chunks of the same size

Memory: the peak resident set above the inputs, each way in a separate process. Time: process CPU time on one thread, the ways
interleaved, the median over rounds of the ratio within a round. Seconds and bytes are context; the ratios are the result.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F

from ngpt_core import sphere
from ngpt_core.nn.head import linear_cross_entropy, logit_scale

WAYS = ("naive", "chunked", "torch")


def inputs(args: argparse.Namespace) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    h, W = sphere.random(args.tokens, args.d, generator=g), sphere.random(args.vocab, args.d, generator=g)
    s_z = 5 + 10 * torch.rand(args.vocab, generator=g)
    return [*(x.requires_grad_() for x in (h, W, s_z)), torch.randint(0, args.vocab, (args.tokens,), generator=g)]


def run(way: str, h: torch.Tensor, W: torch.Tensor, s_z: torch.Tensor, targets: torch.Tensor, chunk: int | None) -> float:
    for x in (h, W, s_z):
        x.grad = None
    if way == "naive":
        loss = F.cross_entropy(logit_scale(F.linear(h, W), s_z), targets)
    else:
        loss = linear_cross_entropy(h, W, targets, s_z, chunk=chunk, backend=way)
    loss.backward()
    return loss.item()


def status(field: str) -> int:
    """A field of /proc/self/status in bytes: VmRSS is current, VmHWM the peak."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field))


def peak(way: str, args: argparse.Namespace) -> int:
    """Peak bytes above the inputs during one forward and backward pass. Called in a fresh process."""
    small = argparse.Namespace(tokens=8, d=args.d, vocab=64)
    run(way, *inputs(small), chunk=4)  # libraries and thread pools come first
    x = inputs(args)
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # forget the highest point so far
    before = status("VmRSS")
    run(way, *x, args.chunk)
    return status("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 4096), ("d", 256), ("vocab", 32768), ("chunk", None), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", help="write the figures and the machine's description to this JSON file")
    parser.add_argument("--peak", choices=WAYS, help=argparse.SUPPRESS)  # a child process: print one number
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak:
        print(peak(args.peak, args))
        return

    ways = [w for w in WAYS if w != "torch" or hasattr(F, "linear_cross_entropy")]
    memory = {w: int(subprocess.check_output([sys.executable, *sys.argv, "--peak", w])) for w in ways}
    x = inputs(args)
    seconds: dict[str, list[float]] = {w: [] for w in ways}
    losses = {}
    for _ in range(args.rounds):
        for way in ways:
            start = time.process_time()
            losses[way] = run(way, *x, args.chunk)
            seconds[way].append(time.process_time() - start)

    chunk = args.chunk or max(256, args.d)  # what chunk=None means
    print(f"{args.tokens} tokens, vocabulary {args.vocab}, d {args.d}, chunk {chunk}, float32, one thread")
    print(f"{'':9}{'loss':>11}{'peak MB':>10}{'/ naive':>9}{'CPU s':>8}{'/ naive':>9}")
    rows = {}
    for w in ways:
        ratio = statistics.median(a / b for a, b in zip(seconds[w], seconds["naive"]))
        rows[w] = {
            "loss": losses[w],
            "peak_bytes": memory[w],
            "memory_ratio": memory[w] / memory["naive"],
            "seconds": statistics.median(seconds[w]),
            "time_ratio": ratio,
        }
        r = rows[w]
        print(f"{w:9}{r['loss']:11.6f}{r['peak_bytes'] / 2**20:10.1f}{r['memory_ratio']:9.1%}{r['seconds']:8.2f}{ratio:9.2f}")
    if args.out:
        machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        setting = {k: getattr(args, k) for k in ("tokens", "d", "vocab", "chunk", "rounds")}
        with open(args.out, "w") as f:
            json.dump(machine | setting | {"ways": rows}, f, indent=1)


if __name__ == "__main__":
    main()
