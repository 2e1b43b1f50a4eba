"""What does a packed corpus give to its readers: any stretch of its tokens, with the boundaries of the documents in it.

A ``Corpus`` is the folder that packing.py wrote, opened: the manifest is read and every file's size compared with it (cheap: a
shard that was cut short is found here); ``verify`` reads the files and compares their sha256 (once, at the start of a run).
A ``Stream`` is one split as a single long row of N tokens over all shards, memory-mapped: nothing is loaded before it is read,
and processes on one machine share the pages.

    windows of length T tile the stream: window i is stream[i T : i T + T + 1], T inputs and the T targets one further on;
    every token but the first is a target exactly once an epoch. The last window may be short.
"""

import hashlib
import platform
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np

from ..files import cache_folder, read_json, sha256
from .packing import FORMAT, checksum, pack, token_dtype
from .sources import documents, stdlib_files
from .tokenizers import ByteTokenizer, Tokenizer, check_description, content, from_description

__all__ = ["BUILT_IN", "Corpus", "Stream", "check_tokenizer", "embedded", "open_corpus", "stdlib"]

_SUMS = ("tokens", "documents", "bytes")  # of a split: those of its shards together


class Stream:
    """One split of a corpus: N tokens in a row."""

    def __init__(self, folder: Path, split: dict, dtype: str):
        self.folder, self.shards, self.dtype = folder, split["shards"], np.dtype(dtype)
        self.tokens, self.documents, self.bytes = split["tokens"], split["documents"], split["bytes"]
        self.starts = np.cumsum([0, *(shard["tokens"] for shard in self.shards)])
        self._maps = lru_cache(maxsize=256)(self._map)  # a bound on open files: a large corpus has thousands of shards

    def _map(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        shard = self.shards[number]
        return np.memmap(self.folder / shard["file"], self.dtype, "r"), np.memmap(self.folder / shard["index"], "<i8", "r")

    def windows(self, length: int) -> int:
        """How many windows of ``length`` inputs tile the stream: ceil((N - 1) / T)."""
        return max(0, -(-(self.tokens - 1) // length))

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """tokens[start:stop] as int64, and for each the number of its document, counted from 0 at ``start``."""
        stop = min(stop, self.tokens)
        pieces, heads = [], []
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < stop:
            tokens, offsets = self._maps(number)
            base = int(self.starts[number])
            end = min(stop, int(self.starts[number + 1]))
            pieces.append(tokens[start - base : end - base])
            first, last = np.searchsorted(offsets, [start - base, end - base])
            is_head = np.zeros(end - start, np.int64)
            is_head[offsets[first:last] - (start - base)] = 1
            heads.append(is_head)
            start, number = end, number + 1
        document = np.cumsum(np.concatenate(heads))
        return np.concatenate(pieces).astype(np.int64), document - document[0]

    def window(self, i: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        return self.read(i * length, i * length + length + 1)


def _agrees(manifest: dict) -> bool:
    """Whether what a manifest says fits together."""
    try:
        splits = {name: manifest["splits"][name] for name in ("train", "val")}
        sums = (split[key] == sum(s[key] for s in split["shards"]) for split in splits.values() for key in _SUMS)
        kind = manifest["dtype"] == token_dtype(manifest["tokenizer"]["vocab_size"]).str
        return kind and all(sums) and manifest["checksum"] == checksum(splits) and isinstance(manifest["held_out"]["rule"], str)
    except (LookupError, TypeError, AttributeError, StopIteration):  # something is missing, or of another kind
        return False


class Corpus:
    """A packed corpus, opened; ``corpus.stream("train")`` reads it."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        if not (self.folder / "manifest.json").is_file():
            raise ValueError(
                f"{self.folder.absolute()} is not a packed corpus (it has no manifest.json): make one with "
                f"`ngpt data pack FILES... --out {self.folder}`."
            )
        self.manifest = read_json(self.folder / "manifest.json")
        if self.manifest.get("format") != FORMAT:
            found = self.manifest.get("format")
            raise ValueError(f"{self.folder} has the format {found}, this version reads {FORMAT}: pack it again.")
        check_description(self.manifest.get("tokenizer"), self.folder / "manifest.json")
        self.vocab_size = self.manifest["tokenizer"]["vocab_size"]
        if not _agrees(self.manifest):
            raise ValueError(f"{self.folder}/manifest.json disagrees with itself: it was damaged or edited; pack again.")
        self.checksum: str = self.manifest["checksum"]
        for path, size, _ in self._files():
            found = path.stat().st_size if path.exists() else None
            if found != size:
                state = (
                    "is missing" if found is None else f"was cut short or changed: {found:,} bytes, {size:,} in the manifest"
                )
                raise ValueError(f"the shard {path} {state}; restore it, or pack the corpus again.")

    def _files(self) -> list[tuple[Path, int, str]]:
        width = np.dtype(self.manifest["dtype"]).itemsize
        files = []
        for split in self.manifest["splits"].values():
            for shard in split["shards"]:
                files.append((self.folder / shard["file"], shard["tokens"] * width, shard["sha256"]))
                files.append((self.folder / shard["index"], (shard["documents"] + 1) * 8, shard["index_sha256"]))
        return files

    def verify(self, rank: int = 0, world: int = 1) -> None:
        """Read the shards and compare their sha256 with the manifest; N ranks share the work."""
        for path, _, digest in self._files()[rank::world]:
            if (found := sha256(path)) != digest:
                raise ValueError(
                    f"the shard {path} has a wrong checksum (sha256 {found[:16]}..., the manifest says {digest[:16]}...): "
                    f"it was damaged or changed; restore it, or pack the corpus again."
                )

    def stream(self, split: str) -> Stream:
        part = self.manifest["splits"].get(split)
        if part is None or part["tokens"] < 2:
            raise ValueError(f"{self.folder} has no {split!r} split to read (fewer than two tokens): pack more text.")
        return Stream(self.folder, part, self.manifest["dtype"])

    def has(self, split: str) -> bool:
        return self.manifest["splits"].get(split, {"tokens": 0})["tokens"] >= 2

    def tokenizer(self) -> Tokenizer:
        return from_description(self.manifest["tokenizer"], self.folder)


def embedded() -> Corpus:
    """The corpus that comes with the package: 1.2 MB of CPython 3.11.7's library, the same on every machine.

    Its folder has the text, a manifest (the checksum, the list of files), the license, and the script that made it. A tenth of
    the text is held out: 10 of 107 files.
    """
    folder = Path(__file__).parent / "embedded"
    text = folder / "text.jsonl.gz"
    try:
        wanted, found = read_json(folder / "manifest.json").get("sha256"), sha256(text)
    except OSError as error:
        raise ValueError(f"the embedded corpus cannot be read ({error}): install the package again.") from None
    if found != wanted:
        raise ValueError(f"{text} was damaged (sha256 {found[:16]}..., not {str(wanted)[:16]}...): install the package again.")
    return _cached("embedded", wanted, documents(str(text)), val_fraction=0.1)


def stdlib() -> Corpus:
    """The standard library of the Python that runs this: 10 MB, not the same text in two versions of Python."""
    files = [(name, path.read_bytes()) for name, path in stdlib_files()]
    digest = hashlib.sha256()
    for name, text in files:
        digest.update(f"{name}\0{len(text)}\0".encode() + text)
    version = f"stdlib-{sys.implementation.name}-{platform.python_version()}"
    return _cached(version, digest.hexdigest(), (text for _, text in files if text), val_fraction=0.02)


BUILT_IN = {"embedded": embedded, "stdlib": stdlib}  # the corpora that --data takes by name


def _cached(title: str, digest: str, texts: Iterable[bytes], val_fraction: float) -> Corpus:
    """The texts, packed into the cache byte by byte, once. Their checksum is in the folder's name: other texts go elsewhere."""
    folder = cache_folder() / f"{title}-{digest[:12]}-{FORMAT}"
    if not (folder / "manifest.json").exists():
        try:
            pack(texts, folder, ByteTokenizer(), val_fraction, sources={"name": title, "sha256": digest})
        except (OSError, ValueError) as error:
            if not (folder / "manifest.json").exists():  # else another process has put the same corpus there first
                raise ValueError(
                    f"cannot write the corpus {title} to {folder} ({error}): set NGPT_CACHE to a folder you may write to."
                ) from None
    return Corpus(folder)


def check_tokenizer(corpora: list[tuple[Corpus, float]], wanted: dict, whose: object) -> None:
    """A ValueError for a corpus that was packed with another tokenizer than the one described by ``wanted``."""
    for corpus, _ in corpora:
        if content(found := corpus.manifest["tokenizer"]) != content(wanted):
            raise ValueError(
                f"{corpus.folder} was packed with the tokenizer {_named(found)} and {whose} with {_named(wanted)}: the same "
                f"number is another text in each; pack it again with that of {whose}."
            )


def _named(description: dict) -> str:
    parts = [f"vocabulary {description['vocab_size']}", f"end of text {description['end_of_text']}"]
    if "sha256" in description:
        parts.append(f"sha256 {description['sha256'][:12]}")
    return f"{description['spec']} ({', '.join(parts)})"


def open_corpus(where: str) -> Corpus:
    """A corpus of BUILT_IN by its name, otherwise the folder of a packed one."""
    return BUILT_IN[where]() if where in BUILT_IN else Corpus(where)
