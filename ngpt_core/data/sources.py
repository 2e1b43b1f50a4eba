"""Where do documents come from? Text, JSON lines, parquet, a URL, a Hugging Face dataset: each read as a stream of bytes.

A *source* is an argument of ``ngpt data pack``:
    notes.txt, 'src/**/*.py'     a file, or a quoted glob: one file is one document (or several, cut at ``separator``)
    web.jsonl, web.jsonl.gz      one document per line, in the field ``field``
    web.parquet                  one document per row, in the column ``field`` (needs pyarrow)
    https://host/file.txt        downloaded once into the cache; its checksum is recorded then and verified on every later use
    shakespeare, tinystories     a public corpus from the table ``PUBLIC``
    hf:NAME[:SPLIT]              a Hugging Face dataset, streamed (needs datasets)

Files are read in sorted order, so the same files give the same corpus on every machine.
"""

import contextlib
import glob
import gzip
import hashlib
import http.client
import io
import json
import os
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from io import BufferedIOBase
from itertools import chain
from pathlib import Path
from typing import Any

from ..files import cache_folder, new_file, read_json, sha256, write_json

__all__ = ["PUBLIC", "documents", "download", "expand", "stdlib_files"]

# name -> (url, separator of its documents). No checksums: each user's first download records one.
_STORIES = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4"
PUBLIC = {
    "shakespeare": ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt", None),
    "tinystories": (f"{_STORIES}-valid.txt", "<|endoftext|>"),
    "tinystories-train": (f"{_STORIES}-train.txt", "<|endoftext|>"),
}

# a .gz or parquet file may expand to 100 times its size, and to a gigabyte in any case
MAX_EXPANSION = 100
ALWAYS_ALLOWED = 1 << 30
MAX_BYTES = 1 << 40  # of a download
MIN_SPEED = 1 << 10  # of a download, in bytes per second, over each minute
HEADER_TIMEOUT = 180  # seconds until a server has sent its header, redirects included

_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}


