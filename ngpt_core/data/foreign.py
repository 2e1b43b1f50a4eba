"""How does somebody else's token file become a corpus without copying a token?

``--data`` takes these layouts as they are, a file or a folder of files with ``train`` and ``val`` in their names:

    nanoGPT     train.bin, val.bin: 16-bit ids and nothing else
    llm.c       *_train_*.bin, *_val_*.bin: 256 int32, of which the first three are magic, version and the number of tokens,
                then 16-bit ids (magic 20240520, version 1) or 32-bit ids (20240801, version 7)
    Megatron    PREFIX.bin: ids and nothing else, with PREFIX.idx, which has their type and the boundaries of the documents

A file is read once, for its sha256, its largest id and its documents. The result is a packed corpus in the cache: a manifest,
the offsets of the documents, and links to the files in place of shards. Everything that holds for a packed corpus
(packing.py) then holds here: --verify-data, blends, and a resumed run that detects changed content, wherever the files are.

No layout names its tokenizer, so the user does. Without an .idx, a document ends with the tokenizer's end-of-text id; llm.c's
scripts write it before each document, which is the same stream except that the first document is that one id.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..files import cache_folder, new_folder, sha256
from ..seal import Damaged, write_sealed
from .corpus import Corpus
from .packing import FORMAT, checksum
from .tokenizers import ByteTokenizer, Tokenizer, content, describe

__all__ = ["Foreign", "is_foreign", "open_foreign"]

_LLM_C: dict[tuple[int, int], np.dtype] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}  # (magic, version) -> the type of its ids
_HEADER = 1024  # bytes of llm.c's header
_MEGATRON = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # its codes for integers
_MAGIC = b"MMIDIDX\0\0"
_PIECE = 1 << 24  # tokens checked at a time


@dataclass(frozen=True)
class _File:
    """One token file: where its ids start, their type, and the offsets of its documents if an index has them."""

    path: Path
    dtype: np.dtype
    tokens: int
    skip: int = 0
    offsets: np.ndarray | None = None

    def read(self) -> np.ndarray:
        return np.memmap(self.path, self.dtype, "r", offset=self.skip, shape=(self.tokens,))


class Foreign(Corpus):
    """A corpus whose shards are links to the files of another trainer."""

    @contextlib.contextmanager
    def _advice(self) -> Iterator[None]:
        try:
            yield
        except Damaged as error:
            raise Damaged(f"{self.name} has changed since it was first read ({error}): restore it.") from None


def _bin(where: str) -> Path:
    """The .bin file that ``where`` means: the path itself, or Megatron's prefix."""
    path = Path(where)
    return path if path.suffix == ".bin" or path.is_dir() else path.with_name(path.name + ".bin")


def is_foreign(where: str) -> bool:
    """Whether ``where`` is a token file, a prefix of one, or a folder of them."""
    path = Path(where)
    if path.is_dir():
        return not (path / "manifest.json").exists() and any(path.glob("*.bin"))
    return bool(path.name) and (path.suffix in (".bin", ".idx") or any(Path(f"{where}{s}").is_file() for s in (".bin", ".idx")))


