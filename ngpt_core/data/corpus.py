"""What do readers get from a packed corpus? Any range of its tokens, with the document boundaries in it.

A ``Corpus`` is an open folder that packing.py wrote. Opening it reads the sealed manifest and compares every file's size with
it, a cheap way to find truncated shards; ``verify`` reads the files and compares their sha256 (at the start of a run). A
``Stream`` is one split as a sequence of N tokens over all shards, memory-mapped: nothing is loaded before it is read, and
processes on one machine share the pages.

    windows of length T tile the stream: window i is stream[i T : i T + T + 1], T inputs and the T targets shifted by one;
    every token except the first is a target exactly once per epoch. The last window may be short.
"""

import contextlib
import hashlib
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np

from ..files import cache_folder, read_json, sha256
from ..seal import Damaged, Entry, check_files, listed, note_unsealed, read_sealed, verify
from . import verified
from .packing import FORMAT, checksum, pack
from .sources import documents, stdlib_files
from .tokenizers import ByteTokenizer, Tokenizer, check_copy, check_description, content, from_description

__all__ = ["BUILT_IN", "Corpus", "Stream", "check_tokenizer", "embedded", "open_corpus", "stdlib"]

_SUMS = ("tokens", "documents", "bytes")  # of a split: the sums over its shards


class Stream:
    """One split of a corpus: a sequence of N tokens."""

    def __init__(self, folder: Path, split: dict, dtype: str):
        self.folder, self.shards, self.dtype = folder, split["shards"], np.dtype(dtype)
        self.tokens, self.documents, self.bytes = split["tokens"], split["documents"], split["bytes"]
        self.starts = np.cumsum([0, *(shard["tokens"] for shard in self.shards)])
        self._maps = lru_cache(maxsize=256)(self._map)  # limits open files: a large corpus has thousands of shards

    def _map(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        shard = self.shards[number]
        tokens = np.memmap(self.folder / shard["file"], self.dtype, "r", offset=shard.get("skip", 0))
        return tokens, np.memmap(self.folder / shard["index"], "<i8", "r")

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


def _is_consistent(manifest: dict) -> bool:
    """Whether the parts of a manifest agree with each other."""
    try:
        splits = {name: manifest["splits"][name] for name in ("train", "val")}
        sums = (split[key] == sum(s[key] for s in split["shards"]) for split in splits.values() for key in _SUMS)
        names = (isinstance(s[key], str) for split in splits.values() for s in split["shards"] for key in ("file", "index"))
        kind = np.iinfo(np.dtype(manifest["dtype"])).max >= manifest["tokenizer"]["vocab_size"] - 1
        return (
            kind
            and all(sums)
            and all(names)
            and manifest["checksum"] == checksum(splits)
            and isinstance(manifest["held_out"]["rule"], str)
        )
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration):  # something is missing or has the wrong type
        return False


class Corpus:
    """An open packed corpus; ``corpus.stream("train")`` reads it. Messages refer to it as ``name``, by default its folder."""

    def __init__(self, folder: Path | str, name: Path | str | None = None):
        self.folder = Path(folder)
        self.name = self.folder if name is None else name
        if not (self.folder / "manifest.json").is_file():
            raise ValueError(
                f"{self.folder.absolute()} is not a packed corpus (it has no manifest.json): make one with "
                f"`ngpt data pack FILES... --out {self.folder}`."
            )
        self.manifest, sealed = read_sealed(self.folder / "manifest.json")
        if not sealed:
            note_unsealed(self.folder)
        if self.manifest.get("format") != FORMAT:
            found = self.manifest.get("format")
            raise ValueError(f"{self.folder} has corpus format {found}; this version reads {FORMAT}: pack it again.")
        check_description(self.manifest.get("tokenizer"), self.folder / "manifest.json")
        self.vocab_size = self.manifest["tokenizer"]["vocab_size"]
        if not _is_consistent(self.manifest):
            raise ValueError(f"{self.folder}/manifest.json is inconsistent: it was damaged or edited; pack the corpus again.")
        self.checksum: str = self.manifest["checksum"]
        files = self._files("train", "val")
        with self._advice():
            check_files(self.folder, files)

    def _files(self, *splits: str) -> dict[str, Entry]:
        """The shards of these splits and their indices, as the manifest describes them."""
        width, files = np.dtype(self.manifest["dtype"]).itemsize, {}
        for shard in chain.from_iterable(self.manifest["splits"][split]["shards"] for split in splits):
            size = shard.get("skip", 0) + shard["tokens"] * width
            files[shard["file"]] = {"bytes": size, "sha256": shard["sha256"]}
            files[shard["index"]] = {"bytes": (shard["documents"] + 1) * 8, "sha256": shard["index_sha256"]}
        return listed(files, self.folder / "manifest.json")

    def verify(self, rank: int = 0, world: int = 1, splits: tuple[str, ...] = ("train", "val"), everything: bool = True) -> int:
        """Read the shards and compare their sha256 with the manifest; N ranks share the work. Returns the number of bytes
        read. ``everything=False`` skips the files that were verified before (verified.py)."""
        files = self._files(*splits)
        large, mine = sum(e["bytes"] for e in files.values()) >= verified.MIN_BYTES, dict(list(files.items())[rank::world])
        with self._advice():
            check_files(self.folder, mine)
            size = verify(self.folder, mine if everything else verified.unverified(self.folder, self.checksum, mine))
        check_copy(self.manifest["tokenizer"], self.folder)
        if large and size:
            verified.remember(self.folder, self.checksum, mine, rank)
        return size

    @contextlib.contextmanager
    def _advice(self) -> Iterator[None]:
        try:
            yield
        except Damaged as error:
            raise Damaged(f"{error}: restore it, or pack the corpus again.") from None

    def stream(self, split: str) -> Stream:
        if not self.has(split):
            raise ValueError(f"{self.name} has no {split!r} split to read (fewer than two tokens): pack more text.")
        return Stream(self.folder, self.manifest["splits"][split], self.manifest["dtype"])

    def has(self, split: str) -> bool:
        return self.manifest["splits"].get(split, {"tokens": 0})["tokens"] >= 2

    def tokenizer(self) -> Tokenizer:
        return from_description(self.manifest["tokenizer"], self.folder)