def stdlib_files() -> list[tuple[str, Path]]:
    """(name, path) of the source files of this Python's standard library, sorted by name.

    Tests, installed packages and generated tables (encodings, pydoc_data) are excluded.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = ((path.relative_to(root), path) for path in root.rglob("*.py"))
    files = sorted((name.as_posix(), path) for name, path in found if not _EXCLUDED & set(name.parts) and path.is_file())
    if not files:
        raise ValueError(f"this Python ({sys.version.split()[0]}) has no standard library sources in {root}: use --data DIR.")
    return files


def expand(sources: Iterable[str]) -> list[str]:
    """Replace globs by their matches, sorted; keep everything else. ValueError if a source does not exist."""
    paths = []
    for source in sources:
        if source.startswith("hf:") and source[3:4] in ("", ":"):
            raise ValueError(f"{source!r} names no dataset: write hf:NAME or hf:NAME:SPLIT.")
        if source in PUBLIC or source.startswith(("http://", "https://", "hf:")):
            paths.append(source)
        elif glob.has_magic(source) and not Path(source).exists():
            matches = sorted(p for p in glob.glob(source, recursive=True) if Path(p).is_file())
            if not matches:
                raise ValueError(f"no file matches {source!r}.")
            paths.extend(matches)
        elif source and Path(source).is_dir():  # Path("") is the working directory
            raise ValueError(f"{source!r} is a folder: name the files to pack, for example '{source}/**/*.txt'.")
        elif not Path(source).is_file():
            raise ValueError(f"there is no file {source!r}, and the public corpora are {', '.join(PUBLIC)}.")
        else:
            paths.append(source)
    return paths


def documents(path: str, field: str = "text", separator: str | None = None) -> Iterator[bytes]:
    """The documents of one expanded source, as UTF-8 bytes; empty ones are left out."""
    if path.startswith("hf:"):
        found = _hugging_face(path, field)
    elif path in PUBLIC:
        url, own = PUBLIC[path]
        found = _text(download(url), separator or own)
    else:
        file = download(path) if path.startswith(("http://", "https://")) else Path(path)
        name = file.name.lower().removesuffix(".gz")
        if name.endswith((".jsonl", ".ndjson")):
            found = _json_lines(file, field)
        elif name.endswith(".parquet"):
            found = _parquet(file, field)
        else:
            found = _text(file, separator)
    return (document for document in found if document)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BufferedIOBase]:
    try:
        with open(path, "rb") as file:
            if path.name.lower().endswith(".gz"):
                yield io.BufferedReader(_Expanded(gzip.GzipFile(fileobj=file), path, _limit(path)))
            else:
                yield file
    except (OSError, EOFError, zlib.error) as error:  # those of zlib and gzip do not name the file
        raise ValueError(_unreadable(path, error)) from None


class _Expanded(io.RawIOBase):
    """What a compressed file expands to, up to a limit: a few kilobytes can expand to more than any disk holds."""

    def __init__(self, file: gzip.GzipFile, path: Path, limit: int):
        self.file, self.path, self.limit = file, path, limit

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        block = self.file.read(len(buffer))
        if self.file.tell() > self.limit:
            raise ValueError(_expands(self.path, self.limit))
        buffer[: len(block)] = block
        return len(block)


def _limit(path: Path) -> int:
    """How many bytes a compressed file may expand to."""
    return max(ALWAYS_ALLOWED, MAX_EXPANSION * path.stat().st_size)


def _expands(path: Path, limit: int) -> str:
    return (
        f"{path} expands to more than {limit:,} bytes, {MAX_EXPANSION} times its size, which text does not do: unpack it and "
        "inspect it first."
    )


def _unreadable(path: Path, error: Exception) -> str:
    if reason := getattr(error, "strerror", None):  # from the system: no permission, a failing disk
        return f"{path} cannot be read: {reason}."
    return f"{path} cannot be read ({' '.join(str(error).split())}): it was cut short or damaged; download or copy it again."


_BINARY = {  # the first bytes of files that are not text
    b"\x1f\x8b": "gzip (name it .gz)", b"BZh": "bzip2 (unpack it first)", b"\x28\xb5\x2f\xfd": "zstandard (unpack it first)",
    b"\xfd7zXZ": "xz (unpack it first)", b"PK\x03\x04": "zip (unpack it first)", b"PAR1": "parquet (name it .parquet)",
    b"%PDF-": "PDF (extract its text first)",
}  # fmt: skip


def _text(path: Path, separator: str | None) -> Iterator[bytes]:
    with _open(path) as file:
        start = file.read(8)
        if kind := next((kind for magic, kind in _BINARY.items() if start.startswith(magic)), None):
            raise ValueError(f"{path} is not text but {kind}: packing it would store its raw bytes.")
        file.seek(0)
        if separator is None:
            yield _check_text(file.read(), path)
            return
        mark, rest = separator.encode(), b""
        while block := _check_text(file.read(1 << 24), path):
            *whole, rest = (rest + block).split(mark)
            yield from (document.strip() for document in whole)
        yield rest.strip()


def _check_text(block: bytes, path: Path) -> bytes:
    if b"\0" in block:  # for the byte tokenizer, byte 0 ends a document
        raise ValueError(f"{path} is not text: it contains a zero byte; convert it to UTF-8 if it is UTF-16, or leave it out.")
    return block


def _json_lines(path: Path, field: str) -> Iterator[bytes]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[field]
            except (ValueError, LookupError, TypeError, RecursionError):
                text = None
            if not isinstance(text, str):
                raise ValueError(f"{path}, line {number}: expected a JSON object with text in {field!r} (--field NAME).")
            yield text.encode("utf-8", errors="replace")


def _parquet(path: Path, field: str) -> Iterator[bytes]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path} needs the package `pyarrow`: pip install pyarrow.") from None
    try:
        limit, size = _limit(path), 0
        # Read as a dictionary, a text that occurs in many rows is in memory once; ``as_py`` copies one row at a time.
        with pyarrow.parquet.ParquetFile(path, read_dictionary=[field]) as file:
            if field not in file.schema_arrow.names:
                raise ValueError(f"{path} has no column {field!r}; it has {file.schema_arrow.names}: choose one with --field.")
            groups = (file.metadata.row_group(i) for i in range(file.num_row_groups))
            if sum(group.total_byte_size for group in groups) > limit:
                raise ValueError(_expands(path, limit))
            for row in chain.from_iterable(batch.column(0) for batch in file.iter_batches(columns=[field])):
                if (text := row.as_py()) is None:
                    continue
                if not isinstance(text, str):
                    raise ValueError(f"{path} has no text in the column {field!r}: choose another with --field.")
                if (size := size + len(text)) > limit:
                    raise ValueError(_expands(path, limit))
                yield text.encode()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(_unreadable(path, error)) from None


def _hugging_face(source: str, field: str) -> Iterator[bytes]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f"{source!r} needs the package `datasets`: pip install datasets.") from None
    name, _, split = source.removeprefix("hf:").partition(":")
    for row in load_dataset(name, split=split or "train", streaming=True):
        if not isinstance(row.get(field), str):
            raise ValueError(f"{source!r} has no text in the field {field!r}; it has {sorted(row)}: choose one with --field.")
        yield row[field].encode("utf-8", errors="replace")


def download(url: str, folder: Path | None = None) -> Path:
    """The file at ``url``, from the cache if it is there.

    ``downloads.json`` in the cache records the sha256 of the first download. A later copy with another checksum (damaged, or
    changed at its origin) is refused.
    """
    folder = (folder or cache_folder()) / "downloads"
    folder.mkdir(parents=True, exist_ok=True)
    ledger_path = folder / "downloads.json"
    ledger = read_json(ledger_path) if ledger_path.exists() else {}
    name = url.rstrip("/").rpartition("/")[2].partition("?")[0][-100:]
    path = folder / f"{hashlib.sha256(url.encode()).hexdigest()[:12]}-{name}"
    if path.exists() and url in ledger:
        _expect(sha256(path), ledger[url]["sha256"], f"the cached copy {path} is damaged: delete it and download again")
        return path
    with new_file(path) as part:
        with open(part, "wb") as file:
            _fetch(url, file)
        digest = sha256(part)
        if url in ledger:
            _expect(digest, ledger[url]["sha256"], f"{url} has changed; remove its entry from {ledger_path} to accept it")
        ledger[url] = {"sha256": digest, "bytes": os.path.getsize(part), "file": path.name}
    write_json(ledger_path, ledger)
    return path


def _answer(url: str) -> http.client.HTTPResponse:
    """The response to a request for ``url``, from a thread: a server that sends its header byte by byte would never run into
    a socket's timeout."""
    answer: Future = Future()

    def ask() -> None:
        try:
            answer.set_result(urllib.request.urlopen(url, timeout=60))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    wait([answer], HEADER_TIMEOUT)
    if not answer.done():
        raise ValueError(f"could not download {url}: the server did not answer within {HEADER_TIMEOUT} seconds; try again.")
    return answer.result()