# ---- layouts ---------------------------------------------------------------------------------------------------------
def _layout(path: Path, prefix: bool) -> _File:
    """The layout of one .bin file. ValueError if it has none of the three."""
    if not path.is_file():
        raise ValueError(f"there is no token file {path}.")
    index, size = path.with_suffix(".idx"), path.stat().st_size
    if index.is_file():
        return _megatron(path, index, size)
    if prefix:
        raise ValueError(f"{path} has no index: {index} is missing. Copy it too, or name {path} if the file needs none.")
    with open(path, "rb") as file:
        head = file.read(_HEADER)
    first = np.frombuffer(head[: len(head) // 4 * 4], "<i4")
    if len(first) and first[0] // 10000 == 2024:  # llm.c's magic numbers are dates
        return _llm_c(path, first, size)
    if size % 2:
        raise ValueError(f"{path} has {size:,} bytes, an odd number: it is not a list of 16-bit ids, or was cut short.")
    sample = np.frombuffer(path.open("rb").read(1 << 16), "<u2")
    if len(sample) >= 16 and sample[1::2].max() < 8 <= sample[::2].max():
        raise ValueError(
            f"{path} looks like 32-bit ids (every second 16-bit number is almost 0) and has no header: Megatron's files need "
            f"{index.name} beside them; a file without a header is read as nanoGPT's 16-bit ids."
        )
    return _File(path, np.dtype("<u2"), size // 2)


def _llm_c(path: Path, header: np.ndarray, size: int) -> _File:
    if len(header) < 256:
        raise ValueError(f"{path} ends inside the header of llm.c's layout (it has {size:,} bytes): it was cut short.")
    magic, version, tokens = (int(x) for x in header[:3])
    dtype = _LLM_C.get((magic, version))
    if dtype is None:
        known = ", ".join(f"{m} version {v}" for m, v in _LLM_C)
        raise ValueError(f"{path} has llm.c's magic number {magic} version {version}: token files have {known}.")
    if size != _HEADER + tokens * dtype.itemsize:
        raise ValueError(
            f"{path} has {size:,} bytes, and its header promises {tokens:,} tokens, which need "
            f"{_HEADER + tokens * dtype.itemsize:,}: it was cut short or damaged."
        )
    return _File(path, dtype, tokens, _HEADER)


def _megatron(path: Path, index: Path, size: int) -> _File:
    raw = index.read_bytes()
    if raw[:9] != _MAGIC:
        raise ValueError(f"{index} is not Megatron's index: it starts with {raw[:9]!r} and not with {_MAGIC!r}.")
    if len(raw) < 34:
        raise ValueError(f"{index} ends inside its header (it has {len(raw)} bytes): it was cut short.")
    version, code = int.from_bytes(raw[9:17], "little"), raw[17]
    sequences, documents = (int(n) for n in np.frombuffer(raw[18:34], "<u8"))
    if version != 1 or code not in _MEGATRON:
        raise ValueError(
            f"{index} has version {version} and type code {code}: this reads version 1 with integers (codes "
            f"{', '.join(map(str, _MEGATRON))})."
        )
    if len(raw) != 34 + 12 * sequences + 8 * documents:
        raise ValueError(
            f"{index} has {len(raw):,} bytes, and its {sequences:,} sequences and {documents:,} document indices need "
            f"{34 + 12 * sequences + 8 * documents:,}: it was cut short, or holds the modes of a multimodal corpus, which are "
            "not read."
        )
    dtype = np.dtype(_MEGATRON[code])
    sizes = np.frombuffer(raw, "<i4", sequences, 34).astype(np.int64)
    pointers = np.frombuffer(raw, "<i8", sequences, 34 + 4 * sequences)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    bounds = np.frombuffer(raw, "<i8", documents, 34 + 12 * sequences)
    if (sizes < 0).any() or not np.array_equal(pointers, starts[:-1] * dtype.itemsize) or starts[-1] * dtype.itemsize != size:
        raise ValueError(
            f"{index} does not describe {path.name}: its sequences must follow each other and fill the file's {size:,} bytes; "
            "one of the two was damaged or belongs to another corpus."
        )
    ordered = not (np.diff(bounds) < 0).any()
    if not documents or not ordered or bounds[0] != 0 or bounds[-1] != sequences:
        raise ValueError(f"{index} has document indices that do not run from 0 to {sequences}: it was damaged.")
    return _File(path, dtype, int(starts[-1]), offsets=np.unique(starts[bounds]))


# ---- a folder in the cache -------------------------------------------------------------------------------------------
def _splits(where: str, split: str) -> dict[str, list[_File]]:
    """The files of each split: those of a folder by the words in their names, a single file as the requested split."""
    path = _bin(where)
    found: dict[str, list[_File]] = {"train": [], "val": []}
    if not path.is_dir():
        given = Path(where)
        path = given.with_suffix(".bin") if given.suffix == ".idx" else path
        found[split].append(_layout(path, prefix=path != given))
        return found
    for file in sorted(path.glob("*.bin")):
        words = file.stem.replace("-", "_").split("_")
        names = [name for name in found if name in words]
        if len(names) != 1:
            raise ValueError(
                f"{file} has neither train nor val as a word of its name: in a folder of token files the name decides what is "
                "held out. Rename it, or name the files with --data and --val-data."
            )
        found[names[0]].append(_layout(file, prefix=False))
    return found


def _offsets(file: _File, tokenizer: Tokenizer) -> np.ndarray:
    """The offsets of the file's documents. Every id is checked: ValueError if one is not the tokenizer's."""
    tokens = file.read()
    ends: list[np.ndarray] = [np.zeros(1, np.int64)]
    for start in range(0, file.tokens, _PIECE):
        piece = tokens[start : start + _PIECE]
        for wrong in (int(piece.min()), int(piece.max())):
            if not 0 <= wrong < tokenizer.vocab_size:
                raise ValueError(
                    f"{file.path} has the id {wrong}, and the ids of {tokenizer.spec!r} lie in [0, {tokenizer.vocab_size}): it "
                    f"was written with another tokenizer, or not in the layout that its first bytes suggest (ids of "
                    f"{8 * file.dtype.itemsize} bits{f' after {file.skip} bytes' if file.skip else ''})."
                )
        if file.offsets is None and tokenizer.end_of_text is not None:
            ends.append(start + 1 + np.flatnonzero(piece == tokenizer.end_of_text))
    return np.unique(np.append(np.concatenate(ends), file.tokens)) if file.offsets is None else file.offsets


def _text_bytes(file: _File, offsets: np.ndarray, tokenizer: Tokenizer) -> int:
    """The bytes of text in the file, for bits per byte: its documents are decoded, without their end tokens."""
    tokens, total = file.read(), 0
    for start, stop in pairwise(offsets):
        ids = tokens[start:stop]
        ids = ids[ids != tokenizer.end_of_text]
        is_bytes = isinstance(tokenizer, ByteTokenizer)  # they need not be UTF-8
        total += len(ids) if is_bytes else len(tokenizer.decode(ids.tolist()).encode())
    return total


def _link(files: dict[str, list[_File]], folder: Path, tokenizer: Tokenizer) -> None:
    """Write the folder: links to the files, the offsets of their documents, and the manifest."""
    splits: dict[str, dict[str, Any]] = {}
    for name, parts in files.items():
        shards: list[dict[str, Any]] = []
        for number, file in enumerate(parts):
            link, index = folder / f"{name}-{number:05d}.tokens", folder / f"{name}-{number:05d}.docs"
            offsets = _offsets(file, tokenizer)
            index.write_bytes(offsets.astype("<i8").tobytes())
            link.symlink_to(file.path.absolute())
            size = _text_bytes(file, offsets, tokenizer) if name == "val" else 0  # nothing needs it for training text
            about = {"file": link.name, "index": index.name, "skip": file.skip, "tokens": file.tokens, "bytes": size}
            sums = {"sha256": sha256(link), "index_sha256": sha256(index)}
            shards.append({**about, "documents": len(offsets) - 1, **sums})
        splits[name] = {key: sum(shard[key] for shard in shards) for key in ("tokens", "documents", "bytes")}
        splits[name]["shards"] = shards
    every = [file for parts in files.values() for file in parts]
    manifest = {
        "format": FORMAT,
        "tokenizer": describe(tokenizer, folder),
        "dtype": every[0].dtype.str,
        "tokens": sum(file.tokens for file in every),
        "held_out": {"rule": "files", "fraction": splits["val"]["tokens"] / sum(file.tokens for file in every)},
        "checksum": checksum(splits),
        "sources": [str(file.path.absolute()) for file in every],
        "splits": splits,
    }
    write_sealed(folder / "manifest.json", manifest)


def open_foreign(where: str, tokenizer: Tokenizer | None, split: str = "train") -> Foreign:
    """The corpus of these files; a single file is the split ``split``. The first time, all of them are read."""
    files = _splits(where, split)
    every = [file for parts in files.values() for file in parts]
    for file in every:
        if file.tokens == 0:
            raise ValueError(f"{file.path} holds no tokens.")
        if tokenizer is not None and np.iinfo(file.dtype).max < tokenizer.vocab_size - 1:
            raise ValueError(
                f"{file.path} has ids of type {file.dtype.name}, too narrow for the {tokenizer.vocab_size} ids of "
                f"{tokenizer.spec!r}: it was written with another tokenizer; name that one with --tokenizer."
            )
        if file.dtype != every[0].dtype:
            raise ValueError(f"{file.path} and {every[0].path} have ids of different types: give them as two items of --data.")
    if tokenizer is None:
        raise ValueError(
            f"{where} does not record its tokenizer: name it with --tokenizer, as for `ngpt data pack` (nanoGPT's and llm.c's "
            "scripts use tiktoken:gpt2 unless they say otherwise)."
        )
    identity = [(str(f.path.absolute()), (s := f.path.stat()).st_size, s.st_mtime_ns, len(files["val"])) for f in every]
    indices = [(s.st_size, s.st_mtime_ns) for f in every if f.offsets is not None for s in [f.path.with_suffix(".idx").stat()]]
    key = json.dumps([FORMAT, identity, indices, content(describe(tokenizer))])
    folder = cache_folder() / f"linked-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not (folder / "manifest.json").exists():
        try:
            with new_folder(folder) as temporary:
                _link(files, temporary, tokenizer)
        except (OSError, ValueError):
            if not (folder / "manifest.json").exists():  # otherwise another process has just written the same folder
                raise
    return Foreign(folder, name=where)
