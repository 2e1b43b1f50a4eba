"""How does a model continue a text?

Token by token: compute the logits of the last position, divide them by the temperature, filter, then sample. The logits are
those of the loss, s_z included, so a temperature of 1 gives the distribution that the model was trained on.

With a cache, each step processes one token: attention keeps its keys and values, Mamba-2 its state and the last inputs of its
convolution. Without a cache, every step reads the whole sequence again. That is slower, and serves as a check of the cache.

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
    """softmax(logits / temperature) over the candidates, 0 for all other tokens: [B, V] -> [B, V].

    ``top_k`` keeps the k most likely tokens. ``top_p`` keeps the smallest set of most likely tokens with a total probability
    (after temperature and top-k) of at least p. The most likely token is always kept; temperature 0 keeps only that one.
    """
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # Shift the largest logit to 0 and bound the divisor from below, so that no temperature gives inf or inf / inf.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(logits.dtype).tiny)
    if top_k is not None and top_k < logits.shape[-1]:
        keep = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, logits.topk(top_k, -1).indices, True)
        logits = logits.masked_fill(~keep, -torch.inf)
    p = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, index = p.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # total probability of the more likely tokens
        top_p = max(top_p, torch.finfo(p.dtype).tiny)  # a smaller one would become 0 and keep nothing
        p = p.masked_fill(torch.zeros_like(p, dtype=torch.bool).scatter_(-1, index, before >= top_p), 0.0)
        p = p / p.sum(-1, keepdim=True)
    return p


def _check(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not is_count(max_new_tokens, 0) or max_new_tokens >= 2**63:
        raise ValueError(f"max_new_tokens must be a number of tokens >= 0 and below 2^63; got {max_new_tokens!r}.")
    if not is_within(temperature, 0):
        raise ValueError(f"temperature must be a finite number >= 0 (0 is greedy); got {temperature!r}.")
    if top_k is not None and not is_count(top_k, 1):
        raise ValueError(f"top_k must be an integer >= 1, or None for all tokens; got {top_k!r}.")
    if top_p is not None and not (is_within(top_p, 0, open=True) and top_p <= 1):
        raise ValueError(f"top_p must be in (0, 1], or None for all tokens; got {top_p!r}.")


def _stops(stop: int | Sequence[int] | None, vocab_size: int) -> list[int]:
    tokens: list[Any] = [] if stop is None else list(stop) if isinstance(stop, Iterable) and not is_number(stop) else [stop]
    if not all(is_count(token, 0) and token < vocab_size for token in tokens):
        raise ValueError(f"stop must be a token in [0, {vocab_size}), a list of them, or None; got {stop!r}.")
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

    A row that has drawn a ``stop`` token repeats it from then on. When every row has, the stream ends.
    """
    check_tokens(tokens, model.config.vocab_size)
    _check(max_new_tokens, temperature, top_k, top_p)
    max_new_tokens, sampling = int(max_new_tokens), (float(temperature), None if top_k is None else int(top_k), top_p)
    limit = model.config.max_seq_len
    if limit is not None and tokens.shape[1] + max_new_tokens > limit:
        raise ValueError(f"{tokens.shape[1]} + {max_new_tokens} new tokens exceed max_seq_len = {limit}: ask for fewer.")
    if not isinstance(use_cache, bool):
        raise ValueError(f"use_cache must be True or False; got {use_cache!r}.")
    if not (generator is None or isinstance(generator, torch.Generator)):
        raise ValueError(f"generator must be a torch.Generator, or None for torch's own; got {generator!r}.")
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
    try:
        cache = model.new_cache(batch, length + max_new_tokens) if use_cache and max_new_tokens else None
    except RuntimeError as error:
        if not any(word in str(error) for word in ("memory", "overflow")):
            raise
        raise ValueError(f"A cache for {max_new_tokens:,} new tokens does not fit into memory: ask for fewer.") from None
    done = torch.zeros(batch, dtype=torch.bool, device=tokens.device)
    read = tokens  # what the model reads next: the whole sequence, or with a cache only the tokens that it lacks
    for _ in range(max_new_tokens):
        h, _ = model.hidden(read, cache=cache)
        logits = model.head(h[:, -1:])[:, -1].float()
        if not bool(logits.isfinite().all()):
            raise ValueError("The logits of the next token are not finite; model.check() names the place that broke.")
        p = probabilities(logits, *sampling)
        new = torch.multinomial(p, 1, generator=generator)[:, 0] if sampling[0] else p.argmax(-1)
        new = torch.where(done, read[:, -1], new)
        yield new
        done |= torch.isin(new, stops)
        if batch and bool(done.all()):
            return
        read = new[:, None] if use_cache else torch.cat([read, new[:, None]], 1)
