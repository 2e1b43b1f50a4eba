"""Which learns faster, GPT or nGPT? Two minutes on a laptop, side by side.

``ngpt demo`` (``make demo``) trains three runs on the embedded corpus, with the same blocks and data in the same order:
GPT, nGPT, and nGPT on a schedule half as long. The third one asks the paper's question directly: the middle of a long schedule
is no substitute for a short one. Each uses its own recipe, scaled to the length of the run, and one thread; two run at a time.
Batches are small, 256 tokens: at this size both sides learn more from many small steps than from a few large ones (chapter 9).
The demo prints which model is ahead and how certain that is: the 95% interval of the difference over the held-out files, which
both models read, and the spread over seeds (chapter 9 of the book). It then prints a sample of each and the path of the report.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

from ..data.corpus import embedded
from ..files import printable
from ..nn.io import load
from ..presets import preset as named_preset
from ..train.evaluate import evaluate_documents
from .report import LoggedRun, read_run, write_report

__all__ = ["demo"]

_CALIBRATION = 20  # steps to measure the speed; the first is not counted
_BATCH, _LENGTH = 2, 128  # sequences per step, and tokens per sequence
_ROWS = 16  # windows per batch of the comparison


class Part(NamedTuple):
    """One run of the demo."""

    name: str
    flag: str
    share: float  # of GPT's steps

    @property
    def title(self) -> str:
        return {"gpt": "GPT", "ngpt": "nGPT", "ngpt-half": "nGPT, half the tokens"}[self.name]


PARTS = (Part("gpt", "--baseline", 1.0), Part("ngpt", "--normalized", 1.0), Part("ngpt-half", "--normalized", 0.5))


def _start(folder: Path, part: Part, preset: str, steps: int, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "ngpt_core", "train", "--preset", preset, part.flag, "--steps", str(steps)]
    evaluate = max(1, steps // 20)
    command += ["--eval-every", str(evaluate), "--save-every", "0", "--diagnostics-every", str(evaluate)]
    command += ["--batch-size", str(_BATCH), "--seq-len", str(_LENGTH), "--out", str(folder), *flags]
    log = open(f"{folder}.log", "w", encoding="utf-8")
    return subprocess.Popen(command, stderr=log, stdout=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def _train(out: Path, parts: tuple[Part, ...], preset: str, steps: int, *flags: str) -> list[LoggedRun]:
    """Train the parts, two at a time, and show their progress; an error in any of them ends the demo."""
    waiting, running, failed = list(parts), dict[str, subprocess.Popen](), None
    try:
        while failed is None and (waiting or any(process.poll() is None for process in running.values())):
            while waiting and sum(process.poll() is None for process in running.values()) < 2:
                part = waiting.pop(0)
                running[part.name] = _start(out / part.name, part, preset, max(1, round(part.share * steps)), *flags)
            time.sleep(1.0)
            if not flags:
                _show(out, running)
            failed = next((name for name, process in running.items() if process.poll()), None)
        if sys.stderr.isatty() and not flags:
            print(file=sys.stderr)
    finally:
        _end(running.values())
    if failed is not None:
        status, lines = running[failed].returncode, Path(f"{out / failed}.log").read_text(errors="replace").splitlines()
        reason = f"it was killed by signal {-status}" if status < 0 else (lines or ["?"])[-1].removeprefix("ngpt: ")
        raise ValueError(f"training {failed} failed: {reason}")
    return [read_run(str(out / part.name)) for part in parts]


def _end(processes: Iterable[subprocess.Popen]) -> None:
    """End the processes: ask them to save and stop, and kill those that do not."""
    for process in processes:
        process.terminate()  # no effect on one that has ended
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def _show(out: Path, running: dict[str, subprocess.Popen]) -> None:
    parts = []
    for name in running:
        path = out / name / "metrics.jsonl"
        if path.exists() and path.stat().st_size:
            try:
                run = read_run(str(out / name))
            except ValueError:  # its first line is being written
                continue
            parts.append(f"{name}: step {run.records[-1]['step']}/{run.config['steps']}, loss {run.records[-1]['loss']:.3f}")
    if parts and sys.stderr.isatty():
        print("\r\x1b[2K" + "   ".join(parts), end="", file=sys.stderr, flush=True)


Losses = list[tuple[float, int]]  # per document: the sum of the cross-entropy, and the number of targets


def loss_of(documents: Losses) -> float:
    """The mean over all targets."""
    return sum(total for total, _ in documents) / sum(count for _, count in documents)


def paired(a: Losses, b: Losses) -> tuple[float, float]:
    """(the loss of b minus that of a, half the width of its 95% interval) over documents that both have read.

    The windows of a file resemble each other, so a file counts as one observation, not each of its windows. The variance is the
    jackknife's, which leaves out one file at a time: (n - 1)/n times the sum of (d_i - D t_i)^2 / (T - t_i)^2, where file i has
    t_i of the T targets, d_i is the difference of its two sums, and D is the difference. Since a few long files count for more,
    Student's quantile has T^2 / sum(t_i^2) - 1 degrees of freedom. (For files as long as Python's and random differences, the
    interval covers 94%.)
    """
    n, targets = len(a), sum(count for _, count in a)
    difference = loss_of(b) - loss_of(a)
    if n < 2:
        return difference, math.inf
    moves = [(y - x - difference * count) / (targets - count) for (x, count), (y, _) in zip(a, b)]
    freedom = max(1.0, targets**2 / sum(count**2 for _, count in a) - 1)
    return difference, _student(freedom) * math.sqrt((n - 1) / n * sum(move**2 for move in moves))


def _student(freedom: float) -> float:
    """The 97.5% quantile of Student's distribution, by Cornish and Fisher's expansion: 0.7% too small at 3, 3% at 2."""
    z = 1.959964
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))


# Two standard deviations over seeds of the difference between nGPT and GPT: chapter 9's evidence (a test recomputes them).
SEED_SPREAD = {"hybrid": 0.012, "dense": 0.057}


def _compare(folder: Path, runs: list[LoggedRun], preset: str) -> None:
    corpus, losses = embedded(), {}
    torch.set_num_threads(1)
    for part in PARTS:
        losses[part.name] = evaluate_documents(load(folder / part.name / "export"), corpus, _ROWS, _LENGTH)
    print(f"\n{'':<22} {'steps':>6} {'held-out loss':>14} {'against GPT':>20}")
    for part, run in zip(PARTS, runs):
        difference, half = paired(losses["gpt"], losses[part.name])
        versus = "" if part.name == "gpt" else f"{difference:+.4f} +- {half:.4f}"
        print(f"{part.title:<22} {run.records[-1]['step']:>6} {loss_of(losses[part.name]):>14.4f} {versus:>20}")
    print("\n" + verdict(*paired(losses["gpt"], losses["ngpt"])))
    print(half_verdict(*paired(losses["gpt"], losses["ngpt-half"])))
    print(f"+- is the 95% interval over {len(losses['gpt'])} held-out files, for these two models.")
    spread = SEED_SPREAD["dense" if preset.endswith("-dense") else "hybrid"]
    print(f"Over seeds, such a difference varies by {spread:.3f} (two standard deviations; the book's chapter 9).")
    print("One seed and a short run: an illustration. The book's chapter 9 has the evidence.")


def verdict(difference: float, half: float) -> str:
    """A sentence: which model is ahead after the same tokens."""
    if abs(difference) <= half:
        return f"After the same tokens there is no clear difference ({difference:+.4f} +- {half:.4f} nats per byte)."
    first = "nGPT" if difference < 0 else "GPT"
    return f"After the same tokens {first} is ahead by {abs(difference):.4f} +- {half:.4f} nats per byte."


def half_verdict(difference: float, half: float) -> str:
    """A sentence: whether nGPT reaches GPT's loss with half of the tokens."""
    if difference < -half:
        what = "ends below GPT's loss"
    elif difference <= half:
        what = "ends at GPT's loss, within the uncertainty"
    else:
        what = "does not reach GPT's loss"
    return f"With half of the tokens nGPT {what} (difference {difference:+.4f} +- {half:.4f})."


