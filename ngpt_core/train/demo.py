"""Which one learns faster, GPT or nGPT? Two minutes on a laptop, side by side.

``ngpt demo`` (``make demo``) trains both on the embedded corpus: the same blocks, the same data in the same order, the same
number of steps, each with its own recipe; two processes with one thread each, at the same time. It prints who is ahead, whoever
it is, lets both write, and says where the report is. At this size and length the result is an illustration, not evidence.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

from .corpus import embedded
from .report import LoggedRun, comparison, read_run, sentence, write_report

__all__ = ["demo"]

_CALIBRATION = 6  # steps that measure the speed; the first is left out


def _start(folder: Path, kind: str, preset: str, steps: int, *flags: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "ngpt_core",
        "train",
        "--preset",
        preset,
        kind,
        "--steps",
        str(steps),
        "--out",
        str(folder),
    ]
    evaluate = max(1, steps // 20)
    command += ["--eval-every", str(evaluate), "--save-every", "0", "--diagnostics-every", str(evaluate), *flags]
    log = open(f"{folder}.log", "w", encoding="utf-8")
    return subprocess.Popen(command, stderr=log, stdout=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def _both(out: Path, names: dict[str, str], preset: str, steps: int, *flags: str) -> list[LoggedRun]:
    """Train both at the same time, with a line now and then; an error of either ends the demo."""
    running = {name: _start(out / name, kind, preset, steps, *flags) for name, kind in names.items()}
    try:
        while any(process.poll() is None for process in running.values()):
            time.sleep(2.0)
            if not flags:
                _show(out, running, steps)
        if sys.stderr.isatty() and not flags:
            print(file=sys.stderr)
    finally:
        for process in running.values():
            if process.poll() is None:
                process.terminate()
    for name, process in running.items():
        if process.returncode:
            raise ValueError(f"training {name} failed: {(Path(f'{out / name}.log').read_text().splitlines() or ['?'])[-1]}")
    return [read_run(str(out / name)) for name in names]


def _show(out: Path, running: dict[str, subprocess.Popen], steps: int) -> None:
    parts = []
    for name in running:
        path = out / name / "metrics.jsonl"
        if path.exists() and (records := read_run(str(out / name)).records if path.stat().st_size else None):
            parts.append(f"{name}: step {records[-1]['step']}/{steps}, loss {records[-1]['loss']:.3f}")
    if parts and sys.stderr.isatty():
        print("\r\x1b[2K" + "   ".join(parts), end="", file=sys.stderr, flush=True)


def demo(out: str | None, minutes: float, preset: str) -> int:
    """Calibrate, train both for about ``minutes``, compare, report."""
    folder = Path(out) if out else next(p for p in (Path(f"demo-{i}" if i > 1 else "demo") for i in count(1)) if not p.exists())
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose another --out, or remove it first.")
    if minutes <= 0:
        raise ValueError(f"--minutes must be above 0; got {minutes}.")
    (folder / "calibration").mkdir(parents=True, exist_ok=True)
    corpus = embedded()
    print(
        f"corpus: this machine's Python standard library, {corpus.manifest['tokens']:,} tokens, checksum {corpus.checksum[:12]}"
    )
    names = {"gpt": "--baseline", "ngpt": "--normalized"}
    trial = _both(
        folder / "calibration", names, preset, _CALIBRATION, "--sample-tokens", "0", "--eval-windows", "8", "--no-tensorboard"
    )
    seconds = max((run.records[-1]["time"] - run.records[0]["time"]) / (len(run.records) - 1) for run in trial)
    shutil.rmtree(folder / "calibration")
    steps = max(20, int(60 * minutes / (1.25 * seconds)))  # a quarter for evaluation and start
    print(f"training GPT and nGPT ({preset}) for {steps} steps each, side by side: about {minutes:g} minutes")
    runs = _both(folder, names, preset, steps)
    print()
    for run in runs:
        print(f"{run.kind:<5} held-out loss {run.series('val_loss')[1][-1]:.4f}   {run.records[-1]['time']:.0f} s of training")
    first, second = sorted(runs, key=lambda run: run.series("val_loss")[1][-1])
    gap = second.series("val_loss")[1][-1] - first.series("val_loss")[1][-1]
    print(f"{first.kind} is ahead by {gap:.4f} nats per byte.")
    for row in comparison(runs):
        print(sentence(row))
    for run in runs:
        print(f"\n{run.kind} writes:\n{_last_sample(folder / run.name)}")
    print("\n" + write_report([str(folder / name) for name in names], str(folder / "report.html")))
    return 0


def _last_sample(folder: Path) -> str:
    return json.loads((folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()[-1])["text"]
