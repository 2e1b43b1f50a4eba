"""What does a run log?

    metrics.jsonl    one line per optimizer step, flushed: step, tokens, loss (only the cross-entropy), lr, grad_norm, ...;
                     val_loss if it was evaluated, diagnostics every ``diagnostics_every`` steps
    samples.jsonl    text that the model generated, with the step
    a live line      loss, tokens/s, MFU, lr, time left; without a terminal a plain line every ten seconds
    others           TensorBoard, W&B, MLflow and your own: ``callbacks.py`` and ``loggers.py``

MFU (model FLOPs utilization) is the share of the peak that the model's own arithmetic uses: 3 times the FLOPs of the forward
pass (forward and backward, without recomputation), times tokens/s, divided by the number of ranks times the peak.
"""

import contextlib
import json
import os
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import is_number
from ..files import sync_names, write_text
from ..gpus import peak_flops
from .callbacks import Callback, LiveLine, find_callback, load_callback
from .config import TrainConfig
from .flops import flops_per_token
from .loggers import MLflow, TensorBoard, WandB, check_installed
from .world import World

if TYPE_CHECKING:
    from .run import Run

__all__ = ["JSONL", "Metrics", "check_loggers", "read_lines", "read_metrics"]


def read_metrics(run: Path | str) -> list[dict]:
    """The lines of a run's metrics.jsonl, without a line that a crash or a full disk cut short."""
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run} is not a run: it has no metrics.jsonl (ngpt train --out {run} starts one).")
    return [record for record in read_lines(path) if all(is_number(record.get(key)) for key in ("tokens", "loss", "time"))]


def read_lines(path: Path) -> list[dict]:
    """The records of a .jsonl file that have a step, without incomplete lines."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and isinstance(record.get("step"), int)]


def _remove_lines(path: Path, after: int) -> None:
    """Remove the lines of steps beyond ``after``, atomically: on a full disk the others must survive."""
    write_text(path, "".join(json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= after))


class JSONL(Callback):
    """metrics.jsonl and samples.jsonl, flushed line by line."""

    def start(self, run: "Run", after: int) -> None:
        """Lines of steps beyond ``after`` (written after the checkpoint that a run resumes from) are removed."""
        path, self.samples = run.folder / "metrics.jsonl", run.folder / "samples.jsonl"
        for old in filter(Path.exists, (path, self.samples)):
            _remove_lines(old, after)
        self.file = open(path, "a", encoding="utf-8")

    def step(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def sample(self, step: int, text: str) -> None:
        with open(self.samples, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "text": text}) + "\n")

    def sync(self) -> None:
        """Flush both files to the disk."""
        os.fsync(self.file.fileno())
        if self.samples.exists():
            with open(self.samples, "a", encoding="utf-8") as file:
                os.fsync(file.fileno())
        sync_names(self.samples.parent)

    def end(self, step: int, finished: bool) -> None:
        self.file.close()


def check_loggers(config: TrainConfig) -> None:
    """ValueError if the run cannot report as asked. Called before anything is written."""
    check_installed("--wandb", "wandb", config.wandb)
    check_installed("--mlflow", "mlflow", config.mlflow)
    for name in config.callback:
        find_callback(name)


class Metrics:
    """Reports to every callback of a run, on the first rank only. metrics.jsonl comes first, the live line last."""

    def __init__(self, run: "Run", after: int, world: World):
        config = run.config
        self.waiting: deque[dict[str, Any]] = deque()  # steps without a line
        peak = peak_flops(world.device) * world.size
        self.per_token = flops_per_token(run.model, config.seq_len) / peak  # seconds at the peak
        self.folder, self.step = run.folder, after
        self.callbacks: list[Callback] = [JSONL()]
        self.callbacks += [TensorBoard()] if config.tensorboard else []
        self.callbacks += [WandB(config.wandb)] if config.wandb else []
        self.callbacks += [MLflow(config.mlflow)] if config.mlflow else []
        self.callbacks += [load_callback(name) for name in config.callback] + [LiveLine()]
        for callback in self.callbacks:
            callback.start(run, after)

    def add(self, record: dict[str, Any]) -> None:
        """Queue a step's record, which is empty until its numbers are known."""
        self.waiting.append(record)

    def write(self, sample: str | None = None) -> None:
        """Report the steps whose numbers are known; the last one with its sample, if there is one."""
        while self.waiting and self.waiting[0]:
            record = self.waiting.popleft()
            record["mfu"] = record["tokens_per_s"] * self.per_token
            self._report(record, None if self.waiting else sample)

    def _report(self, record: dict[str, Any], sample: str | None) -> None:
        """Report a step, with its held-out loss and its sample if there are any."""
        self.step = record["step"]
        try:
            for callback in self.callbacks:
                callback.step(record)
                if "val_loss" in record:
                    callback.eval(self.step, record["val_loss"])
                if sample is not None:
                    callback.sample(self.step, sample)
        except OSError as error:
            raise OSError(error.errno, f"metrics of step {self.step}: {error.strerror}", str(self.folder)) from None
        except Exception as error:  # a user's callback, or a service: a ValueError, so that the loop saves the step first
            name = type(callback).__name__
            raise ValueError(f"the callback {name} failed at step {self.step}: {type(error).__name__}: {error}") from error

    def sync(self) -> None:
        """Flush the lines of all steps to the disk."""
        for callback in self.callbacks:
            if isinstance(callback, JSONL):
                callback.sync()

    def saved(self) -> None:
        for callback in self.callbacks:
            callback.save(self.step)

    def close(self, finished: bool) -> None:
        for callback in self.callbacks:
            callback.end(self.step, finished)
