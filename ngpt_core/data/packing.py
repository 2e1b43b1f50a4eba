"""How does text become a corpus that thousands of processes can read at once and that detects damage?

A packed corpus is a folder:
    manifest.json          a description: tokenizer, splits, shards with sizes and sha256, sources, an overall checksum; sealed
    train-00000.tokens     the tokens of all documents, concatenated: uint8, uint16 or uint32, depending on the vocabulary
    train-00000.docs       int64 offsets: document i of the shard is tokens[docs[i] : docs[i+1]]
    val-00000.tokens, ...  the held-out split, in separate files
    tokenizer.json         a copy of the tokenizer, unless it is ``bytes``

**The held-out split never overlaps with training**, because it is decided here, once, by the content of a document: it is held
out if the 64-bit hash of its bytes falls into the lowest ``val_fraction`` of all hashes. Equal documents therefore land on the
same side, the order of files does not matter, and a corpus that grows keeps its split. With few documents, the held-out share
can miss its target by far (a single book is all or nothing). If it is below half or above twice the target, or leaves less than
half of the intended training text, the last ``val_fraction`` of *every* document's tokens is held out instead. The manifest
records which rule was applied.
"""

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..files import new_folder, sha256
from ..seal import write_sealed
from .sources import documents, expand
from .tokenizers import Tokenizer, describe

__all__ = ["FORMAT", "checksum", "pack", "pack_files"]

FORMAT = 1
_BATCH = 1 << 20  # bytes of text given to the tokenizer at once


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest little-endian unsigned integer that holds every id below ``vocab_size``."""
    return next(np.dtype(kind) for kind in ("<u1", "<u2", "<u4") if vocab_size <= 1 << 8 * int(kind[2]))


class _Split:
    """Writes the shards of one split."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, shard_tokens: int):
        self.folder, self.name, self.dtype, self.shard_tokens = folder, name, dtype, shard_tokens
        self.shards: list[dict] = []
        self.offsets: list[int] = []
        self.file: BinaryIO | None = None

    def add(self, tokens: np.ndarray, size: int) -> None:
        if self.file is not None and self.offsets[-1] + len(tokens) > self.shard_tokens:
            self.close()
        if self.file is None:
            self.file = open(self.folder / f"{self.name}-{len(self.shards):05d}.tokens", "wb")
            self.offsets, self.size = [0], 0
        self.file.write(tokens.astype(self.dtype).tobytes())
        self.offsets.append(self.offsets[-1] + len(tokens))
        self.size += size

    def close(self) -> None:
        if self.file is None:
            return
        self.file.close()
        path = Path(self.file.name)
        index = path.with_suffix(".docs")
        index.write_bytes(np.asarray(self.offsets, "<i8").tobytes())
        sizes = {"tokens": self.offsets[-1], "documents": len(self.offsets) - 1, "bytes": self.size}  # bytes: of the text
        sums = {"sha256": sha256(path), "index_sha256": sha256(index)}
        self.shards.append({"file": path.name, "index": index.name, **sizes, **sums})
        self.file = None

    def summary(self) -> dict:
        self.close()
        totals = {key: sum(shard[key] for shard in self.shards) for key in ("tokens", "documents", "bytes")}
        return {**totals, "shards": self.shards}


def _tokenize(texts: Iterable[bytes], tokenizer: Tokenizer) -> Iterator[tuple[bytes, np.ndarray]]:
    """(text, tokens) of each document, tokenized in batches so that fast tokenizers can use their threads."""
    batch: list[bytes] = []
    for text in chain(texts, [None]):
        if batch and (text is None or sum(map(len, batch)) + len(text) > _BATCH):
            try:
                encoded = tokenizer.encode(batch)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"a document is not UTF-8 ({error.reason} in {error.object[error.start : error.start + 16]!r}): "
                    f"convert it, or use --tokenizer bytes."
                ) from None
            for document, tokens in zip(batch, encoded):
                if len(tokens) and int(tokens.max()) >= tokenizer.vocab_size:
                    raise ValueError(
                        f"the tokenizer {tokenizer.spec!r} produced the id {int(tokens.max())}, but its ids must be below "
                        f"{tokenizer.vocab_size}: it is damaged; choose another."
                    )
                end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
                yield document, np.append(tokens, end).astype(np.int64)
            batch = []
        if text:
            batch.append(text)


def _held_out(document: bytes, fraction: float) -> bool:
    return int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big") < fraction * 2**64


