"""Which files of a corpus has this user already verified?

A run that starts again would read terabytes only to compute the same checksums. So the user's cache remembers what was
verified: the path, size and modification time of each file, under the checksum of the corpus. A file for which any of these
differs is read again. That catches every file that was written to. A disk that flips bits does not change the time; this is
caught by ``ngpt train --verify-data`` and ``ngpt check``, which read everything.

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

__all__ = ["MIN_BYTES", "remember", "unverified"]

MIN_BYTES = 1 << 30  # a smaller corpus is not remembered


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def unverified(folder: Path, checksum: str, files: Mapping[str, Entry]) -> dict[str, Entry]:
    """The files that must be read."""
    known: dict[str, object] = {}
    with contextlib.suppress(OSError, ValueError):  # there is no cache
        for record in sorted((cache_folder() / "verified").glob(f"{checksum[:32]}-*.json")):  # one per rank
            with contextlib.suppress(OSError, ValueError):
                known |= read_json(record) if is_ours(record) else {}
    return {name: e for name, e in files.items() if known.get(str((folder / name).absolute())) != _stamp(folder / name)}


def remember(folder: Path, checksum: str, files: Mapping[str, Entry], rank: int = 0) -> None:
    """Record that these files have been verified, unless the cache cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        path = cache_folder() / "verified" / f"{checksum[:32]}-{platform.node()}-{rank}.json"
        known: dict[str, object] = {}
        with contextlib.suppress(OSError, ValueError):
            known = read_json(path)
        make_folder(path.parent)
        write_text(path, json.dumps(known | {str((folder / name).absolute()): _stamp(folder / name) for name in files}))
        os.chmod(path, 0o600)
