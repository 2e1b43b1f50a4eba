"""What does a run leave on the disk, and who may train into its folder?

    RUN/config.json      both configs, the number of steps, the corpora with their checksums, versions
        metrics.jsonl, samples.jsonl, checkpoints/, tensorboard/
        export/          the finished model (safetensors): a run that has it is finished
        tokenizer.json   a copy, unless the tokenizer is bytes
        .lock            while the run trains: which process trains it

config.json and the export are sealed (seal.py). A run is never overwritten. Only one that has not trained a step, because
memory ran out or it was killed, may be started again. One process at a time may train: two would overwrite each other's
checkpoints and metrics. ``.lock`` is locked by the operating system, which releases it when the process ends, for whatever
reason. With many ranks, the first one takes the lock.
"""

import contextlib
import os
import platform
import socket
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import torch

from .. import __version__
from ..config import ModelConfig
from ..data.corpus import Corpus
from ..data.tokenizers import Tokenizer, check_description, describe, from_description
from ..files import make_folder, printable
from ..nn.io import CONFIG, WEIGHTS
from ..seal import SEAL, Damaged, check_folder, note_unsealed, read_sealed, write_sealed
from .checkpoint import hide, newest, remove, sweep
from .config import TrainConfig
from .metrics import read_lines

if TYPE_CHECKING:
    from .run import Run
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # a missing module has no type

__all__ = ["Lock", "RunFolder", "take"]

C = TypeVar("C", TrainConfig, ModelConfig)
FORMAT = 1
LOCK = ".lock"
_LOGS = {"tensorboard", "wandb", "wandb.json", "mlflow.json"}
_TEMPORARY = tuple(
    f".{name}-" for name in ("config.json", "tokenizer.json", "metrics.jsonl", "samples.jsonl", "export", "deleted-export")
)
_BEFORE_FIRST_STEP = {"config.json", "metrics.jsonl", "tokenizer.json", "checkpoints", LOCK} | _LOGS


class Lock:
    """A locked folder, until ``close``."""

    def __init__(self, file: TextIO):
        self.file = file

    def close(self) -> None:
        """Remove the file while it is still locked: a process that waits for it notices that it is gone."""
        with contextlib.suppress(OSError):
            os.unlink(self.file.name)
        self.file.close()


def take(folder: Path) -> Lock:
    """Create the folder if necessary and lock it. ValueError if another process has locked it."""
    while True:
        try:
            make_folder(folder)
            file = open(folder / LOCK, "a+", encoding="utf-8")
        except OSError as error:
            reason = f"{error.strerror} ({error.filename})"
            raise ValueError(f"{folder} cannot be written to: {reason}. Choose another --out.") from None
        try:
            # The lock belongs to the process, not to the open file: a forked worker that outlives the process does not keep it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            who = file.read().strip() or "another process"
            file.close()
            raise ValueError(f"{folder} is being trained by {who}: wait for it or stop it, or choose another --out.") from None
        except (OSError, AttributeError):
            text = f"ngpt: this file system has no locks: make sure that nothing else trains into {folder}."
            print(printable(text), file=sys.stderr)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / LOCK)):
                break
        file.close()  # its owner removed it between our two calls
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return Lock(file)


def _is_leftover(path: Path) -> bool:
    """Whether a run that was killed while it started may have left this file, which nobody needs."""
    return path.name == LOCK or path.name.startswith(_TEMPORARY)


