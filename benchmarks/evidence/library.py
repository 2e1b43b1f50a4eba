"""Which text were the runs trained on? The whole library of CPython 3.11.7, pinned file by file, whatever Python runs this.

    library/files.sha256    its 610 files in order, each with its sha256 (``sha256sum -c`` reads the list too)
    library/*.txt           copies of the two that are made when Python is built: no other build of 3.11.7 has the same

``corpus()`` takes every file from the library of the Python that runs it, compares it with the list, and packs all of them into
the cache. After that, any Python works.
"""

import platform
from pathlib import Path

from ngpt_core.data.corpus import Corpus
from ngpt_core.data.packing import pack
from ngpt_core.data.sources import stdlib_files
from ngpt_core.data.tokenizers import ByteTokenizer
from ngpt_core.files import cache_folder, sha256

LIBRARY = Path(__file__).parent / "library"
VERSION = "3.11.7"
CHECKSUM = "de141aa96d0b38cbdfd2080cb6d09a7a75c6f7bc5086e93f5b0a2ed3d9470479"  # of the packed corpus; evidence.json has it


def corpus() -> Corpus:
    """The corpus of the evidence, or a ValueError that says which Python has it."""
    folder = cache_folder() / f"evidence-{CHECKSUM[:12]}"
    if not folder.exists():
        texts = (path.read_bytes() for path in files() if path.stat().st_size)
        pack(texts, folder, ByteTokenizer(), sources={"name": f"the library of CPython {VERSION}"})
    found = Corpus(folder)
    found.verify()
    if found.checksum != CHECKSUM:
        raise ValueError(f"{folder} has the checksum {found.checksum}, the evidence {CHECKSUM}: remove that folder.")
    return found


def files() -> list[Path]:
    """The files of the list, in its order, each one compared with it."""
    listed = [line.split("  ", 1) for line in (LIBRARY / "files.sha256").read_text().splitlines()]
    here, found, other = dict(stdlib_files()), [], []
    for digest, name in listed:
        copy = LIBRARY / f"{Path(name).name}.txt"
        path = copy if copy.exists() else here.get(name)
        if path is None or sha256(path) != digest:
            other.append(name)
        else:
            found.append(path)
    if other:
        raise ValueError(
            f"the evidence was trained on the library of CPython {VERSION}, and this is Python {platform.python_version()}: "
            f"{len(other)} of its {len(listed)} files are missing here or differ ({', '.join(other[:3])}, ...). "
            f"Run it with CPython {VERSION}."
        )
    return found
