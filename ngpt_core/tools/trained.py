"""Where is the trained model of a folder, and on which device is it used?

A folder is a run (the model is its export, or else its newest checkpoint) or was written by ``ngpt_core.save``.
"""

from pathlib import Path

import torch

from ..data.tokenizers import ByteTokenizer, Tokenizer
from ..nn.io import WEIGHTS, load
from ..nn.model import LanguageModel
from ..train.checkpoint import load_model, newest
from ..train.folder import RunFolder

__all__ = ["open_model", "pick_device", "run_of"]


def pick_device(name: str) -> torch.device:
    """The device of that name; auto is cuda if there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda; got {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def run_of(folder: str) -> RunFolder | None:
    """The run that a folder is or is the export of; None for a model without a run, which has neither data nor a tokenizer."""
    path = Path(folder)
    if path.resolve().name == "export" and (path.resolve().parent / "metrics.jsonl").is_file():
        return RunFolder(path.resolve().parent)
    return None if (path / WEIGHTS).is_file() else RunFolder(path)


def open_model(folder: str, device: torch.device) -> tuple[LanguageModel, Tokenizer]:
    """The model in ``folder``, in eval() mode, and its tokenizer."""
    run = run_of(folder)
    if run is None:
        return load(folder, device), ByteTokenizer()
    tokenizer, checkpoint = run.tokenizer(), newest(run.path)
    if run.has_export():
        try:
            return load(run.path / "export", device), tokenizer
        except ValueError as error:
            again = f" Or remove {run.path / 'export'}: ngpt train --out {run.path} --resume writes it again."
            raise ValueError(f"{error}{again if checkpoint else ''}") from None
    if checkpoint is None:
        raise ValueError(f"{run.path} has no model yet: it is not finished and has not saved a checkpoint.")
    return load_model(checkpoint).to(device).eval(), tokenizer
