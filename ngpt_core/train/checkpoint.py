"""How does a run survive: a crash, a kill, a full disk, another number of ranks?

A checkpoint is a folder ``checkpoints/step-00000100``:
    *.distcp, .metadata    tensors, by PyTorch's Distributed Checkpoint: each rank writes its parts, any number of ranks reads
                           model.NAME                   parameters and router biases
                           optimizer.KEY.NAME           the optimizer's state of a parameter
    rng-00000.pt           the random state of a rank
    state.json             format version, step, schedule, position in the data, both configs

It is written under another name (``.step-00000100``), forced to the disk, and renamed: a folder called ``step-...`` is
complete. After a crash the last good one is still there; the next save removes the incomplete one.
"""

import contextlib
import io
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from ..config import ModelConfig
from ..files import read_json, sync, write_json
from ..nn.model import LanguageModel
from .memory import ran_out
from .world import World

__all__ = ["FORMAT", "Checkpoint", "Checkpoints", "load_model", "newest", "open_checkpoint"]

FORMAT = 1
STATE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: what state.json holds, read once, and where the tensors are."""

    path: Path
    state: dict[str, Any]
    model: ModelConfig


def _by_step(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in a folder, oldest first."""
    named = ((path.name.removeprefix("step-"), path) for path in folder.glob("step-*") if (path / STATE).is_file())
    return dict(sorted((int(step), path) for step, path in named if step.isdecimal()))


def newest(run: Path | str) -> Path | None:
    """The newest complete checkpoint in a run's folder."""
    return next(reversed(_by_step(Path(run) / "checkpoints").values()), None)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read and check everything except for the tensors."""
    with _reading(path):
        state = read_json(path / STATE)
        kinds: dict = {"format": int, "step": int, "ranks": int, "steps": int, "seconds": int | float}
        kinds |= dict.fromkeys(("schedule", "data", "model", "config"), dict)
        if wrong := sorted(name for name, kind in kinds.items() if not isinstance(state.get(name), kind)):
            raise ValueError(f"{STATE} has no {', '.join(wrong)}, or one of the wrong type")
        if not path.name.endswith(f"{state['step']:08d}") or state["schedule"].get("t") != state["step"] + 1:
            raise ValueError(f"{STATE} was edited: it refers to another step")
    if state["format"] != FORMAT:
        raise ValueError(f"{path} has checkpoint format {state['format']}; this version reads {FORMAT}.")
    with _reading(path):
        return Checkpoint(path, state, ModelConfig.from_dict(state["model"]))


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns any error in the block into one sentence about the checkpoint: damaged bytes raise errors of every kind."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        if ran_out(error):
            raise
        raise ValueError(f"the checkpoint {path} cannot be read: {_why(error)}. Remove it to use an older one.") from None


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Everything that is saved as a tensor, by name: the tensors themselves, not copies."""
    tensors = {f"model.{name}": x for name, x in model.state_dict().items()}
    if optimizer is not None:
        for name, p in model.named_parameters():
            tensors |= {f"optimizer.{key}.{name}": x for key, x in optimizer.state.get(p, {}).items()}
    return tensors


