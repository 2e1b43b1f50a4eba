"""How does a model continue a text?

Token by token: logits of the last position, filtered and divided by the temperature, then a draw. The logits are those of the
loss, s_z included, so a temperature of 1 is the distribution that the model was trained to give.

With a cache each step costs one token: attention keeps its keys and values, Mamba-2 its state and the last inputs of its
convolution. Without it every step reads the whole sequence again: slower by the length, and the check of the first.

Shapes: tokens [B, T], logits [B, V].
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checks import is_count, is_number, is_within
from .embedding import check_tokens

if TYPE_CHECKING:
    from .model import LanguageModel

__all__ = ["probabilities", "stream"]


def probabilities(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """softmax(logits / temperature) over the candidates, the others 0: [B, V] -> [B, V].

    ``top_k``: the k likeliest. ``top_p``: the fewest likeliest whose probabilities (after temperature and top-k) reach p; the
    likeliest is always kept. Temperature 0 puts everything on the likeliest.
    """
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # The largest becomes 0 first, and the divisor at least the smallest number: no temperature makes inf, or inf / inf.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(logits.dtype).tiny)
    if top_k is not None and top_k < logits.shape[-1]:
        keep = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, logits.topk(top_k, -1).indices, True)
        logits = logits.masked_fill(~keep, -torch.inf)
    p = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, index = p.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # what the likelier ones already have
        p = p.masked_fill(torch.zeros_like(p, dtype=torch.bool).scatter_(-1, index, before >= top_p), 0.0)
        p = p / p.sum(-1, keepdim=True)
    return p


def _check(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not is_count(max_new_tokens, 0):
        raise ValueError(f"max_new_tokens is a number of tokens and must not be negative; got {max_new_tokens!r}.")
    if not is_within(temperature, 0):
        raise ValueError(f"temperature must be a finite number >= 0 (0 is greedy); got {temperature!r}.")
    if top_k is not None and not is_count(top_k, 1):
        raise ValueError(f"top_k must be an integer, at least 1, or None for all tokens; got {top_k!r}.")
    if top_p is not None and not (is_within(top_p, 0, open=True) and top_p <= 1):
        raise ValueError(f"top_p must be in (0, 1], or None for all tokens; got {top_p!r}.")


def _stops(stop: int | Sequence[int] | None, vocab_size: int) -> list[int]:
    tokens: list[Any] = [] if stop is None else list(stop) if isinstance(stop, Iterable) and not is_number(stop) else [stop]
    if not all(is_count(token, 0) and token < vocab_size for token in tokens):
        raise ValueError(f"stop must be a token in [0, {vocab_size}), several of them, or None; got {stop!r}.")
    return [int(token) for token in tokens]


def stream(
    model: "LanguageModel",
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    use_cache: bool = True,
    stop: int | Sequence[int] | None = (),
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield the next tokens [B] after the prompts ``tokens`` [B, T], up to ``max_new_tokens`` times.

    A row that has drawn a token of ``stop`` repeats it from then on; when every row has, the stream ends.
    """
    check_tokens(tokens, model.config.vocab_size)
    _check(max_new_tokens, temperature, top_k, top_p)
    max_new_tokens, sampling = int(max_new_tokens), (float(temperature), None if top_k is None else int(top_k), top_p)
    limit = model.config.max_seq_len
    if limit is not None and tokens.shape[1] + max_new_tokens > limit:
        raise ValueError(f"{tokens.shape[1]} + {max_new_tokens} new tokens are more than max_seq_len = {limit}.")
    stops = torch.tensor(_stops(stop, model.config.vocab_size), dtype=torch.long, device=tokens.device)
    return _steps(model, tokens.long(), max_new_tokens, sampling, use_cache, stops, generator)


@torch.no_grad()
def _steps(
    model: "LanguageModel",
    tokens: Tensor,
    max_new_tokens: int,
    sampling: tuple[float, int | None, float | None],
    use_cache: bool,
    stops: Tensor,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    batch, length = tokens.shape
    cache = model.new_cache(batch, length + max_new_tokens) if use_cache and max_new_tokens else None
    done = torch.zeros(batch, dtype=torch.bool, device=tokens.device)
    read = tokens  # what the model has to read next: the whole sequence, or with a cache what it does not hold yet
    for _ in range(max_new_tokens):
        h, _ = model.hidden(read, cache=cache)
        logits = model.head(h[:, -1:])[:, -1].float()
        if not bool(logits.isfinite().all()):
            raise ValueError("The logits of the next token are not finite: model.check() says where the numbers were lost.")
        p = probabilities(logits, *sampling)
        new = torch.multinomial(p, 1, generator=generator)[:, 0] if sampling[0] else p.argmax(-1)
        new = torch.where(done, read[:, -1], new)
        yield new
        done |= torch.isin(new, stops)
        if batch and bool(done.all()):
            return
        read = new[:, None] if use_cache else torch.cat([read, new[:, None]], 1)
