"""Which tokens does each rank see at each step? The same ones on every machine and after every resume.

Samples are numbered s = 0, 1, 2, ... over the whole run. Sample s is one window of T tokens, and which one depends only on
(seed, the corpora, T, s), not on the number of ranks or the batch size. A global batch of B samples is [s, s + B); rank r of R
reads its rows r B/R ... (r+1) B/R. So one process and a thousand draw the same batches, and the state to resume from is a few
integers, exact to the token.

    source       with several corpora, sample s comes from the one furthest behind its weight (largest w_i (s+1) - n_i, with
                 n_i its samples so far): the shares are exact at every step, not only on average
    order        the n_i-th sample of corpus i is window P(n_i mod W), with W its number of windows and P a new permutation for
                 each pass: every window once per epoch. P is a keyed Feistel network, so no list of W numbers is ever built
    documents    a window may hold several documents: their numbers come with the tokens, so that attention and state do not
                 cross their boundaries; a target that would be the first token of the next document is ignored (-100)
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..checks import is_count
from .corpus import Corpus, check_tokenizer

__all__ = ["IGNORE", "Batch", "Loader", "permute", "window"]

IGNORE = -100  # the target that F.cross_entropy ignores


@dataclass
class Batch:
    """The data of one step, or one rank's share of it."""

    tokens: Tensor
    """int64 [B, T]."""
    targets: Tensor
    """int64 [B, T]: the next token, or IGNORE at the end of a document."""
    documents: Tensor
    """int64 [B, T]: 0, 0, 1, 1, 1, ... within each row."""

    def to(self, device: torch.device) -> "Batch":
        """The same batch on ``device``."""
        return Batch(*(x.to(device, non_blocking=True) for x in (self.tokens, self.targets, self.documents)))

    def pinned(self) -> "Batch":
        """The same batch in pinned memory, which a GPU copies from while the host goes on."""
        return Batch(*(x.pin_memory() for x in (self.tokens, self.targets, self.documents)))

    def split(self, rows: int) -> list["Batch"]:
        """Micro-batches of ``rows`` rows."""
        return [Batch(*parts) for parts in zip(*(x.split(rows) for x in (self.tokens, self.targets, self.documents)))]

    @property
    def counted(self) -> Tensor:
        """The number of targets that count, a scalar tensor."""
        return (self.targets != IGNORE).sum()


def permute(index: int, size: int, key: bytes) -> int:
    """The image of ``index`` under the permutation of range(size) that ``key`` selects, in constant memory.

    A four-round Feistel network on 2b bits is a permutation of range(4^b); walking it until the value falls below ``size``
    restricts it to range(size) (at most four steps on average, since 4^b < 4 size).
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            digest = hashlib.blake2b(turn.to_bytes(1, "little") + right.to_bytes(8, "little"), key=key, digest_size=8)
            left, right = right, left ^ (int.from_bytes(digest.digest(), "little") & mask)
        index = left << half | right
        if index < size:
            return index


def window(tokens: np.ndarray, document: np.ndarray, T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(inputs, targets, documents) [T] from a window's T + 1 tokens (fewer at the end of a stream) and their documents."""
    targets = np.where(document[1:] == document[:-1], tokens[1:], IGNORE)
    short = T - len(targets)
    return (
        np.pad(tokens[:-1], (0, short)),
        np.pad(targets, (0, short), constant_values=IGNORE),
        np.pad(document[:-1], (0, short), mode="edge"),
    )


class Loader:
    """Batches from one split of one or more corpora. ``next()`` reads one; ``state_dict()`` is the position."""

    def __init__(
        self,
        corpora: list[tuple[Corpus, float]],
        batch_size: int,
        seq_len: int,
        split: str = "train",
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ):
        check_tokenizer(corpora, corpora[0][0].manifest["tokenizer"], corpora[0][0].folder)
        total = sum(weight for _, weight in corpora)
        self.corpora, self.weights = [corpus for corpus, _ in corpora], [weight / total for _, weight in corpora]
        self.streams = [corpus.stream(split) for corpus in self.corpora]
        self.batch_size, self.seq_len, self.split, self.seed = batch_size, seq_len, split, seed
        self.rank, self.world = rank, world
        self.counts = [0] * len(corpora)  # samples taken from each corpus; their sum is s

    @property
    def windows(self) -> int:
        """Windows in one pass over all corpora."""
        return sum(stream.windows(self.seq_len) for stream in self.streams)

    def _assign(self, s: int, counts: list[int]) -> int:
        return max(range(len(counts)), key=lambda i: (self.weights[i] * (s + 1) - counts[i], -i))

    def _row(self, source: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        stream, T = self.streams[source], self.seq_len
        epoch, position = divmod(count, stream.windows(T))
        name = f"{self.seed}/{self.corpora[source].checksum}/{self.split}/{epoch}"
        key = hashlib.blake2b(name.encode(), digest_size=16).digest()
        return window(*stream.window(permute(position, stream.windows(T), key), T), T)

    def next(self, limit: int | None = None) -> Batch:
        """This rank's rows of the next global batch. Samples numbered ``limit`` or higher have no targets (for evaluation)."""
        batch, self.counts = self.read(self.counts, limit)
        return batch

    def read(self, counts: list[int], limit: int | None = None) -> tuple[Batch, list[int]]:
        """(this rank's rows of the global batch at the position ``counts``, the position after it)."""
        share, counts = self.batch_size // self.world, list(counts)
        mine, rows = range(self.rank * share, (self.rank + 1) * share), []
        for b in range(self.batch_size):  # every rank counts all B samples and reads only its own
            s = sum(counts)
            source = self._assign(s, counts)
            if b in mine:
                tokens, targets, document = self._row(source, counts[source])
                rows.append((tokens, targets if limit is None or s < limit else np.full_like(targets, IGNORE), document))
            counts[source] += 1
        return Batch(*(torch.from_numpy(np.stack(column)) for column in zip(*rows))), counts

    def state_dict(self) -> dict:
        corpora = [corpus.checksum for corpus in self.corpora]
        return {"counts": list(self.counts), "seed": self.seed, "seq_len": self.seq_len, "corpora": corpora}

    def load_state_dict(self, state: dict) -> None:
        here = self.state_dict()
        for key, advice in (
            ("corpora", "the corpus is not the one that this run was trained on: give the same --data"),
            ("seq_len", "a position is counted in windows: resume with the same --seq-len"),
            ("seed", "the order of the data depends on the seed: resume with the same --seed"),
        ):
            if state[key] != here[key]:
                raise ValueError(f"cannot continue from this data position: {advice} (was {state[key]}, is {here[key]}).")
        if len(state["counts"]) != len(self.counts) or not all(is_count(n, 0) for n in state["counts"]):
            raise TypeError(f"counts of {len(self.counts)} corpora are {state['counts']!r}")
        self.counts = list(state["counts"])
