"""Where is the trained model of a folder, and on which device is it used?

A folder is a run (the model is its export, or its newest checkpoint while it still trains) or what ``ngpt_core.save`` wrote.
"""

from pathlib import Path

import torch

from ..data.tokenizers import ByteTokenizer, Tokenizer
from ..nn.io import CONFIG, WEIGHTS, load
from ..nn.model import LanguageModel
from ..train.checkpoint import load_model, newest
from ..train.run import Run

__all__ = ["open_model", "pick_device", "run_of"]


def pick_device(name: str) -> torch.device:
    """auto, cpu or cuda as a device; auto is cuda where there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda; got {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def run_of(folder: str) -> Path | None:
    """The run that a folder is or is the export of; None for another model: that has neither data nor a tokenizer."""
    path = Path(folder)
    if path.resolve().name == "export" and (path.resolve().parent / "metrics.jsonl").is_file():
        return path.resolve().parent
    return None if (path / WEIGHTS).is_file() else path


def open_model(folder: str, device: torch.device) -> tuple[LanguageModel, Tokenizer]:
    """The model in ``folder``, in eval() mode, and its tokenizer."""
    path = run_of(folder)
    if path is None:
        return load(folder, device), ByteTokenizer()
    tokenizer, checkpoint = Run.tokenizer(path), newest(path)
    if all((path / "export" / name).is_file() for name in (CONFIG, WEIGHTS)):
        try:
            return load(path / "export", device), tokenizer
        except ValueError as error:
            again = f" Or remove {path / 'export'}: ngpt train --out {path} --resume writes it again."
            raise ValueError(f"{error}{again if checkpoint else ''}") from None
    if checkpoint is None:
        raise ValueError(f"{path} has no model yet: it is neither finished nor has it saved a checkpoint.")
    return load_model(checkpoint).to(device).eval(), tokenizer