def _fetch(url: str, file: BufferedIOBase) -> None:
    """Write the complete content of ``url`` to ``file``."""
    try:
        with _answer(url) as response:
            size, mark, began = 0, 0, time.monotonic()
            while block := response.read1(1 << 20):
                file.write(block)
                size += len(block)
                if size > MAX_BYTES:
                    raise ValueError(f"could not download {url}: it has more than {MAX_BYTES:,} bytes.")
                if (now := time.monotonic()) - began > 60:
                    if size - mark < 60 * MIN_SPEED:
                        raise ValueError(f"could not download {url}: it is slower than {MIN_SPEED} bytes/s; try again.")
                    mark, began = size, now
            if response.length:  # announced but not read: a connection that ends early looks like the end of the file
                raise http.client.IncompleteRead(b"", response.length)
    except http.client.IncompleteRead as error:
        missing = f", {error.expected:,} bytes are missing" if error.expected else ""
        raise ValueError(f"could not download {url}: the connection ended early{missing}; try again.") from None
    except urllib.error.HTTPError as error:
        raise ValueError(f"could not download {url}: {error}.") from None
    except (OSError, http.client.HTTPException, UnicodeError) as error:  # URLError and timeouts are OSErrors
        raise ValueError(f"could not download {url}: {getattr(error, 'reason', error)}.") from None


def _expect(found: str, wanted: str, advice: str) -> None:
    if found != wanted:
        raise ValueError(f"wrong checksum: {advice} (sha256 {found[:16]}..., recorded {wanted[:16]}...).")
