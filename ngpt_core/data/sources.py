"""Where do documents come from? Text, JSON lines, parquet, a URL, a Hugging Face dataset: each read as a stream of bytes.

A *source* is what a person types after ``ngpt data pack``:
    notes.txt, 'src/**/*.py'     a file, or a quoted glob: one file is one document (or several, cut at ``separator``)
    web.jsonl, web.jsonl.gz      one document a line, in the field ``field``
    web.parquet                  one document a row, in the column ``field`` (needs pyarrow)
    https://host/file.txt        downloaded once into the cache, its checksum recorded then and verified every time after
    shakespeare, tinystories     a public corpus of the table ``PUBLIC``, by its URL
    hf:NAME[:SPLIT]              a Hugging Face dataset, streamed (needs datasets)

Files are taken in sorted order, so that the same files give the same corpus on every machine.
"""

import contextlib
import glob
import gzip
import hashlib
import http.client
import json
import os
import sys
import sysconfig
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedIOBase
from pathlib import Path

from ..files import cache_folder, new_file, read_json, sha256, write_json

__all__ = ["PUBLIC", "documents", "download", "expand", "stdlib_files"]

# name -> (url, what separates its documents). No checksums: each is computed at the first download on the user's machine.
_STORIES = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4"
PUBLIC = {
    "shakespeare": ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt", None),
    "tinystories": (f"{_STORIES}-valid.txt", "<|endoftext|>"),
    "tinystories-train": (f"{_STORIES}-train.txt", "<|endoftext|>"),
}

_NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}


def stdlib_files() -> list[tuple[str, Path]]:
    """(name, path) of the source files of this Python's standard library, sorted by name.

    Tests, installed packages and the generated tables (encodings, pydoc_data) are left out: they are not prose about Python.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = ((path.relative_to(root), path) for path in root.rglob("*.py"))
    files = sorted((name.as_posix(), path) for name, path in found if not _NOT_PROSE & set(name.parts) and path.is_file())
    if not files:
        raise ValueError(f"this Python ({sys.version.split()[0]}) has no standard library sources in {root}: give --data DIR.")
    return files


def expand(sources: Iterable[str]) -> list[str]:
    """Globs to sorted paths; the names of PUBLIC to URLs; everything else as it is."""
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
        elif source and Path(source).is_dir():  # "" is a path too: the working directory's
            raise ValueError(f"{source!r} is a folder: say which of its files to pack, for example '{source}/**/*.txt'.")
        elif not Path(source).is_file():
            raise ValueError(f"there is no file {source!r} (a public corpus by name: {', '.join(PUBLIC)}).")
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
        with (gzip.open if path.name.lower().endswith(".gz") else open)(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:  # zlib's and gzip's own do not say which file it was
        raise ValueError(_unreadable(path, error)) from None


def _unreadable(path: Path, error: Exception) -> str:
    if reason := getattr(error, "strerror", None):  # the system's own: no permission, a failing disk
        return f"{path} cannot be read: {reason}."
    return f"{path} cannot be read ({' '.join(str(error).split())}): it was cut short or damaged; get it again."


_NO_TEXT = {  # how files begin that are no text
    b"\x1f\x8b": "gzip (call it .gz)", b"BZh": "bzip2 (unpack it first)", b"\x28\xb5\x2f\xfd": "zstandard (unpack it first)",
    b"\xfd7zXZ": "xz (unpack it first)", b"PK\x03\x04": "zip (unpack it first)", b"PAR1": "parquet (call it .parquet)",
    b"%PDF-": "PDF (extract its text first)",
}  # fmt: skip


def _text(path: Path, separator: str | None) -> Iterator[bytes]:
    with _open(path) as file:
        start = file.read(8)
        if kind := next((kind for magic, kind in _NO_TEXT.items() if start.startswith(magic)), None):
            raise ValueError(f"{path} is no text but {kind}: its bytes would be packed as they are.")
        file.seek(0)
        if separator is None:
            yield _without_zero(file.read(), path)
            return
        mark, rest = separator.encode(), b""
        while block := _without_zero(file.read(1 << 24), path):
            *whole, rest = (rest + block).split(mark)
            yield from (document.strip() for document in whole)
        yield rest.strip()


def _without_zero(block: bytes, path: Path) -> bytes:
    if b"\0" in block:  # the byte tokenizer's end of a document
        raise ValueError(f"{path} is no text: it has a zero byte; convert it to UTF-8 if it is UTF-16, or leave it out.")
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
                raise ValueError(f"{path}, line {number}: want a JSON object with text in the field {field!r} (--field NAME).")
            yield text.encode("utf-8", errors="replace")


def _parquet(path: Path, field: str) -> Iterator[bytes]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path} needs the package `pyarrow`: pip install pyarrow.") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise ValueError(f"{path} has no column {field!r}; it has {file.schema_arrow.names}: choose one with --field.")
            for batch in file.iter_batches(columns=[field]):
                texts = [text for text in batch.column(0).to_pylist() if text is not None]
                if not all(isinstance(text, str) for text in texts):
                    raise ValueError(f"{path} has no text in the column {field!r}: choose another with --field.")
                yield from (text.encode() for text in texts)
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
    """The file behind ``url``, from the cache when it is there.

    ``downloads.json`` in the cache remembers the sha256 computed at the first download. A later copy with another checksum
    (damaged, or changed at its origin) is refused, never used silently.
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


def _fetch(url: str, file: BufferedIOBase) -> None:
    """Write what is behind ``url`` to ``file``, all of it."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            while block := answer.read(1 << 20):
                file.write(block)
            if answer.length:  # bytes announced and not read: a server that goes away early looks like the end of the file
                raise http.client.IncompleteRead(b"", answer.length)
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
