"""How does a run survive a crash, a kill, a full disk, or a change in the number of ranks?

A checkpoint is a folder ``checkpoints/step-00000100``:
    *.safetensors, index.json    the tensors (storage.py): each rank writes its parts, any number of ranks reads them
                                 model.NAME                   parameters and router biases
                                 optimizer.KEY.NAME           the optimizer's state of a parameter
                                 random.RANK.DEVICE           the random state of a rank
    state.json                   format version, step, schedule, position in the data, both configs, and the list of the files
                                 with their sha256: the seal (seal.py) of the checkpoint

Nothing in it can run code. It is written under another name (``.step-00000100``), forced to the disk, and renamed: a folder
called ``step-...`` is complete. After a crash the last good one is still there; what is left of an incomplete one is removed
when the run continues. A damaged one is found before it is used (recovery.py).
"""

import contextlib
import logging
import os
import secrets
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
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
from ..files import make_folder, printable, sync, sync_names
from ..nn.model import LanguageModel
from ..optim.groups import check_moments
from ..seal import Damaged, Entry, check_files, listed, read_sealed, verify, write_sealed
from .format1 import OldReader, read_random
from .memory import ran_out
from .storage import INDEX, Reader, Writer, read_index
from .world import World

__all__ = ["FORMAT", "Checkpoint", "Checkpoints", "by_step", "hide", "load_model", "newest", "open_checkpoint", "remove",
           "sweep"]  # fmt: skip

FORMAT = 2
STATE = "state.json"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what an optimizer has of every parameter once it has made a step


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: the content of state.json, read once, and where the tensors are."""

    path: Path
    state: dict[str, Any]
    model: ModelConfig
    files: dict[str, Entry]  # as state.json lists them; none in format 1

    def verify(self, kind: str = "", rank: int = 0, world: int = 1) -> int:
        """Read the files (only those whose name begins with ``kind``, and index.json) and compare their sha256; N ranks share
        the work. Returns the number of bytes."""
        names = [name for name in sorted(self.files) if name.startswith(kind) or name == INDEX]
        with _reading(self.path):
            return verify(self.path, {name: self.files[name] for name in names[rank::world]})

    def check_tensors(self) -> None:
        """``Damaged`` unless the list of tensors has the whole model and its optimizer."""
        with torch.device("meta"):
            model = LanguageModel(self.model)
        with _reading(self.path):
            _check_names(self.reader().tensors, set(_tensors(model)), set(dict(model.named_parameters())), self.state["step"])

    def reader(self) -> Reader | OldReader:
        return Reader(self.path, read_index(self.path, self.files)) if self.state["format"] == FORMAT else OldReader(self.path)


def by_step(run: Path | str) -> dict[int, Path]:
    """The checkpoints of a run, oldest first."""
    named = ((path.name.removeprefix("step-"), path) for path in (Path(run) / "checkpoints").glob("step-*") if path.is_dir())
    return dict(sorted((int(step), path) for step, path in named if step.isdecimal()))


def newest(run: Path | str) -> Path | None:
    """The newest checkpoint in a run's folder."""
    return next(reversed(by_step(run).values()), None)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read and check everything except the tensors: only the sizes of their files."""
    with _reading(path):
        state, sealed = read_sealed(path / STATE)
        kinds: dict = {"format": int, "step": int, "ranks": int, "steps": int, "seconds": int | float}
        kinds |= dict.fromkeys(("schedule", "data", "model", "config"), dict)
        if wrong := sorted(name for name, kind in kinds.items() if not isinstance(state.get(name), kind)):
            raise ValueError(f"{STATE} has no {', '.join(wrong)}, or one of the wrong type")
        if not path.name.endswith(f"{state['step']:08d}") or state["schedule"].get("t") != state["step"] + 1:
            raise ValueError(f"{STATE} was edited: it refers to another step")
        if not isinstance(anchor := state["schedule"].get("anchor"), list) or len(anchor) != 2:
            raise ValueError(f"{STATE} was edited: its schedule has no anchor")
    if state["format"] not in (1, FORMAT):
        raise ValueError(f"{path} has checkpoint format {state['format']}; this version reads 1 and {FORMAT}.")
    with _reading(path):
        if state["format"] == FORMAT:
            if not sealed:
                raise ValueError(f"{STATE} was edited: it has no seal")
            files = listed(state.get("files"), path / STATE)
            check_files(path, files)
        else:
            if odd := sorted(entry.name for entry in path.iterdir() if not entry.is_file()):  # a pipe is read forever
                raise ValueError(f"{odd[0]} is not a file")
            files = {}
            logging.getLogger("ngpt_core").warning(
                "%s has format 1, which an older version wrote: damage in it may go unnoticed. To convert it, continue the run "
                "(ngpt train --resume), which writes format 2.",
                path,
            )
        return Checkpoint(path, state, ModelConfig.from_dict(state["model"]), files)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn any error in the block into one sentence about the checkpoint: damaged bytes raise errors of every kind."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        if ran_out(error):
            raise
        _raise_interruption(error)
        run = path.parent.parent
        raise Damaged(
            f"the checkpoint {path} cannot be read: {_why(error)}. ngpt train --out {run} --resume sets it aside and continues "
            "from an older one."
        ) from None


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Everything that is saved as a tensor, by name: the tensors themselves, not copies."""
    tensors = {f"model.{name}": x for name, x in model.state_dict().items()}
    if optimizer is not None:
        for name, p in model.named_parameters():
            tensors |= {f"optimizer.{key}.{name}": x for key, x in optimizer.state.get(p, {}).items()}
    return tensors


