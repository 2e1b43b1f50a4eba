"""What does a rehearsal read if no --data is given? Windows of documents with random lengths.

The real ``Loader`` reads it. The tokens are zeros; only the boundaries of the documents matter, and how many of them a window
holds. Lengths are exponential around the mean, so short documents are the most frequent, as in text from the web.
"""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

__all__ = ["synthetic"]

_WINDOWS = 64


def synthetic(seq_len: int, document_length: int, vocab_size: int, seed: int = 0) -> Any:
    """A corpus for ``Loader``. ``document_length``: tokens per document on average; 0: every window is one document."""
    name = f"{seq_len}/{document_length}/{seed}"
    stream = _Stream(seq_len, document_length, seed)
    return SimpleNamespace(
        folder=Path("synthetic"),
        manifest={"tokenizer": {"spec": "synthetic", "vocab_size": vocab_size, "end_of_text": 0}},
        vocab_size=vocab_size,
        checksum=hashlib.sha256(name.encode()).hexdigest(),
        stream=lambda split: stream,
    )


class _Stream:
    """One split: ``_WINDOWS`` windows of tokens with document numbers."""

    def __init__(self, seq_len: int, document_length: int, seed: int) -> None:
        total = _WINDOWS * seq_len + 1
        self.document: np.ndarray = np.zeros(total, np.int64)
        if document_length:
            lengths = (
                np.random.default_rng(seed).exponential(document_length, 8 + 4 * total // document_length).astype(np.int64)
            )
            starts = np.cumsum(np.maximum(lengths, 2))
            self.document[starts[starts < total]] = 1
            self.document = np.cumsum(self.document)

    def windows(self, length: int) -> int:
        return _WINDOWS

    def window(self, i: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        document = self.document[i * length : i * length + length + 1]
        return np.zeros(len(document), np.int64), document - document[0]
