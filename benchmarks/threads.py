"""What does a second thread gain in a training step, and how many more tokens does the demo train than before?

    python benchmarks/threads.py [--rounds 9] [--before CHECKOUT] [--out benchmarks/results/threads.json]

Steps of ``micro`` (4 x 256 tokens) and of the demo (2 x 128 tokens), each way in its own process, interleaved (see step.py).
    CPU time, two threads / one    what the second thread costs in all: above 1, work is done twice, or threads wait in loops
    own time, one thread / two     CPU time of the main thread, which ends last: the speed-up on a machine with two idle cores
    wall time, one thread / two    the same by the clock, which on a busy machine says more about the others
    tokens in the demo's time      CPU time of a step of the other checkout, over that of this one
OpenMP's threads wait asleep (OMP_WAIT_POLICY=passive), so that waiting is not counted as work.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import step
import torch
from timing import machine

SIZES = {"micro": (4, 256), "demo": (2, 128)}  # sequences, tokens of a sequence


def worker(way: str, preset: str, size: str, threads: int) -> None:
    """A child: one line in, one step, its seconds out: CPU time, CPU time of this thread, wall time."""
    torch.set_num_threads(threads)
    step.B, step.T = SIZES[size]
    one = step.prepare(way, preset)
    for _ in sys.stdin:
        start = time.process_time(), time.thread_time(), time.perf_counter()
        one()
        end = time.process_time(), time.thread_time(), time.perf_counter()
        print("=", *(b - a for a, b in zip(start, end)), flush=True)


class Child:
    def __init__(self, way: str, preset: str, size: str, threads: int, checkout: Path | None = None) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        if checkout is not None:
            env["PYTHONPATH"] = str(checkout)
        command = [sys.executable, __file__, "--worker", way, preset, size, str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self) -> list[float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return next([float(x) for x in line.split()[1:]] for line in self.process.stdout if line.startswith("= "))


def measure(children: dict[str, Child], rounds: int) -> dict[str, list[list[float]]]:
    seconds: dict[str, list[list[float]]] = {name: [] for name in children}
    for i in range(-3, rounds):
        for name, child in children.items():
            spent = child.ask()
            if i >= 0:
                seconds[name].append(spent)
    for child in children.values():
        child.process.communicate()
    return seconds


def middle(a: list[list[float]], b: list[list[float]], column: int) -> float:
    """The median over rounds of the ratio within a round."""
    return round(statistics.median(x[column] / y[column] for x, y in zip(a, b)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--before", type=Path, help="another checkout to compare the demo's steps with")
    parser.add_argument("--demo-preset", default="pico")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(*args.worker[:3], int(args.worker[3]))
    rows: dict[str, float] = {}
    for way in ("GPT", "nGPT"):
        seconds = measure({str(n): Child(way, "micro", "micro", n) for n in (1, 2)}, args.rounds)
        rows[f"{way}: CPU time, two threads / one"] = middle(seconds["2"], seconds["1"], 0)
        rows[f"{way}: own time, one thread / two"] = middle(seconds["1"], seconds["2"], 1)
        rows[f"{way}: wall time, one thread / two"] = middle(seconds["1"], seconds["2"], 2)
        if args.before is not None:
            demo = {
                name: Child(way, args.demo_preset, "demo", 1, where) for name, where in (("now", None), ("then", args.before))
            }
            seconds = measure(demo, 2 * args.rounds)
            rows[f"{way}: tokens in the demo's time, now / before"] = middle(seconds["then"], seconds["now"], 0)
    print(f"{args.rounds} rounds, torch {torch.__version__}; {machine()['cpu']}; load {os.getloadavg()[0]:.0f}")
    for row, x in rows.items():
        print(f"{row:48}{x:8.2f}")
    if args.out:
        data = {"machine": machine(), "rounds": args.rounds, "rows": rows}
        args.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
