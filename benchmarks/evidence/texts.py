"""Which text are the runs of the second round trained on? The sources of sixteen pinned Python packages.

    python benchmarks/evidence/texts.py            fetch (100 MB), check, pack into the cache; prints what each corpus holds
    python benchmarks/evidence/texts.py --pin      the same, and write the lists anew (only when the packages change)

    texts/sdists.sha256     the archives, each with its sha256; pip's index knows their addresses
    texts/python.xz         every .py file of them, in order: 16 hexadecimal digits of its sha256, and its name
    texts/docs.xz           every page of documentation (.rst, .md, and .txt below a folder of documentation)
    texts/corpora.json      the checksums of the packed corpora

"python" is for training, tuning and results; "docs", prose in another language with other statistics, is for one last test.
Each is divided by document, once, by the hash of its bytes: a quarter of a percent (docs: one percent) is held out for the
tuning, as much again for the results, and the rest is trained on. A run of the plan sees less than one epoch, so no window is
seen twice.

Left out: files below 200 bytes or above 200 kB (tables of numbers), text that is not UTF-8 or has a zero byte (it ends a
document), and all copies of a file except the first. Copies that differ in a few bytes stay.

The text itself is not in the repository. Its licenses: BSD (Django, SymPy, pandas, scikit-learn, NetworkX, Astropy, Sphinx,
IPython, NumPy, Numba), MIT (SQLAlchemy, Twisted, mypy, pytest), Apache 2.0 (Tornado, aiohttp); some files inside have others,
which their archives name.
"""

import argparse
import hashlib
import json
import lzma
import os
import re
import tarfile
import urllib.request
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urljoin

from pip._internal.models.index import PyPI

from ngpt_core.data.corpus import Corpus
from ngpt_core.data.packing import pack
from ngpt_core.data.tokenizers import ByteTokenizer
from ngpt_core.files import cache_folder, new_file, read_json, sha256, write_json

TEXTS = Path(__file__).parent / "texts"
SIZES = range(200, 200_001)  # bytes of a file
HELD_OUT = {"python": 0.0025, "docs": 0.01}  # the share of the documents (of the range of their hashes) in each held-out part
DIGITS = 16  # of a file's sha256 in a list: enough to tell that it differs; the packed corpus has all 64


class Texts(NamedTuple):
    """A corpus in its three parts."""

    train: Corpus
    tuning: Corpus
    result: Corpus


def texts(name: str) -> Texts:
    """The corpus "python" or "docs", packed in the cache; fetched and packed if it is not there yet."""
    checksums = read_json(TEXTS / "corpora.json")[name]
    folder = cache_folder() / f"{name}-{checksums['train'][:12]}"
    if not (folder / "result" / "manifest.json").exists():  # the last one to be written
        _pack(name, folder, checked(name))
    found = Texts(*(Corpus(folder / part) for part in Texts._fields))
    for part, corpus in found._asdict().items():
        if corpus.checksum != checksums[part]:
            raise ValueError(f"{corpus.folder} has the checksum {corpus.checksum}, not {checksums[part]}: remove {folder}.")
        corpus.verify(everything=False)
    return found


# ---- from archives to documents --------------------------------------------------------------------------------------
def archives() -> Iterator[Path]:
    """The archives of the list in the cache, each one compared with its sha256."""
    for line in (TEXTS / "sdists.sha256").read_text().splitlines():
        digest, name = line.split("  ")
        path = cache_folder() / "sdists" / name
        if not path.exists():
            with new_file(_made(path)) as temporary, urllib.request.urlopen(address(name, digest), timeout=300) as reply:
                temporary.write_bytes(reply.read())
        if sha256(path) != digest:
            raise ValueError(f"{path} is not the archive of the list: remove it to fetch it again.")
        yield path