def demo(out: str | None, minutes: float, preset: str) -> int:
    """Calibrate, train for about ``minutes``, compare, report."""
    folder = Path(out) if out else next(p for p in (Path(f"demo-{i}" if i > 1 else "demo") for i in count(1)) if not p.exists())
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty: choose another --out, or remove it first.")
    if not 0 < minutes < math.inf:
        raise ValueError(f"--minutes must be a finite number above 0; got {minutes}.")
    named_preset(preset)  # an unknown name is reported before anything is written
    (folder / "calibration").mkdir(parents=True, exist_ok=True)
    corpus = embedded()
    print(f"corpus: embedded (CPython source), {corpus.manifest['tokens']:,} tokens, checksum {corpus.checksum[:12]}")
    quick = ("--sample-tokens", "0", "--eval-windows", "8", "--no-tensorboard")
    trial = _train(folder / "calibration", PARTS[:2], preset, _CALIBRATION, *quick)
    seconds = max((run.records[-1]["time"] - run.records[0]["time"]) / (len(run.records) - 1) for run in trial)
    shutil.rmtree(folder / "calibration")
    # the half run starts when one of the other two is done; a quarter is for evaluation and startup
    steps = max(20, int(60 * minutes / (1.25 * 1.5 * seconds)))
    print(f"training {preset}: GPT and nGPT for {steps} steps, nGPT again for half of them: about {minutes:g} minutes")
    runs = _train(folder, PARTS, preset, steps)
    _compare(folder, runs, preset)
    for part in PARTS:
        print(f"\n{part.title} writes:\n{printable(_last_sample(folder / part.name))}")
    print("\n" + write_report([str(folder / part.name) for part in PARTS], str(folder / "report.html")))
    return 0


def _last_sample(folder: Path) -> str:
    return json.loads((folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()[-1])["text"]
