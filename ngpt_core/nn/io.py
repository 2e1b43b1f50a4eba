"""How is a model saved to files and loaded again?

A folder holds ``model.safetensors`` (the weights and the routers' biases, nothing that runs code), ``config.json`` (with the
format version) and ``seal.json`` (the sha256 of both, verified by ``load``). Each file is written under a temporary name and
then renamed, so a crash leaves the old one intact. The weights carry a fingerprint of their config, so files of two different
models are never mixed up, even where a folder has no seal.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .. import seal
from ..config import ModelConfig
from ..files import new_file, read_json
from . import stream
from .model import LanguageModel, unwrap

__all__ = ["CONFIG", "WEIGHTS", "load", "save"]

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def _fingerprint(config: ModelConfig) -> str:
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()


def save(
    model: LanguageModel,
    folder: str | Path,
    state: Mapping[str, Tensor] | None = None,
    whole: Iterable[Tensor] | None = None,
) -> Path:
    """Write model.safetensors, config.json and their seal into ``folder``, created if needed; returns the folder.

    ``state`` replaces ``model.state_dict()``: pass the gathered tensors of a sharded model. Or pass its sharded tensors, and as
    ``whole`` an iterable that yields them gathered, in the order of ``stream.ordered(state)``: each is written before the next
    is requested. Equal models give equal files.
    """
    model, folder = unwrap(model, "ngpt_core.save"), Path(folder)  # a wrapper renames parameters
    state = model.state_dict() if state is None else state
    _check_same(_empty(model.config).state_dict(), state, "This state belongs to")
    if whole is None and (split := next((k for k, v in state.items() if hasattr(v, "full_tensor")), None)):
        raise ValueError(f"{split} is sharded: gather every tensor (x.full_tensor(), on all ranks) and pass them as state=.")
    if absent := next((k for k, v in state.items() if v.is_meta), None):
        raise ValueError(f"{absent} is on the meta device and has no values: call to_empty(device=...) and init_weights().")
    _check_dtypes(state, "This model")
    about = {name: (state[name].dtype, tuple(state[name].shape)) for name in stream.ordered(state)}
    whole = (state[name] for name in about) if whole is None else whole
    _make(folder)
    with new_file(folder / CONFIG) as config, new_file(folder / WEIGHTS) as weights:
        config.write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")
        written = stream.write(weights, about, whole, {"config": _fingerprint(model.config)})
        files = {CONFIG: seal.entry(config), WEIGHTS: written}
        files = seal.unseal(folder) | files
    seal.seal_folder(folder, files)
    return folder


def load(folder: str | Path, device: str | torch.device = "cpu") -> LanguageModel:
    """The model that ``save`` wrote, on ``device``, in eval() mode. ValueError if the files are not exactly that."""
    if not isinstance(folder, (str, os.PathLike)):
        raise ValueError(f"ngpt_core.load takes the path of a folder that ngpt_core.save wrote; got {folder!r}.")
    folder, device = Path(folder), torch.device(device)
    torch.empty(1, device=device)  # torch's error for a missing device is clearer than safetensors'
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: give a folder that ngpt_core.save wrote.")
    try:
        seal.check_folder(folder)
    except seal.Damaged as error:
        raise ValueError(f"{error}. Copy the folder again.") from None
    data = read_json(folder / CONFIG)
    try:
        config = ModelConfig.from_dict(data)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from None
    try:
        with safe_open(folder / WEIGHTS, "pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}
    except OSError as error:
        reason: object = error
        try:
            open(folder / WEIGHTS, "rb").close()  # safetensors reports every reason as a missing file; the system is precise
        except OSError as known:
            reason = known.strerror
        raise ValueError(f"{folder / WEIGHTS} cannot be read: {reason}.") from None
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is truncated or not a safetensors file ({error}): copy it again.") from None
    model = _empty(config)
    _check_same(model.state_dict(), state, f"The weights in {folder} belong to")
    _check_dtypes(state, folder / WEIGHTS)
    if metadata.get("config") != _fingerprint(config):
        raise ValueError(f"{folder / WEIGHTS} was saved with a different config than {CONFIG} beside it: restore the pair.")
    model.load_state_dict(state, assign=True)  # replaces the meta tensors, so nothing is initialized twice
    return model.eval()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        why = None if os.access(folder, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        why = error.strerror
    if why is not None:
        raise ValueError(f"Cannot write to the folder {folder} ({why}): choose another one.")


def _empty(config: ModelConfig) -> LanguageModel:
    try:
        with torch.device("meta"):
            return LanguageModel(config)
    except (RuntimeError, OverflowError) as error:  # more numbers than torch can count
        raise ValueError(f"No model of this config can be made: {str(error).splitlines()[0]}") from None


def _check_dtypes(state: Mapping[str, Tensor], where: object) -> None:
    """ValueError unless all tensors have one floating-point dtype: with a mixture, the forward pass would fail or round where
    it should not. Only a router's bias may be float32 in a half-precision model, as in transformers: the scores are float32."""
    first = state["embedding.weight"].dtype
    for name, x in state.items():
        wider = name.endswith("router.bias") and x.dtype == torch.float32
        if not x.is_floating_point() or (x.dtype != first and not wider):
            raise ValueError(
                f"{where} must have one floating-point precision; {name} is {x.dtype}, others are {first}. Cast them all with "
                "model.to(torch.float32) and save again."
            )


def _check_same(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], what: str) -> None:
    """ValueError unless the names and shapes are exactly those that the config asks for."""
    for name in wanted.keys() | found.keys():
        want, have = ([list(x[name].shape)] if name in x else None for x in (wanted, found))
        if want != have:
            raise ValueError(
                f"{what} a different config: {name} should be {want[0] if want else 'absent'} but is "
                f"{have[0] if have else 'missing'}."
            )
