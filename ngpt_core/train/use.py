"""How is a trained model used: evaluated, asked to write?

A folder is a run (the model is its export, or its newest checkpoint while it still trains) or what ``ngpt_core.save`` wrote.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from ..nn.io import CONFIG, WEIGHTS, load
from ..nn.model import LanguageModel
from .checkpoint import load_model, newest
from .config import TrainConfig
from .loss import bits_per_byte, evaluate, evaluate_positions
from .memory import room_for
from .run import Run, open_blend
from .tokenizer import ByteTokenizer, Tokenizer, stream_text
from .world import World

__all__ = ["evaluate_run", "evaluation_text", "generate", "open_model"]


def pick_device(name: str) -> torch.device:
    """auto, cpu or cuda as a device; auto is cuda where there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda; got {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _run_of(folder: str) -> Path | None:
    """The run that a folder is or is the export of; None for another model: that has neither data nor a tokenizer."""
    path = Path(folder)
    if path.resolve().name == "export" and (path.resolve().parent / "metrics.jsonl").is_file():
        return path.resolve().parent
    return None if (path / WEIGHTS).is_file() else path


def open_model(folder: str, device: torch.device) -> tuple[LanguageModel, Tokenizer]:
    """The model in ``folder``, in eval() mode, and its tokenizer."""
    path = _run_of(folder)
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


def evaluate_run(
    folder: str, data: list[str] | None, windows: int, seq_len: int | None, rows: int, device: str
) -> dict[str, object]:
    """Held-out loss, bits per byte, perplexity and per-position loss."""
    for name, value in (("windows", windows), ("batch-size", rows), ("seq-len", 1 if seq_len is None else seq_len)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1; got {value}.")
    with room_for("evaluating", "Lower --batch-size or --seq-len, or use --device cpu."):
        return _evaluate(folder, data, windows, seq_len, rows, pick_device(device))


def _evaluate(
    folder: str, data: list[str] | None, windows: int, seq_len: int | None, rows: int, device: torch.device
) -> dict[str, object]:
    model, _ = open_model(folder, device)
    run = _run_of(folder)
    config, packed_with = (TrainConfig(), None) if run is None else (Run.settings(run), Run.read(run)["tokenizer"])
    corpora = open_blend(tuple(data or config.val_data or config.data), model.config.vocab_size, packed_with, folder)
    corpora = [(corpus, weight) for corpus, weight in corpora if corpus.has("val")]
    if not corpora:
        raise ValueError("there is no held-out split to evaluate on: pack the corpus with --val-fraction above 0.")
    seq_len = seq_len or config.seq_len
    result = evaluate(model, corpora, windows, rows, seq_len, World(device))
    if not result.tokens:
        raise ValueError("the held-out split has no token to predict: its documents are too short. Pack it from more text.")
    positions = evaluate_positions(model, corpora, windows, rows, seq_len)
    return {
        "loss": result.loss,
        "perplexity": math.exp(result.loss),
        "bits_per_byte": bits_per_byte(result.loss, corpora),
        "tokens": result.tokens,
        "seq_len": seq_len,
        "loss_by_position": positions,
    }


def evaluation_text(result: dict, as_json: bool) -> str:
    """The result of ``evaluate_run`` as ``ngpt eval`` prints it."""
    if as_json:
        return json.dumps(result)
    lines = [
        f"loss           {result['loss']:.4f}  (nats per token, {result['tokens']:,} held-out tokens)",
        f"bits per byte  {result['bits_per_byte']:.4f}",
        f"perplexity     {result['perplexity']:.3f}",
        "loss by position of the window",
    ]
    start, losses = 0, result["loss_by_position"]
    while start < len(losses):  # 0, 1, 2-3, 4-7, 8-15, ...
        stop = min(max(2 * start, start + 1), len(losses))
        part = [x for x in losses[start:stop] if not math.isnan(x)]
        if part:
            place = f"{start}" if stop == start + 1 else f"{start}-{stop - 1}"
            lines.append(f"  {place:>11}  {sum(part) / len(part):.4f}")
        start = stop
    return "\n".join(lines)


def generate(folder: str, prompt: str, max_new_tokens: int, seed: int, device: str, **sampling) -> Iterator[str]:
    """The prompt, then the text as it is written."""
    with room_for("writing", "Lower --max-new-tokens, shorten the prompt, or use --device cpu."):
        yield from _write(folder, prompt, max_new_tokens, seed, pick_device(device), sampling)


def _write(
    folder: str, prompt: str, max_new_tokens: int, seed: int, device: torch.device, sampling: dict[str, object]
) -> Iterator[str]:
    model, tokenizer = open_model(folder, device)
    if not prompt:
        raise ValueError("--prompt must hold at least one character: the model continues a text.")
    try:
        tokens = torch.from_numpy(tokenizer.encode([prompt.encode()])[0].astype("int64"))[None].to(device)
    except UnicodeError:
        raise ValueError(f"--prompt {prompt!r} is no text: some of its bytes are not UTF-8.") from None
    if not tokens.numel():
        raise ValueError(f"--prompt {prompt!r} has no tokens: its tokenizer drops all of it. Add a word.")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"--seed must be an integer of at most 63 bits; got {seed}.")
    stop = [] if tokenizer.end_of_text is None else tokenizer.end_of_text
    generator = torch.Generator(device).manual_seed(seed)
    new = model.stream(tokens, max_new_tokens, stop=stop, generator=generator, **sampling)
    yield prompt
    yield from stream_text(tokenizer, (i for i in map(int, new) if i != tokenizer.end_of_text), tokens[0].tolist())