@contextlib.contextmanager
def _no_warning() -> Iterator[None]:
    """Suppress torch's warning that a single process saves or loads: here that is intended."""
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
        self.pending: tuple[Future, Writer, dict] | None = None  # (future, writer, state) of a save in progress

    # ---- saving ------------------------------------------------------------------------------------------------------
    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict) -> None:
        """Write the checkpoint of ``step``. ValueError if that fails; no incomplete checkpoint is left behind."""
        self.finish()
        temporary = self.folder / f".step-{step:08d}"
        self._try(step, self._prepare, temporary)
        self.world.barrier()
        tensors = _tensors(model, optimizer) | _random(self.world)
        state, writer = {"format": FORMAT, "step": step, "ranks": self.world.size, **state}, Writer(temporary)
        if self.group is not None:
            future = self._try(step, lambda: dcp.async_save(tensors, storage_writer=writer, process_group=self.group))
            self.pending = (future, writer, state)
            return
        with _no_warning():
            self._try(step, lambda: dcp.save(tensors, storage_writer=writer, no_dist=self.no_dist))
        self._complete(writer, state)

    def finish(self) -> None:
        """Wait for the background save, if there is one, and rename it. All ranks call this together."""
        if self.pending is None:
            return
        (future, writer, state), self.pending = self.pending, None
        self._try(state["step"], future.result)
        self._complete(writer, state)

    def _prepare(self, temporary: Path) -> None:
        if self.world.main:
            make_folder(self.folder)
            sweep(self.folder)
            temporary.mkdir()

    def _complete(self, writer: Writer, state: dict) -> None:
        self.world.barrier()  # every rank has written its part
        temporary, path = writer.folder, self.folder / f"step-{state['step']:08d}"

        def rename() -> None:
            write_sealed(temporary / STATE, {**state, "files": writer.files})
            sync(temporary)
            replaced = [hide(path)] if path.exists() else []  # saved before this run was resumed from an older one
            os.replace(temporary, path)
            sync_names(self.folder)
            for old in replaced:
                remove(old)
            self._prune()

        if self.world.main:
            self._try(state["step"], rename)
        self.world.barrier()

    def _prune(self) -> None:
        """Remove all checkpoints except the newest ``keep`` and those at multiples of ``keep_every``."""
        for step, path in list(by_step(self.folder.parent).items())[: -self.keep]:
            if not (self.keep_every and step % self.keep_every == 0):
                remove(path)
        sweep(self.folder)  # once more, what could not be deleted: no save may follow

    def _try(self, step: int, write: Callable, *args: object) -> Any:
        try:
            return write(*args)
        except (OSError, CheckpointException, RuntimeError) as error:
            shutil.rmtree(self.folder / f".step-{step:08d}", ignore_errors=True)
            _raise_interruption(error)
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
            reader = checkpoint.reader()
            _check_names(reader.tensors, set(tensors), set(parameters), checkpoint.state["step"])
            for name in (name for name in reader.tensors if name.startswith("optimizer.")):
                _, key, parameter = name.split(".", 2)
                p, stored = parameters[parameter], reader.tensors[name]
                size, dtype = stored.size, stored.properties.dtype
                tensors[name] = torch.zeros_like(p, dtype=dtype) if size == p.shape else torch.zeros(size, dtype=dtype)
                optimizer.state[p][key] = tensors[name]
            random: dict[str, Tensor] = _random(self.world) if checkpoint.state["ranks"] == self.world.size else {}
            if checkpoint.state["format"] == FORMAT:
                tensors |= random
            dcp.load(tensors, storage_reader=reader, no_dist=self.no_dist)
            _check_moments(parameters, optimizer, checkpoint.state["step"])
            if random and checkpoint.state["format"] != FORMAT:
                random = {f"random.{device}": x for device, x in read_random(path, self.world.rank).items()}
            for name, x in random.items():
                if name.endswith("cpu"):
                    torch.set_rng_state(x)
                elif self.world.device.type == "cuda":
                    torch.cuda.set_rng_state(x, self.world.device)


