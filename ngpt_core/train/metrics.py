"""What is logged of a run, while it trains and afterwards?

    metrics.jsonl    one line for each optimizer step, flushed: step, tokens, loss (only the cross-entropy), lr, grad_norm, ...;
                     val_loss where it was evaluated, diagnostics every ``diagnostics_every`` steps
    samples.jsonl    text that the model wrote, and at which step
    a live line      loss, tokens/s, MFU, lr, time left; without a terminal a plain line every ten seconds
    TensorBoard, W&B the same numbers, if installed and asked for

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
    """The lines of a run's metrics.jsonl, without one that a crash or a full disk cut short."""
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run} is not a run: it has no metrics.jsonl (ngpt train --out {run} makes one).")
    return [record for record in read_lines(path) if all(is_number(record.get(key)) for key in ("tokens", "loss", "time"))]


def read_lines(path: Path) -> list[dict]:
    """The records of a .jsonl file that have a step, without incomplete lines."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and isinstance(record.get("step"), int)]


def _remove_lines(path: Path, after: int) -> None:
    """Remove the lines of steps beyond ``after``, atomically: a full disk must not cost the others."""
    write_text(path, "".join(json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= after))


def check_wandb(project: str | None) -> None:
    """Can the run report to Weights & Biases as asked? Called before anything is written."""
    if project and find_spec("wandb") is None:
        raise ValueError(f"--wandb {project} needs the package wandb: pip install wandb, or leave it out.")


class Metrics:
    """Writes a run's numbers, on the first rank only."""

    def __init__(self, run: Path, after: int, total: int, tensorboard: bool, wandb: str | None):
        """Lines of steps beyond ``after`` (written after the checkpoint that a run resumes from) are removed."""
        self.folder, self.after, self.total = run, after, total
        self.out: TextIO = sys.stderr or io.StringIO()  # a closed stderr (2>&-) is None
        path, self.samples = run / "metrics.jsonl", run / "samples.jsonl"
        for old in filter(Path.exists, (path, self.samples)):
            _remove_lines(old, after)
        self.file = open(path, "a", encoding="utf-8")
        self.board = self._tensorboard(run) if tensorboard else None
        self.wandb = self._wandb(run, wandb) if wandb else None
        self.began, self.shown = time.monotonic(), 0.0
        self.live = self.out.isatty()

    @staticmethod
    def _tensorboard(run: Path) -> Any | None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None  # not installed; metrics.jsonl has everything
        return SummaryWriter(str(run / "tensorboard"))

    @staticmethod
    def _wandb(run: Path, project: str) -> Any:
        import wandb

        try:
            return wandb.init(project=project, dir=str(run), name=run.name, resume="allow")
        except Exception as error:  # no network, no login: it raises its own errors
            raise ValueError(f"--wandb {project} cannot be reached ({error}): log in to it, or leave it out.") from None

    def write(self, record: dict, sample: str | None) -> None:
        """Log a step: its line of metrics.jsonl, flushed, a sample if there is one, and the live line."""
        try:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
            if sample is not None:
                with open(self.samples, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": record["step"], "text": sample}) + "\n")
            numbers = {k: v for k, v in record.items() if isinstance(v, (int, float))}
            if self.board is not None:
                for key, value in numbers.items():
                    self.board.add_scalar(key, value, record["step"])
            if self.wandb is not None:
                self.wandb.log(numbers, step=record["step"])
        except OSError as error:
            raise OSError(error.errno, f"metrics of step {record['step']}: {error.strerror}", str(self.folder)) from None
        self._show(record)

    def _show(self, record: dict) -> None:
        """The live line: rewritten in a terminal at most ten times a second; elsewhere a line every ten seconds."""
        now, last = time.monotonic(), record["step"] == self.total
        if now - self.shown < (0.1 if self.live else 10.0) and not last and record["step"] > 1:
            return
        self.shown = now
        seconds = int((self.total - record["step"]) * (now - self.began) / (record["step"] - self.after))
        left = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
        line = (
            f"step {record['step']}/{self.total}  loss {record['loss']:.4f}  {record['tokens_per_s']:,.0f} tokens/s  "
            f"MFU {record['mfu']:.1%}  lr {record['lr']:.2e}  {left} left"
        )
        if "val_loss" in record:
            line += f"  val {record['val_loss']:.4f}"
        if self.live:
            line = f"\r\x1b[2K{line}"
        with contextlib.suppress(OSError):  # the reader may be gone, as with `2>&1 | head`
            print(line, end="" if self.live and not last else "\n", file=self.out, flush=True)

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()