def _read_back(folder: Path, splits: dict[str, dict], dtype: np.dtype) -> Iterator[tuple[int, np.ndarray]]:
    """(bytes of text, tokens) of each document already written; a shard's bytes are divided evenly over its tokens."""
    for shard in chain(*(split["shards"] for split in splits.values())):
        tokens = np.fromfile(folder / shard["file"], dtype)
        offsets = np.fromfile(folder / shard["index"], "<i8")
        for start, stop in pairwise(offsets):
            yield round(shard["bytes"] * int(stop - start) / shard["tokens"]), tokens[start:stop]


def checksum(splits: dict[str, dict]) -> str:
    """The checksum of the whole corpus: sha256 over those of its shards, in order."""
    shards = chain.from_iterable(split["shards"] for split in splits.values())
    every = [[shard[key] for key in ("file", "sha256", "index_sha256")] for shard in shards]
    return hashlib.sha256(json.dumps(every).encode()).hexdigest()


def pack(
    texts: Iterable[bytes],
    out: Path | str,
    tokenizer: Tokenizer,
    val_fraction: float = 0.02,
    shard_tokens: int = 1 << 28,
    sources: object = None,
) -> dict:
    """Write the documents ``texts`` to the new folder ``out`` and return its manifest. If it fails, nothing is left there."""
    if not 0 <= val_fraction <= 1:
        raise ValueError(
            f"val_fraction, the share of tokens to hold out, must be between 0 (none) and 1 (all); got {val_fraction}."
        )
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens, the largest number of tokens in a shard, must be at least 1; got {shard_tokens}.")
    dtype = token_dtype(tokenizer.vocab_size)
    with new_folder(Path(out)) as folder:
        rule, writers = "documents", {name: _Split(folder, name, dtype, shard_tokens) for name in ("train", "val")}
        for text, tokens in _tokenize(texts, tokenizer):
            writers["val" if _held_out(text, val_fraction) else "train"].add(tokens, len(text))
        splits = {name: writer.summary() for name, writer in writers.items()}
        total = sum(part["tokens"] for part in splits.values())
        if total == 0:
            raise ValueError("the corpus is empty: the sources hold no text.")
        most = min(2 * val_fraction, (1 + val_fraction) / 2)
        if not val_fraction / 2 <= splits["val"]["tokens"] / total <= most:
            rule, splits = "tails", _cut_tails(folder, splits, dtype, shard_tokens, val_fraction)
        manifest = {
            "format": FORMAT,
            "tokenizer": describe(tokenizer, folder),
            "dtype": dtype.str,
            "tokens": total,
            "held_out": {"rule": rule, "fraction": val_fraction},
            "checksum": checksum(splits),
            "python": platform.python_version(),
            "sources": sources,
            "splits": splits,
        }
        write_sealed(folder / "manifest.json", manifest)
    return manifest


def _cut_tails(folder: Path, splits: dict[str, dict], dtype: np.dtype, shard_tokens: int, fraction: float) -> dict[str, dict]:
    """The second rule: the last ``fraction`` of every document is held out. Rewrites the shards in the same order."""
    rewritten = {name: _Split(folder, f"{name}-again", dtype, shard_tokens) for name in splits}
    for size, tokens in _read_back(folder, splits, dtype):
        cut = len(tokens) - round(len(tokens) * fraction)
        for name, part in (("train", tokens[:cut]), ("val", tokens[cut:])):
            if len(part):
                rewritten[name].add(part, round(size * len(part) / len(tokens)))
    for shard in chain(*(split["shards"] for split in splits.values())):
        for key in ("file", "index"):
            (folder / shard[key]).unlink()
    cut_splits = {name: writer.summary() for name, writer in rewritten.items()}
    for shard in chain(*(split["shards"] for split in cut_splits.values())):
        for key in ("file", "index"):
            name = shard[key].replace("-again", "")
            (folder / shard[key]).rename(folder / name)
            shard[key] = name
    return cut_splits


def pack_files(
    sources: list[str],
    out: Path | str,
    tokenizer: Tokenizer,
    field: str = "text",
    separator: str | None = None,
    val_fraction: float = 0.02,
    shard_tokens: int = 1 << 28,
) -> dict:
    """``ngpt data pack``: the documents of files, globs, URLs and datasets (sources.py) into the folder ``out``."""
    if separator == "":
        raise ValueError("--separator must not be empty: leave it out to make each file one document.")
    paths = expand(sources)
    texts = chain.from_iterable(documents(path, field, separator) for path in paths)
    return pack(texts, out, tokenizer, val_fraction, shard_tokens, sources=paths)