def embedded() -> Corpus:
    """The corpus that comes with the package: 1.2 MB of CPython 3.11.7's library, the same on every machine.

    Its folder holds the text, a manifest (the checksum, the list of files), the license, and the script that made it. A tenth
    of the text is held out: 10 of 107 files.
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
    """The standard library of the running Python: 10 MB of text, which differs between versions of Python."""
    files = [(name, path.read_bytes()) for name, path in stdlib_files()]
    digest = hashlib.sha256()
    for name, text in files:
        digest.update(f"{name}\0{len(text)}\0".encode() + text)
    version = f"stdlib-{sys.implementation.name}-{platform.python_version()}"
    return _cached(version, digest.hexdigest(), (text for _, text in files if text), val_fraction=0.02)


BUILT_IN = {"embedded": embedded, "stdlib": stdlib}  # the corpora that --data takes by name


def _cached(title: str, digest: str, texts: Iterable[bytes], val_fraction: float) -> Corpus:
    """The texts, packed into the cache as bytes, once. The folder's name contains their checksum: other texts go elsewhere."""
    folder = cache_folder() / f"{title}-{digest[:12]}-{FORMAT}-sealed"
    if not (folder / "manifest.json").exists():
        try:
            pack(texts, folder, ByteTokenizer(), val_fraction, sources={"name": title, "sha256": digest})
        except (OSError, ValueError) as error:
            if not (folder / "manifest.json").exists():  # otherwise another process has just written the same corpus
                raise ValueError(
                    f"cannot write the corpus {title} to {folder} ({error}): set NGPT_CACHE to a folder you may write to."
                ) from None
    return Corpus(folder)


def check_tokenizer(corpora: list[tuple[Corpus, float]], wanted: dict, owner: object) -> None:
    """ValueError if a corpus was packed with another tokenizer than ``wanted``, which is that of ``owner``."""
    for corpus, _ in corpora:
        if content(found := corpus.manifest["tokenizer"]) != content(wanted):
            raise ValueError(
                f"{corpus.name} was packed with the tokenizer {_named(found)} and {owner} with {_named(wanted)}: the same "
                f"id means different text in each; pack it again with the tokenizer of {owner}."
            )


def _named(description: dict) -> str:
    parts = [f"vocabulary {description['vocab_size']}", f"end of text {description['end_of_text']}"]
    if "sha256" in description:
        parts.append(f"sha256 {description['sha256'][:12]}")
    return f"{description['spec']} ({', '.join(parts)})"


def open_corpus(where: str, tokenizer: Callable[[], Tokenizer | None] = lambda: None, split: str = "train") -> Corpus:
    """A corpus of BUILT_IN by its name, the packed corpus in a folder, or token files of another trainer (foreign.py), which
    need ``tokenizer``; a single token file is the split ``split``."""
    from .foreign import is_foreign, open_foreign  # here, because foreign.py imports this module

    if where in BUILT_IN:
        return BUILT_IN[where]()
    return open_foreign(where, tokenizer(), split) if is_foreign(where) else Corpus(where)