def address(archive: str, digest: str) -> str:
    """Where pip's index (PIP_INDEX_URL, or pip's own default) has the archive with this sha256."""
    index = os.environ.get("PIP_INDEX_URL") or PyPI.simple_url
    project = f"{index.rstrip('/')}/{archive.rpartition('-')[0].replace('_', '-').lower()}/"
    with urllib.request.urlopen(project, timeout=300) as reply:
        links = re.findall(r'href="([^"]+)"', reply.read().decode())
    found = [urljoin(project, unescape(link)) for link in links if link.endswith(f"#sha256={digest}")]
    if not found:
        raise ValueError(f"{project} has no archive {archive} with the sha256 {digest}.")
    return found[0]


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def belongs(name: str, path: str) -> bool:
    """Whether a file is part of a corpus, by its path in the archive."""
    *folders, _ = path.split("/")
    if name == "python":
        return path.endswith(".py")
    return path.endswith((".rst", ".md")) or (path.endswith(".txt") and bool({"doc", "docs"} & set(folders)))


def documents(name: str) -> Iterator[tuple[str, bytes]]:
    """(path, text) of every document of a corpus, in the order of the archives and, within one, of the paths."""
    seen = set()
    for archive in archives():
        with tarfile.open(archive) as tar:
            members = {m.name: m for m in tar if m.isfile() and m.size in SIZES and belongs(name, m.name)}
            for path in sorted(members):
                text = tar.extractfile(members[path]).read()
                if usable(text) and (digest := hashlib.sha256(text).digest()) not in seen:
                    seen.add(digest)
                    yield path, text


def usable(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in text


def part(text: bytes, share: float) -> str:
    """The part that a document belongs to, if each held-out part has this share of all."""
    place = int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"parts").digest(), "big") / 2**64
    return "tuning" if place < share else "result" if place < 2 * share else "train"


def line(path: str, text: bytes) -> str:
    return f"{hashlib.sha256(text).hexdigest()[:DIGITS]}  {path}"


def checked(name: str) -> list[tuple[str, bytes]]:
    """The documents, compared with the list."""
    found, listed = list(documents(name)), lzma.decompress((TEXTS / f"{name}.xz").read_bytes()).decode().splitlines()
    if other := sorted({line(*document) for document in found} ^ set(listed)):
        raise ValueError(f"{len(other)} files of the corpus {name} are not those of its list, such as {other[0]!r}.")
    return found


# ---- from documents to packed corpora --------------------------------------------------------------------------------
def _pack(name: str, folder: Path, found: list[tuple[str, bytes]]) -> None:
    for each in Texts._fields:
        if not (folder / each / "manifest.json").exists():
            mine = (text for _, text in found if part(text, HELD_OUT[name]) == each)
            held_out = 0.0 if each == "train" else 1.0  # a whole corpus is one split
            pack(mine, folder / each, ByteTokenizer(), held_out, sources={"name": f"{name}, {each}", "list": f"{name}.xz"})


def pin() -> None:
    """Write the lists and the checksums from the archives."""
    checksums = {}
    for name in ("python", "docs"):
        found = list(documents(name))
        (TEXTS / f"{name}.xz").write_bytes(lzma.compress("\n".join(line(*d) for d in found).encode(), preset=9))
        trial = cache_folder() / f"{name}-pinned"
        _pack(name, trial, found)
        checksums[name] = {each: Corpus(trial / each).checksum for each in Texts._fields}
        trial.rename(cache_folder() / f"{name}-{checksums[name]['train'][:12]}")
    write_json(TEXTS / "corpora.json", checksums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pin", action="store_true", help="write the lists and checksums from the archives")
    if parser.parse_args().pin:
        pin()
    for name in json.loads((TEXTS / "corpora.json").read_text()):
        for each, corpus in texts(name)._asdict().items():
            split = corpus.manifest["splits"]["train" if each == "train" else "val"]
            print(f"{name:<7}{each:<7}{split['documents']:6} documents {split['bytes']:11,} bytes  {corpus.folder}")


if __name__ == "__main__":
    main()
