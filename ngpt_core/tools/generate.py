"""How does a trained model continue a text? ``ngpt generate`` prints it."""

from collections.abc import Iterator

import torch

from ..data.tokenizers import Tokenizer, stream_text
from ..nn.model import LanguageModel
from ..train.memory import room_for
from ..train.trained import open_model, pick_device

__all__ = ["generate"]


def generate(
    folder: str, prompt: str, max_new_tokens: int, seed: int, device: str, tokenizer: str | None = None, **sampling: object
) -> Iterator[str]:
    """The prompt, then the text as it is generated."""
    with room_for("generating", "Lower --max-new-tokens, shorten the prompt, or use --device cpu."):
        yield from _continued(open_model(folder, pick_device(device), tokenizer), prompt, max_new_tokens, seed, sampling)


def _continued(
    opened: tuple[LanguageModel, Tokenizer], prompt: str, max_new_tokens: int, seed: int, sampling: dict
) -> Iterator[str]:
    model, tokenizer = opened
    device = model.embedding.weight.device
    if not prompt:
        raise ValueError("--prompt must not be empty: the model continues a text.")
    try:
        tokens = torch.from_numpy(tokenizer.encode([prompt.encode()])[0].astype("int64"))[None].to(device)
    except UnicodeError:
        raise ValueError(f"--prompt {prompt!r} is not text: some of its bytes are not UTF-8.") from None
    if not tokens.numel():
        raise ValueError(f"--prompt {prompt!r} has no tokens: the tokenizer drops all of it. Add a word.")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"--seed must be an integer of at most 63 bits; got {seed}.")
    generator = torch.Generator(device).manual_seed(seed)
    new = model.stream(tokens, max_new_tokens, stop=tokenizer.end_of_text, generator=generator, **sampling)
    yield prompt
    yield from stream_text(tokenizer, (i for i in map(int, new) if i != tokenizer.end_of_text), tokens[0].tolist())
