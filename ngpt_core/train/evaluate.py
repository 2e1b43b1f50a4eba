"""How good is a model on text that it has never seen?

The held-out loss is the mean cross-entropy over a fixed set of windows, the same at every evaluation on any number of ranks.
Bits per byte make models with different tokenizers comparable: the loss in bits times the tokens per byte of text.

    bits per byte = loss / ln 2 * tokens / bytes          (tokens and bytes of the held-out split)

Per-position loss: the mean over tokens at position 0, 1, 2, ... of a window. It falls for as long as more context helps.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ..data.corpus import Corpus
from ..data.loader import IGNORE, Batch, Loader, window
from ..nn.documents import pack
from ..nn.model import LanguageModel
from .world import World

__all__ = ["Evaluation", "bits_per_byte", "evaluate", "evaluate_documents", "evaluate_positions"]


@dataclass
class Evaluation:
    """A held-out loss and the number of tokens behind it."""

    loss: float
    """Mean cross-entropy in nats per token; nan if there was nothing to predict."""
    tokens: int
    """Targets that were counted."""


def _held_out(
    corpora: list[tuple[Corpus, float]], windows: int, rows: int, seq_len: int, world: World
) -> tuple[Loader, int, int]:
    """(loader, number of windows that count, number of batches)."""
    loader = Loader(corpora, rows * world.size, seq_len, "val", seed=0, rank=world.rank, world=world.size)
    windows = min(windows, loader.windows)
    return loader, windows, math.ceil(windows / loader.batch_size)


@torch.no_grad()
def evaluate(
    model: LanguageModel, corpora: list[tuple[Corpus, float]], windows: int, rows: int, seq_len: int, world: World
) -> Evaluation:
    """The held-out loss over ``windows`` windows, ``rows`` of them at once on each rank."""
    was_training = model.training
    model.eval()
    loader, windows, batches = _held_out(corpora, windows, rows, seq_len, world)
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    for _ in range(batches):
        batch = loader.next(limit=windows)
        counted = batch.counted
        documents = pack(batch.documents, world.device)  # before it is sent: the host knows the documents' lengths
        batch = batch.to(world.device)
        total[0] += model.loss(batch.tokens, batch.targets, documents, denominator=1.0).double()
        total[1] += counted
    model.train(was_training)
    loss, count = world.sum(total).tolist()
    return Evaluation(loss / count if count else math.nan, int(count))


@torch.no_grad()
def evaluate_positions(
    model: LanguageModel, corpora: list[tuple[Corpus, float]], windows: int, rows: int, seq_len: int
) -> list[float]:
    """Mean cross-entropy at each position of a window (NaN where nothing was counted), in one process."""
    model.eval()
    device = next(model.parameters()).device
    loader, windows, batches = _held_out(corpora, windows, rows, seq_len, World(device))
    losses, counted = [], []
    for _ in range(batches):
        batch: Batch = loader.next(limit=windows).to(device)
        losses.append(_cross_entropy(model, batch))
        counted.append((batch.targets != IGNORE).double().cpu())
    return (torch.cat(losses).sum(0) / torch.cat(counted).sum(0)).tolist()


@torch.no_grad()
def evaluate_documents(model: LanguageModel, corpus: Corpus, rows: int, seq_len: int) -> list[tuple[float, int]]:
    """(sum of the cross-entropy, number of targets) of each document in the held-out split, in one process."""
    stream, number, losses, counted, numbers = corpus.stream("val"), 0, [], [], []
    model.eval()
    device = next(model.parameters()).device
    for first in range(0, stream.windows(seq_len), rows):
        read = []
        for i in range(first, min(first + rows, stream.windows(seq_len))):
            tokens, document = stream.window(i, seq_len)
            read.append(window(tokens, document, seq_len))
            numbers.append(number + read[-1][2])
            number += int(document[-1])  # the last token is the next window's first
        batch = Batch(*(torch.from_numpy(np.stack(column)) for column in zip(*read))).to(device)
        losses.append(_cross_entropy(model, batch))
        counted.append((batch.targets != IGNORE).double().cpu())
    sums = (np.bincount(np.concatenate(numbers), torch.cat(x).flatten()) for x in (losses, counted))
    return [(float(total), int(count)) for total, count in zip(*sums) if count]


def _cross_entropy(model: LanguageModel, batch: Batch) -> torch.Tensor:
    """The loss of every token [B, T], in float64; 0 where the target is ignored."""
    logits = model(batch.tokens, batch.documents)
    return F.cross_entropy(logits.transpose(1, 2), batch.targets, ignore_index=IGNORE, reduction="none").double().cpu()


def bits_per_byte(loss: float, corpora: list[tuple[Corpus, float]]) -> float:
    """The loss in bits per byte of text, from the tokens and bytes of the corpora's held-out splits."""
    splits = [corpus.manifest["splits"]["val"] for corpus, _ in corpora]
    return loss / math.log(2) * sum(s["tokens"] for s in splits) / sum(s["bytes"] for s in splits)