@contextlib.contextmanager
def _no_warning() -> Iterator[None]:
    """Suppresses torch's warning that a single process saves or loads: here that is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


class Checkpoints:
    """The checkpoints of one run: ``save`` and ``load``. With ``background`` a save returns once everything is copied."""

    def __init__(self, run: Path, world: World, keep: int = 2, keep_every: int = 0, background: bool = False):
        self.folder, self.world, self.keep, self.keep_every = Path(run) / "checkpoints", world, keep, keep_every
        self.no_dist = not dist.is_initialized()
        # The background thread communicates with its peers while training does: it needs its own group.
        self.group = dist.new_group(backend="gloo") if background else None
        self.pending: tuple[Future, int, dict] | None = None  # (future, step, state) of a save in progress

    # ---- saving ------------------------------------------------------------------------------------------------------
    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict) -> None:
        """Write the checkpoint of ``step``. If that fails: one sentence, and no incomplete checkpoint is left."""
        self.finish()
        temporary = self.folder / f".step-{step:08d}"
        self._try(step, self._prepare, temporary)
        self.world.barrier()
        self._try(step, self._save_random, temporary)
        tensors, state = _tensors(model, optimizer), {"format": FORMAT, "step": step, "ranks": self.world.size, **state}
        if self.group is not None:
            future = self._try(step, lambda: dcp.async_save(tensors, checkpoint_id=temporary, process_group=self.group))
            self.pending = (future, step, state)
            return
        with _no_warning():
            self._try(step, lambda: dcp.save(tensors, checkpoint_id=temporary, no_dist=self.no_dist))
        self._complete(step, state)

    @property
    def ready(self) -> bool:
        """Whether a background save on this rank has ended and ``finish`` may complete it."""
        return self.pending is not None and self.pending[0].done()

    def finish(self) -> None:
        """Wait for the background save, if there is one, and rename it. All ranks call this together."""
        if self.pending is None:
            return
        (future, step, state), self.pending = self.pending, None
        self._try(step, future.result)
        self._complete(step, state)

    def _prepare(self, temporary: Path) -> None:
        if self.world.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            for incomplete in self.folder.glob(".step-*"):
                shutil.rmtree(incomplete)
            temporary.mkdir()

    def _save_random(self, temporary: Path) -> None:
        state = {"cpu": torch.get_rng_state()}
        if self.world.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.world.device)
        buffer = io.BytesIO()  # torch's own writer would report a full disk as "unexpected pos"
        torch.save(state, buffer)
        (temporary / f"rng-{self.world.rank:05d}.pt").write_bytes(buffer.getvalue())

    def _complete(self, step: int, state: dict) -> None:
        self.world.barrier()  # every rank has written its part
        temporary, path = self.folder / f".step-{step:08d}", self.folder / f"step-{step:08d}"

        def rename() -> None:
            write_json(temporary / STATE, state)
            sync(temporary)
            if path.exists():  # saved before this run was resumed from an older one
                shutil.rmtree(path)
            os.replace(temporary, path)
            sync(self.folder)
            self._prune()

        if self.world.main:
            self._try(step, rename)
        self.world.barrier()

    def _prune(self) -> None:
        """Remove all but the newest ``keep`` checkpoints and those of every ``keep_every`` steps."""
        for step, path in list(_by_step(self.folder).items())[: -self.keep]:
            if not (self.keep_every and step % self.keep_every == 0):
                shutil.rmtree(path)

    def _try(self, step: int, write: Callable, *args: object) -> Any:
        try:
            return write(*args)
        except (OSError, CheckpointException, RuntimeError) as error:
            shutil.rmtree(self.folder / f".step-{step:08d}", ignore_errors=True)
            last = newest(self.folder.parent)
            raise ValueError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {_why(error)}. Fix that and continue "
                f"with --resume; {f'the last good one is {last}' if last else 'there is no earlier one'}."
            ) from None

    # ---- loading -----------------------------------------------------------------------------------------------------
    def load(self, checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Fill model and optimizer, on any number of ranks; if it is the same number, also restore the random states."""
        path, tensors, parameters = checkpoint.path, _tensors(model), dict(model.named_parameters())
        with _reading(path), _no_warning():
            stored: dict = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
            for name in (name for name in stored if name.startswith("optimizer.")):
                _, key, parameter = name.split(".", 2)
                p, size, dtype = parameters[parameter], stored[name].size, stored[name].properties.dtype
                tensors[name] = torch.zeros_like(p, dtype=dtype) if size == p.shape else torch.zeros(size, dtype=dtype)
                optimizer.state[p][key] = tensors[name]
            dcp.load(tensors, checkpoint_id=path, no_dist=self.no_dist)
            if checkpoint.state["ranks"] == self.world.size:
                saved = torch.load(path / f"rng-{self.world.rank:05d}.pt", weights_only=True)
                torch.set_rng_state(saved["cpu"])
                if "cuda" in saved and self.world.device.type == "cuda":
                    torch.cuda.set_rng_state(saved["cuda"], self.world.device)


def _why(error: BaseException) -> str:
    """The cause of an error of Distributed Checkpoint, in a few words."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if "inline_container" in str(error) or "PytorchStreamWriter" in str(error):  # how torch reports that a write was cut short
        return "a file could not be written completely; is the disk full, or a quota reached?"
    lines = str(error).splitlines()
    text = lines[0].rstrip(".") if lines else "the file ends too early"
    return text if isinstance(error, (ValueError, RuntimeError)) else f"{type(error).__name__}, {text}"


def load_model(path: Path) -> LanguageModel:
    """Only the model, in one process, from a checkpoint that any number of ranks wrote."""
    model = LanguageModel(open_checkpoint(path).model)
    with _reading(path), _no_warning():
        dcp.load(_tensors(model), checkpoint_id=path, no_dist=True)
    return model
