"""How can speeds be compared on a shared machine? Interleaved, CPU time, medians of ratios.

Wall-clock ratios on a shared machine were 0.71, 0.85 and 1.19 for the same pair. So we use process CPU time, run every variant
once per round, take the ratio within a round and the median over rounds. Seconds are context; the ratios are the result.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["allocated_above", "by", "interleaved", "machine", "peak_above", "ratio"]


def interleaved(ways: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """CPU seconds of every variant in every round, after ``warmup`` rounds that are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(warmup + rounds):
        for name, work in ways.items():
            start = time.process_time()
            work()
            if i >= warmup:
                seconds[name].append(time.process_time() - start)
    return seconds


def ratio(seconds: Mapping[str, list[float]], way: str, base: str) -> float:
    """The median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(seconds[way], seconds[base]))


def _status(field: str) -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field))


def peak_above(work: Callable[[], object]) -> int:
    """The peak increase of the resident set during ``work``, in bytes (Linux). It is exact in a fresh process."""
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # forget the highest point so far
    before = _status("VmRSS")
    work()
    return max(0, _status("VmHWM") - before)


def allocated_above(work: Callable[[], object]) -> int:
    """Peak bytes of torch's CPU allocator during ``work``, above what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = sorted((e.start_ns(), e.nbytes()) for e in seen.profiler.kineto_results.events() if e.name() == "[memory]")
    return max(accumulate((size for _, size in events), initial=0))


def by(checkout: Path, *command: str) -> dict:
    """What this script writes to ``--out`` when it imports the package from another checkout."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        env = {**os.environ, "PYTHONPATH": str(checkout)}
        subprocess.run([sys.executable, sys.argv[0], *command, "--out", str(out)], env=env, check=True)
        return json.loads(out.read_text())


def machine() -> dict[str, str | int | float]:
    """The machine that the figures were measured on, without host name and paths, and its load at the end."""
    model = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            model = next((line.split(":")[1].strip() for line in f if line.startswith("model name")), model)
    return {"cpu": model, "cores": os.cpu_count() or 1, "threads": torch.get_num_threads(), "system": platform.system(),
            "python": platform.python_version(), "torch": torch.__version__, "load": round(os.getloadavg()[0], 1)}  # fmt: skip
