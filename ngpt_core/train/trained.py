"""Where is the trained model in a folder, and on which device does it run?

The folder is a run (the model is its export or, before that, its newest checkpoint), a copy of a run's export, or a folder that
``ngpt_core.save`` wrote. The tokenizer comes from the run or the export. ``ngpt_core.save`` does not write one, and it is never
guessed.
"""

from pathlib import Path

import torch

from ..data.tokenizers import Tokenizer, check_description, describe, from_description, load_tokenizer
from ..files import read_json, write_json
from ..nn.io import WEIGHTS, load
from ..nn.model import LanguageModel
from .checkpoint import load_model, newest
from .folder import RunFolder

__all__ = ["description_of", "open_model", "pick_device", "run_of", "tokenizer_of", "write_tokenizer"]

DESCRIPTION = "ngpt_tokenizer.json"  # in an export: what ``describe`` returns


def pick_device(name: str) -> torch.device:
    """The device of that name; auto is cuda if there is a GPU."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda; got {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU on this machine; use --device cpu.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def run_of(folder: str) -> RunFolder | None:
    """The run in a folder, or the run whose export the folder is; None for a model without a run, which has no data."""
    path = Path(folder)
    if path.resolve().name == "export" and (path.resolve().parent / "metrics.jsonl").is_file():
        return RunFolder(path.resolve().parent)
    return None if (path / WEIGHTS).is_file() else RunFolder(path)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> list[str]:
    """Write the tokenizer into an export, so that a copy of the export still has it. Returns the names of the files."""
    write_json(folder / DESCRIPTION, describe(tokenizer, folder))
    return [name for name in (DESCRIPTION, "tokenizer.json") if (folder / name).is_file()]


def tokenizer_of(folder: str, spec: str | None = None) -> Tokenizer:
    """The tokenizer of the model in ``folder``, or the one that ``--tokenizer`` names."""
    if spec is not None:
        return load_tokenizer(spec)
    run = run_of(folder)
    return from_description(description_of(folder), Path(folder)) if run is None else run.tokenizer()


def description_of(folder: str) -> dict:
    """What ``describe`` said about the tokenizer of the model in ``folder``. ValueError if there is nothing."""
    path, run = Path(folder) / DESCRIPTION, run_of(folder)
    if run is not None:
        return run.record["tokenizer"]
    if not path.is_file():
        raise ValueError(
            f"{folder} holds a model but no tokenizer: copy {DESCRIPTION} (and tokenizer.json, if there is one) from the "
            "export of its run, or name the tokenizer with --tokenizer (for a model of bytes: --tokenizer bytes)."
        )
    description = read_json(path)
    check_description(description, path)
    return description


def open_model(folder: str, device: torch.device, tokenizer: str | None = None) -> tuple[LanguageModel, Tokenizer]:
    """The model in ``folder``, in eval() mode, and its tokenizer, or the one that ``tokenizer`` names."""
    found, run = tokenizer_of(folder, tokenizer), run_of(folder)
    if run is None:
        return load(folder, device), found
    checkpoint = newest(run.path)
    if (run.path / "export").is_dir():  # a damaged model is an error, and never replaced by another
        try:
            return load(run.path / "export", device), found
        except ValueError as error:
            hint = f" Or remove {run.path / 'export'}: ngpt train --out {run.path} --resume writes it again."
            raise ValueError(f"{error}{hint if checkpoint else ''}") from None
    if checkpoint is None:
        raise ValueError(f"{run.path} has no model yet: it is not finished and has not saved a checkpoint.")
    return load_model(checkpoint).to(device).eval(), found
