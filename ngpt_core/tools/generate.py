"""How does a trained model continue a text? What ``ngpt generate`` writes."""

from collections.abc import Iterator

import torch

from ..data.tokenizers import stream_text
from ..train.memory import room_for
from .trained import open_model, pick_device

__all__ = ["generate"]


def generate(folder: str, prompt: str, max_new_tokens: int, seed: int, device: str, **sampling: object) -> Iterator[str]:
    """The prompt, then the text as it is written."""
    with room_for("writing", "Lower --max-new-tokens, shorten the prompt, or use --device cpu."):
        yield from _write(folder, prompt, max_new_tokens, seed, pick_device(device), sampling)


def _write(folder: str, prompt: str, max_new_tokens: int, seed: int, device: torch.device, sampling: dict) -> Iterator[str]:
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
    generator = torch.Generator(device).manual_seed(seed)
    new = model.stream(tokens, max_new_tokens, stop=tokenizer.end_of_text, generator=generator, **sampling)
    yield prompt
    yield from stream_text(tokenizer, (i for i in map(int, new) if i != tokenizer.end_of_text), tokens[0].tolist())
