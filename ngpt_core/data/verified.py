"""Which files of a corpus does this user already know to be whole?

A run that is queued again would read terabytes only to find the same checksums. So what was verified is remembered in the
user's cache: for each file its path, size and time of change, under the checksum of the corpus. A file for which any of these
differs is read again. That finds every file that was written to; a disk that changes bits by itself leaves the time as it was,
and is found by ``ngpt train --verify-data`` and ``ngpt check``, which read everything.

A record counts only if no other user can have written it. Small corpora are not remembered: they are read in a second.
"""

import contextlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from ..files import cache_folder, make_folder, read_json, write_text
from ..native import is_ours
from ..seal import Entry

__all__ = ["LEAST", "remember", "unknown"]

LEAST = 1 << 30  # bytes: below, a corpus is not remembered


def _facts(path: Path) -> list[int]:
    about = path.stat()
    return [about.st_size, about.st_mtime_ns]


def unknown(folder: Path, checksum: str, files: Mapping[str, Entry]) -> dict[str, Entry]:
    """Those of the files that have to be read."""
    known: dict[str, object] = {}
    with contextlib.suppress(OSError, ValueError):  # there is no cache
        for record in sorted((cache_folder() / "verified").glob(f"{checksum[:32]}-*.json")):  # one for each rank
            with contextlib.suppress(OSError, ValueError):
                known |= read_json(record) if is_ours(record) else {}
    return {name: e for name, e in files.items() if known.get(str((folder / name).absolute())) != _facts(folder / name)}


def remember(folder: Path, checksum: str, files: Mapping[str, Entry], rank: int = 0) -> None:
    """These files have been verified. (A cache that cannot be written remembers nothing.)"""
    with contextlib.suppress(OSError, ValueError):
        path = cache_folder() / "verified" / f"{checksum[:32]}-{platform.node()}-{rank}.json"
        known: dict[str, object] = {}
        with contextlib.suppress(OSError, ValueError):
            known = read_json(path)
        make_folder(path.parent)
        write_text(path, json.dumps(known | {str((folder / name).absolute()): _facts(folder / name) for name in files}))
        os.chmod(path, 0o600)