def _random(world: World) -> dict[str, Tensor]:
    """The random states of this rank, by their names in a checkpoint."""
    found = {f"random.{world.rank:05d}.cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        found[f"random.{world.rank:05d}.cuda"] = torch.cuda.get_rng_state(world.device)
    return found


def _check_names(tensors: Iterable[str], model: set[str], parameters: set[str], step: int) -> None:
    """ValueError unless the tensors are those of this model and, after the first step, of its whole optimizer."""
    moments = {f"optimizer.{key}.{name}" for key in MOMENTS for name in parameters} if step else set()
    found = {name for name in tensors if not name.startswith("random.")}
    of_parameters = {name for name in found if name.startswith("optimizer.") and name.split(".", 2)[-1] in parameters}
    if missing := (model | moments) - found:
        raise ValueError(f"it has no {min(missing)}, which this model and its optimizer have")
    if other := found - model - of_parameters:
        raise ValueError(f"it has {min(other)}, which this model and its optimizer do not have")


def _check_moments(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, done: int) -> None:
    """ValueError for a state that no run leaves behind: nothing else would notice damage in a checkpoint of format 1."""
    states = {name: optimizer.state.get(p, {}) for name, p in parameters.items()}
    if wrong := next((name for name, s in states.items() if s and not 0 <= float(s["step"]) <= done), None):
        raise ValueError(f"it has {float(states[wrong]['step']):g} updates of {wrong}, and the run made {done}")
    check_moments([(name, parameters[name], key, s[key]) for name, s in states.items() if s for key in MOMENTS[1:]])


def sweep(folder: Path) -> None:
    """Remove what an interrupted save or deletion left in a folder of checkpoints."""
    for leftover in (*folder.glob(".step-*"), *folder.glob(".deleted-*")):
        remove(leftover)


def hide(path: Path) -> Path:
    """Rename a folder that is to be deleted, so that one that is half deleted is never mistaken for a whole one."""
    os.replace(path, hidden := path.with_name(f".deleted-{path.name}-{secrets.token_hex(4)}"))
    return hidden


def remove(path: Path) -> None:
    """Delete a folder. A failure is a warning: nothing is lost."""
    try:
        shutil.rmtree(path if path.name.startswith(".") else hide(path))
    except OSError as error:
        print(printable(f"ngpt: {path} could not be deleted ({error.strerror}); training continues."), file=sys.stderr)


def _raise_interruption(error: BaseException) -> None:
    """Ctrl-C and SIGTERM on any rank, which Distributed Checkpoint reports as it does damage, end the process as elsewhere."""
    for failure, _ in error.failures.values() if isinstance(error, CheckpointException) else ():
        if not isinstance(failure, Exception):
            raise failure from None


def _why(error: BaseException) -> str:
    """The cause of an error from Distributed Checkpoint, in a few words."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    lines = str(error).splitlines()
    text = lines[0].rstrip(".") if lines else "the file ends too early"
    return text if isinstance(error, (ValueError, RuntimeError)) else f"{type(error).__name__}, {text}"


def load_model(path: Path) -> LanguageModel:
    """Load only the model, in one process, from a checkpoint that any number of ranks wrote. Its files are verified first."""
    checkpoint = open_checkpoint(path)
    checkpoint.verify("model-")
    model = LanguageModel(checkpoint.model)
    with _reading(path), _no_warning():
        dcp.load(_tensors(model), storage_reader=checkpoint.reader(), no_dist=True)
    return model
