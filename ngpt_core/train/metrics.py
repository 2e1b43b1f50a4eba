"""What does a person see of a run, while it runs and afterwards?

    metrics.jsonl    one line for each optimizer step, flushed: step, tokens, loss (cross-entropy alone), lr, grad_norm, ...;
                     val_loss where it was evaluated, diagnostics every so many steps
    samples.jsonl    text that the model wrote, and when
    a live line      loss, tokens/s, MFU, lr, time left; a plain line now and then where there is no terminal
    TensorBoard, W&B the same numbers, where installed and asked for

MFU (model FLOPs utilization) is the share of the device's peak that the model's own arithmetic uses: 3 times the forward pass's
FLOPs (forward and backward, without recomputation), times tokens/s, over ranks times peak.
"""

import contextlib
import io
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from ..checks import is_number
from ..files import write_text

__all__ = ["Metrics", "check_wandb", "read_lines", "read_metrics"]


def read_metrics(run: Path | str) -> list[dict]:
    """The lines of a run's metrics.jsonl; one that a crash or a full disk cut short is left out."""
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run} is not a run: it has no metrics.jsonl (ngpt train --out {run} makes one).")
    return [record for record in read_lines(path) if all(is_number(record.get(key)) for key in ("tokens", "loss", "time"))]


def read_lines(path: Path) -> list[dict]:
    """The records of a .jsonl file, each with its step; without lines that are not whole."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and isinstance(record.get("step"), int)]


def _take_back(path: Path, after: int) -> None:
    """Leave out the lines of steps beyond ``after``; all at once, for a full disk must not cost the others."""
    write_text(path, "".join(json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= after))


def check_wandb(project: str | None) -> None:
    """Before anything is written: can the run report to Weights & Biases as it was asked to?"""
    if project and find_spec("wandb") is None:
        raise ValueError(f"--wandb {project} needs the package wandb: pip install wandb, or leave it out.")


class Metrics:
    """Writes a run's numbers. Only the first rank has one."""

    def __init__(self, run: Path, after: int, total: int, tensorboard: bool, wandb: str | None, out: TextIO | None = None):
        """Lines of steps beyond ``after`` (written after the checkpoint that a run resumes from) are taken back."""
        self.total, self.out = total, out or sys.stderr or io.StringIO()  # a closed stderr (2>&-) is None
        path = run / "metrics.jsonl"
        if path.exists():
            _take_back(path, after)
        self.file = open(path, "a", encoding="utf-8")
        self.samples = run / "samples.jsonl"
        if self.samples.exists():
            _take_back(self.samples, after)
        self.board = self._tensorboard(run) if tensorboard else None
        self.wandb = self._wandb(run, wandb) if wandb else None
        self.shown = 0.0
        self.live = self.out.isatty()

    @staticmethod
    def _tensorboard(run: Path) -> Any | None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None  # an extra that is not installed; metrics.jsonl has everything
        return SummaryWriter(str(run / "tensorboard"))

    @staticmethod
    def _wandb(run: Path, project: str) -> Any:
        import wandb

        try:
            return wandb.init(project=project, dir=str(run), name=run.name, resume="allow")
        except Exception as error:  # no network, no login: it has errors of its own
            raise ValueError(f"--wandb {project} cannot be reached ({error}): log in to it, or leave it out.") from None

    def write(self, record: dict) -> None:
        """One line of metrics.jsonl, on the disk's side of Python's buffers when this returns."""
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        numbers = {k: v for k, v in record.items() if isinstance(v, (int, float))}
        if self.board is not None:
            for key, value in numbers.items():
                self.board.add_scalar(key, value, record["step"])
        if self.wandb is not None:
            self.wandb.log(numbers, step=record["step"])

    def sample(self, step: int, text: str) -> None:
        with open(self.samples, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "text": text}) + "\n")

    def progress(self, record: dict, seconds_left: float) -> None:
        """The live line: rewritten in a terminal at most ten times a second; elsewhere a line every ten seconds."""
        now, last = time.monotonic(), record["step"] == self.total
        if now - self.shown < (0.1 if self.live else 10.0) and not last and record["step"] > 1:
            return
        self.shown = now
        left = f"{int(seconds_left // 3600)}:{int(seconds_left // 60) % 60:02d}:{int(seconds_left) % 60:02d}"
        line = (
            f"step {record['step']}/{self.total}  loss {record['loss']:.4f}  {record['tokens_per_s']:,.0f} tokens/s  "
            f"MFU {record['mfu']:.1%}  lr {record['lr']:.2e}  {left} left"
        )
        if "val_loss" in record:
            line += f"  val {record['val_loss']:.4f}"
        if self.live:
            line = f"\r\x1b[2K{line}"
        with contextlib.suppress(OSError):  # who looked on may be gone, as with `2>&1 | head`: the training goes on
            print(line, end="" if self.live and not last else "\n", file=self.out, flush=True)

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()