class RunFolder:
    """The folder of a run. config.json is read once, on first use."""

    def __init__(self, path: Path | str):
        self.path = Path(path)

    # ---- reading -----------------------------------------------------------------------------------------------------
    @cached_property
    def record(self) -> dict[str, Any]:
        """The content of config.json."""
        path = self.path / "config.json"
        if not path.is_file():
            raise ValueError(f"{self.path} is not a run: it has no config.json (ngpt train --out {self.path} starts one).")
        record, sealed = read_sealed(path)
        if not sealed:
            note_unsealed(path)
        if record.get("format") != FORMAT:
            raise ValueError(f"{self.path} has run format {record.get('format')}; this version reads {FORMAT}.")
        for name, kind in {"steps": int, "model": dict, "train": dict}.items():
            if not isinstance(record.get(name), kind):
                raise ValueError(f"{path}: {name!r} is missing or has the wrong type; restore the file.")
        check_description(record.get("tokenizer"), path)
        return record

    @property
    def config(self) -> TrainConfig:
        return self._parsed(TrainConfig, "train")

    @property
    def model(self) -> ModelConfig:
        return self._parsed(ModelConfig, "model")

    def _parsed(self, kind: type[C], name: str) -> C:
        values = self.record[name]
        try:
            return kind.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{self.path / 'config.json'}, {name}: {error}") from None

    def tokenizer(self) -> Tokenizer:
        return from_description(self.record["tokenizer"], self.path)

    def has_run(self) -> bool:
        """Whether a run is in the folder. ValueError if something else is."""
        if (self.path / "config.json").is_file():
            return True
        if self.path.exists() and (not self.path.is_dir() or not all(map(_is_leftover, self.path.iterdir()))):
            reason = "holds other files but no run" if self.path.is_dir() else "is a file"
            raise ValueError(f"{self.path} {reason}: choose a new or empty folder for --out.")
        return False

    def has_trained(self) -> bool:
        """Whether the run has trained a step. Also true if the folder holds files that no run writes."""
        metrics, names = self.path / "metrics.jsonl", {file.name for file in self.path.iterdir() if not _is_leftover(file)}
        return (
            newest(self.path) is not None
            or not names <= _BEFORE_FIRST_STEP
            or (metrics.is_file() and bool(read_lines(metrics)))
        )

    def has_export(self) -> bool:
        """Whether the export exists and is complete, as far as can be told without reading all of it."""
        export = self.path / "export"
        if not all((export / name).is_file() for name in (CONFIG, WEIGHTS)):
            return False
        try:
            return not (export / SEAL).is_file() or check_folder(export, read=False) is not None
        except Damaged as error:
            print(f"ngpt: {printable(str(error))}: ngpt train --resume writes it again.", file=sys.stderr)
            return False

    # ---- writing -----------------------------------------------------------------------------------------------------
    def claim(self, run: "Run") -> Lock:
        """Lock the folder. The run's checkpoint must still be the newest one."""
        lock, latest = take(self.path), newest(self.path)
        if latest != (run.checkpoint and run.checkpoint.path) and latest not in run.damaged:
            lock.close()
            raise ValueError(f"another process has just trained {self.path}: run the command again.")
        return lock

    def begin(self, run: "Run", corpora: list[tuple[Corpus, float]]) -> None:
        """Write config.json and a copy of the tokenizer. The export of a run that continues is removed: it would no longer be
        the run's model, and the checkpoint has the same weights. So is what a killed process left behind."""
        sweep(self.path / "checkpoints")
        for leftover in self.path.iterdir():
            if leftover.name != LOCK and _is_leftover(leftover):
                remove(leftover) if leftover.is_dir() else leftover.unlink()
        metrics = self.path / "metrics.jsonl"
        if run.checkpoint is None and metrics.is_file() and (lines := read_lines(metrics)):
            text = f"ngpt: {self.path} has no checkpoint: it starts again from its first step; {len(lines)} steps are repeated."
            print(printable(text), file=sys.stderr)
        if (export := self.path / "export").is_dir():
            start = run.checkpoint.path if run.checkpoint else "its start"
            text = f"{export} is removed: the run continues from {start} and exports its model again."
            print(printable(text), file=sys.stderr)
            remove(hide(export))
        tokenizer = corpora[0][0].tokenizer()
        used = [
            {"folder": str(c.folder), "weight": weight, "checksum": c.checksum, "sources": c.manifest.get("sources")}
            for c, weight in corpora
        ]
        record = {"format": FORMAT, "id": run.id, "steps": run.steps, "scaled": run.scaled, "model": run.model.to_dict()}
        record |= {"train": run.config.to_dict(), "corpora": used, "tokenizer": describe(tokenizer)}
        record["versions"] = {"python": platform.python_version(), "torch": torch.__version__, "ngpt_core": __version__}
        write_sealed(self.path / "config.json", record)  # before any other file: without it the folder is not a run
        describe(tokenizer, self.path)
